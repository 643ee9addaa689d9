"""What the tests of strategies measure in the processes of the ranks, all of it in one start of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from tests.strategies.ranks import MicroBatch, Model, Step, as_one_batch, make_data, make_step, message_of, random_steps
from vla_async.strategies import SizeWeightedDDPStrategy, SizeWeightedFSDPStrategy
from vla_async.strategies.size_weighted import parameters_of, whole

STRATEGIES = {"ddp": SizeWeightedDDPStrategy, "fsdp": SizeWeightedFSDPStrategy}

SPLITS: dict[str, list[Step]] = {
    "unequal sizes": [make_step([[5, 3, 4], [1, 2, 7]])],
    "unequal counts": [make_step([[5, 3, 4], [2]])],
    "an empty rank, the other one, then none": [make_step(s) for s in ([[5, 3], []], [[], [4, 4]], [[3], [3]], [[], [2]])],
    "a short last step": [make_step([[6, 6], [6, 6]]), make_step([[6, 6], [6, 6]]), make_step([[1], []])],
    "several epochs over the same rows": [make_step([[4, 4], [4]])] * 4,
    "critic warm-up on all ranks": [make_step([[4], [4]], ["critic", "critic"]), make_step([[4], [4]])],
    "critic warm-up on one rank": [make_step([[4], [4]], ["critic", "both"]), make_step([[4], []], ["critic", "both"])],
    **{f"random {seed}": random_steps(seed, ranks=2) for seed in range(12)},
}
CLIPS: dict[str, dict[str, float]] = {"none": {}, "norm": {"max_norm": 0.05}, "value": {"clip_val": 0.02}}


class Run:
    """A model with its optimizer on one rank, and the same alone, which gets all rows in one batch."""

    def __init__(self, strategy: str, optimizer: Callable[[Any], Optimizer], **fabric: Any) -> None:
        self.strategy = STRATEGIES[strategy](timeout=60)
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=self.strategy, **fabric)
        self.fabric.launch()
        torch.manual_seed(self.fabric.global_rank)  # ranks that start unlike
        self.model = Model()
        self.wrapped, self.optimizer = self.fabric.setup(self.model, optimizer(self.model.parameters()))
        self.alone = Model()
        self.alone.load_state_dict(self.model.state_dict())
        self.alone_optimizer = optimizer(self.alone.parameters())

    def backward(self, micro_batches: list[MicroBatch], data: Any, through: Any = None) -> None:
        for micro_batch in micro_batches:
            with self.fabric.autocast():
                loss, count = micro_batch.loss(through or self.wrapped, data)
            self.fabric.backward(loss, num_samples=count)

    def expect(self, batch: list[MicroBatch], data: Any) -> None:
        """What one device has to step by: the mean loss over all valid rows of the batch."""
        total = 0
        for micro_batch in batch:
            with self.fabric.autocast():
                loss, count = micro_batch.loss(self.alone, data)
            loss.backward()
            total += count
        for parameter in self.alone.parameters():
            if parameter.grad is not None:
                parameter.grad /= total
        self.largest = max(p.grad.abs().max() for p in self.alone.parameters() if p.grad is not None)

    def difference(self) -> float:
        """Of the gradients, relative to the largest element before clipping; infinite if one lacks what the other has."""
        pairs = list(zip(parameters_of(self.optimizer.optimizer), parameters_of(self.alone_optimizer), strict=True))
        if any((p.grad is None) != (alone.grad is None) for p, alone in pairs):
            return float("inf")
        return max(
            float((whole(p.grad) - alone.grad).abs().max() / self.largest) for p, alone in pairs if p.grad is not None
        )

    def step(self) -> float:
        """Step both; the difference of the parameters after that."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.alone_optimizer.step()
        self.alone_optimizer.zero_grad()
        return relative(list(zip(self.model.parameters(), self.alone.parameters(), strict=True)))


def relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    largest = max(expected.detach().abs().max() for _, expected in pairs)
    return float(max((tensor.detach() - expected.detach()).abs().max() for tensor, expected in pairs) / largest)


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def measure_splits(strategy: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, (name, steps) in enumerate(SPLITS.items()):
        for clip, how in CLIPS.items() if number < 7 else [list(CLIPS.items())[number % 3]]:
            run, worst = Run(strategy, momentum), {"gradient": 0.0, "norm": 0.0, "parameters": 0.0}
            for index, step in enumerate(steps):
                data = make_data(80, seed=100 * number + index)
                run.expect(as_one_batch(step), data)
                run.backward(step[run.fabric.global_rank], data, through=run.model if number % 2 else None)
                norm = torch.nn.utils.get_total_norm([p.grad for p in run.alone.parameters() if p.grad is not None])
                returned = run.fabric.clip_gradients(run.wrapped, run.optimizer, **how) if how else None
                run.strategy.normalize(run.optimizer.optimizer)
                if clip == "norm":
                    torch.nn.utils.clip_grad_norm_(run.alone.parameters(), **how)
                    worst["norm"] = max(worst["norm"], abs(float(returned / norm) - 1.0))
                elif clip == "value":
                    torch.nn.utils.clip_grad_value_(run.alone.parameters(), how["clip_val"])
                worst["gradient"] = max(worst["gradient"], run.difference())
                worst["norm"] = max(worst["norm"], abs(run.strategy.grad_norm / float(norm) - 1.0))
                worst["parameters"] = max(worst["parameters"], run.step())
            worst["calls"] = float(run.model.calls) - sum(len(step[run.fabric.global_rank]) for step in steps)
            run.strategy.teardown()
            found[f"{name}, clip {clip}"] = worst
    return found


def measure_bf16(strategy: str) -> dict[str, float]:
    run, step, data = Run(strategy, momentum, precision="bf16-mixed"), make_step([[5, 3, 4], [2]]), make_data(20, seed=1)
    run.backward(step[run.fabric.global_rank], data)
    run.strategy.normalize(run.optimizer.optimizer)
    run.expect([micro_batch for of_rank in step for micro_batch in of_rank], data)  # bfloat16 rounds each on its own
    found = {"to the same micro-batches on one device": run.difference()}
    run.alone.zero_grad()
    (loss, count), *_ = [micro_batch.loss(run.alone, data) for micro_batch in as_one_batch(step)]
    (loss / count).backward()
    return found | {"to one batch in float32": run.difference()}


def measure_refusals(strategy: str) -> dict[str, str]:
    run, data = Run(strategy, momentum), make_data(20, seed=2)
    raw, batch, first = run.optimizer.optimizer, MicroBatch(0, 4), run.fabric.global_rank == 0
    found = {
        "no num_samples": message_of(lambda: run.fabric.backward(batch.loss(run.model, data)[0])),
        "nothing on any rank": message_of(run.optimizer.step),
    }
    run.backward([batch], data)
    run.optimizer.step()
    run.optimizer.zero_grad()
    if first:
        batch.loss(run.model, data)[0].backward()
    else:
        run.backward([batch], data)
        found["raw backward after a counted one"] = message_of(lambda: batch.loss(run.model, data)[0].backward())
    found["raw backward on rank 0 alone"] = message_of(run.optimizer.step)
    give_up(run)
    run.backward([batch], data)
    if not first:
        run.optimizer.zero_grad()
    found["zeroed on rank 1"] = message_of(lambda: run.strategy.normalize(raw))
    give_up(run)
    before = copy.deepcopy(run.model.state_dict())
    spoilt = (data[0] * (float("nan") if first else 1.0), *data[1:])
    run.backward([batch], spoilt)
    found["nan on rank 0"] = message_of(run.optimizer.step)
    give_up(run)
    after = run.model.state_dict()
    found["weights kept"] = str(all(torch.equal(before[name], after[name]) for name in before if name != "calls"))
    run.backward([batch], data)
    run.fabric.clip_gradients(run.wrapped, run.optimizer, max_norm=1.0)
    found["backward after clipping"] = message_of(
        lambda: run.fabric.backward(torch.ones(1, requires_grad=True), num_samples=1)
    )
    found["forward after clipping"] = message_of(lambda: run.wrapped(torch.ones(1)) if strategy == "fsdp" else None)
    run.optimizer.step()
    if first:
        run.optimizer.zero_grad()
        run.backward([batch], data)
    found["no zero_grad on rank 1"] = message_of(run.optimizer.step)
    other = run.fabric.setup_optimizers(SGD([run.model.scale], lr=0.1))
    give_up(run)
    run.backward([batch], data)
    found["another optimizer"] = message_of(lambda: (run.optimizer if first else other).step())
    found["another module"] = message_of(lambda: run.fabric.setup(torch.nn.Linear(2, 1 if first else 3)))
    return found


def measure_turns(strategy: str) -> dict[str, float]:
    """Two optimizers that take turns, where a rank has nothing for the turn of the second."""
    run, data = Run(strategy, lambda parameters: SGD(list(parameters)[-4:-2], lr=0.1)), make_data(20, seed=3)
    first = {id(p) for p in parameters_of(run.alone_optimizer)}
    others = [p for p, alone in zip(run.model.parameters(), run.alone.parameters(), strict=True) if id(alone) not in first]
    second = run.fabric.setup_optimizers(SGD(others, lr=0.1))
    of_critic, of_both = make_step([[4], [2]], ["critic", "critic"]), make_step([[3, 3], []])
    run.expect(as_one_batch(of_critic), data)
    run.backward(of_critic[run.fabric.global_rank], data)
    found = {"first": run.step()}
    second.zero_grad()
    run.alone.zero_grad()
    run.alone_optimizer = SGD([p for p in run.alone.parameters() if id(p) not in first], lr=0.1)
    run.expect(as_one_batch(of_both), data)
    run.backward(of_both[run.fabric.global_rank], data)
    run.optimizer = second
    return found | {"second": run.step()}


def give_up(run: Run) -> None:
    run.optimizer.zero_grad()
    run.strategy.reset()


def measure_set_up() -> dict[str, str]:
    """What FSDP refuses at set-up."""

    def only_blocks(module: Model, mesh: Any) -> Model:
        for block in module.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        return module

    def in_bfloat16(module: Model, mesh: Any) -> Model:
        return fully_shard(module, mesh=mesh["data_parallel"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

    def set_up(*optimizers: Optimizer, model: Model | None = None, **options: Any) -> Any:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=SizeWeightedFSDPStrategy(timeout=60, **options))
        fabric.launch()
        return fabric.setup(model or Model(), *optimizers)

    started = Model()
    optimizer = momentum(started.parameters())
    started.training_step(*make_data(4, seed=0)).backward()
    optimizer.step()
    return {
        "not the module": message_of(lambda: set_up(parallelize_fn=only_blocks)),
        "mp_policy": message_of(lambda: set_up(parallelize_fn=in_bfloat16)),
        "another model's optimizer": message_of(lambda: set_up(momentum(Model().parameters()))),
        "an optimizer that has stepped": message_of(lambda: set_up(optimizer, model=started)),
    }


def measure_rest(strategy: str, directory: Path) -> dict[str, Any]:
    """Checkpoints, sums of plain numbers."""

    def adam(parameters: Any) -> Optimizer:
        return AdamW(parameters, lr=0.01)

    def advance(run: Run, seed: int) -> float:
        step, data = make_step([[3], [2, 2]]), make_data(20, seed=seed)
        run.expect(as_one_batch(step), data)
        run.backward(step[run.fabric.global_rank], data)
        return run.step()

    run = Run(strategy, adam)
    advance(run, seed=0)
    content = {"model": run.model.state_dict(), "optimizer": run.optimizer.optimizer.state_dict()}
    run.fabric.save(directory / "plain.ckpt", content)
    run.fabric.save(directory / "objects.ckpt", {"model": run.wrapped, "optimizer": run.optimizer})
    run.fabric.barrier()
    read = [torch.load(directory / name, weights_only=True) for name in ("plain.ckpt", "objects.ckpt")]
    found: dict[str, Any] = {"saved": [relative(same(file["model"], run.model.state_dict())) for file in read]}
    entries = [entry for file in read for entry in file["optimizer"]["state"].values()]
    found["sharded"] = any(isinstance(value, DTensor) for entry in entries for value in entry.values())
    resumed = Run(strategy, adam)
    resumed.fabric.load(directory / "objects.ckpt", {"model": resumed.wrapped, "optimizer": resumed.optimizer})
    resumed.alone.load_state_dict(read[0]["model"])  # on one device
    resumed.alone_optimizer.load_state_dict(read[0]["optimizer"])
    advance(run, seed=1)
    found["resumed against one device"] = advance(resumed, seed=1)
    found["resumed against not interrupted"] = relative(same(resumed.model.state_dict(), run.model.state_dict()))
    rank = run.fabric.global_rank
    sums = run.fabric.all_reduce(torch.tensor([2.0**40 + 1 + rank, 0.5], dtype=torch.float64), reduce_op="sum")
    return found | {"sums": sums.tolist()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(first[name], second[name]) for name in first if name != "calls"]


def measure(rank: int, strategy: str, directory: Path) -> dict[str, Any]:
    """All that needs the two ranks, as starting them takes long."""
    return {
        "splits": measure_splits(strategy),
        "bf16": measure_bf16(strategy),
        "rest": measure_rest(strategy, directory),
        "turns": measure_turns(strategy),
        "set-up": measure_set_up() if strategy == "fsdp" else {},
        "refusals": measure_refusals(strategy),  # last: they may leave the ranks apart
    }
