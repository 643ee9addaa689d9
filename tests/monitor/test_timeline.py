"""The timeline of real runs: in the format, a lane for everybody, an arrow for every trajectory that was consumed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import make_trainer, tiny
from tests.monitor.trace_format import Event, check_trace
from vla_async.callbacks import Callback
from vla_async.envs import ToyEnvs
from vla_async.loops import EvaluateLoop, StreamingFitLoop, SyncFitLoop
from vla_async.monitor import timeline_run
from vla_async.monitor.timeline import FILE, Slice, read_timeline
from vla_async.monitor.timeline_run import WORKER, Timeline
from vla_async.monitor.timeline_track import CAPACITY, Kind, clock
from vla_async.placement import Placement
from vla_async.trainer import AsyncTrainer

ENVS = ToyEnvs(num_envs=3, chunk_size=2, max_episode_steps=8)
LANES = ["env worker 0", "env worker 1", "env worker 2", "publisher", "replica 0", "replica 1", "trainer rank 0"]


def fit(root: Path, timeline: Any, *callbacks: Callback, **options: Any) -> AsyncTrainer:
    placement = Placement("disaggregated", ["cpu", "cpu"])
    loop = StreamingFitLoop(decisions_per_env=3, update_epochs=1, placement=placement)
    settings = {"fit_loop": loop, "max_steps": 4, "callbacks": [*callbacks], "num_threads": 1, "timeline": timeline}
    trainer = make_trainer(root, **(settings | options))
    trainer.fit(tiny(), ENVS)
    return trainer


class Recorded:
    """A run's timeline, as events and as slices."""

    def __init__(self, trainer: AsyncTrainer) -> None:
        path = trainer.run.path / FILE
        self.events, self.slices = check_trace(path), read_timeline(path)
        self.steps = {slice.args["step"]: slice for slice in self.of("trainer rank 0") if "step" in slice.args}

    def of(self, lane: str, name: str | None = None) -> list[Slice]:
        return [slice for slice in self.slices if slice.lane == lane and name in (None, slice.name)]

    def arrows(self) -> list[tuple[Event, Event]]:
        begun = {event["id"]: event for event in self.events if event["ph"] == "s"}
        return [(begun[event["id"]], event) for event in self.events if event["ph"] == "f"]

    def lane(self, event: Event) -> str:
        names = (e for e in self.events if e["name"] == "thread_name" and e["tid"] == event["tid"])
        return str(next(names)["args"]["name"])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Four updates of three fragments each, two validations in turn."""
    evaluation = EvaluateLoop(num_episodes=1, num_videos=0)
    return Recorded(fit(tmp_path_factory.mktemp("run"), True, evaluate_loop=evaluation, val_every_n_steps=2))


def test_everybody_has_a_lane_and_is_seen_at_work(recorded: Recorded) -> None:
    """The format is checked in :func:`check_trace`, which read the file."""
    assert sorted({slice.lane for slice in recorded.slices}) == LANES
    for lane in LANES[:3]:
        assert {"reset", "env steps"} <= {slice.name for slice in recorded.of(lane)}
    replicas = [*recorded.of("replica 0"), *recorded.of("replica 1")]
    assert {slice.args["version"] for slice in replicas if slice.name == "swap weights"} == {1, 2, 3, 4}
    decisions = sum(slice.args["rows"] for slice in replicas if slice.name == "forward")
    assert decisions >= sum(slice.name == "env steps" for slice in recorded.slices) > 4 * 3 * 3 - 1
    assert [slice.args["version"] for slice in recorded.of("publisher", "publish")] == [1, 2, 3, 4]


def test_a_step_is_made_of_what_the_trainer_does(recorded: Recorded) -> None:
    """A Gantt picture of one is drawn from these; validation is in turn, so inside the step that it follows."""
    assert [*recorded.steps] == [1, 2, 3, 4]
    parts = ["forward and backward", "optimizer step", "prepare", "publish", "read", "wait for trajectories"]
    for number, step in recorded.steps.items():
        inside = [slice for slice in recorded.of("trainer rank 0") if slice.step == number and slice is not step]
        found = Counter(slice.name for slice in inside)
        assert {name: found[name] for name in parts} == dict.fromkeys(parts, 3) | {"optimizer step": 1, "publish": 1}
        assert found["validate"] == (number % 2 == 0)
        assert all(step.start_s <= slice.start_s <= slice.end_s <= step.end_s for slice in inside)
        assert sum(s.args["decisions"] for s in inside if s.name == "forward and backward") == 9
    assert recorded.of("trainer rank 0", "validate")[0].step is None, "the first validation comes before the first step"


def test_every_trajectory_that_was_consumed_has_an_arrow_into_its_step(recorded: Recorded) -> None:
    ends = Counter()
    for begin, end in recorded.arrows():
        assert recorded.lane(begin).startswith("env worker")
        assert recorded.lane(end) == "trainer rank 0"
        at = end["ts"] / 1e6
        (step,) = (number for number, step in recorded.steps.items() if step.start_s <= at <= step.end_s)
        ends[step] += 1
    assert ends == {1: 3, 2: 3, 3: 3, 4: 3}


def test_queue_and_staleness_are_curves(recorded: Recorded) -> None:
    curves = {
        name: [e["args"] for e in recorded.events if e["ph"] == "C" and e["name"] == name] for name in ("queue", "staleness")
    }
    assert all(0 <= point["waiting"] <= 6 for point in curves["queue"])
    assert len(curves["queue"]) == 4 * (3 + 1)
    assert len(curves["staleness"]) == 4
    assert all(0.0 <= point["mean"] <= point["max"] <= 1.0 for point in curves["staleness"])


def test_a_range_records_its_steps_and_nothing_else(tmp_path: Path) -> None:
    run = Recorded(fit(tmp_path, [2, 3]))
    assert [*run.steps] == [2, 3]
    assert sorted({slice.lane for slice in run.slices}) == LANES
    begin, end = run.steps[2].start_s, run.steps[3].end_s
    assert all(slice.end_s >= begin for slice in run.slices)
    late = [slice for slice in run.slices if slice.start_s > end]
    assert not [slice for slice in late if slice.lane == "trainer rank 0"]
    assert len(late) < 30, "the others hear of the end when the next step begins, not much later"


def test_without_a_timeline_nothing_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_run, "Track", None)
    monkeypatch.setattr(timeline_run, "TraceFile", None)
    trainer = fit(tmp_path, False, max_steps=1)
    assert trainer.state.counters.step == 1
    assert not (trainer.run.path / FILE).exists()


class Interrupting(Callback):
    def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
        if trainer.state.counters.step == 2:
            raise KeyboardInterrupt


def test_an_interrupt_leaves_what_was_recorded_until_then(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, True, Interrupting())
    (path,) = tmp_path.glob(f"test/*/{FILE}")
    check_trace(path)
    assert {slice.args["step"] for slice in read_timeline(path) if "step" in slice.args} == {1, 2}


def test_the_synchronous_loop_shows_the_trainer_rolling_out_and_training_by_turns(tmp_path: Path) -> None:
    run = Recorded(fit(tmp_path, True, fit_loop=SyncFitLoop(decisions_per_env=3, update_epochs=1), max_steps=2))
    assert sorted({slice.lane for slice in run.slices}) == [*LANES[:3], "trainer rank 0"]
    rollouts = run.of("trainer rank 0", "roll out")
    for worker in LANES[:3]:
        executed = [slice.args["env_steps"] for slice in run.of(worker, "env steps")]
        assert len(executed) == 2 * 3
        assert all(1 <= steps <= 2 for steps in executed)
        busy = run.of(worker)
        assert all(any(r.start_s <= slice.start_s and slice.end_s <= r.end_s for r in rollouts) for slice in busy)
    names = Counter(slice.name for slice in run.of("trainer rank 0"))
    assert [names[name] for name in ("roll out", "decide", "wait for envs", "prepare", "forward and backward")] == [
        2,
        6,
        6,
        2,
        2,
    ]


# ---------------------------------------------------------------- without a run


def test_records_that_were_lost_are_told_in_their_lane(tmp_path: Path) -> None:
    """A gap would else be taken for idleness."""
    timeline = Timeline(True)
    timeline.open(tmp_path)
    track = timeline.track(WORKER, 3)
    assert track is not None
    now = clock()
    for number in range(CAPACITY + 2):
        track.add(Kind.ENV_STEPS, now + number, now + number + 0.5, 0, 1, 1)
    with pytest.warns(UserWarning, match="lacks 2 records, for which there was no room; it says where"):
        timeline.close()
    (told,) = (event for event in check_trace(tmp_path / FILE) if event["ph"] == "i")
    assert told["name"] == "2 records lost"
    assert len(read_timeline(tmp_path / FILE)) == CAPACITY


def test_an_arrow_begins_where_its_slot_was_last_finished(tmp_path: Path) -> None:
    """A slot is used again and again, also after what it held was dropped."""
    timeline = Timeline(True)
    timeline.open(tmp_path)
    tracks = [timeline.track(WORKER, number) for number in range(2)]
    now = clock()
    for worker, track in enumerate(tracks):
        assert track is not None
        for began in (worker, worker + 2):
            track.add(Kind.ENV_STEPS, now + began, now + began + 1, 0, 1, 1)
            track.add(Kind.FINISHED, now + began, now + began + 1, 5)  # by turns in the same slot
    for taken in (3.5, 4.5):
        assert timeline.own is not None
        timeline.own.add(Kind.READ, now + taken, now + taken + 0.2, 1)
        timeline.own.add(Kind.TAKEN, now + taken, now + taken + 0.2, 5)
    timeline.close()
    events = check_trace(tmp_path / FILE)
    begun = [event for event in events if event["ph"] == "s"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [lanes[event["tid"]] for event in begun] == ["env worker 0", "env worker 1"]
    assert begun[0]["ts"] - begun[1]["ts"] == pytest.approx(-1e6)


@pytest.mark.parametrize("setting", [[3], [0, 2], [4, 3], []])
def test_a_range_that_holds_no_step_is_refused(setting: list[int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.timeline=\[.*\] must be true, false, or \[first, last\]"):
        make_trainer(tmp_path, timeline=setting)


def test_a_range_after_the_last_step_is_refused(tmp_path: Path) -> None:
    """It would leave a timeline with nothing in it, and a report without one."""
    with pytest.raises(ValueError, match=r"trainer.timeline=\[3, 5\] would record nothing, for trainer.max_steps=2"):
        make_trainer(tmp_path, timeline=[3, 5], max_steps=2)
    make_trainer(tmp_path, timeline=[2, 5], max_steps=2)


def test_another_file_is_no_timeline(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(ValueError, match="is no timeline that a run has written"):
        read_timeline(tmp_path / FILE)
