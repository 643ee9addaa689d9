"""What a chunk does to an episode, against hand-computed cases and against a plain loop over env steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrl.envs.utils import check_env_specs

from vla_async.envs import ChunkedEnv, EnvSpec, SimStep, Simulator

ON_SUCCESS = ("terminate", "finish_chunk", "continue")


@dataclass(frozen=True)
class Script:
    """What happens in a row at which env step of each episode; the reward of env step k is k."""

    success: frozenset[int] = frozenset()
    failure: int = 0


class Lazy(Mapping[str, Tensor]):
    """Fails the test if it is read too late, and counts that it was read."""

    def __init__(self, simulator: Scripted, leaves: dict[str, Tensor]) -> None:
        self.simulator, self.leaves, self.tick = simulator, leaves, simulator.tick

    def __getitem__(self, name: str) -> Tensor:
        assert self.tick == self.simulator.tick, "read after the simulator has moved on"
        self.simulator.reads += 1
        return self.leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)


@dataclass
class Scripted(Simulator):
    """Follows a script per row; what it returns for rows that were not asked for is garbage. It reuses its buffers."""

    scripts: Sequence[Script] = (Script(),)
    has_failure: bool = True
    tick: int = 0
    reads: int = 0
    actions: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_rows = len(self.scripts)
        self.action_low, self.action_high = (-1.0, -2.0), (1.0, 2.0)
        self.elapsed = torch.zeros(self.num_rows, dtype=torch.int64)
        self.seeds = torch.zeros(self.num_rows, dtype=torch.int64)
        self.state = torch.zeros(self.num_rows, 2)

    @property
    def instructions(self) -> Sequence[str]:
        return [f"follow script {row}" for row in range(self.num_rows)]

    @property
    def tasks(self) -> Sequence[str]:
        return ["script"] * self.num_rows

    def _observe(self, rows: Tensor) -> None:
        self.state[:] = torch.stack([self.seeds, self.elapsed], dim=-1)
        self.state[~rows] = float("nan")

    def reset(self, rows: Tensor, seeds: Tensor) -> dict[str, Tensor]:
        self.tick += 1
        self.seeds[rows], self.elapsed[rows] = seeds[rows], 0
        self._observe(rows)
        return {"state": self.state}

    def step(self, action: Tensor, rows: Tensor) -> SimStep:
        self.tick += 1
        self.actions.append(action.clone())
        self.elapsed += 1  # as on a GPU: all rows move, whether or not anyone looks at them
        now = self.elapsed.tolist()
        success = torch.tensor([step in script.success for step, script in zip(now, self.scripts, strict=True)])
        failure = torch.tensor([step == script.failure for step, script in zip(now, self.scripts, strict=True)])
        reward = torch.where(rows, self.elapsed.to(torch.float32), float("nan"))
        self._observe(rows)
        lazy = Lazy(self, {"state": self.state})
        return SimStep(lazy, reward, success | ~rows, (failure | ~rows) if self.has_failure else None)

    def render(self) -> Tensor:
        return torch.full((2, 2, 3), int(self.elapsed[0]), dtype=torch.uint8)


def build(
    *scripts: Script, chunk: int = 4, horizon: int = 100, on_success: str = "terminate", batched: bool = False
) -> ChunkedEnv:
    simulator = Scripted(scripts=scripts or (Script(),))
    options = {"chunk_size": chunk, "max_episode_steps": horizon, "on_success": on_success}
    env = ChunkedEnv(simulator, **options, is_batched=batched or len(scripts) > 1)
    env.reset_rows(torch.ones(simulator.num_rows, dtype=torch.bool), torch.arange(7, 7 + simulator.num_rows))
    return env


def chunk_of(env: ChunkedEnv, value: float = 0.0) -> Tensor:
    return torch.full((env.num_rows, env.chunk_size, 2), value)


# ------------------------------------------------------------------------------------------ hand-computed cases


@pytest.mark.parametrize(
    ("on_success", "rewards", "executed", "success", "terminated", "last_step"),
    [
        ("terminate", [1, 2, 0, 0], [1, 1, 0, 0], True, True, 2),
        ("finish_chunk", [1, 2, 3, 4], [1, 1, 1, 1], False, True, 4),
        ("continue", [1, 2, 3, 4], [1, 1, 1, 1], False, False, 4),
    ],
)
def test_success_at_the_second_of_four_steps(
    on_success: str, rewards: list[int], executed: list[int], success: bool, terminated: bool, last_step: int
) -> None:
    """A success that lasts one env step only: each setting ends the episode where it says it does."""
    env = build(Script(frozenset({2})), on_success=on_success)
    result = env.step_chunk(chunk_of(env))
    assert result.step_rewards.tolist() == [rewards]
    assert result.executed.int().tolist() == [executed]
    assert (result.success.item(), result.success_once.item()) == (success, True)
    assert (result.terminated.item(), result.truncated.item()) == (terminated, False)
    assert result.observation["state"].tolist() == [[7, last_step]]


def test_success_at_end_differs_from_success_once() -> None:
    """With ``continue`` an episode that succeeded and lost it again ends without success, but is remembered."""
    env = build(Script(frozenset({1, 2})), chunk=3, horizon=3, on_success="continue")
    result = env.step_chunk(chunk_of(env))
    assert (result.success.item(), result.success_once.item(), result.truncated.item()) == (False, True, True)


@pytest.mark.parametrize("on_success", ON_SUCCESS)
def test_the_horizon_truncates_inside_a_chunk(on_success: str) -> None:
    """Horizon 6 in chunks of 4: the second chunk executes two env steps, and is cut, not ended."""
    env = build(chunk=4, horizon=6, on_success=on_success)
    assert not env.step_chunk(chunk_of(env)).done.item()
    result = env.step_chunk(chunk_of(env))
    assert result.step_rewards.tolist() == [[5, 6, 0, 0]]
    assert result.executed.tolist() == [[True, True, False, False]]
    assert (result.terminated.item(), result.truncated.item()) == (False, True)
    assert result.observation["state"].tolist() == [[7, 6]]


@pytest.mark.parametrize(("on_success", "terminated"), [("terminate", True), ("finish_chunk", True), ("continue", False)])
def test_success_at_the_horizon_is_either_an_end_or_a_cut(on_success: str, terminated: bool) -> None:
    """Never both: what is terminated must not be bootstrapped."""
    env = build(Script(frozenset({4})), chunk=4, horizon=4, on_success=on_success)
    result = env.step_chunk(chunk_of(env))
    assert (result.terminated.item(), result.truncated.item()) == (terminated, not terminated)


@pytest.mark.parametrize("on_success", ON_SUCCESS)
def test_failure_ends_the_episode_at_once(on_success: str) -> None:
    env = build(Script(failure=3), on_success=on_success)
    result = env.step_chunk(chunk_of(env))
    assert result.executed.tolist() == [[True, True, True, False]]
    assert (result.terminated.item(), result.truncated.item(), result.success_once.item()) == (True, False, False)


def test_rows_end_at_different_times_and_keep_their_own_end() -> None:
    """Row 0 succeeds at 1, row 1 fails at 3, row 2 runs on: each holds the observation of its own last env step."""
    env = build(Script(frozenset({1})), Script(failure=3), Script(), chunk=4)
    result = env.step_chunk(chunk_of(env))
    assert result.step_rewards.tolist() == [[1, 0, 0, 0], [1, 2, 3, 0], [1, 2, 3, 4]]
    assert result.observation["state"].tolist() == [[7, 1], [8, 3], [9, 4]]
    assert result.success.tolist() == [True, False, False]
    assert result.terminated.tolist() == [True, True, False]


def test_a_partial_reset_leaves_the_other_rows_alone() -> None:
    env = build(Script(frozenset({1})), Script(), chunk=2)
    before = env.step_chunk(chunk_of(env))
    observation = env.reset_rows(torch.tensor([True, False]), torch.tensor([50, 60]))
    assert observation["state"].tolist() == [[50, 0], [8, 2]]
    assert before.observation["state"].tolist() == [[7, 1], [8, 2]], "the reset overwrote the final observation"
    assert before.success_once.tolist() == [True, False], "the reset overwrote the episode's success"
    after = env.step_chunk(chunk_of(env))
    assert after.step_rewards.tolist() == [[1, 0], [3, 4]]


def test_rows_that_take_no_part_hold_what_they_held() -> None:
    env = build(Script(frozenset({1})), Script(frozenset({1})), chunk=2)
    result = env.step_chunk(chunk_of(env), torch.tensor([False, True]))
    assert result.executed.tolist() == [[False, False], [True, False]]
    assert result.observation["state"].tolist() == [[7, 0], [8, 1]]
    assert result.success_once.tolist() == [False, True]
    nobody = env.step_chunk(chunk_of(env), torch.tensor([False, False]))
    assert not nobody.executed.any()
    assert nobody.observation["state"].tolist() == [[7, 0], [8, 1]]


def test_a_simulator_without_failures_needs_no_failure_flag() -> None:
    env = build(Script(failure=1))
    env.simulator.has_failure = False  # type: ignore[attr-defined]
    assert not env.step_chunk(chunk_of(env)).done.item()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_action_that_is_not_finite_is_refused_before_anything_moves(bad: float) -> None:
    env = build(Script(), Script(), chunk=3)
    chunk = chunk_of(env)
    chunk[1, 2, 0] = bad
    with pytest.raises(ValueError, match=r"\[row, step, element\] \[1, 2, 0\] is not finite"):
        env.step_chunk(chunk)
    assert env.simulator.elapsed.tolist() == [0, 0]  # type: ignore[attr-defined]


def test_actions_are_clipped_to_each_elements_bounds() -> None:
    env = build(chunk=1)
    env.step_chunk(torch.tensor([[[5.0, -5.0]]]))
    assert env.simulator.actions[-1].tolist() == [[1.0, -2.0]]  # type: ignore[attr-defined]


def test_an_observation_inside_a_chunk_is_not_read() -> None:
    """A picture costs more than the physics: a chunk of four reads one observation, not four."""
    env = build(chunk=4)
    before = env.simulator.reads  # type: ignore[attr-defined]
    env.step_chunk(chunk_of(env))
    assert env.simulator.reads == before + 1  # type: ignore[attr-defined]


def test_recording_gives_a_frame_per_executed_env_step_of_row_0() -> None:
    """Row 1 goes on after row 0 has ended: its env steps are in no video."""
    env = build(Script(failure=2), Script(), chunk=4)
    env.recording = True
    assert [int(frame[0, 0, 0]) for frame in env.step_chunk(chunk_of(env)).frames] == [1, 2]


def test_several_rows_must_be_declared_as_a_batch() -> None:
    with pytest.raises(ValueError, match="is_batched=True"):
        ChunkedEnv(Scripted(scripts=(Script(), Script())))


def test_env_spec_tells_a_policy_what_it_sees() -> None:
    spec = build(chunk=3).env_spec
    assert (spec.action_low, spec.action_high) == ((-1.0, -2.0), (1.0, 2.0))
    assert (spec.chunk_size, spec.state_dim, spec.images, spec.action_dim) == (3, 2, {}, 2)
    assert type(spec).from_dict(spec.to_dict()) == spec


# ------------------------------------------------------------------------------------------ against a plain loop

scripts = st.builds(Script, success=st.frozensets(st.integers(1, 9), max_size=3), failure=st.integers(0, 9))


def plain_chunk(
    script: Script, elapsed: int, once: bool, chunk: int, horizon: int, on_success: str
) -> tuple[list[float], bool, bool, bool, bool]:
    """One decision of one row, step by step: (rewards, success at the end, success once, terminated, truncated)."""
    rewards: list[float] = []
    success = terminated = truncated = False
    while len(rewards) < chunk and not terminated and not truncated:
        elapsed += 1
        rewards.append(elapsed)
        success = elapsed in script.success
        once = once or success
        terminated = elapsed == script.failure or (success and on_success == "terminate")
        truncated = elapsed == horizon and not terminated
    if on_success == "finish_chunk" and once:
        terminated, truncated = True, False
    return rewards, success, once, terminated, truncated


@settings(max_examples=150)
@given(
    rows=st.lists(scripts, min_size=1, max_size=4),
    chunk=st.integers(1, 5),
    horizon=st.integers(5, 9),
    on_success=st.sampled_from(ON_SUCCESS),
)
def test_chunks_agree_with_a_plain_loop(rows: list[Script], chunk: int, horizon: int, on_success: str) -> None:
    """Whatever the scripts, the chunk length and the horizon; rows that ended start again while the others go on."""
    env = build(*rows, chunk=chunk, horizon=horizon, on_success=on_success, batched=True)
    elapsed, once, seeds = [0] * len(rows), [False] * len(rows), list(range(7, 7 + len(rows)))
    for decision in range(8):
        result = env.step_chunk(chunk_of(env))
        for row, script in enumerate(rows):
            rewards, success, once[row], terminated, truncated = plain_chunk(
                script, elapsed[row], once[row], chunk, horizon, on_success
            )
            elapsed[row] += len(rewards)
            assert result.step_rewards[row].tolist() == rewards + [0.0] * (chunk - len(rewards))
            assert result.executed[row].sum().item() == len(rewards)
            assert result.success[row].item() == success
            assert result.success_once[row].item() == once[row]
            assert (result.terminated[row].item(), result.truncated[row].item()) == (terminated, truncated)
            assert result.observation["state"][row].tolist() == [seeds[row], elapsed[row]]
        over = result.done
        if over.any():
            for row in torch.nonzero(over).flatten().tolist():
                elapsed[row], once[row], seeds[row] = 0, False, 100 * decision + row
            env.reset_rows(over, torch.tensor(seeds))


# ------------------------------------------------------------------------------------------ as a TorchRL env


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("chunk", [1, 3])
def test_torchrls_own_checks_pass(rows: int, chunk: int) -> None:
    """Specs, dtypes, shapes, resets and rollouts, for a single env and for a batch."""
    check_env_specs(build(*[Script(frozenset({5}))] * rows, chunk=chunk))


def test_a_rollout_keeps_the_end_of_each_episode() -> None:
    """TorchRL resets by itself: the final observation, reward and success stand in ``next``, the root starts anew."""
    env = build(Script(frozenset({3})), chunk=2)
    rollout = env.rollout(4, break_when_any_done=False)
    assert rollout["next", "done"].flatten().tolist() == [False, True, False, True]
    assert rollout["next", "success"].flatten().tolist() == [False, True, False, True]
    assert rollout["next", "reward"].flatten().tolist() == [3, 3, 3, 3]
    assert rollout["next", "step_rewards"].tolist() == [[1, 2], [3, 0], [1, 2], [3, 0]]
    assert rollout["next", "observation", "state"][:, 1].tolist() == [2, 3, 2, 3]
    assert rollout["observation", "state"][:, 1].tolist() == [0, 2, 0, 2]
    first, second = rollout["observation", "state"][[0, 2], 0].tolist()
    assert first != second, "the second episode has the seed of the first"
    assert rollout[0]["language_instruction"] == "follow script 0"


def test_a_batch_resets_only_the_rows_that_ended() -> None:
    env = build(Script(frozenset({2})), Script(), chunk=2)
    rollout = env.rollout(3, break_when_any_done=False)
    assert rollout["observation", "state"][:, :, 1].tolist() == [[0, 0, 0], [0, 2, 4]]
    assert rollout["next", "done"].squeeze(-1).tolist() == [[True] * 3, [False] * 3]
    assert rollout[0, 0]["language_instruction"] == "follow script 0"


def test_a_seed_repeats_the_episodes_whatever_ran_before() -> None:
    env = build(Script(frozenset({1})), chunk=1)
    env.set_seed(3)
    first = env.rollout(3, break_when_any_done=False)["observation", "state"]
    env.rollout(2)
    env.set_seed(3)
    assert torch.equal(env.rollout(3, break_when_any_done=False)["observation", "state"], first)
    env.set_seed(4)
    assert not torch.equal(env.rollout(3, break_when_any_done=False)["observation", "state"], first)


def test_closing_the_env_closes_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    env = build()
    closed = []
    monkeypatch.setattr(env.simulator, "close", lambda: closed.append(True))
    env.close()
    assert closed


def test_an_action_element_without_room_is_refused() -> None:
    # else policies would scale by its range of zero, and every action would be NaN
    with pytest.raises(ValueError, match="of action element 1 leave it no room"):
        EnvSpec((-1.0, 0.5), (1.0, 0.5), chunk_size=1)
