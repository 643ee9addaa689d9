"""A replica that compiles its policy decides as one that does not."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch._dynamo.testing import CompileCounter

from tests.policies.vla_fakes import SPEC, observations
from vla_async import keys
from vla_async.collectors.replica_process import compile_acting
from vla_async.policies import TinyVLAPolicy


def counter() -> Any:
    """A stand-in for the compiler: it counts what it is given, and runs that as it is."""
    torch._dynamo.reset()
    return CompileCounter()


def test_what_a_policy_acts_with_is_compiled_and_decides_the_same() -> None:
    """``nn.Module.compile`` alone compiles the forward pass, which our policies do not act with."""
    torch.manual_seed(0)
    policy, backend = TinyVLAPolicy(hidden=[8]).eval(), counter()
    policy.build(SPEC)
    plain = policy.act(observations(policy, 3))
    compile_acting(policy, backend=backend)
    assert backend.frame_count == 0
    compiled = policy.act(observations(policy, 3))
    assert backend.frame_count > 0
    assert backend.op_count > 10, "the network itself was left out"
    for key in (keys.CHUNK, keys.LOG_PROB, keys.VALUE):
        torch.testing.assert_close(compiled[key], plain[key], rtol=1e-5, atol=1e-5)


def test_weights_that_are_copied_in_count_at_once() -> None:
    """Compiled code that kept the first weights would act on them for ever."""
    policy, backend = TinyVLAPolicy(hidden=[8]).eval(), counter()
    policy.build(SPEC)
    compile_acting(policy, backend=backend)
    before, frames = policy.act(observations(policy, 3))[keys.VALUE], backend.frame_count
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(parameter + 0.1)
    after = policy.act(observations(policy, 3))[keys.VALUE]
    assert not torch.allclose(before, after, atol=1e-3)
    assert backend.frame_count == frames, "an update must not compile it again"


def test_the_forward_pass_of_any_other_module_is_compiled() -> None:
    """TorchRL's modules act with their forward pass."""
    module, backend = TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=["action"]), counter()
    compile_acting(module, backend=backend)
    assert module(TensorDict({"x": torch.ones(4, 3)}, [4]))["action"].shape == (4, 2)
    assert backend.frame_count > 0
