"""Size-weighted accumulation on one device: whatever the split, the gradient is that of one batch."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn

from vla_async.strategies import SizeWeightedSingleDeviceStrategy


class Setup:
    """A small regression on Fabric."""

    def __init__(self, lr: float = 0.1, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.strategy = SizeWeightedSingleDeviceStrategy(device="cpu")
        self.fabric = Fabric(accelerator="cpu", strategy=self.strategy, **options)
        named = list(self.model.named_parameters())
        self.wrapped, self.optimizer = self.fabric.setup(self.model, torch.optim.SGD(named, lr=lr))
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(12, 3, generator=generator), torch.randn(12, 1, generator=generator)

    def loss(self, rows: Tensor) -> Tensor:
        # past the wrapper, as a LightningModule's training_step goes on one device
        return (self.model(self.x[rows]) - self.y[rows]).pow(2).sum()

    def backward(self, *sizes: int) -> None:
        for rows in torch.arange(sum(sizes)).split(list(sizes)):
            self.fabric.backward(self.loss(rows), num_samples=len(rows))

    @property
    def gradient(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])

    def reference(self, n: int = 12) -> Tensor:
        model = copy.deepcopy(self.model)
        model.zero_grad()
        (model(self.x[:n]) - self.y[:n]).pow(2).mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 11)), clip=st.sampled_from([None, "norm", "value"]), max_norm=st.sampled_from([0.01, 1e9])
)
def test_any_split_gives_the_gradient_of_one_batch_also_through_clipping(cuts, clip, max_norm):
    setup = Setup()
    reference, edges = setup.reference(), [0, *sorted(cuts), 12]
    setup.backward(*[b - a for a, b in itertools.pairwise(edges)])
    if clip == "norm":
        norm = setup.fabric.clip_gradients(setup.wrapped, setup.optimizer, max_norm=max_norm)
        assert norm.item() == pytest.approx(reference.norm().item(), rel=1e-5), "clipping must see the mean, not the sum"
        expected = reference * min(1.0, max_norm / (reference.norm().item() + 1e-6))
    elif clip == "value":
        setup.fabric.clip_gradients(setup.wrapped, setup.optimizer, clip_val=max_norm)
        expected = reference.clamp(-max_norm, max_norm)
    else:
        setup.strategy.normalize(setup.optimizer.optimizer)
        expected = reference
    torch.testing.assert_close(setup.gradient, expected, rtol=1e-5, atol=1e-6)
    before = torch.cat([p.detach().flatten() for p in setup.model.parameters()])
    setup.optimizer.step()
    after = torch.cat([p.detach().flatten() for p in setup.model.parameters()])
    torch.testing.assert_close(after, before - 0.1 * expected, rtol=1e-5, atol=1e-6)


def test_masked_elements_and_an_empty_micro_batch_weigh_nothing():
    setup = Setup()
    reference = setup.reference(5)
    setup.backward(3, 2)
    setup.fabric.backward(setup.loss(torch.arange(5, 9)) * 0.0, num_samples=0)
    setup.optimizer.step()
    torch.testing.assert_close(setup.gradient, reference, rtol=1e-5, atol=1e-6)


def test_consecutive_steps_do_not_mix_their_counts():
    setup = Setup()
    setup.backward(7, 5)
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    reference = setup.reference(4)
    setup.backward(1, 3)
    setup.optimizer.step()
    torch.testing.assert_close(setup.gradient, reference, rtol=1e-5, atol=1e-6)


def test_only_the_optimizers_own_parameters_are_divided_and_two_optimizers_share_an_accumulation():
    torch.manual_seed(0)
    first, second, outside = (nn.Linear(2, 1) for _ in range(3))
    fabric = Fabric(accelerator="cpu", strategy=SizeWeightedSingleDeviceStrategy(device="cpu"))
    optimizers = fabric.setup_optimizers(torch.optim.SGD(first.parameters(), 0.1), torch.optim.SGD(second.parameters(), 0.1))
    fabric.backward(sum(m(torch.ones(4, 2)).sum() for m in (first, second, outside)), num_samples=4)
    optimizers[0].step()
    assert first.weight.grad.tolist() == [[1.0, 1.0]]
    assert second.weight.grad.tolist() == [[4.0, 4.0]], "its own step has not come yet"
    optimizers[1].step()
    assert second.weight.grad.tolist() == [[1.0, 1.0]]
    assert outside.weight.grad.tolist() == [[4.0, 4.0]]


def test_the_gradient_norm_before_clipping_can_be_read():
    setup = Setup()
    setup.backward(12)
    setup.fabric.clip_gradients(setup.wrapped, setup.optimizer, max_norm=1e-3)
    assert setup.strategy.grad_norm == pytest.approx(setup.reference().norm().item(), rel=1e-5)


# ---------------------------------------------------------------- refusals


def test_a_backward_without_a_count_is_refused():
    setup = Setup()
    with pytest.raises(ValueError, match=r"no num_samples.*call fabric.backward\(loss_sum, num_samples=valid_count\)"):
        setup.fabric.backward(setup.loss(torch.arange(3)))
    with pytest.raises(ValueError, match="num_samples=-1 must not be negative"):
        setup.fabric.backward(setup.loss(torch.arange(3)), num_samples=-1)


def test_a_raw_backward_alone_is_refused_at_the_step():
    setup = Setup()
    setup.loss(torch.arange(3)).backward()
    with pytest.raises(RuntimeError, match=r"no valid loss element \(raw loss.backward\(\) is not counted\)"):
        setup.optimizer.step()


def test_a_raw_backward_before_a_counted_one_is_refused():
    setup = Setup()
    setup.loss(torch.arange(3)).backward()
    with pytest.raises(RuntimeError, match="gradients from before this accumulation"):
        setup.backward(3)


def test_a_raw_backward_after_a_counted_one_is_refused():
    setup = Setup()
    setup.backward(3)
    with pytest.raises(RuntimeError, match=r"loss.backward\(\) in the middle of an accumulation is not counted"):
        setup.loss(torch.arange(3)).backward()


def test_a_raw_backward_behind_the_wrapped_forward_is_refused_by_lightning():
    setup = Setup()
    with pytest.raises(RuntimeError, match=r"requires you to call `fabric.backward"):
        setup.wrapped(setup.x).sum().backward()


def test_an_idle_strategy_leaves_raw_backwards_alone():
    setup = Setup()
    setup.backward(3)
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    setup.loss(torch.arange(3)).backward()
    assert all(p.grad is not None for group in setup.optimizer.param_groups for p in group["params"])


def test_an_accumulation_lasts_until_all_optimizers_in_it_have_stepped():
    """Those that got no gradient have nothing to step for."""
    first, second, idle = (nn.Linear(2, 1) for _ in range(3))
    fabric = Fabric(accelerator="cpu", strategy=SizeWeightedSingleDeviceStrategy(device="cpu"))
    optimizers = fabric.setup_optimizers(*(torch.optim.SGD(m.parameters(), 0.1) for m in (first, second, idle)))
    fabric.backward(sum(m(torch.ones(4, 2)).sum() for m in (first, second)), num_samples=4)
    optimizers[0].step()
    with pytest.raises(RuntimeError, match="in the middle of an accumulation"):
        second(torch.ones(4, 2)).sum().backward()
    optimizers[1].step()
    second(torch.ones(4, 2)).sum().backward()


def test_a_strategy_that_was_torn_down_leaves_nothing_on_the_parameters():
    """Not even after a step that was given up: the policy goes on to whatever its user does with it."""
    setup = Setup()
    setup.backward(3)
    setup.strategy.teardown()
    assert not any(p._post_accumulate_grad_hooks for p in setup.model.parameters())
    setup.loss(torch.arange(3)).backward()


def test_an_accumulation_that_was_interrupted_does_not_stop_another_strategy_on_the_same_model():
    setup = Setup()
    reference = setup.reference()
    setup.backward(3)
    second = Setup()
    second.model = setup.model
    second.wrapped, second.optimizer = second.fabric.setup(setup.model, torch.optim.SGD(setup.model.parameters(), lr=0.1))
    second.optimizer.zero_grad()
    second.backward(5, 7)
    second.optimizer.step()
    torch.testing.assert_close(second.gradient, reference, rtol=1e-5, atol=1e-6)


def test_a_forgotten_zero_grad_is_refused():
    setup = Setup()
    setup.backward(3)
    setup.optimizer.step()
    with pytest.raises(RuntimeError, match=r"call optimizer.zero_grad\(\) after each step"):
        setup.backward(3)
    setup.optimizer.zero_grad(set_to_none=False)
    setup.backward(3)  # zeros are as good as none


def test_a_step_without_a_backward_or_without_a_valid_element_is_refused():
    setup = Setup()
    with pytest.raises(RuntimeError, match="no valid loss element"):
        setup.optimizer.step()
    setup.backward(3)
    setup.optimizer.step()
    with pytest.raises(RuntimeError, match="without a backward since the last one"):
        setup.optimizer.step()
    setup.optimizer.zero_grad()
    setup.fabric.backward(setup.loss(torch.arange(3)) * 0.0, num_samples=0)
    with pytest.raises(RuntimeError, match="no valid loss element"):
        setup.optimizer.step()


def test_a_backward_between_clipping_and_the_step_is_refused():
    setup = Setup()
    setup.backward(3)
    setup.fabric.clip_gradients(setup.wrapped, setup.optimizer, max_norm=1.0)
    with pytest.raises(RuntimeError, match="after the gradients were divided"):
        setup.backward(3)


def test_zeroed_gradients_are_refused_until_the_count_is_forgotten_too():
    setup = Setup()
    setup.backward(3)
    setup.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"call strategy.reset\(\)"):
        setup.backward(3)
    setup.strategy.reset()
    setup.backward(5)
    reference = setup.reference(5)
    setup.optimizer.step()
    torch.testing.assert_close(setup.gradient, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(value, clip):
    setup = Setup()
    before = copy.deepcopy(setup.model.state_dict())
    setup.x[2, 0] = value
    message = r"gradient is not finite \(norm nan\) at a mean loss of .*; first in 0.weight"
    with pytest.raises(FloatingPointError, match=message):  # noqa: PT012
        setup.backward(3, 3)
        if clip:
            setup.fabric.clip_gradients(setup.wrapped, setup.optimizer, max_norm=1.0)
        setup.optimizer.step()
    for name, tensor in setup.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_closure_is_refused():
    setup = Setup()
    with pytest.raises(ValueError, match="closure"):
        setup.optimizer.step(lambda: setup.loss(torch.arange(3)))


def test_a_scaled_loss_is_refused():
    strategy = SizeWeightedSingleDeviceStrategy(device="cpu", precision=MixedPrecision("16-mixed", "cpu"))
    with pytest.raises(ValueError, match="use bf16-mixed"):
        strategy.setup_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


def test_bf16_autocast_accumulates_in_float32():
    setup = Setup(precision="bf16-mixed")
    with setup.fabric.autocast():
        losses = [setup.loss(rows) for rows in torch.arange(12).split([5, 7])]
    for loss, n in zip(losses, (5, 7), strict=True):
        setup.fabric.backward(loss, num_samples=n)
    reference = setup.reference()
    setup.strategy.normalize(setup.optimizer.optimizer)
    assert setup.gradient.dtype == torch.float32
    torch.testing.assert_close(setup.gradient, reference, rtol=0.05, atol=0.02)
