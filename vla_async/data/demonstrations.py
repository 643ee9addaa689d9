"""Demonstrations on disk: a memory-mapped TensorDict of frames, and LeRobot-style metadata beside it.

    <directory>/data/                 TensorDict [frames], memory-mapped: TensorDict.load_memmap reads it
    <directory>/meta/info.json        env spec, settings of the envs, number of episodes and frames, attempts made
    <directory>/meta/episodes.jsonl   per episode: index, task, instruction, length, success, seed

A frame is one env step: ``observation`` (what the action was decided on), ``action`` [A], ``episode_index``,
``frame_index`` and ``next`` with ``reward``, ``done`` and ``success``.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from vla_async import keys
from vla_async.envs.base import EnvFactory, EnvSpec
from vla_async.policies.base import VLAPolicy

FORMAT = "vla_async-demonstrations-1"

# names of the settings that decide what an action means and what an observation holds; others may differ between uses
_DECISIVE = (
    *("suite", "robot", "control_mode", "action_dim"),
    *("obs", "image_size", "camera", "wrist_camera", "cameras"),
)


def decisive_settings(factory: EnvFactory) -> dict[str, Any]:
    """The settings of envs that decide what an observation holds and what an action means, as JSON has them.

    A factory of one's own takes part with those of its fields that have the names the built-in factories use.
    """
    settings = {name: getattr(factory, name) for name in _DECISIVE if hasattr(factory, name)}
    if settings.get("obs") == "state":
        settings.pop("image_size", None)  # there is no image
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


@dataclass(frozen=True)
class EpisodeInfo:
    """What stands in episodes.jsonl about one episode."""

    episode_index: int
    task: str
    instruction: str
    length: int
    success: bool
    seed: int


def check_target(directory: Path, overwrite: bool) -> None:
    """See whether a dataset may be written to ``directory``.

    Raises:
        FileExistsError: if a dataset stands there and ``overwrite`` is off, or if something else stands there.
        RuntimeError: if its parent cannot be made or written to.
    """
    if directory.exists():
        ours = (directory / "meta" / "info.json").is_file()
        if not (overwrite and ours):
            fix = "set collect_loop.overwrite to replace it" if ours else "it is no dataset of demonstrations"
            raise FileExistsError(f"collect_loop.directory={str(directory)!r} exists already; {fix}, or choose another")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory.parent):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise RuntimeError(
            f"collect_loop.directory={str(directory)!r} cannot be written ({reason}); choose a place that can be"
        ) from error


class DemonstrationWriter:
    """Gathers episodes and writes them as one dataset, completely or not at all.

    Args:
        directory: where the dataset will stand.
        spec: what the envs look like.
        overwrite: replace a dataset that stands there.
        factory: the envs, whose decisive settings are noted so that a mismatch is found; None notes nothing.

    Raises:
        FileExistsError: as :func:`check_target`.
        RuntimeError: as :func:`check_target`.
    """

    def __init__(self, directory: Path, spec: EnvSpec, overwrite: bool = False, factory: EnvFactory | None = None) -> None:
        check_target(directory, overwrite)
        self.directory, self.spec = directory, spec
        self._env = {} if factory is None else decisive_settings(factory)
        self._frames: list[TensorDict] = []
        self._episodes: list[EpisodeInfo] = []

    def __len__(self) -> int:
        return len(self._episodes)

    def add(self, frames: TensorDict, *, task: str, instruction: str, success: bool, seed: int) -> None:
        """Add one episode, given as a TensorDict ``[length]`` with ``observation``, ``action`` and ``next``."""
        index, length = len(self._episodes), len(frames)
        frames.set("episode_index", torch.full((length,), index))
        frames.set("frame_index", torch.arange(length))
        self._frames.append(frames)
        self._episodes.append(EpisodeInfo(index, task, instruction, length, success, seed))

    def write(self, attempts: int) -> None:
        """Write the dataset.

        Args:
            attempts: episodes that were tried to get these.

        Raises:
            RuntimeError: if there is nothing to write, or if the disk does not take it.
        """
        if not self._frames:
            raise RuntimeError(f"none of {attempts} attempts succeeded, so there are no demonstrations to write")
        unfinished = self.directory.with_name(self.directory.name + ".unfinished")
        replaced = self.directory.with_name(self.directory.name + ".replaced")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            self._write_files(unfinished, attempts)
            if self.directory.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                self.directory.rename(replaced)
            unfinished.rename(self.directory)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"the demonstrations could not be written to {self.directory}: {error}") from error
        finally:  # also of an interrupt
            shutil.rmtree(unfinished, ignore_errors=True)
            if replaced.exists() and not self.directory.exists():
                replaced.rename(self.directory)
            shutil.rmtree(replaced, ignore_errors=True)

    def _write_files(self, directory: Path, attempts: int) -> None:
        (directory / "meta").mkdir(parents=True)
        frames: Any = torch.cat(self._frames)
        frames.memmap(directory / "data")
        lines = [json.dumps(asdict(episode)) for episode in self._episodes]
        (directory / "meta" / "episodes.jsonl").write_text("\n".join(lines) + "\n")
        info = {
            "format": FORMAT,
            "env_spec": self.spec.to_dict(),
            "env": self._env,
            "total_episodes": len(self._episodes),
            "total_frames": len(frames),
            "attempts": attempts,
        }
        (directory / "meta" / "info.json").write_text(json.dumps(info, indent=2) + "\n")


class Demonstrations:
    """A dataset of demonstrations, opened for imitation.

    Args:
        directory: a dataset that :class:`DemonstrationWriter` wrote.
        chunk_size: H, the number of actions that one decision imitates.
        max_episodes: use only the first so many; all by default.

    Raises:
        FileNotFoundError: if there is no dataset.
        ValueError: if it has no episode, or its format is unknown.
    """

    def __init__(self, directory: Path, chunk_size: int, max_episodes: int | None = None) -> None:
        if not (directory / "meta" / "info.json").is_file():
            raise FileNotFoundError(
                f"sft_loop.directory={str(directory)!r} holds no demonstrations; collect some with `vla-async collect`"
            )
        info = json.loads((directory / "meta" / "info.json").read_text())
        if info.get("format") != FORMAT:
            raise ValueError(f"{directory} has format {info.get('format')!r}, but {FORMAT!r} is expected")
        lines = (directory / "meta" / "episodes.jsonl").read_text().splitlines()
        self.episodes = [EpisodeInfo(**json.loads(line)) for line in lines][:max_episodes]
        self.directory, self.attempts = directory, int(info["attempts"])
        self._env: dict[str, Any] = info.get("env", {})  # what wrote it need not have known its envs
        self.num_frames = sum(episode.length for episode in self.episodes)
        if not self.num_frames:
            raise ValueError(f"{directory} holds no episode; collect some with `vla-async collect`")
        recorded = EnvSpec.from_dict(info["env_spec"])
        self.spec = replace(recorded, chunk_size=chunk_size)
        self.frames: TensorDictBase = TensorDict.load_memmap(directory / "data")[: self.num_frames]
        ends = torch.tensor([episode.length for episode in self.episodes]).cumsum(0)
        self._last: Tensor = ends[self.frames["episode_index"]] - 1  # [frames], index of the last frame of the episode

    def check_env(self, factory: EnvFactory) -> None:
        """See whether what is demonstrated can be done in some envs.

        Raises:
            ValueError: if they have other tasks, or show or move something else.
        """
        here = f"sft_loop.directory={str(self.directory)!r}"
        fix = "collect demonstrations for these envs, or choose the dataset or the envs anew"
        if others := sorted({episode.task for episode in self.episodes} - set(factory.task_names)):
            raise ValueError(f"{here} shows {', '.join(others)}, but env has {', '.join(factory.task_names)}; {fix}")
        settings = decisive_settings(factory)
        different = [name for name in settings if name in self._env and self._env[name] != settings[name]]
        if different:
            wanted = ", ".join(f"env.{name}={settings[name]!r}" for name in different)
            recorded = ", ".join(f"{name}={self._env[name]!r}" for name in different)
            raise ValueError(f"{here} was collected with {recorded}, but {wanted}; {fix}")

    def decisions(self, indices: Tensor, tokens: Tensor) -> TensorDict:
        """The decisions that start at some frames.

        Args:
            indices: int64 ``[B]``.
            tokens: int64 ``[episodes, L]``, the tokens of each episode's instruction.

        Returns:
            TensorDict ``[B]`` with ``observation``, ``instruction_tokens``, ``("vla_action", "chunk")`` ``[B, H, A]`` and
            ``action_is_pad`` ``[B, H]``; past the end of its episode a chunk repeats the last action, as padding.
        """
        steps = indices.unsqueeze(-1) + torch.arange(self.spec.chunk_size)
        last = self._last[indices].unsqueeze(-1)
        frames = self.frames[indices]
        return TensorDict(
            {
                keys.OBSERVATION: frames[keys.OBSERVATION].clone(),
                keys.INSTRUCTION_TOKENS: tokens[frames["episode_index"]],
                keys.CHUNK: self.frames["action"][torch.minimum(steps, last)],
                keys.ACTION_IS_PAD: steps > last,
            },
            batch_size=[len(indices)],
        )

    def tokens(self, policy: VLAPolicy) -> Tensor:
        """int64 ``[episodes, L]``: each episode's instruction, as ``policy`` tokenizes it."""
        return torch.stack([policy.tokenize(episode.instruction) for episode in self.episodes])
