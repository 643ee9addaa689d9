"""Look for the system libraries that the simulators load, and install what is missing where apt can.

    python3 scripts/system_libraries.py           look, then install what is missing (root, or sudo without a password)
    python3 scripts/system_libraries.py --check   only look

Exit status 0 if everything is there, else 1 and a message that names what to install. Standard library only: it runs
before the virtual environment exists.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from apt_sources import backports_source, main_archive

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for what nothing has to be installed for
from vla_async.doctor.libraries import LIBRARIES, MESA_NEEDED, MESA_PACKAGE, Library, loads, mesa_of, version_of
from vla_async.doctor.vulkan import vulkan_devices

BACKPORTS_FILE = Path("/etc/apt/sources.list.d/vla-async-backports.sources")


class SetupError(Exception):
    """The libraries cannot be installed from here; the message says what the user has to do."""


# ------------------------------------------------------------------------------------------------ what is there


def missing_libraries() -> list[Library]:
    """The libraries that do not load, and have to."""
    missing = [library for library in LIBRARIES if not loads(library.soname)]
    return [lib for lib in missing if any(map(candidate, lib.packages)) or not any(map(loads, lib.instead))]


def vulkan_works() -> bool:
    """Whether a device is there that ManiSkill can use: any GPU, or a Mesa that is new enough on the CPU."""
    return any(not device.is_cpu or mesa_of(device.driver) >= MESA_NEEDED for device in vulkan_devices())


# ------------------------------------------------------------------------------------------------ apt


def run(*command: str) -> str:
    """The output of a command in the C locale."""
    result = subprocess.run(command, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=False)
    return result.stdout


def candidate(package: str) -> str:
    """The version that apt would install, or an empty string."""
    if shutil.which("apt-cache") is None:
        return ""
    match = re.search(r"Candidate: (\S+)", run("apt-cache", "policy", package))
    return "" if match is None or match[1] == "(none)" else match[1]


def as_root() -> list[str]:
    """The prefix that makes a command run as root.

    Raises:
        SetupError: if this user cannot become root without a password.
    """
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") and subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0:
        return ["sudo", "-n"]
    raise SetupError("they are installed as root, and this user has no sudo without a password")


def apt_get(*arguments: str) -> None:
    """Run apt-get as root without questions.

    Raises:
        SetupError: if it fails; not for an update, where one broken source among several need not matter.
    """
    options = ["-q", "-o", "DPkg::Lock::Timeout=300", "-o", "Dpkg::Use-Pty=0"]
    command = [*as_root(), "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *options, *arguments]
    print("+ apt-get", *arguments, flush=True)
    result = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    if result.returncode != 0 and arguments[0] != "update":
        raise SetupError(f"`apt-get {' '.join(arguments)}` failed")


# ------------------------------------------------------------------------------------------------ installing


def install_libraries(libraries: list[Library]) -> None:
    """Install the packages that have these libraries; one that no package of this release has is left out."""
    packages = [next(filter(candidate, library.packages), None) for library in libraries]
    wanted = sorted({package for package in packages if package})
    if wanted:
        apt_get("install", "-y", "--no-install-recommends", *wanted)


def install_mesa() -> None:
    """Install Mesa's Vulkan drivers, from Debian's backports if the release's own are too old.

    Raises:
        SetupError: if this release has no Mesa that is new enough.
    """
    install = ("install", "-y", "--no-install-recommends")
    if version_of(candidate(MESA_PACKAGE)) >= MESA_NEEDED:
        apt_get(*install, MESA_PACKAGE)
        return
    archive = main_archive(run("apt-get", "indextargets"))
    if archive is None:
        raise SetupError(f"the {MESA_PACKAGE} of this release is {candidate(MESA_PACKAGE) or 'missing'}, which is too old")
    if not archive.has_backports:
        print(f"+ write {BACKPORTS_FILE}", flush=True)
        text = backports_source(archive, archive.sources_file.read_text(encoding="utf-8"))
        subprocess.run(
            [*as_root(), "tee", str(BACKPORTS_FILE)], input=text, text=True, stdout=subprocess.DEVNULL, check=True
        )
        apt_get("update")
    # named like this, only the driver and what it cannot do without come from there, not the rest of Mesa
    apt_get(*install, f"{MESA_PACKAGE}/{archive.backports}")


def all_there_now() -> bool:
    """Look again in a new process: the dynamic linker may remember in this one that a library was missing."""
    return subprocess.run([sys.executable, __file__, "--check"], capture_output=True, check=False).returncode == 0


def report(libraries: list[Library], vulkan: bool, why: str) -> str:
    """What is missing, why it was not installed, and what to install on Debian and Ubuntu."""
    lines = ["The simulators need system libraries that this machine lacks:"]
    lines += [f"  - {library.soname} (package {' or '.join(library.packages)})" for library in libraries]
    if not vulkan:
        needed = ".".join(map(str, MESA_NEEDED))
        lines.append(f"  - a Vulkan driver: of a GPU, or Mesa's software driver from version {needed} on ({MESA_PACKAGE})")
    lines += [f"Not installed by this script: {why}.", "Install them, then run the same command again:"]
    packages = " ".join(library.packages[-1] for library in LIBRARIES)
    lines += [
        f"  Debian 13, Ubuntu 24.04 (with its updates) or newer:  sudo apt-get install {packages} {MESA_PACKAGE}",
        f"  Debian 12:  sudo apt-get install {packages}",
        f"              sudo apt-get install {MESA_PACKAGE}/bookworm-backports  (from bookworm-backports)",
        "  Older releases: their Mesa is too old for software rendering; a GPU with its vendor's Vulkan driver works.",
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Look, install if not told otherwise, and look again; returns the exit status."""
    if platform.system() != "Linux":
        print(f"system libraries are not looked for on {platform.system()}: see docs/install.md", file=sys.stderr)
        return 0
    libraries, vulkan, why = missing_libraries(), vulkan_works(), "it was only asked to look"
    if vulkan and not libraries:
        return 0
    if "--check" not in arguments:
        try:
            if shutil.which("apt-get") is None:
                raise SetupError("there is no apt-get here")
            apt_get("update")
            install_libraries(libraries)
            if not vulkan_works():
                install_mesa()
            why = "apt's packages do not have them"
        except SetupError as error:
            why = str(error)
        if all_there_now():
            return 0
        libraries, vulkan = missing_libraries(), vulkan_works()
    print(report(libraries, vulkan, why), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
