"""Each check, on a machine that lacks what it looks for: it must say so, and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from vla_async.doctor import apart, graphics, machine, software
from vla_async.doctor.apart import Ended, run_apart
from vla_async.doctor.check import Check
from vla_async.doctor.machine import GIB, MIB, Limits
from vla_async.doctor.software import TorchFacts

NONE = TorchFacts("2.13.0+cpu")
CUDA = TorchFacts("2.13.0", "12.8", driver="535.104.05")


def says(check: Check, status: str, *words: str) -> None:
    assert check.status == status, check
    text = f"{check.found} {check.fix}"
    assert all(word in text for word in words), text
    assert bool(check.fix) == (status != "ok"), "what is not well has a remedy, and only that"


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [((3, 9), "fail", "PYTHON="), ((3, 10), "ok", "3.10"), ((3, 13), "warn", "3.11 and 3.12")],
)
def test_python(version: tuple[int, int], status: str, words: str) -> None:
    says(software.python(version), status, words)


@pytest.mark.parametrize(
    ("facts", "wants", "status", "words"),
    [
        (TorchFacts(problem="libcudart.so.12: no such file"), False, "fail", ["cannot be imported", "libcudart", "pip"]),
        (NONE, False, "ok", ["no GPU"]),
        (NONE, True, "fail", ["no NVIDIA driver", "trainer.accelerator=cpu"]),
        (TorchFacts("2.13.0+cpu", driver="570.1"), False, "warn", ["the GPU goes unused", "pip install"]),
        (TorchFacts("2.13.0+cpu", driver="570.1"), True, "fail", ["the GPU goes unused"]),
        (CUDA, False, "warn", ["driver 535.104.05: no device", "CUDA 12.8", "CUDA_VISIBLE_DEVICES"]),
        (TorchFacts("2.13.0", "12.8", (), "535.1", "the driver is too old"), True, "fail", ["the driver is too old"]),
        (TorchFacts("2.13.0", "12.8", ("H100", "H100"), "570.1"), True, "ok", ["2 × H100"]),
    ],
)
def test_torch_and_its_driver(facts: TorchFacts, wants: bool, status: str, words: list[str]) -> None:
    """A GPU that torch cannot use costs a run its speed, or, where the recipe asks for it, its start."""
    says(software.torch_and_cuda(facts, wants), status, *words)


def test_packages_of_the_core_must_be_there_and_those_of_extras_fit() -> None:
    wanted = ["torch>=2.8", "rich>=13.7", 'mani_skill>=3.0.1; extra == "maniskill"', 'ray>=2.49; extra == "ray"']
    there = {"torch": "2.13.0+cpu", "rich": "15.0.0", "mani_skill": "3.0.1"}
    says(software.packages(wanted, there.get), "ok", "3 of the packages")
    says(software.packages(wanted, (there | {"torch": "2.7.1"}).get), "fail", "torch>=2.8", "pip install 'torch>=2.8'")
    says(software.packages(wanted, {"torch": "2.8"}.get), "fail", "rich>=13.7")
    says(software.packages(wanted, (there | {"mani_skill": "2.9"}).get), "warn", "mani_skill>=3.0.1 (not 2.9)")
    says(software.packages([], there.get), "warn", "pip install .")
    says(software.packages(software.own_requirements()), "ok")


def test_loggers_have_to_be_importable() -> None:
    """A run that ends when it opens its logger has started its envs for nothing."""
    path = "lightning.pytorch.loggers.WandbLogger"
    (missing,) = software.loggers([path], lambda name: name != "wandb")
    says(missing, "fail", "wandb is not installed", "pip install wandb")
    (unknown,) = software.loggers(["no_such_package.Logger"])
    says(unknown, "fail", "cannot be imported", "trainer.loggers")
    (there,) = software.loggers(["lightning.fabric.loggers.CSVLogger"])
    says(there, "ok")


def test_ffmpeg() -> None:
    def missing() -> str:
        raise RuntimeError("No ffmpeg exe could be found.")

    check = software.ffmpeg(True, missing)
    says(check, "fail", "No ffmpeg exe", "evaluate_loop.num_videos=0")
    assert check.blocks
    assert not software.ffmpeg(False, missing).blocks, "who records nothing does without"
    says(software.ffmpeg(True), "ok")


@pytest.mark.parametrize(
    ("free", "slab", "status", "word"),
    [
        (1 * MIB, None, "fail", "--shm-size"),
        (64 * MIB, None, "warn", "--shm-size"),  # what docker gives
        (64 * MIB, 65 * MIB, "fail", "fit_loop.max_staleness"),
        (64 * MIB, 60 * MIB, "ok", "60 MiB"),
        (3 * GIB, None, "ok", "3.0 GiB free"),
    ],
)
def test_shared_memory_is_held_against_the_slab(free: int, slab: int | None, status: str, word: str) -> None:
    """A page of shared memory that cannot be had kills the process that touches it."""
    check = machine.shared_memory(free, slab)
    says(check, status, word)
    assert check.blocks is (status == "fail")


def test_a_loop_without_a_slab_needs_no_shared_memory() -> None:
    assert not machine.shared_memory(1 * MIB, 0).blocks


def test_limits_are_held_against_the_number_of_processes() -> None:
    files, threads = machine.limits(Limits(1024, 4096, 500), processes=100)
    says(files, "fail", "at most 1,024", "1,856", "ulimit -n 1856")
    says(threads, "fail", "at most 500", "864", "fit_loop.envs_per_worker")
    files, threads = machine.limits(Limits(1024, 1024, None), processes=100)
    says(files, "fail", "limits.conf")
    says(threads, "ok", "no limit")
    assert [check.status for check in machine.limits(Limits(1024, 1024, 500), processes=40)] == ["ok", "ok"]


def test_fewer_cores_than_processes_are_worth_a_warning() -> None:
    says(machine.cores(4, 2, 1, 1), "ok")
    says(machine.cores(3.5, 2, 1, 1), "warn", "for 4: env workers 2, replicas on CPUs 1, trainers 1", "env.num_envs")


def test_disk(tmp_path: Path) -> None:
    """The directory need not exist; what is above it has to be writable, and to have room."""
    root = tmp_path / "new" / "runs"
    says(machine.disk(root, lambda path: 10 * GIB), "ok", "10.0 GiB free")
    says(machine.disk(root, lambda path: 2 * GIB), "warn", "trainer.root_dir")
    says(machine.disk(root, lambda path: MIB), "fail", "1 MiB free")
    assert not root.exists()
    says(machine.disk(Path("/proc/nowhere")), "fail", "/proc cannot be written to", "trainer.root_dir")


def test_processes_that_do_not_start() -> None:
    says(machine.processes(lambda args, timeout: Ended("", "OSError: forbidden")), "fail", "OSError: forbidden", "sandbox")


def test_system_libraries_are_those_of_the_installed_simulators() -> None:
    def bare(soname: str) -> bool:
        return False

    check = graphics.system_libraries(["maniskill", "libero"], needed=True, there=bare)
    says(check, "fail", "libvulkan.so.1", "sudo apt-get install", "libvulkan1", "administrator")
    assert check.blocks
    assert "libvulkan1" not in graphics.system_libraries(["libero"], needed=True, there=bare).fix
    says(graphics.system_libraries([], needed=False, there=bare), "ok")
    says(graphics.system_libraries(["libero"], True, lambda soname: soname != "libOSMesa.so.8"), "ok")


@pytest.mark.parametrize(
    ("ended", "status", "words"),
    [
        (Ended("[]"), "fail", ["no device", "libvulkan1", "administrator"]),
        (
            Ended('[{"is_cpu": true, "driver": "Mesa 22.3.6 (LLVM 15)"}]'),
            "fail",
            ["older than Mesa 24.3", "bookworm-backports"],
        ),
        (Ended('[{"is_cpu": true, "driver": "Mesa 24.3.0"}]'), "ok", ["software: Mesa 24.3.0"]),
        (Ended('[{"is_cpu": false, "driver": "570.86"}]'), "ok", ["GPU: 570.86"]),
        (Ended("", "it crashed with SIGSEGV", crashed=True), "fail", ["SIGSEGV"]),
    ],
)
def test_vulkan(ended: Ended, status: str, words: list[str]) -> None:
    def run(args: Sequence[str], timeout_s: float) -> Ended:
        return ended

    says(graphics.vulkan(True, run), status, *words)


def test_egl_or_osmesa_is_enough() -> None:
    says(graphics.offscreen_gl(True, {}, lambda soname: False), "fail", "neither works", "libosmesa6")
    says(graphics.offscreen_gl(True, {0: None, 1: 2}, lambda soname: False), "ok", "EGL device 0, EGL device 1 (CUDA 2)")
    says(graphics.offscreen_gl(True, {}, lambda soname: True), "ok", "OSMesa")


def test_what_runs_apart_may_crash_hang_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segmentation fault of a driver must not be the doctor's."""
    crash = run_apart(["-c", "import os, signal; print('so far', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"], 20.0)
    assert crash == Ended("so far\n", "it crashed with SIGSEGV", crashed=True)
    assert run_apart(["-c", "raise ValueError('no such thing')"], 20.0).problem == "ValueError: no such thing"
    assert run_apart(["-c", "import sys; print(sys.stdin.read())"], 20.0, b"hello") == Ended("hello\n")

    def hang(*args: object, timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(apart.subprocess, "run", hang)
    assert run_apart(["-c", ""], 7.0).problem == "it took longer than 7 s"


def test_vulkan_is_asked_without_anything_that_is_installed() -> None:
    """So that a broken environment does not hide what the machine has."""
    result = subprocess.run([sys.executable, "-I", "-S", graphics.vulkan_program.__file__], capture_output=True, check=True)
    assert isinstance(json.loads(result.stdout), list)
