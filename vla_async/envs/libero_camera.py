"""A camera of a robosuite simulation that draws its picture only when somebody looks at it.

Without a GPU a picture costs several times as much as an env step. robosuite draws one in every env step; a policy that
decides once in H env steps looks at one in H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

Picture = np.ndarray[Any, np.dtype[np.uint8]]

_MAX_GEOMS = 1000  # as in robosuite's own scene


class Camera:
    """One camera of ``sim``.

    :meth:`capture` keeps the scene of the moment, which costs next to nothing; :meth:`picture` draws it. The picture is
    the one, bit for bit, that robosuite would have drawn at that moment.

    Args:
        sim: robosuite's ``MjSim``, with an offscreen render context.
        name: the camera's name in the model.
        size: height and width.
        fast: leave out reflections, and smooth edges by averaging 2 × 2 pixels instead of multisampling, see
            :func:`prepare_context`.
    """

    def __init__(self, sim: Any, name: str, size: int, fast: bool) -> None:
        import mujoco

        self._mujoco, self._sim, self.size = mujoco, sim, size
        self._scale = 2 if fast else 1
        self._scene = mujoco.MjvScene(sim.model._model, maxgeom=_MAX_GEOMS)
        if fast:
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._view = mujoco.MjvCamera()
        self._view.type, self._view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, sim.model.camera_name2id(name)
        self._picture: Picture | None = None
        self.blank: Picture = np.zeros((size, size, 3), dtype=np.uint8)

    def capture(self, _cache: object = None) -> Picture:
        """Keep the present scene. Returns a blank picture: robosuite calls this as a sensor, and wants one."""
        context = self._sim._render_context_offscreen
        everything = self._mujoco.mjtCatBit.mjCAT_ALL
        model, data = self._sim.model._model, self._sim.data._data
        self._mujoco.mjv_updateScene(model, data, context.vopt, context.pert, self._view, everything, self._scene)
        self._picture = None
        return self.blank

    def picture(self) -> Picture:
        """The captured scene, uint8 ``[size, size, 3]`` as OpenGL has it; drawn once."""
        if self._picture is None:
            context, pixels = self._sim._render_context_offscreen, self.size * self._scale
            context.gl_ctx.make_current()  # another simulation of this process may have drawn last
            viewport = self._mujoco.MjrRect(0, 0, pixels, pixels)
            drawn: Picture = np.empty((pixels, pixels, 3), dtype=np.uint8)
            self._mujoco.mjr_render(viewport=viewport, scn=self._scene, con=context.con)
            self._mujoco.mjr_readPixels(rgb=drawn, depth=None, viewport=viewport, con=context.con)
            self._picture = drawn if self._scale == 1 else _halve(drawn)
        return self._picture


def _halve(picture: Picture) -> Picture:
    """Average blocks of 2 × 2 pixels, rounding to nearest."""
    blocks = picture.reshape(picture.shape[0] // 2, 2, picture.shape[1] // 2, 2, 3)
    averaged: Picture = ((blocks.sum(axis=(1, 3), dtype=np.uint16) + 2) // 4).astype(np.uint8)
    return averaged


def prepare_context(sim: Any, size: int, fast: bool) -> None:
    """Make the render context large enough for pictures of ``size``, and drop multisampling if ``fast``.

    Multisampling makes a software renderer go through small triangles several times.
    """
    context, visual = sim._render_context_offscreen, sim.model._model.vis
    pixels = size * (2 if fast else 1)
    if not fast and pixels <= min(context.con.offWidth, context.con.offHeight):
        return
    visual.global_.offwidth, visual.global_.offheight = max(pixels, context.con.offWidth), max(pixels, context.con.offHeight)
    if fast:
        visual.quality.offsamples = 0
    context.gl_ctx.make_current()
    context.con.free()
    context._set_mujoco_context_and_buffers()


class LazyObservation(Mapping[str, Tensor]):
    """An observation whose pictures are drawn when they are read, until the next env step."""

    def __init__(self, leaves: dict[str, Callable[[], Tensor]]) -> None:
        self._leaves = leaves

    def __getitem__(self, name: str) -> Tensor:
        return self._leaves[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)
