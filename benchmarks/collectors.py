"""The engines that are compared, each built as its documentation advises for envs in processes (or threads) on one host.

TorchRL's are fastest on envs written by hand, and its shared memory refuses envs that show a text, so they get those unless
told otherwise. Ours gets both.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector
from torchrl.envs import EnvBase, ParallelEnv
from torchrl.modules.inference_server import InferenceServerConfig

from benchmarks.bare import BareCollector
from benchmarks.cases import Case, Form, StatePolicy
from vla_async.emulation import EmulatedEnvBase
from vla_async.envs import EnvFactory

NAMES = {
    "bare": "no engine: envs, device and pipes alone, the limit on this machine",
    "ours": "StreamingCollector",
    "ours-lockstep": "StreamingCollector, async_interaction=False",
    "lockstep": "TorchRL Collector(ParallelEnv)",
    "multi-async": "TorchRL MultiAsyncCollector, a copy of the policy per env",
    "abc-threads": "TorchRL AsyncBatchedCollector, envs in threads",
    "abc-shm": "TorchRL AsyncBatchedCollector, processes and shared memory",
    "abc-slots": "TorchRL AsyncBatchedCollector, processes and process slots",
}


@dataclass
class Engine:
    """A collector that is about to run.

    Attributes:
        collector: anything that iterates over batches and has ``shutdown``.
        policy: the learner's copy of the policy.
        publish: hands the learner's weights to the collector.
        wait_s: (p50, p95) of the time for which requests waited for their forward, where it is known.
    """

    collector: Any
    policy: torch.nn.Module
    publish: Callable[[], None]
    wait_s: Callable[[], tuple[float, float] | None]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.collector)


def make_policy(name: str, case: Case) -> Any:
    """The policy for the engine ``name``; what its engine needs is imported too, so that neither counts as its start."""
    if name.startswith("ours"):
        import vla_async.collectors.streaming  # noqa: F401
    policy: Any = case.make_policy(_form(name))
    if case.forward is None and not (name.startswith("ours") and _form(name) == "chunked"):
        return StatePolicy(policy, "push the cube", _form(name))
    return policy


def build(name: str, case: Case, envs: EnvFactory, policy: Any, max_wait_s: float) -> Engine:
    """Build the engine ``name``, with ``@plain`` behind it for envs in that form.

    Args:
        name: one of :data:`NAMES`, alone or with ``@chunked`` or ``@plain``.
        case: what is measured.
        envs: the case's envs, counted.
        policy: of :func:`make_policy`.
        max_wait_s: Tmax of our own collector.
    """
    engine, form = name.partition("@")[0], _form(name)
    makers = [functools.partial(make_env, envs, index, form) for index in range(envs.num_envs)]
    frames = case.frames_per_env * envs.num_envs
    if engine == "bare":
        if case.forward is None:
            raise ValueError("the bare engine has no policy; leave it out of cases that are not emulated")
        return Engine(BareCollector(envs, case.forward, frames), policy, lambda: None, lambda: None)
    if engine.startswith("ours"):
        return _ours(policy, envs if form == "chunked" else makers, frames, max_wait_s, engine == "ours-lockstep")
    acting = copy.deepcopy(policy)  # what acts must not share memory with what learns, or weights tear
    return _torchrl(engine, makers, policy, acting, frames)


def _form(name: str) -> Form:
    return "plain" if name.endswith("@plain") else "chunked"


def make_env(envs: EnvFactory, index: int, form: Form) -> EnvBase:
    """Env ``index`` in that form."""
    if form == "chunked":
        return envs.make(index)
    return EmulatedEnvBase(envs.make_simulator(index), envs.max_episode_steps)


def _ours(policy: Any, source: Any, frames: int, max_wait_s: float, lockstep: bool) -> Engine:
    from vla_async.collectors import StreamingCollector

    collector = StreamingCollector(
        source, policy, frames_per_batch=frames, max_wait_s=max_wait_s, async_interaction=not lockstep
    )

    def wait_s() -> tuple[float, float] | None:
        stats = collector.stats()
        return stats["request_wait_s/p50"], stats["request_wait_s/p95"]

    return Engine(collector, policy, lambda: collector.update_policy_weights_(policy), wait_s)


def _torchrl(name: str, makers: list[Any], policy: Any, acting: Any, frames: int) -> Engine:
    wait_s: Callable[[], tuple[float, float] | None] = lambda: None  # noqa: E731
    collector: Any
    if name == "lockstep":
        collector = Collector(ParallelEnv(len(makers), makers), acting, frames_per_batch=frames, total_frames=-1)
    elif name == "multi-async":
        collector = MultiAsyncCollector(makers, acting, frames_per_batch=frames // len(makers), total_frames=-1)
    else:
        collector = _batched(name, makers, acting, frames)

        def wait_s() -> tuple[float, float] | None:
            stats = collector.server_stats()
            return stats["p50_queue_ms"] / 1e3, stats["p95_queue_ms"] / 1e3

    def publish() -> None:
        collector.update_policy_weights_(TensorDict.from_module(policy).data)

    return Engine(collector, policy, publish, wait_s)


def _batched(name: str, makers: list[Any], acting: Any, frames: int) -> AsyncBatchedCollector:
    options: dict[str, Any] = {
        "abc-threads": {"env_backend": "threading"},
        "abc-shm": {"env_backend": "multiprocessing", "env_exchange": "shm"},
        "abc-slots": {"env_backend": "multiprocessing", "transport": "auto"},
    }[name]
    options |= {"policy_factory": functools.partial(copy.deepcopy, acting)} if name == "abc-slots" else {"policy": acting}
    server = InferenceServerConfig(max_batch_size=len(makers), collect_stats=True)
    collector = AsyncBatchedCollector(makers, frames_per_batch=frames, total_frames=-1, server_config=server, **options)
    if name == "abc-slots" and collector.server_backend != "process":
        raise RuntimeError("TorchRL fell back from process slots to a thread server, which is another engine")
    return collector
