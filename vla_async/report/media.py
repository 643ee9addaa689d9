"""Videos and saved trajectories of a run, as many inside the page as there is room for."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from vla_async.report.columns import SampledRun

_VIDEO = re.compile(r"(?P<split>validate|test)_(?P<version>\d+)_(?P<task>.+)_(?P<seed>\d+)_(?P<verdict>success|failure)")
_TRAJECTORY = re.compile(r"(?P<split>train|validate|test)_(?P<version>\d+)_(?P<seed>\d+)_(?P<verdict>success|failure)")


@dataclass(frozen=True)
class Clip:
    """An episode to look at.

    Attributes:
        run: whose it is.
        path: of the video, or of the trajectory if there is no video of it.
        task: its task.
        verdict: ``success`` or ``failure``; empty if its name does not say.
        about: split, version and seed.
        trajectory: the saved trajectory, if there is one.
        size: of the video, in bytes.
        uri: the video itself; empty if there is none, or no room for it.
    """

    run: str
    path: Path
    task: str
    verdict: str
    about: str
    trajectory: Path | None = None
    size: int = 0
    uri: str = ""


@dataclass(frozen=True)
class Gallery:
    """The episodes of all runs.

    Attributes:
        evaluations: videos of evaluations, the newest first.
        trajectories: saved trajectories, failed and newest ones first.
    """

    evaluations: list[Clip]
    trajectories: list[Clip]

    @property
    def left_out(self) -> list[Clip]:
        """Those whose videos are not inside the page, although there are some."""
        return [clip for clip in (*self.evaluations, *self.trajectories) if clip.size and not clip.uri]


def gallery(runs: Sequence[SampledRun], max_bytes: float) -> Gallery:
    """The episodes of some runs, with as many videos as there is room for: in turn one of each run and kind.

    Args:
        runs: the runs.
        max_bytes: what all videos together may add to the page.
    """
    evaluations = [list(_evaluations(run)) for run in runs]
    trajectories = [list(_trajectories(run)) for run in runs]
    order = [clip for turn in zip_longest(*evaluations, *trajectories) for clip in turn if clip is not None]
    filled: dict[int, Clip] = {}
    room = max_bytes
    for clip in order:
        encoded = 4 * -(-clip.size // 3)
        if clip.size and encoded <= room:
            room -= encoded
            filled[id(clip)] = _with_video(clip)
    return Gallery(
        *([filled.get(id(clip), clip) for clips in kind for clip in clips] for kind in (evaluations, trajectories))
    )


def _evaluations(run: SampledRun) -> Iterator[Clip]:
    """By policy version, the newest first; of one version, failures first."""
    found = [(_VIDEO.fullmatch(path.stem), path) for path in run.run.videos]
    for match, path in sorted(found, key=lambda it: (-int(it[0]["version"]), it[0]["verdict"]) if it[0] else (1, "")):
        named = match.groupdict() if match else {"task": path.stem}
        yield Clip(run.label, path, named["task"], named.get("verdict", ""), _about(named), None, path.stat().st_size)


def _trajectories(run: SampledRun) -> Iterator[Clip]:
    """Failures first, of these the newest."""
    found = [(_TRAJECTORY.fullmatch(path.stem), path) for path in run.run.trajectories]
    for match, path in sorted(found, key=lambda it: (it[0]["verdict"], -int(it[0]["version"])) if it[0] else ("z", 0)):
        named = match.groupdict() if match else {}
        video = path.with_suffix(".mp4")
        size = video.stat().st_size if video.is_file() else 0
        shown = video if size else path
        yield Clip(run.label, shown, path.parent.name, named.get("verdict", ""), _about(named), path, size)


def _about(named: dict[str, str]) -> str:
    if "split" not in named:
        return ""
    return f"{named['split']}, after {int(named['version'])} updates, seed {named['seed']}"


def _with_video(clip: Clip) -> Clip:
    encoded = base64.b64encode(clip.path.read_bytes()).decode()
    return Clip(**{**clip.__dict__, "uri": f"data:video/mp4;base64,{encoded}"})
