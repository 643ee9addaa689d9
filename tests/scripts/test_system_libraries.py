"""The script that looks for the simulators' system libraries, without touching this machine's."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = """\
Created-By: Packages
Codename: bookworm-security
Label: Debian-Security
Origin: Debian
Component: main
Repo-URI: http://mirror.invalid/debian-security/
Sourcesentry: {file}:2

Created-By: Packages
Codename: bookworm
Label: Debian
Origin: Debian
Component: main
Repo-URI: http://mirror.invalid/debian/
Sourcesentry: {file}:1
"""


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("system_libraries")


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("apt_sources")


class FakeMachine:
    """A machine without the libraries, whose apt knows some packages; replaces what the script does to a real one."""

    def __init__(
        self, script: ModuleType, monkeypatch: pytest.MonkeyPatch, candidates: dict[str, str], targets: str
    ) -> None:
        self.script, self.candidates, self.targets = script, candidates, targets
        self.installed: set[str] = set()
        self.commands: list[str] = []
        self.vulkan = [script.vulkan_devices.__globals__["VulkanDevice"](is_cpu=True, driver="Mesa 22.3.6 (LLVM 15.0.6)")]
        monkeypatch.setattr(script, "loads", self.loads)
        monkeypatch.setattr(script, "candidate", lambda package: self.candidates.get(package, ""))
        monkeypatch.setattr(script, "run", lambda *command: self.targets)
        monkeypatch.setattr(script, "apt_get", self.apt_get)
        monkeypatch.setattr(script, "vulkan_devices", lambda: self.vulkan)
        monkeypatch.setattr(script, "as_root", list)
        monkeypatch.setattr(script, "all_there_now", lambda: False)
        monkeypatch.setattr(script.shutil, "which", lambda name: name)
        monkeypatch.setattr(script.platform, "system", lambda: "Linux")

    def loads(self, soname: str) -> bool:
        return any(lib.soname == soname and self.installed & set(lib.packages) for lib in self.script.LIBRARIES)

    def apt_get(self, *arguments: str) -> None:
        self.commands.append(" ".join(arguments))
        if arguments[0] == "install":
            self.installed |= {name for name in arguments[1:] if not name.startswith("-")}


def test_this_machine_has_what_the_tests_need(libraries: ModuleType) -> None:
    """`make test` has set it up; without a Vulkan device or EGL the simulators' tests would fail one by one."""
    assert libraries.missing_libraries() == []
    assert libraries.vulkan_works()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("25.0.7-2~bpo12+1", (25, 0)),
        ("1:24.3.1-1", (24, 3)),
        ("22.3.6 (LLVM 15.0.6)", (22, 3)),
        ("(none)", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_versions_are_read_from_debian_and_from_drivers(libraries: ModuleType, text: str, version: tuple[int, int]) -> None:
    assert libraries.version_of(text) == version


@pytest.mark.parametrize(
    ("is_cpu", "driver", "works"),
    [
        (True, "Mesa 22.3.6 (LLVM 15.0.6)", False),
        (True, "Mesa 24.3.0 (LLVM 19.1.0)", True),
        (True, "", False),
        (False, "570.86.10", True),
    ],
)
def test_a_gpu_needs_no_mesa_and_the_cpu_a_new_one(
    libraries: ModuleType, monkeypatch: pytest.MonkeyPatch, is_cpu: bool, driver: str, works: bool
) -> None:
    device = libraries.vulkan_devices.__globals__["VulkanDevice"](is_cpu=is_cpu, driver=driver)
    monkeypatch.setattr(libraries, "vulkan_devices", lambda: [device])
    assert libraries.vulkan_works() is works


def test_a_new_enough_mesa_is_installed_from_the_release(libraries: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release with the t64 names and a recent Mesa needs no backports."""
    candidates = {lib.packages[0]: "1" for lib in libraries.LIBRARIES} | {"mesa-vulkan-drivers": "25.0.7-2"}
    machine = FakeMachine(libraries, monkeypatch, candidates, targets="")
    libraries.main([])
    assert machine.commands[0] == "update"
    assert "libglib2.0-0t64" in machine.commands[1]
    assert machine.commands[2:] == ["install -y --no-install-recommends mesa-vulkan-drivers"]


def test_an_old_mesa_is_taken_from_backports_of_the_same_mirror(
    libraries: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "debian.sources"
    file.write_text(
        "Types: deb\n# http://other.invalid/debian\nURIs: http://mirror.invalid/debian\nSuites: bookworm\n"
        "Components: main\nSigned-By: /keys/debian.gpg\n"
    )
    candidates = {lib.packages[-1]: "1" for lib in libraries.LIBRARIES} | {"mesa-vulkan-drivers": "22.3.6-1"}
    machine = FakeMachine(libraries, monkeypatch, candidates, TARGETS.format(file=file))
    monkeypatch.setattr(libraries, "BACKPORTS_FILE", tmp_path / "backports.sources")
    libraries.main([])
    assert (tmp_path / "backports.sources").read_text() == (
        "Types: deb\nURIs: http://mirror.invalid/debian/\nSuites: bookworm-backports\nComponents: main\n"
        "Signed-By: /keys/debian.gpg\n"
    )
    assert "libglib2.0-0" in machine.commands[1].split()
    assert machine.commands[2:] == ["update", "install -y --no-install-recommends mesa-vulkan-drivers/bookworm-backports"]


def test_a_release_with_too_old_a_mesa_is_told_so(
    libraries: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    candidates = {lib.packages[-1]: "1" for lib in libraries.LIBRARIES} | {"mesa-vulkan-drivers": "23.2.1-1ubuntu3"}
    FakeMachine(libraries, monkeypatch, candidates, targets="")
    assert libraries.main([]) == 1
    message = capsys.readouterr().err
    assert "23.2.1" in message
    assert "apt-get install mesa-vulkan-drivers/bookworm-backports" in message


def test_without_root_the_message_names_the_packages(
    libraries: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    candidates = {lib.packages[-1]: "1" for lib in libraries.LIBRARIES} | {"mesa-vulkan-drivers": "25.0.7"}
    machine = FakeMachine(libraries, monkeypatch, candidates, targets="")

    def refuse(*arguments: str) -> None:
        raise libraries.SetupError("no sudo")

    monkeypatch.setattr(libraries, "apt_get", refuse)
    assert libraries.main([]) == 1
    message = capsys.readouterr().err
    assert "no sudo" in message
    assert all(package in message for package in ("libvulkan1", "libegl1", "libosmesa6", "mesa-vulkan-drivers"))
    assert machine.commands == []


def test_egl_is_enough_where_no_package_has_osmesa(libraries: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "loads", lambda soname: soname != "libOSMesa.so.8")
    monkeypatch.setattr(libraries, "candidate", lambda package: "")
    assert libraries.missing_libraries() == []
    monkeypatch.setattr(libraries, "candidate", lambda package: "22.3.6")
    assert [lib.soname for lib in libraries.missing_libraries()] == ["libOSMesa.so.8"]


@pytest.mark.parametrize(
    ("text", "keyring"),
    [
        ("deb [arch=amd64 signed-by=/keys/a.gpg] http://mirror.invalid/debian bookworm main\n", "/keys/a.gpg"),
        (
            "# deb [signed-by=/keys/b.gpg] http://mirror.invalid/debian x main\ndeb http://mirror.invalid/debian/ x main\n",
            None,
        ),
        ("URIs: http://a.invalid/debian http://mirror.invalid/debian/\nSigned-By:\n KEY\n .\n END\n", "\n KEY\n .\n END"),
        ("deb [signed-by=/keys/c.gpg] http://other.invalid/debian bookworm main\n", None),
    ],
)
def test_the_keyring_is_the_one_of_the_same_mirror(sources: ModuleType, text: str, keyring: str | None) -> None:
    assert sources.signed_by(text, "http://mirror.invalid/debian/") == keyring


def test_backports_that_are_configured_already_are_not_added_again(sources: ModuleType) -> None:
    more = TARGETS + "\nCreated-By: Packages\nCodename: bookworm-backports\nOrigin: Debian Backports\n"
    assert not sources.main_archive(TARGETS.format(file="/x.sources")).has_backports
    assert sources.main_archive(more.format(file="/x.sources")).has_backports


def test_other_distributions_have_no_debian_archive(sources: ModuleType) -> None:
    assert sources.main_archive(TARGETS.replace("Origin: Debian", "Origin: Ubuntu")) is None
