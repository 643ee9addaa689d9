"""``TrainState``: one object, which is also what a checkpoint holds."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric import Fabric
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vla_async.monitor import metric_table as names
from vla_async.policies.base import VLAPolicy
from vla_async.run_directory import checkpoints_of, resolve_checkpoint
from vla_async.strategies.size_weighted import parameters_of


@dataclass
class Counters:
    """How far a run is.

    Attributes:
        step: updates done (in SFT, optimizer steps); also the policy_version.
        optimizer_steps: optimizer steps done.
        env_steps: env steps executed for training.
        episodes: training episodes finished.
        elapsed_s: wall-clock seconds spent training, over all resumes.
        best_success: the best validated success_once so far, -1 before the first.
    """

    step: int = 0
    optimizer_steps: int = 0
    env_steps: int = 0
    episodes: int = 0
    elapsed_s: float = 0.0
    best_success: float = -1.0

    @property
    def axes(self) -> dict[str, float]:
        """What a metric can be drawn over, beside the step."""
        return {names.ENV_STEPS: self.env_steps, names.EPISODES: self.episodes, names.ELAPSED_S: self.elapsed_s}


@dataclass
class TrainState:
    """Everything that a resumed run needs.

    Attributes:
        stage: ``fit`` or ``sft``, which loop it belongs to.
        policy: the policy, with its objective.
        optimizer: its optimizer.
        scheduler: its learning-rate scheduler, stepped with every optimizer step, or None.
        counters: how far the run is.
        loop: state of the loop, as it stood when the last step ended.
        seed: the run's seed, which a resumed run must have too.
    """

    stage: str
    policy: VLAPolicy
    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    counters: Counters = field(default_factory=Counters)
    loop: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    stopped: bool = False  # by a callback, after this step; no part of a checkpoint
    # by the loop: its state as a checkpoint is to hold it, made of that after a step when one is written
    complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    _finished: dict[str, Any] | None = None
    _gathered: dict[str, Any] | None = None  # the state of an optimizer that is sharded

    def gather(self) -> None:
        """Put the state of an optimizer that is sharded together, for which all ranks must come; others need nothing.

        What is written afterwards is this state, so that rank 0 can write it alone.
        """
        if any(isinstance(parameter, DTensor) for parameter in parameters_of(self.optimizer)):
            self._gathered = _copied(self.optimizer.state_dict())

    def end_step(self) -> None:
        """Keep a copy, in main memory, of what a checkpoint written now would hold.

        A run that is cut short is resumed from here: in the middle of an update the weights are already newer than the
        counters, the envs and the shuffling.
        """
        content = self.content()
        weights = content.pop("state_dict")
        # what is frozen stays as it is, and may be most of a large model
        frozen = {name for name, parameter in self.policy.named_parameters() if not parameter.requires_grad}
        copied = _copied({name: tensor for name, tensor in weights.items() if name not in frozen})
        self._finished = {"state_dict": weights | copied} | _copied(content)

    def content(self) -> dict[str, Any]:
        """What a checkpoint holds, as of now."""
        return {
            "state_dict": self.policy.state_dict(),
            "optimizer": self._gathered or self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "objective": None if self.policy.objective is None else self.policy.objective.state_dict(),
            "counters": asdict(self.counters),
            "loop": self.loop,
            "stage": self.stage,
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "env_spec": None if self.policy.env_spec is None else self.policy.env_spec.to_dict(),
            "hyper_parameters": plain_hyper_parameters(self.policy),
            "pytorch-lightning_version": lightning.__version__,
            "seed": self.seed,
        }

    @property
    def finished(self) -> dict[str, Any]:
        """What :meth:`end_step` kept, which nobody changes any more; what is now, if it was not called yet."""
        return self.content() if self._finished is None else self._finished

    def save(self, fabric: Fabric, path: Path, finished_step: bool = False) -> None:
        """Write a checkpoint by :func:`write_checkpoint`.

        Args:
            fabric: writes it.
            path: the file.
            finished_step: write what :meth:`end_step` kept, if it was called, instead of what is now.
        """
        content = self.finished if finished_step else self.content()
        if self.complete is not None:
            content = content | {"loop": self.complete(content["loop"])}
        write_checkpoint(fabric, path, content)

    def load(self, path: Path) -> None:
        """Take over a checkpoint of the same stage.

        Raises:
            ValueError: if it is no checkpoint, or belongs to another stage or another policy.
        """
        self.restore(read_checkpoint(path, self.stage), path)

    def restore(self, content: dict[str, Any], path: Path) -> None:
        """Take over what was read from the checkpoint ``path``; raises as :meth:`load`."""
        if content["seed"] != self.seed:
            raise ValueError(
                f"{path} is of a run with trainer.seed={content['seed']}, not {self.seed}; resume it with its own seed, "
                "or start a new run from its weights with trainer.init_from"
            )
        load_weights(self.policy, content, path)
        if (self.scheduler is None) != (content["scheduler"] is None):
            has = "no learning-rate scheduler" if self.scheduler is None else "a learning-rate scheduler"
            raise ValueError(f"{path} and this run differ: this run has {has}; resume with the settings it was written with")
        try:
            self.optimizer.load_state_dict(content["optimizer"])
        except ValueError as error:
            raise ValueError(f"the optimizer of {path} does not fit this run's: {error}") from error
        if self.scheduler is not None:
            self.scheduler.load_state_dict(content["scheduler"])
        if self.policy.objective is not None and content["objective"] is not None:
            self.policy.objective.load_state_dict(content["objective"])
        self.counters = Counters(**content["counters"])
        self.loop = content["loop"]
        torch.set_rng_state(content["torch_rng"])
        if torch.cuda.is_available() and content["cuda_rng"]:
            torch.cuda.set_rng_state_all(content["cuda_rng"])


def find_checkpoint(
    ckpt_path: str | None, root: Path, name: str, stage: str | None = None, prefer: str | None = None
) -> tuple[dict[str, Any], Path] | None:
    """Find a checkpoint by :func:`resolve_checkpoint` and read it by :func:`read_checkpoint`; None for none.

    Args:
        ckpt_path: as for :func:`resolve_checkpoint`.
        root: directory of all runs.
        name: name of the run.
        stage: the stage that it must be of; ``last`` and ``best`` pass over runs of others.
        prefer: the stage whose ``last`` or ``best`` is taken if there is one, for example ``sft`` to start RL from.
    """
    if ckpt_path is None:
        return None
    path = resolve_checkpoint(ckpt_path, root, name)
    wanted = stage or prefer
    if wanted is not None and str(ckpt_path) in ("last", "best"):
        for candidate in checkpoints_of(name, root, str(ckpt_path)):
            content = read_checkpoint(candidate)
            if content["stage"] == wanted:
                return content, candidate
    return read_checkpoint(path, stage), path


def write_checkpoint(fabric: Fabric, path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint; an existing one is replaced only by a complete new one.

    The file can be read by ``fabric.load`` with ``weights_only`` and by ``policy_class.load_from_checkpoint``.

    Raises:
        RuntimeError: if it cannot be written (for example, because the disk is full).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    try:
        # fabric.save waits for other ranks, and rank 0 writes without them
        write = fabric.save if fabric.world_size == 1 else fabric.strategy.save_checkpoint
        write(unfinished, content)
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:
        unfinished.unlink(missing_ok=True)
        kept = f"; the previous {path.name} is kept" if path.exists() else ""
        raise RuntimeError(f"the checkpoint {path} could not be written: {error}{kept}") from error


def read_checkpoint(path: Path, stage: str | None = None) -> dict[str, Any]:
    """Load a checkpoint onto the CPU, without running any code from it.

    Args:
        path: the file.
        stage: the stage that wants to resume it; None if only its weights are wanted.

    Raises:
        ValueError: if it is no checkpoint of this library, or one of another stage.
    """
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read as a checkpoint: {error}") from error
    if not isinstance(content, dict) or not {"state_dict", "counters", "stage"} <= content.keys():
        raise ValueError(f"{path} is no checkpoint of vla_async: it lacks state_dict, counters or stage")
    if stage is not None and content["stage"] != stage:
        raise ValueError(
            f"{path} was written by {content['stage']!r}, so {stage!r} cannot resume it; "
            "to start from its weights, give it as trainer.init_from"
        )
    return dict(content)


def load_weights(policy: VLAPolicy, content: dict[str, Any], path: Path) -> None:
    """Put a checkpoint's weights into a built policy.

    Raises:
        ValueError: names the tensors that do not fit.
    """
    try:
        policy.load_state_dict(content["state_dict"])
    except RuntimeError as error:
        raise ValueError(f"the weights of {path} do not fit this {type(policy).__name__}: {error}") from error


def plain_hyper_parameters(policy: VLAPolicy) -> dict[str, Any]:
    """The hyperparameters that survive ``weights_only``: plain values; objects (an objective) are left out."""
    return {name: value for name, value in policy.hparams.items() if _is_plain(value)}


def _copied(value: Any) -> Any:
    """A deep copy of nested dicts and lists whose tensors lie in main memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.keys())) and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str))
