"""Looking for GPUs: with drivers that are not there, that are none, and with one made for the test."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conch.process.gpu_discovery import find_gpus, gpu_uuids

pytestmark = pytest.mark.process

DRIVER = """
int cuInit(unsigned flags) { return RESULT; }
int cuDeviceGetCount(int *count) { *count = 3; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    int capabilities[] = {52, 61, 90};
    *value = attribute == 75 ? capabilities[device] / 10 : capabilities[device] % 10;
    return 0;
}
int cuDeviceGetUuid(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = i * 16 + device;
    return device == 1;
}
"""


def driver(directory: Path, result: int = 0) -> str:
    """A stand-in for the CUDA driver, with three GPUs."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a driver with")
    library = directory / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", f"-DRESULT={result}", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=DRIVER.encode(), check=True)
    return str(library)


@pytest.mark.parametrize(("least", "expected"), [(6.0, (1, 2)), (6.1, (1, 2)), (6.2, (2,)), (0.0, (0, 1, 2))])
def test_gpus_with_the_capability(tmp_path: Path, least: float, expected: tuple[int, ...]) -> None:
    assert find_gpus(least, driver(tmp_path)) == expected


def test_gpus_that_are_too_old_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "conch"):
        find_gpus(6.0, driver(tmp_path))
    assert caplog.messages == ["GPU 0 is not used: its compute capability is 5.2, less than 6.0"]


def test_a_driver_without_a_device(tmp_path: Path) -> None:
    assert find_gpus(6.0, driver(tmp_path, result=100)) == ()


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **more: pytest.fail("a process"))
    assert find_gpus(6.0, "libno-such-driver.so.1") == ()


def test_a_library_that_is_no_driver(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "conch"):
        assert find_gpus(6.0, "libc.so.6") == ()
    assert "can't be asked for GPUs" in caplog.text


def test_an_interpreter_that_can_not_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with caplog.at_level(logging.WARNING, "conch"):
        assert find_gpus(6.0, "libc.so.6") == ()
    assert "can't be asked for GPUs" in caplog.text


def test_uuids(tmp_path: Path) -> None:
    """As nvidia-smi and NVML write them; empty for one that has none."""
    expected = ("GPU-00102030-4050-6070-8090-a0b0c0d0e0f0", "", "GPU-02122232-4252-6272-8292-a2b2c2d2e2f2")
    assert gpu_uuids(driver(tmp_path)) == expected


def test_uuids_without_a_driver(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert gpu_uuids("libno-such-driver.so.1") == gpu_uuids(driver(tmp_path, result=100)) == ()
    with caplog.at_level(logging.WARNING, "conch"):
        assert gpu_uuids("libc.so.6") == ()
    assert "can't be asked for the UUIDs" in caplog.text
