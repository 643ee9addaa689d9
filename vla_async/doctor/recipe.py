"""``Needs``: what a recipe wants of the machine, found by building its parts without running them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vla_async.cli import VLACLI
from vla_async.doctor.check import Check
from vla_async.envs import EnvFactory, EnvSpec
from vla_async.loops import StreamingFitLoop
from vla_async.memory import work_of
from vla_async.refusals import ConfigError
from vla_async.state import find_checkpoint

_MEND = "mend the setting that it names"


@dataclass(frozen=True)
class Needs:
    """What ``fit`` of a recipe takes; as much as is known where its parts cannot be built.

    Attributes:
        check: whether they can, and go together.
        root: the directory of all runs.
        loggers: class paths of the loggers beside metrics.csv.
        wants_cuda: whether it asks for CUDA devices.
        env: its envs; None if they cannot be built.
        workers: env workers.
        replicas: copies of the policy that act in processes of their own.
        cpu_replicas: those of them that act on a CPU.
        ranks: that train.
        rows: of the slab.
        records: whether it records videos.
    """

    check: Check
    root: Path
    loggers: tuple[str, ...] = ()
    wants_cuda: bool = False
    env: EnvFactory | None = None
    workers: int = 0
    replicas: int = 0
    cpu_replicas: int = 0
    ranks: int = 1
    rows: int = 0
    records: bool = False

    @property
    def processes(self) -> int:
        """All that run beside each other."""
        return self.workers + self.replicas + self.ranks

    def slab_bytes(self, spec: EnvSpec | None) -> int:
        """The least that the slab takes: what the policy sees, and its chunks with their log-probs.

        Args:
            spec: what the envs are like; None if that is not known, and then nothing is.
        """
        if spec is None:
            return 0
        seen = sum(math.prod(shape) for shape in spec.images.values()) + 4 * (spec.state_dim or 0)
        return self.rows * (seen + 2 * 4 * spec.chunk_size * spec.action_dim)


class _Unrun(VLACLI):
    """Builds what a command line of ``fit`` says, and leaves it at that.

    Attributes:
        problem: why it cannot be built; empty if it can.
        is_built: whether there is a trainer, a policy and envs; for a recipe that fails for want of CUDA, those without it.
        wants_cuda: whether the recipe asks for CUDA.
        logger_paths: the class paths of the recipe's loggers, which are not built: that may ask a server for a run.
    """

    def __init__(self, args: Sequence[str]) -> None:
        self.problem, self.is_built, self.wants_cuda, self.logger_paths = "", False, False, list[str]()
        super().__init__(["fit", *args])

    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        trainer = self.config[self.subcommand].trainer
        self.wants_cuda = trainer.accelerator == "cuda"
        self.logger_paths = [logger.class_path for logger in trainer.loggers or []]
        trainer.loggers = None

    def instantiate_classes(self) -> None:
        self.problem = self._build()
        if self.problem and self.wants_cuda:
            self.config[self.subcommand].trainer.accelerator = "cpu"
            self._build()

    def _build(self) -> str:
        """Build all parts; returns why that failed."""
        try:
            super().instantiate_classes()
        except (ConfigError, RuntimeError, ImportError, OSError) as error:
            return str(error)
        self.is_built = True
        return ""

    def after_instantiate_classes(self) -> None:
        """Nothing: what the trainer would write is not wanted."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing, which is the point."""


def needs_of(args: Sequence[str]) -> Needs:
    """What ``vla-async fit ARGS`` needs.

    Raises:
        ConfigError: if the command line or the recipe says what does not exist.
    """
    built = _Unrun(args)
    root, loggers, cuda = Path(built.config["fit"].trainer.root_dir), tuple(built.logger_paths), built.wants_cuda
    if not built.is_built:
        return Needs(Check("recipe", "fail", built.problem, _MEND), root, loggers, cuda)
    trainer, policy, env = built.trainer, built.model, built.config_init["fit"].env
    problem = built.problem or _problem(built, env)
    found = problem or f"{type(policy).__name__} on {type(env).__name__}"
    check = Check("recipe", "fail" if problem else "ok", found, _MEND if problem else "")
    loop, workers = trainer.fit_loop, 1 if env.is_batched else env.num_envs
    devices: list[torch.device] = []
    if isinstance(loop, StreamingFitLoop) and not problem:
        workers = len({address.worker for address in loop.plan(trainer).envs})
        devices = loop.placement.replicas(trainer.ranks.settings.devices)
    return Needs(
        check=check,
        root=root,
        loggers=loggers,
        wants_cuda=cuda or any(device.type == "cuda" for device in devices),
        env=env,
        workers=workers,
        replicas=len(devices),
        cpu_replicas=sum(device.type == "cpu" for device in devices),
        ranks=trainer.ranks.settings.num_ranks,
        rows=0 if problem else work_of(loop, trainer).rows,
        records=trainer.val_every_n_steps > 0 and trainer.evaluate_loop.num_videos > 0,
    )


def _problem(built: _Unrun, env: EnvFactory) -> str:
    """Why ``fit`` would refuse the parts before it starts a worker; empty if it would not."""
    trainer = built.trainer
    trainer.policy, trainer.env = built.model, env
    try:
        built.model.check_env(env)
        trainer.fit_loop.check(trainer)
        for callback in trainer.callbacks:
            callback.check(trainer)
        find_checkpoint(trainer.init_from, trainer.root_dir, trainer.name, prefer="sft")
    except (ValueError, RuntimeError, OSError) as error:
        return str(error)
    return ""
