"""``EmulatedVLAPolicy``: a small policy that acts and trains as slowly as a large one would, without using a core."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from tensordict import TensorDictBase

from vla_async.emulation.device import DeviceLock, sleep_until
from vla_async.objectives.base import Objective, StepOutput
from vla_async.policies.tiny import TinyVLAPolicy


class EmulatedVLAPolicy(TinyVLAPolicy):
    """Decides and learns as :class:`TinyVLAPolicy` does, and holds emulated devices for as long as a large model would.

    ``rollout_devices`` act and ``train_devices`` train; ``colocated`` means that all of them do both, by turns. How long a
    call holds its devices:

    - ``act``: ``act_flat_s + act_per_row_s * rows / devices``. Rows are dealt out; the flat part is every device's own.
    - ``training_step``: ``(train_flat_s + train_per_decision_s * decisions) / devices``. Whole micro-batches are dealt out.

    Nothing else takes emulated time: neither the backward pass, whose time belongs to ``training_step``'s, nor a proximal
    policy's recomputation.

    Args:
        objective: what reinforcement learning optimises.
        act_flat_s: seconds per forward pass.
        act_per_row_s: seconds per row of a forward pass, on one device.
        train_flat_s: seconds per micro-batch.
        train_per_decision_s: seconds per decision of a micro-batch, on one device.
        rollout_devices: how many devices act.
        train_devices: how many devices train.
        colocated: whether all devices act and train. Then they do one thing at a time.
        hidden: widths of the hidden layers, of the actor and of the critic.
        lr: learning rate.
    """

    def __init__(
        self,
        objective: Objective | None = None,
        act_flat_s: float = 0.0,
        act_per_row_s: float = 0.0,
        train_flat_s: float = 0.0,
        train_per_decision_s: float = 0.0,
        rollout_devices: int = 1,
        train_devices: int = 1,
        colocated: bool = False,
        hidden: Sequence[int] = (16,),
        lr: float = 3e-4,
    ) -> None:
        costs = {"act_flat_s": act_flat_s, "act_per_row_s": act_per_row_s}
        costs |= {"train_flat_s": train_flat_s, "train_per_decision_s": train_per_decision_s}
        for name, cost in costs.items():
            if not (math.isfinite(cost) and cost >= 0.0):
                raise ValueError(f"model.{name}={cost} must be 0 or a positive number of seconds")
        devices = {"rollout_devices": rollout_devices, "train_devices": train_devices}
        for name, count in devices.items():
            if count < 1:
                raise ValueError(f"model.{name}={count} must be at least 1")
        super().__init__(objective, hidden=hidden, lr=lr)
        self.save_hyperparameters(costs | devices | {"colocated": colocated})
        self._acting = DeviceLock()
        self._training = self._acting if colocated else DeviceLock()

    def act_s(self, rows: int) -> float:
        """Seconds for which a forward pass of so many rows holds the devices that act."""
        return float(self.hparams["act_flat_s"] + self.hparams["act_per_row_s"] * rows / self._devices("rollout_devices"))

    def train_s(self, decisions: int) -> float:
        """Seconds for which a micro-batch of so many decisions holds the devices that train."""
        cost = self.hparams["train_flat_s"] + self.hparams["train_per_decision_s"] * decisions
        return float(cost / self._devices("train_devices"))

    def _devices(self, role: str) -> int:
        options = self.hparams
        return int(options["rollout_devices"] + options["train_devices"] if options["colocated"] else options[role])

    def act(self, td: TensorDictBase) -> TensorDictBase:
        """Decide; see :meth:`VLAPolicy.act`."""
        with self._acting:
            deadline = time.perf_counter() + self.act_s(td.numel())
            td = super().act(td)
            sleep_until(deadline)
        return td

    def training_step(self, batch: TensorDictBase, batch_idx: int = 0) -> StepOutput:  # type: ignore[override]
        """The loss of one micro-batch; see :meth:`VLAPolicy.training_step`."""
        with self._training:
            deadline = time.perf_counter() + self.train_s(batch.numel())
            output = super().training_step(batch, batch_idx)
            sleep_until(deadline)
        return output
