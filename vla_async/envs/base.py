"""What a set of envs is: ``EnvFactory`` describes it, ``Simulator`` steps it, ``EnvSpec`` says what a policy sees."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vla_async.envs.chunked import ChunkedEnv

OnSuccess = Literal["terminate", "finish_chunk", "continue"]
"""What a success does: end the episode at that env step; execute the rest of the chunk, then end; or run to the horizon."""


@dataclass(frozen=True)
class EnvSpec:
    """What a policy has to know of its envs. Plain values only, so that it can be stored in a checkpoint.

    Attributes:
        action_low: lower bound of each action element, length A.
        action_high: upper bound of each action element, length A.
        chunk_size: H, the number of actions of one decision.
        state_dim: length of ``("observation", "state")``, or None without one.
        images: ``(C, H, W)`` of every camera, by its name under ``"observation"``.

    Raises:
        ValueError: for an action element that cannot move: policies scale by its range.
    """

    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    chunk_size: int
    state_dim: int | None = None
    images: dict[str, tuple[int, int, int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for element, (low, high) in enumerate(zip(self.action_low, self.action_high, strict=True)):
            if not low < high:
                raise ValueError(
                    f"action_low={low} and action_high={high} of action element {element} leave it no room; let the env "
                    "fill in what is fixed, and leave it out of its actions"
                )

    @property
    def action_dim(self) -> int:
        return len(self.action_low)

    def to_dict(self) -> dict[str, Any]:
        """The spec as plain lists and dicts (JSON, and ``torch.load(weights_only=True)``)."""
        plain = dataclasses.asdict(self)
        plain |= {"action_low": list(self.action_low), "action_high": list(self.action_high)}
        plain["images"] = {name: list(shape) for name, shape in self.images.items()}
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> EnvSpec:
        """The inverse of :meth:`to_dict`."""
        values = dict(plain)
        values |= {"action_low": tuple(plain["action_low"]), "action_high": tuple(plain["action_high"])}
        values["images"] = {name: tuple(shape) for name, shape in plain["images"].items()}
        return cls(**values)


@dataclass
class SimStep:
    """The result of one env step of all rows of a simulator.

    Attributes:
        observation: by name (``"state"``, ``"image"``, other cameras), each ``[N, ...]``. A mapping may compute a leaf
            when it is read, which happens before the next step or reset, or not at all.
        reward: float32 ``[N]``.
        success: bool ``[N]``, the task's success predicate after this env step.
        failure: bool ``[N]`` where the task was lost for good, or None if the task has no such state.
    """

    observation: Mapping[str, Tensor]
    reward: Tensor
    success: Tensor
    failure: Tensor | None = None


@dataclass
class ChunkStep:
    """What one decision did, for N rows. Rows that were not stepped hold what they held before.

    Attributes:
        observation: by name, each ``[N, ...]``: after the last executed env step, before any reset.
        step_rewards: float32 ``[N, H]``, zero where no env step was executed.
        executed: bool ``[N, H]``.
        success: bool ``[N]``, after the last executed env step.
        success_once: bool ``[N]``, at any env step of the episode so far.
        terminated: bool ``[N]``.
        truncated: bool ``[N]``.
        frames: a picture per executed env step of row 0, if the env records.
    """

    observation: dict[str, Tensor]
    step_rewards: Tensor
    executed: Tensor
    success: Tensor
    success_once: Tensor
    terminated: Tensor
    truncated: Tensor
    frames: list[Tensor]

    @property
    def done(self) -> Tensor:
        return self.terminated | self.truncated


class Simulator(ABC):
    """N rows of one simulator, stepped one env step at a time. :class:`ChunkedEnv` makes an ``EnvBase`` of it.

    This is the short way from a simulator into a trajectory: plain tensors, no TensorDict. A subclass sets
    ``num_rows`` (N; 1 unless the simulator steps a batch), ``action_low`` and ``action_high``, and ``device`` if its
    tensors do not live on the CPU.
    """

    num_rows: int = 1
    device: torch.device = torch.device("cpu")
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]

    @property
    @abstractmethod
    def instructions(self) -> Sequence[str]:
        """The language instruction of each row, length N, valid after a reset."""

    @property
    @abstractmethod
    def tasks(self) -> Sequence[str]:
        """The task name of each row, length N, the unit of per-task reports."""

    @abstractmethod
    def reset(self, rows: Tensor, seeds: Tensor) -> dict[str, Tensor]:
        """Start a new episode in some rows.

        Args:
            rows: bool ``[N]``, the rows to reset; the others go on undisturbed.
            seeds: int64 ``[N]``; a seed fixes the initial state, whatever ran before.

        Returns:
            The observation of all rows, by name, each ``[N, ...]``.
        """

    @abstractmethod
    def step(self, action: Tensor, rows: Tensor) -> SimStep:
        """Execute one action per row.

        Args:
            action: float32 ``[N, A]``.
            rows: bool ``[N]``; what is returned for the other rows is ignored.
        """

    def render(self) -> Tensor:
        """A picture of row 0 for a video, uint8 ``[H, W, 3]``.

        Raises:
            RuntimeError: if the simulator was built without a renderer.
        """
        raise RuntimeError(f"{type(self).__name__} cannot render; build it with make(index, render=True)")

    def close(self) -> None:
        """Release the simulator."""


@dataclass(kw_only=True)
class EnvFactory(ABC):
    """Describes a set of envs and builds any one of them. Picklable, and cheap to construct: no simulator is touched.

    Subclasses are keyword dataclasses that implement :meth:`make_simulator` and :attr:`task_names`, and validate their
    own fields in ``__post_init__`` (after calling this class's).

    Args:
        num_envs: number of envs that are stepped side by side. Env ``i`` runs task ``i % len(task_names)``.
        chunk_size: H, the number of actions of one decision.
        max_episode_steps: the horizon in env steps; the episode is truncated there.
        on_success: ``terminate`` ends the episode at the env step that succeeds and leaves the rest of the chunk
            unexecuted; ``finish_chunk`` executes the rest of the chunk, then ends it; ``continue`` runs to the horizon.
    """

    num_envs: int = 4
    chunk_size: int = 1
    max_episode_steps: int = 50
    on_success: OnSuccess = "terminate"

    def __post_init__(self) -> None:
        for name in ("num_envs", "chunk_size", "max_episode_steps"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"env.{name}={value} must be at least 1")
        if self.on_success not in ("terminate", "finish_chunk", "continue"):
            raise ValueError(f"env.on_success={self.on_success!r}: choose terminate, finish_chunk or continue")
        if self.chunk_size > self.max_episode_steps:
            raise ValueError(
                f"env.chunk_size={self.chunk_size} is longer than env.max_episode_steps={self.max_episode_steps}; "
                "shorten the chunk or lengthen the episode"
            )

    @property
    @abstractmethod
    def task_names(self) -> list[str]:
        """The tasks that this factory's envs run, in order. Known without building a simulator."""

    @property
    def observation_names(self) -> frozenset[str] | None:
        """What stands under ``"observation"``, if it is known without building a simulator; None if it is not."""
        return None

    @property
    def is_batched(self) -> bool:
        """Whether one simulator steps all ``num_envs`` rows at once (a GPU simulator)."""
        return False

    @abstractmethod
    def make_simulator(self, index: int, render: bool = False) -> Simulator:
        """Build the simulator behind env ``index``.

        Args:
            index: which env, in ``[0, num_envs)``. Of a batched factory, which env its row 0 is, so that row r runs task
                ``(index + r) % len(task_names)``: 0, unless it is one of several stages that a larger one was cut into.
            render: whether :meth:`Simulator.render` will be called.
        """

    def check(self) -> None:
        """Look whether this machine can run the envs, before any worker starts.

        Raises:
            RuntimeError: names the missing package or system library and how to install it.
        """

    def make(self, index: int, render: bool = False) -> ChunkedEnv:
        """Build env ``index`` as a TorchRL ``EnvBase`` whose action is a chunk."""
        from vla_async.envs.chunked import ChunkedEnv

        env = ChunkedEnv(
            self.make_simulator(index, render),
            chunk_size=self.chunk_size,
            max_episode_steps=self.max_episode_steps,
            on_success=self.on_success,
            is_batched=self.is_batched,
        )
        if self.is_batched and index:
            self._check_stage(index, list(env.simulator.tasks))
        return env

    def _check_stage(self, index: int, tasks: list[str]) -> None:
        """Make sure that a stage runs the tasks of its own envs: else some tasks would run twice, and others not at all.

        Raises:
            ValueError: if it does not.
        """
        names = self.task_names
        expected = [names[(index + row) % len(names)] for row in range(len(tasks))]
        if tasks != expected:
            raise ValueError(
                f"the stage that begins with env {index} runs {tasks}, but its envs' tasks are {expected}; let "
                f"{type(self).__name__}.make_simulator(index) run task (index + row) % {len(names)}, or set num_stages=1"
            )
