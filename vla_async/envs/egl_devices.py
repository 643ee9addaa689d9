"""Which EGL devices can render without a display. ``python -m vla_async.envs.egl_devices`` lists them.

EGL numbers its devices by itself: the third CUDA device need not be EGL's third, and a container may list devices that
it may not use. So this opens each of them. It runs in a process of its own, because a driver stays loaded once it was
opened, and it needs the standard library only, so that it takes a fraction of a second.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from ctypes import byref, c_int32, c_uint32, c_void_p
from typing import Any

_PLATFORM_DEVICE, _CUDA_DEVICE, _OPENGL_API = 0x313F, 0x323A, 0x30A2
# EGL_SURFACE_TYPE: EGL_PBUFFER_BIT, EGL_RENDERABLE_TYPE: EGL_OPENGL_BIT, EGL_NONE
_OFFSCREEN_OPENGL = (0x3033, 0x0001, 0x3040, 0x0008, 0x3038)
_MAX_DEVICES = 64


def egl_devices(timeout_s: float = 20.0) -> dict[int, int | None]:
    """The devices that work, by EGL's index, with the index that CUDA gives them (None for a device without CUDA).

    Empty without libEGL, without a driver, or if the driver hangs for ``timeout_s`` seconds or crashes.
    """
    command = [sys.executable, "-I", "-S", __file__]
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True, stdin=subprocess.DEVNULL
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return {}
    return {int(index): cuda for index, cuda in json.loads(listed.stdout).items()}


def _function(egl: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    """An EGL extension's function, or None without it."""
    egl.eglGetProcAddress.restype, egl.eglGetProcAddress.argtypes = c_void_p, (ctypes.c_char_p,)
    address = egl.eglGetProcAddress(name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None


def _opens(egl: ctypes.CDLL, display: int | None) -> bool:
    """Whether OpenGL can draw into memory on this display."""
    if not display or not egl.eglInitialize(c_void_p(display), None, None):
        return False
    config, count = c_void_p(), c_int32()
    wanted = (c_int32 * len(_OFFSCREEN_OPENGL))(*_OFFSCREEN_OPENGL)
    usable = egl.eglBindAPI(_OPENGL_API) and egl.eglChooseConfig(c_void_p(display), wanted, byref(config), 1, byref(count))
    egl.eglTerminate(c_void_p(display))
    return bool(usable) and count.value > 0


def _probe() -> dict[int, int | None]:
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return {}
    query = _function(egl, "eglQueryDevicesEXT", c_uint32, c_int32, c_void_p, c_void_p)
    display_of = _function(egl, "eglGetPlatformDisplayEXT", c_void_p, c_uint32, c_void_p, c_void_p)
    attribute = _function(egl, "eglQueryDeviceAttribEXT", c_uint32, c_void_p, c_int32, c_void_p)
    devices, count = (c_void_p * _MAX_DEVICES)(), c_int32()
    if query is None or display_of is None or not query(_MAX_DEVICES, devices, byref(count)):
        return {}
    working: dict[int, int | None] = {}
    for index in range(count.value):
        if _opens(egl, display_of(_PLATFORM_DEVICE, devices[index], None)):
            cuda = ctypes.c_ssize_t(-1)
            known = attribute is not None and attribute(devices[index], _CUDA_DEVICE, byref(cuda))
            working[index] = cuda.value if known and cuda.value >= 0 else None
    return working


if __name__ == "__main__":
    print(json.dumps(_probe()))
