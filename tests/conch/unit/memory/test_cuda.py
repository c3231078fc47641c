"""Memory of CUDA devices, through a driver whose devices' memory is files."""

from __future__ import annotations

import gc
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cuda import FakeCuda, build

from conch.core.device import DeviceTensor
from conch.core.errors import InternalError, ResourceExhaustedError
from conch.memory.cuda import CudaDevice, CudaDevices, CudaMemory
from conch.memory.cuda_driver import CudaError, CudaUnavailableError, Driver

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.process
def test_memory_of_another_process_is_read_and_written_in_place(cuda: FakeCuda, devices: CudaDevices) -> None:
    theirs = cuda.allocate(VALUES, device=1)
    memory = devices.open(theirs.handle, 1)
    assert (memory.device_id, memory.nbytes) == (1, VALUES.nbytes)
    assert bytes(memory.read()) == VALUES.tobytes()
    memory.part(16, 16).write([np.full(4, 7, np.float32).tobytes()])
    assert theirs.array.tolist() == [[0, 1, 2, 3], [7, 7, 7, 7], [8, 9, 10, 11]]


def test_a_handle_is_opened_once_and_closed_with_its_last_use(cuda: FakeCuda, devices: CudaDevices) -> None:
    theirs = cuda.allocate(VALUES)
    first, second = devices.open(theirs.handle, 0), devices.open(theirs.handle, 0)
    assert first.pointer == second.pointer
    assert devices.open_handles == 1
    part = first.part(0, 4)
    del first, second
    assert cuda.open_handles == {theirs.name}
    assert bytes(part.read()) == VALUES[0, :1].tobytes()
    del part
    assert cuda.open_handles == set()
    assert devices.open_handles == 0
    assert bytes(devices.open(theirs.handle, 0).read()) == VALUES.tobytes()


def test_what_a_framework_made_of_a_tensor_keeps_its_memory(cuda: FakeCuda, devices: CudaDevices) -> None:
    theirs = cuda.allocate(VALUES)
    tensor = DeviceTensor("x", "FP32", (3, 4), devices.open(theirs.handle, 0))
    capsule = tensor.__dlpack__(stream=1)
    del tensor
    assert cuda.open_handles == {theirs.name}
    del capsule
    assert cuda.open_handles == set()


@pytest.mark.parametrize("number", [-1, 2, 2**40])
def test_a_device_that_is_not_there(cuda: FakeCuda, devices: CudaDevices, number: int) -> None:
    with pytest.raises(CudaError, match=r"^invalid device ordinal$"):
        devices.open(cuda.allocate(VALUES).handle, number)


def test_a_handle_of_another_device_is_closed_again(cuda: FakeCuda, devices: CudaDevices) -> None:
    theirs = cuda.allocate(VALUES, device=1)
    with pytest.raises(CudaError, match=r"^the memory is on device 1, not on device 0$"):
        devices.open(theirs.handle, 0)
    assert cuda.open_handles == set()
    memory = devices.open(theirs.handle, 1)
    assert memory.nbytes == VALUES.nbytes
    with pytest.raises(CudaError, match=r"^the memory is on device 1, not on device 0$"):
        devices.open(theirs.handle, 0)
    assert bytes(memory.read()) == VALUES.tobytes()


@pytest.mark.parametrize("handle", [b"", b"x" * 63, b"x" * 64, b"\0" * 64, b"x" * 65])
def test_what_is_no_handle(devices: CudaDevices, handle: bytes) -> None:
    with pytest.raises(CudaError, match=r"^invalid argument$"):
        devices.open(handle, 0)
    assert devices.open_handles == 0


def test_a_handle_of_our_own(cuda: FakeCuda, devices: CudaDevices) -> None:
    with pytest.raises(CudaError, match=r"^invalid device context$"):
        devices.open(cuda.allocate(VALUES, pid=os.getpid()).handle, 0)


def test_memory_that_is_gone(cuda: FakeCuda, devices: CudaDevices) -> None:
    theirs = cuda.allocate(VALUES)
    (cuda.directory / theirs.name).unlink()
    with pytest.raises(CudaError, match=r"^invalid resource handle$"):
        devices.open(theirs.handle, 0)


@pytest.mark.parametrize("function", ["cuPointerGetAttribute", "cuMemGetAddressRange_v2"])
def test_a_handle_that_can_not_be_looked_at_is_closed_again(
    cuda: FakeCuda, devices: CudaDevices, function: str
) -> None:
    theirs = cuda.allocate(VALUES)
    with cuda.failing(function, 700), pytest.raises(CudaError, match="illegal memory access"):
        devices.open(theirs.handle, 0)
    assert cuda.open_handles == set()


def test_codes_without_a_text_are_numbers(cuda: FakeCuda, devices: CudaDevices) -> None:
    with cuda.failing("cuIpcOpenMemHandle_v2", 999), pytest.raises(CudaError, match=r"^CUDA error 999$"):
        devices.open(cuda.allocate(VALUES).handle, 0)


def test_no_driver() -> None:
    with pytest.raises(CudaUnavailableError):
        CudaDevices("libno-such-driver.so.1").device(0)


def test_a_library_that_is_no_driver() -> None:
    with pytest.raises(CudaUnavailableError):
        CudaDevices("libc.so.6").device(0)


@pytest.mark.parametrize(("name", "value"), [("FAKE_CUDA_INIT", "100"), ("FAKE_CUDA_GPUS", "0")])
def test_a_driver_without_gpus(
    cuda: FakeCuda, devices: CudaDevices, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(CudaUnavailableError):
        devices.device(0)
    monkeypatch.delenv(name)
    assert devices.device(0).number == 0  # a later try finds one that came


def test_a_device_that_can_not_be_used_is_tried_again(cuda: FakeCuda, devices: CudaDevices) -> None:
    with cuda.failing("cuDevicePrimaryCtxRetain", 2), pytest.raises(CudaError, match="out of memory"):
        devices.device(0)
    assert devices.device(0).number == 0


@pytest.mark.parametrize("function", ["cuMemcpyAsync", "cuStreamSynchronize"])
def test_copies_that_fail(cuda: FakeCuda, devices: CudaDevices, function: str) -> None:
    memory = devices.open(cuda.allocate(VALUES).handle, 0)
    text = r"^a copy on CUDA device 0 failed: an illegal memory access was encountered$"
    with cuda.failing(function, 700):
        with pytest.raises(InternalError, match=text):
            memory.read()
        with pytest.raises(InternalError, match=text):
            memory.write([b"1234"])
    assert bytes(memory.read()) == VALUES.tobytes()


def test_copies_from_many_threads_do_not_disturb_each_other(cuda: FakeCuda, devices: CudaDevices) -> None:
    memories = [devices.open(cuda.allocate(VALUES + n, n % 2).handle, n % 2) for n in range(8)]
    wrong: list[int] = []

    def copy(n: int) -> None:
        for _ in range(50):
            if bytes(memories[n].read()) != (VALUES + n).tobytes():
                wrong.append(n)

    threads = [threading.Thread(target=copy, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_handles_are_opened_and_closed_by_many_threads(cuda: FakeCuda, devices: CudaDevices) -> None:
    theirs = cuda.allocate(VALUES)
    failures: list[Exception] = []

    def use() -> None:
        try:
            for _ in range(100):
                assert bytes(devices.open(theirs.handle, 0).read()) == VALUES.tobytes()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cuda.open_handles == set()


def test_a_handle_that_can_not_be_closed_is_logged(
    cuda: FakeCuda, devices: CudaDevices, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()  # what earlier tests left to the collector would be closed below
    memory = devices.open(cuda.allocate(VALUES).handle, 0)
    with cuda.failing("cuIpcCloseMemHandle", 700), caplog.at_level(logging.ERROR, "conch"):
        del memory
    assert caplog.messages == [
        "memory of CUDA device 0 could not be given back: an illegal memory access was encountered"
    ]


@given(offset=st.integers(-(2**65), 2**65), nbytes=st.integers(-(2**65), 2**65))
def test_no_part_reaches_out_of_its_memory(offset: int, nbytes: int) -> None:
    device = CudaDevice.__new__(CudaDevice)
    device.number = 0
    memory = CudaMemory(device, 4096, 48, None)
    if 0 <= offset <= 48 and 0 <= nbytes <= 48 - offset:
        part = memory.part(offset, nbytes)
        assert (part.pointer, part.nbytes) == (4096 + offset, nbytes)
    else:
        with pytest.raises(ValueError, match="do not lie inside"):
            memory.part(offset, nbytes)


def test_no_write_reaches_out_of_its_memory(cuda: FakeCuda, devices: CudaDevices) -> None:
    theirs = cuda.allocate(VALUES)
    part = devices.open(theirs.handle, 0).part(0, 8)
    with pytest.raises(ValueError, match="more is to be written than 8 bytes"):
        part.write([b"12345678", b"", b"9"])
    assert theirs.array.tolist() == VALUES.tolist()


def test_host_and_device_are_written_one_after_the_other(cuda: FakeCuda, devices: CudaDevices) -> None:
    source = devices.open(cuda.allocate(VALUES, 1).handle, 1)
    theirs = cuda.allocate(np.zeros(6, np.float32))
    target = devices.open(theirs.handle, 0)
    host = np.array([21, 22], np.float32)
    target.write([source.part(4, 8), b"", memoryview(host.tobytes()), host[:1].tobytes()])
    assert theirs.array.tolist() == [1, 2, 21, 22, 21, 0]


def test_new_memory_is_given_back_with_its_last_use(cuda: FakeCuda, devices: CudaDevices) -> None:
    near = devices.open(cuda.allocate(VALUES, 1).handle, 1)
    memory = near.new_memory(8)
    assert memory is not None
    assert (memory.device_id, memory.nbytes) == (1, 8)
    memory.write([b"12345678"])
    assert bytes(memory.read()) == b"12345678"
    stale = CudaMemory(devices.device(1), memory.pointer, 8, None)
    del memory
    with pytest.raises(InternalError, match="illegal memory access"):
        stale.read()


def test_too_little_memory(cuda: FakeCuda, devices: CudaDevices) -> None:
    near = devices.open(cuda.allocate(VALUES).handle, 0)
    with cuda.failing("cuMemAllocAsync", 2), pytest.raises(ResourceExhaustedError, match="out of memory"):
        near.new_memory(8)


def test_a_device_without_pools(
    cuda: FakeCuda, devices: CudaDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_POOLS", "0")
    assert devices.open(cuda.allocate(VALUES).handle, 0).new_memory(8) is None


@pytest.mark.process
def test_a_driver_without_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_DIR", str(tmp_path))
    cuda = FakeCuda(build(tmp_path, old=True), tmp_path)
    assert not Driver(cuda.library).has_pools
    memory = CudaDevices(cuda.library).open(cuda.allocate(VALUES).handle, 0)
    assert memory.new_memory(8) is None
    assert bytes(memory.read()) == VALUES.tobytes()
