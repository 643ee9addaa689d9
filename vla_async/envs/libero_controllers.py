"""A scripted controller for LIBERO's pick-and-place tasks: a source of demonstrations that needs no teleoperation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_async.envs.base import Simulator
from vla_async.envs.controllers import ScriptedController
from vla_async.envs.libero import LiberoSimulator

Vector = np.ndarray[Any, np.dtype[np.float64]]

_METRES_PER_ACTION, _RADIANS_PER_ACTION = 0.05, 0.5  # what an action of 1 asks of LIBERO's pose controller
_OPENING = 0.07  # metres; an object that is wider in every direction is held by its rim
_OPEN, _CLOSED = -1.0, 1.0
# The open hand around the point between its fingertips: half extents along the fingers' motion and across it, and how
# far above that point the part begins. All it moves through on its way down counts, so there is no upper end.
_HAND_PARTS = ((0.055, 0.012, -0.01), (0.105, 0.035, 0.045))


@dataclass(frozen=True)
class Grasp:
    """Where the point between the fingers goes, and how far the hand is turned (radians about the vertical)."""

    point: Vector
    turn: float


class LiberoScene:
    """What the controller knows of the running simulation, without looking at pictures. Lengths are in metres."""

    def __init__(self, simulator: LiberoSimulator) -> None:
        self.env, self._task = simulator.env.env, simulator.instructions[0]
        self.sim = self.env.sim
        self.model, self.data = self.sim.model._model, self.sim.data._data
        robots = {body for body in range(self.model.nbody) if self._name(body).startswith(("robot0", "gripper0", "mount0"))}
        touchable = (self.model.geom_contype != 0) | (self.model.geom_conaffinity != 0)
        self._geoms = [
            geom for geom in range(self.model.ngeom) if touchable[geom] and self.model.geom_bodyid[geom] not in robots
        ]

    def _name(self, body: int) -> str:
        return str(self.sim.model.body_id2name(body))

    @property
    def hand(self) -> Vector:
        """Position of the point between the fingers."""
        position: Vector = self.data.site_xpos[self.env.robots[0].eef_site_id].copy()
        return position

    @property
    def turn(self) -> float:
        """The hand's direction, in radians about the vertical."""
        rotation = self.data.site_xmat[self.env.robots[0].eef_site_id].reshape(3, 3)
        return math.atan2(rotation[1, 0], rotation[0, 0])

    def goal(self) -> tuple[str, str, str]:
        """The task's predicate (``on`` or ``in``), the object to move and the place to move it to.

        Raises:
            ValueError: if the task is not to place one object.
        """
        goals = self.env.parsed_problem["goal_state"]
        if len(goals) != 1 or goals[0][0] not in ("on", "in") or goals[0][1] not in self.env.objects_dict:
            raise ValueError(
                f"LiberoPickPlaceController places one object, which is not the task {self._task!r}; "
                "choose other env.task_ids, for example those of libero_spatial or libero_object"
            )
        return goals[0][0], goals[0][1], goals[0][2]

    def boxes(self, name: str, inverse: bool = False) -> Vector:
        """Bounds of the touchable parts of an object, ``[parts, 2, 3]``: lows and highs; ``inverse``: of all else."""
        root = self.env.obj_body_id[name]
        bodies = {root}
        for body in range(root + 1, self.model.nbody):  # a child follows its parent
            if self.model.body_parentid[body] in bodies:
                bodies.add(body)
        geoms = [geom for geom in self._geoms if (self.model.geom_bodyid[geom] in bodies) != inverse]
        rotations = self.data.geom_xmat[geoms].reshape(-1, 3, 3)
        centers = self.data.geom_xpos[geoms] + np.einsum("gij,gj->gi", rotations, self.model.geom_aabb[geoms, :3])
        reach = np.einsum("gij,gj->gi", np.abs(rotations), self.model.geom_aabb[geoms, 3:])
        return np.stack([centers - reach, centers + reach], axis=1)

    def bounds(self, name: str) -> tuple[Vector, Vector]:
        """Lowest and highest coordinates of an object."""
        boxes = self.boxes(name)
        return boxes[:, 0].min(axis=0), boxes[:, 1].max(axis=0)

    def place(self, name: str) -> tuple[Vector, float]:
        """Middle of a place, and the height of the object that it is a part of."""
        region = self.env.object_sites_dict.get(name)
        low, high = self.bounds(name if region is None else region.parent_name)
        middle = (low + high) / 2 if region is None else self.sim.data.get_site_xpos(name)
        return np.array(middle), float(high[2])

    def best_grasp(self, name: str) -> Grasp:
        """The grasp of an object that leaves the hand the most room, turned only if that is needed."""
        low, high = self.bounds(name)
        size, center, others = high - low, (low + high) / 2, self.boxes(name, inverse=True)
        axes = {0.0: np.array([0.0, 1.0, 0.0]), math.pi / 2: np.array([1.0, 0.0, 0.0])}
        narrow = {turn: axis for turn, axis in axes.items() if size @ axis < _OPENING}
        depth = 0.035 if narrow else 0.02
        center[2] = max(high[2] - min(depth, size[2] - 0.012), low[2] + 0.008)
        if narrow:
            grasps = [Grasp(center, turn) for turn in narrow]
        else:
            rims = {turn: (size @ axis / 2 - 0.006) * axis for turn, axis in axes.items()}
            grasps = [Grasp(center + side * rim, turn) for turn, rim in rims.items() for side in (-1.0, 1.0)]
        return max(grasps, key=lambda grasp: min(_room(grasp, others), 0.02) - (0.01 if grasp.turn else 0.0))


def _room(grasp: Grasp, boxes: Vector) -> float:
    """Distance between the hand on its way to a grasp and the nearest box ``[parts, 2, 3]``; negative if they meet."""
    along = 1 if grasp.turn == 0.0 else 0
    nearest = math.inf
    for reach, thickness, above in _HAND_PARTS:
        half = np.full(2, thickness)
        half[along] = reach
        beside = np.maximum(boxes[:, 0, :2] - (grasp.point[:2] + half), (grasp.point[:2] - half) - boxes[:, 1, :2])
        below = grasp.point[2] + above - boxes[:, 1, 2]
        nearest = min(nearest, float(np.maximum(beside.max(axis=1), below).min()))
    return nearest


class LiberoPickPlaceController(ScriptedController):
    """Picks the object of the goal up and places it: above it, down, close, up, over the place, down, open, up.

    It knows the poses of all objects. What is too wide for the fingers is held by the side of its rim that has the most
    room. If the object slipped or missed its place, it starts again.

    Args:
        gain: how many actions of 1 it takes per 5 cm of distance that is left.
        tolerance: how near, in metres, the hand must come before the next move.
        patience: env steps that one move may take.
    """

    def __init__(self, gain: float = 3.0, tolerance: float = 0.01, patience: int = 30) -> None:
        self.gain, self.tolerance, self.patience = gain, tolerance, patience

    def reset(self, simulator: Simulator) -> None:
        """Plan the episode that has just begun.

        Raises:
            ValueError: if the task is not to place one object, or the simulator is not LIBERO.
        """
        if not isinstance(simulator, LiberoSimulator):
            raise ValueError(f"LiberoPickPlaceController acts in LiberoEnvs, not in a {type(simulator).__name__}")
        self._scene = LiberoScene(simulator)
        self._predicate, self._object, self._place = self._scene.goal()
        self._height, self._straight = float(self._scene.hand[2]), self._scene.turn
        self._plan()

    def _plan(self) -> None:
        self._grasp = self._scene.best_grasp(self._object)
        self._travel = max(self._height - 0.05, self._grasp.point[2] + 0.1)
        self._moves = [self._above, self._down, self._close, self._up, self._over, self._lower, self._open, self._away]
        self._spent = 0

    def act(self, simulator: Simulator) -> Tensor:
        """The next action, float32 ``[1, 7]``."""
        target, gripper, arrived = self._moves[0]()
        self._spent += 1
        if arrived or self._spent >= self.patience:
            done, self._spent = self._moves.pop(0), 0
            if done == self._close:
                self._travel = self._clear_height()
            if not self._moves or (done == self._up and self._slipped()):
                self._plan()
        push = self.gain * (target - self._scene.hand) / _METRES_PER_ACTION
        left = math.remainder(self._straight + self._grasp.turn - self._scene.turn, math.pi)  # fingers are alike
        twist = left / _RADIANS_PER_ACTION if self._grasp.turn else 0.0
        action = np.clip([*push, 0.0, 0.0, twist, gripper], -1.0, 1.0)
        return torch.tensor(action, dtype=torch.float32).unsqueeze(0)

    def _clear_height(self) -> float:
        """Height of the hand at which what hangs from it passes over the place."""
        hanging = self._scene.hand[2] - self._scene.bounds(self._object)[0][2]
        return float(max(self._travel, self._scene.place(self._place)[1] + hanging + 0.03))

    def _slipped(self) -> bool:
        return bool(self._scene.hand[2] > self._scene.bounds(self._object)[1][2] + 0.05)

    def _release(self) -> Vector:
        """Where the hand lets go: with the object's middle over the place, and its bottom on it or just inside it."""
        low, high = self._scene.bounds(self._object)
        middle, top = self._scene.place(self._place)
        bottom = top - 0.03 if self._predicate == "in" else top
        shift = middle - (low + high) / 2
        shift[2] = bottom - low[2]
        target: Vector = self._scene.hand + shift
        return target

    # ---------------------------------------------------------------- the moves: target, gripper, whether it is done

    def _to(
        self, point: Vector, height: float, gripper: float, tolerance: float | None = None
    ) -> tuple[Vector, float, bool]:
        target = np.array([point[0], point[1], height])
        return target, gripper, bool(np.abs(target - self._scene.hand).max() < (tolerance or self.tolerance))

    def _above(self) -> tuple[Vector, float, bool]:
        return self._to(self._grasp.point, self._travel, _OPEN, 0.02)

    def _down(self) -> tuple[Vector, float, bool]:
        return self._to(self._grasp.point, self._grasp.point[2], _OPEN)

    def _close(self) -> tuple[Vector, float, bool]:
        return self._grasp.point, _CLOSED, self._spent >= 10

    def _up(self) -> tuple[Vector, float, bool]:
        return self._to(self._grasp.point, self._travel, _CLOSED, 0.03)

    def _over(self) -> tuple[Vector, float, bool]:
        return self._to(self._release(), self._travel, _CLOSED)

    def _lower(self) -> tuple[Vector, float, bool]:
        target = self._release()
        return self._to(target, target[2], _CLOSED)

    def _open(self) -> tuple[Vector, float, bool]:
        return self._scene.hand, _OPEN, self._spent >= 8

    def _away(self) -> tuple[Vector, float, bool]:
        return self._to(self._scene.hand, self._height, _OPEN, 0.03)
