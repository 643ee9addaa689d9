"""``StalenessAlert``: notices when the data is too old to learn from, or holds nothing to learn."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from vla_async.callbacks.base import Callback
from vla_async.loops.streaming import StreamingFitLoop
from vla_async.monitor.metric import Family, Metric
from vla_async.monitor.metric_table import (
    APPROX_KL,
    EQUAL_GROUPS,
    GROUPS,
    LOG_PROB_GAP,
    ROLLOUT_RETURN,
    ROLLOUT_SUCCESS_ONCE,
    STALENESS_BOUND,
    STALENESS_MAX,
    STALENESS_MEAN,
)

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer

Action = Literal["warn", "stop", "lower"]
_ENTRIES: dict[str, Metric | Family] = {
    "mean_staleness": STALENESS_MEAN,
    "max_staleness": STALENESS_MAX,
    "log_prob_gap": LOG_PROB_GAP,
    "kl": APPROX_KL,
}
_SAME = 1e-9  # means nearer than this differ by rounding


class StalenessAlert(Callback):
    """Compares each update's metrics with thresholds, and acts when one is exceeded in several updates in a row.

    Args:
        mean_staleness: threshold on ``staleness/mean``; null for none.
        max_staleness: threshold on ``staleness/max``; null for none.
        log_prob_gap: threshold on ``ppo/log_prob_gap`` or ``grpo/log_prob_gap``, by how much the log-probs of the policy
            that acted and of the one that is trained differ; null for none.
        kl: threshold on ``ppo/approx_kl`` or ``grpo/approx_kl``; null for none.
        no_signal_updates: alert after so many updates in a row without anything to learn from: GRPO's groups were all
            equal, or success and return were the same in all of the updates. 0 for never.
        patience: a threshold has to be exceeded in so many updates in a row.
        action: ``warn``; ``stop`` ends the run after this update, as if its budget were spent; ``lower`` lowers η of a
            :class:`StreamingFitLoop` by one, and says so, once, when that is no longer possible.

    Raises:
        ValueError: names the setting, its value and the fix.
    """

    def __init__(
        self,
        mean_staleness: float | None = None,
        max_staleness: float | None = None,
        log_prob_gap: float | None = None,
        kl: float | None = None,
        no_signal_updates: int = 0,
        patience: int = 1,
        action: Action = "warn",
    ) -> None:
        thresholds = {
            "mean_staleness": mean_staleness,
            "max_staleness": max_staleness,
            "log_prob_gap": log_prob_gap,
            "kl": kl,
        }
        for name, value in thresholds.items():
            if value is not None and not value >= 0.0:
                raise ValueError(f"staleness_alert.{name}={value} must not be negative, or null for no threshold")
        if no_signal_updates < 0 or no_signal_updates == 1:
            raise ValueError(f"staleness_alert.no_signal_updates={no_signal_updates} must be 0 (never) or at least 2")
        if patience < 1:
            raise ValueError(f"staleness_alert.patience={patience} must be at least 1")
        if action not in ("warn", "stop", "lower"):
            raise ValueError(f"staleness_alert.action={action!r}: choose warn, stop or lower")
        if all(value is None for value in thresholds.values()) and not no_signal_updates:
            raise ValueError(f"staleness_alert has no threshold; set one of {', '.join(thresholds)} or no_signal_updates")
        self.thresholds = {_ENTRIES[name]: value for name, value in thresholds.items() if value is not None}
        self.no_signal_updates, self.patience, self.action = no_signal_updates, patience, action
        self._forget()

    def check(self, trainer: AsyncTrainer) -> None:
        """Refuse to lower what there is not.

        Raises:
            ValueError: if there is no η that could be lowered.
        """
        if self.action == "lower" and not isinstance(trainer.fit_loop, StreamingFitLoop):
            name = type(trainer.fit_loop).__name__
            raise ValueError(f"staleness_alert.action='lower': {name} has no max_staleness; use StreamingFitLoop, or warn")

    def _forget(self) -> None:
        self._exceeded = dict.fromkeys(self.thresholds, 0)
        self._outcomes: deque[tuple[float, float]] = deque(maxlen=self.no_signal_updates)
        self._equal = 0

    def on_start(self, trainer: AsyncTrainer) -> None:
        """Begin to count anew."""
        self._stuck_at = -1
        self._forget()

    def on_step_end(self, trainer: AsyncTrainer, metrics: Mapping[str, float]) -> None:
        """Compare, and act if it is time to."""
        found = [*self._too_high(metrics), *self._no_signal(metrics)]
        if found:
            self._forget()
            self._act(trainer, metrics, f"update {trainer.state.counters.step}: {'; '.join(found)}")

    def _too_high(self, metrics: Mapping[str, float]) -> list[str]:
        found = []
        for entry, threshold in self.thresholds.items():
            name = next((name for name in metrics if entry.labels_of(name) is not None), None)
            exceeds = name is not None and metrics[name] > threshold
            self._exceeded[entry] = self._exceeded[entry] + 1 if exceeds else 0
            if name is not None and self._exceeded[entry] >= self.patience:
                found.append(f"{name}={metrics[name]:.4g} is above {threshold:g}")
        return found

    def _no_signal(self, metrics: Mapping[str, float]) -> list[str]:
        """Whether a whole window of updates had nothing to learn from; one without an episode's end says nothing."""
        if not self.no_signal_updates:
            return []
        if GROUPS.of("grpo") in metrics:
            self._equal = self._equal + 1 if metrics[GROUPS.of("grpo")] == metrics[EQUAL_GROUPS.of("grpo")] else 0
            equal = self._equal >= self.no_signal_updates
            return [f"all groups of {self.no_signal_updates} updates had equal outcomes"] if equal else []
        if ROLLOUT_RETURN.of() in metrics:
            self._outcomes.append((metrics[ROLLOUT_RETURN.of()], metrics[ROLLOUT_SUCCESS_ONCE.of()]))
        if len(self._outcomes) < self.no_signal_updates:
            return []
        spread = max(max(column) - min(column) for column in zip(*self._outcomes, strict=True))
        same = f"success and return were the same in {self.no_signal_updates} updates"
        return [same] if spread <= _SAME else []

    def _act(self, trainer: AsyncTrainer, metrics: Mapping[str, float], what: str) -> None:
        if self.action == "stop":
            trainer.state.stopped = True
            what += "; the run stops"
        if self.action == "lower":
            assert isinstance(trainer.fit_loop, StreamingFitLoop)  # check has made sure of it
            bound = int(metrics[STALENESS_BOUND])
            if bound == self._stuck_at:
                return
            try:
                if bound == 0:
                    raise ValueError("there is no lower one")
                trainer.fit_loop.lower_staleness(bound - 1)
            except ValueError as error:
                self._stuck_at = bound
                what += f"; max_staleness stays {bound}: {error}"
            else:
                what += f"; max_staleness is now {bound - 1}"
        warnings.warn(what, stacklevel=2)
