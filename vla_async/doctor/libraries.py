"""The system libraries that the simulators load, and the packages that have them."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

MESA_NEEDED = (24, 3)  # ManiSkill finds no rendering device on the software Vulkan driver of an older Mesa
MESA_PACKAGE = "mesa-vulkan-drivers"


@dataclass(frozen=True)
class Library:
    """A shared library.

    Attributes:
        soname: what the dynamic linker looks for.
        packages: the names of the package that has it, the newest name first.
        instead: libraries that will do on a release without such a package.
    """

    soname: str
    packages: tuple[str, ...]
    instead: tuple[str, ...] = ()


LIBRARIES = (
    Library("libvulkan.so.1", ("libvulkan1",)),
    Library("libX11.so.6", ("libx11-6",)),
    Library("libGL.so.1", ("libgl1",)),
    Library("libEGL.so.1", ("libegl1",)),
    Library("libOSMesa.so.8", ("libosmesa6",), instead=("libEGL_mesa.so.0", "libEGL_nvidia.so.0")),
    Library("libgthread-2.0.so.0", ("libglib2.0-0t64", "libglib2.0-0")),
)


def loads(soname: str) -> bool:
    """Whether the dynamic linker finds the library and all that it needs."""
    try:
        ctypes.CDLL(soname)
    except OSError:
        return False
    return True


def version_of(text: str) -> tuple[int, int]:
    """``(25, 0)`` of a Debian version such as ``1:25.0.7-2~bpo12+1``; ``(0, 0)`` of ``(none)``."""
    match = re.match(r"(?:\d+:)?(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def mesa_of(driver: str) -> tuple[int, int]:
    """The version in what a driver of Mesa's says of itself, for example ``Mesa 25.0.7-2 (LLVM 19.1.7)``."""
    return version_of(driver.removeprefix("Mesa "))
