"""``vla-async replay``: plays a saved episode again, in the same env, and says whether the same came of it.

The file alone says which env that is. The episode starts from its seed, the recorded actions are executed, and what is seen,
rewarded and reached is compared with what was recorded, decision by decision.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vla_async import keys
from vla_async.data.trajectories import Trajectory, library_versions
from vla_async.envs.base import ChunkStep, EnvFactory
from vla_async.envs.chunked import ChunkedEnv
from vla_async.envs.description import factory_of
from vla_async.monitor.report import Table
from vla_async.monitor.video import write_video
from vla_async.options import OptionParser
from vla_async.refusals import ConfigError

_PICTURES = "pixels of "  # what is compared under such a name decides nothing: another driver draws another picture


@dataclass
class Comparison:
    """What was the same in both episodes, and what was not.

    Attributes:
        tolerance: numbers differ if they are further apart than this, times one plus the recorded one's size.
        compared: numbers that were compared, by what they are.
        different: those that differ.
        largest: the largest difference.
        first: the first difference, in words; None if there is none.
    """

    tolerance: float
    compared: dict[str, int] = field(default_factory=dict)
    different: dict[str, int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    first: str | None = None

    def look(self, name: str, recorded: Tensor, replayed: Tensor, when: str) -> None:
        """Compare tensors.

        Args:
            name: what they are.
            recorded: of any shape and type.
            replayed: the same of the replay.
            when: where in the episode that is.
        """
        before, now = recorded.double(), replayed.double().cpu()
        if before.shape != now.shape:
            self._note(name, 1, math.inf, f"{when}: {name} has shape {list(now.shape)}, recorded {list(before.shape)}")
            return
        both_unknown = before.isnan() & now.isnan()
        apart = torch.where(both_unknown, 0.0, (before - now).abs().nan_to_num(nan=math.inf))
        wrong = apart > self.tolerance * (1.0 + before.abs())
        self.compared[name] = self.compared.get(name, 0) + before.numel()
        text = ""
        if bool(wrong.any()):
            where = torch.nonzero(wrong)[0].tolist()
            at = str(where) if before.numel() > 1 else ""
            text = f"{when}: {name}{at} is {now[tuple(where)].item():g}, recorded {before[tuple(where)].item():g}"
        self._note(name, int(wrong.sum()), float(apart.max()) if apart.numel() else 0.0, text)

    def look_at_text(self, name: str, recorded: str, replayed: str) -> None:
        """Compare texts."""
        self.compared[name] = self.compared.get(name, 0) + 1
        differs = recorded != replayed
        self._note(name, int(differs), math.inf if differs else 0.0, f"{name} is {replayed!r}, recorded {recorded!r}")

    def _note(self, name: str, wrong: int, largest: float, text: str) -> None:
        self.different[name] = self.different.get(name, 0) + wrong
        self.largest[name] = max(self.largest.get(name, 0.0), largest)
        if wrong and self.first is None and not name.startswith(_PICTURES):
            self.first = text

    @property
    def reproduced(self) -> bool:
        return self.first is None

    def table(self) -> Table:
        """A line for each kind of number."""
        table = Table(["compared", "numbers", "different", "largest difference"])
        for name, number in self.compared.items():
            table.rows.append([name, f"{number:,}", f"{self.different[name]:,}", f"{self.largest[name]:.3g}"])
        return table


class Replay:
    """An episode that is played again.

    In a batch all rows play it, each from the same seed, and the recorded row is compared: what a row does must not depend
    on the others, so these may as well do the same, and row 0, which is drawn, shows it.

    Args:
        trajectory: the episode.
        env: the env that it was played in.
        pictures: whether to draw.
        tolerance: see :class:`Comparison`.

    Attributes:
        comparison: what was the same.
        frames: uint8 ``[height, width, 3]`` each, at the start and after each env step.
    """

    def __init__(self, trajectory: Trajectory, env: ChunkedEnv, pictures: bool, tolerance: float) -> None:
        self.trajectory, self.env, self.row = trajectory, env, int(trajectory.info["row"])
        self.comparison, self.frames = Comparison(tolerance), list[Tensor]()
        self.pictures = pictures
        self._rewards: list[float] = []
        self._steps = 0

    def run(self) -> None:
        """Play it, to its recorded end or to where it ends otherwise."""
        info, env, decisions = self.trajectory.info, self.env, self.trajectory.decisions
        active = torch.ones(env.num_rows, dtype=torch.bool, device=env.simulator.device)
        seeds = torch.full((env.num_rows,), int(info["seed"]), dtype=torch.int64, device=env.simulator.device)
        observation = env.reset_rows(active, seeds)
        self.comparison.look_at_text("task", info["task"], env.simulator.tasks[self.row])
        self.comparison.look_at_text("instruction", info["instruction"], env.simulator.instructions[self.row])
        if self.pictures:
            self.frames.append(env.simulator.render().cpu())
        env.recording = self.pictures
        recorded = {name: leaf.unbind() for name, leaf in decisions.get(keys.OBSERVATION, {}).items()}
        for number in range(len(decisions)):
            when = f"decision {number}, env step {self._steps}"
            self._look({name: leaf[number] for name, leaf in recorded.items()}, observation, when)
            chunk = decisions[keys.CHUNK][number].to(active.device)
            result = env.step_chunk(chunk.expand(env.num_rows, *chunk.shape), active)
            self._compare_outcome(number, result, when)
            observation, active = result.observation, active & ~result.done
            if bool(result.done[self.row]) != bool(decisions[keys.DONE][number]):
                return  # the rest of one of them has nothing to be compared with
        self._look(self.trajectory.final_observation, observation, "at the end")
        self._compare_ends(result)

    def _look(self, recorded: dict[str, Tensor], observation: dict[str, Tensor], when: str) -> None:
        for name, leaf in recorded.items():
            kind = _PICTURES if leaf.dtype == torch.uint8 else "observation "
            seen = observation[name][self.row] if name in observation else torch.zeros(0)
            self.comparison.look(f"{kind}{name}", leaf, seen, when)

    def _compare_outcome(self, number: int, result: ChunkStep, when: str) -> None:
        """Compare what a decision led to."""
        recorded, row = self.trajectory.decisions[number], self.row
        outcomes = {
            keys.EXECUTED: ("executed env steps", result.executed[row]),
            keys.STEP_REWARDS: ("rewards", result.step_rewards[row]),
            keys.SUCCESS: ("success", result.success[row : row + 1]),
            keys.SUCCESS_ONCE: ("success once", result.success_once[row : row + 1]),
            keys.TERMINATED: ("terminated", result.terminated[row : row + 1]),
            keys.TRUNCATED: ("truncated", result.truncated[row : row + 1]),
        }
        for key, (name, replayed) in outcomes.items():
            self.comparison.look(name, recorded[key], replayed, when)
        self._rewards.append(float(result.step_rewards[row].sum()))
        self._steps += int(result.executed[row].sum())
        self.frames += [frame.cpu() for frame in result.frames]

    def _compare_ends(self, result: ChunkStep) -> None:
        """Compare what is said of the whole episode."""
        info = self.trajectory.info
        whole = {
            "return": (info["return"], sum(self._rewards)),
            "env steps": (info["env_steps"], self._steps),
            "success once": (info["success_once"], result.success_once[self.row]),
            "success at end": (info["success_at_end"], result.success[self.row]),
        }
        for name, (recorded, replayed) in whole.items():
            self.comparison.look(name, torch.tensor(float(recorded)).double(), torch.tensor(float(replayed)), "at the end")


def replay(args: Sequence[str]) -> int:
    """Carry out ``vla-async replay ARGS``.

    Returns:
        0 if the episode was reproduced, else 1.

    Raises:
        ConfigError: if the command line is wrong, the file is no trajectory, or its env cannot be made.
        RuntimeError: if the simulator is not installed, or the video cannot be written.
    """
    options = _parse(args)
    trajectory, factory = _read(options.file)
    info = trajectory.info
    print(f"{options.file}: {info['task']}, {info['split']} seed {info['seed']}, policy version {info['policy_version']}")
    _tell_versions(info.get("versions", {}))
    factory.check()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the simulators' own, as in an env worker
        env = factory.make(info["env_index"], render=True)
        try:
            played = Replay(trajectory, env, _can_draw(env), options.tolerance)
            played.run()
        finally:
            env.close()
    compared = played.comparison
    compared.table().print()
    within = f"reproduced, to within {options.tolerance:g}"
    print(within if compared.reproduced else f"NOT reproduced; the first difference: {compared.first}")
    if played.frames:
        path = options.video or options.file.with_name(f"{options.file.stem}_replay.mp4")
        _write(path, played.frames)
        if options.show:
            _show(path)
    return int(not compared.reproduced)


def _parse(args: Sequence[str]) -> argparse.Namespace:
    usage = "vla-async replay FILE [--video OUT.mp4] [--show true] [--tolerance X]"
    parser = OptionParser(usage, __doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="a saved trajectory, in trajectories/ of a run")
    parser.add_argument("--video", type=Path, help="the video of the replay; by default beside FILE, <name>_replay.mp4")
    parser.add_argument("--show", choices=("true", "false"), default="false", help="open the video, if there is a display")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="how far numbers may be apart, times 1 + their size")
    options = parser.parse_args(args)
    if options.video is not None and options.video.suffix != ".mp4":
        raise ConfigError(f"--video {options.video}: its name must end in .mp4")
    if not 0.0 <= options.tolerance < math.inf:
        raise ConfigError(f"--tolerance {options.tolerance:g} must be 0 or a positive number")
    options.show = options.show == "true"
    return options


def _read(path: Path) -> tuple[Trajectory, EnvFactory]:
    """A trajectory and the envs that it was played in."""
    try:
        trajectory = Trajectory.load(path)
        if trajectory.info["env"] is None:
            raise ValueError(f"{path} does not say what its env was: {trajectory.info['env_problem']}")
        return trajectory, factory_of(trajectory.info["env"])
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _tell_versions(recorded: dict[str, str]) -> None:
    """Say which libraries have another version than they had: results may differ for that alone."""
    here = library_versions()
    for name, version in recorded.items():
        if here.get(name) != version:
            print(f"  recorded with {name} {version}, replayed with {here.get(name, 'none')}: that may change something")


def _can_draw(env: ChunkedEnv) -> bool:
    try:
        env.simulator.render()
    except RuntimeError as error:
        print(f"  no video: {error}")
        return False
    return True


def _write(path: Path, frames: Sequence[Tensor]) -> None:
    """Make the video, and say where it is."""
    try:
        print(f"video: {write_video(path, frames)}")
    except OSError as error:
        reason = error.strerror or error
        raise RuntimeError(f"the video cannot be written to {path}: {reason}; choose another place with --video") from error


def _show(path: Path) -> None:
    """Open a video in the system's player."""
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        print("  this machine has no display; look at the video on another one")
        return
    webbrowser.open(path.resolve().as_uri())
