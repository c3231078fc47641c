"""PyTorch models on a GPU, with a stand-in for the parts of torch that need one: its device is the host."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.support.backend_harness import Harness, rows
from tests.support.cuda import FakeCuda
from tests.support.device_client import AB, SUM_DIFF, Client, batch_of, run

pytest.importorskip("torch")

import torch

from conch.backends.arrays import ArrayInstance
from conch.core.device import DeviceTensor
from conch.memory.cuda import CudaDevices
from conch_engines.pytorch.torch_function import TorchDeviceFunction
from conch_engines.pytorch.torch_settings import TorchSettings
from conch_engines.pytorch.torchscript_model import TorchScriptProgram

DEVICE = 1


class StandIn:
    """Torch with a GPU whose memory is the host's, where the stand-in of the driver has it."""

    def __init__(self) -> None:
        self.cuda = self
        self.synchronised = 0
        self.staged = 0
        self.failure: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def device(self, *arguments: Any) -> Any:
        """A device for two arguments, as a constructor; else a context."""
        return torch.device("cpu")

    def Stream(self, device: Any) -> StandIn:
        return self

    def synchronize(self) -> None:
        self.synchronised += 1
        if self.failure:
            raise RuntimeError(self.failure)

    def empty(self, *shape: Any, pin_memory: bool, **options: Any) -> Any:
        self.staged += pin_memory
        return torch.empty(*shape, **options)

    def from_dlpack(self, value: Any) -> Any:
        assert isinstance(value, DeviceTensor)
        assert value.memory.device_id == DEVICE
        memory = (ctypes.c_char * value.nbytes).from_address(value.memory.pointer)
        return torch.from_numpy(np.frombuffer(memoryview(memory), value.dtype).reshape(value.shape))


class SumDiff(torch.nn.Module):
    def forward(self, A: torch.Tensor, B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return A + B, A - B


@pytest.fixture
def client(cuda: FakeCuda, devices: CudaDevices) -> Client:
    return Client(cuda, devices, DEVICE)


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture
def instance(harness: Harness, stand_in: StandIn) -> Iterator[ArrayInstance]:
    spec = harness.spec("m", AB, SUM_DIFF)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.script(SumDiff().eval())
    program = TorchScriptProgram(torch, spec, module)
    function = TorchDeviceFunction(stand_in, spec, program, TorchSettings.of(spec), DEVICE)
    instance = ArrayInstance(spec, function)
    yield instance
    instance.close()


def test_tensors_of_a_client_stay_on_the_device(
    instance: ArrayInstance, client: Client, cuda: FakeCuda, stand_in: StandIn
) -> None:
    request, places = client.request({"A": rows(5, 6), "B": rows(1, 2)}, ["SUM", "DIFF"])
    batch = batch_of(request)
    with cuda.failing("cuMemcpyAsync", 700):  # the server copies nothing, so nothing fails
        run(instance, batch)
    assert batch.bytes_copied == 0
    assert stand_in.staged == 0
    assert (places["SUM"][:4].tolist(), places["DIFF"][:4].tolist()) == ([6, 6, 8, 8], [4, 4, 4, 4])
    assert stand_in.synchronised == 1


def test_tensors_in_messages_are_staged(instance: ArrayInstance, client: Client, stand_in: StandIn) -> None:
    for number in range(3):
        request, places = client.request({"A": rows(number)}, ["SUM"], host={"B": rows(1)})
        run(instance, batch_of(request))
        assert places["SUM"][:2].tolist() == [number + 1] * 2
        assert client.answers[-1].outputs[1].numpy().tolist() == [[number - 1] * 2]
    assert stand_in.staged == 1  # one buffer, used by all three


def test_a_batch_of_requests_on_the_device(instance: ArrayInstance, client: Client) -> None:
    made = [client.request({"A": rows(5 + n), "B": rows(n)}, ["SUM"]) for n in range(3)]
    run(instance, batch_of(*(request for request, _ in made)))
    assert [places["SUM"][:2].tolist() for _, places in made] == [[5 + 2 * n] * 2 for n in range(3)]


def test_an_error_of_the_device_says_that_it_is_late(
    instance: ArrayInstance, client: Client, stand_in: StandIn
) -> None:
    stand_in.failure = "CUDA error: an illegal memory access was encountered"
    request, _ = client.request({"A": rows(1), "B": rows(1)}, ["SUM"])
    with pytest.raises(Exception, match=r"illegal memory access.*CUDA_LAUNCH_BLOCKING=1"):
        run(instance, batch_of(request))
