"""A client whose tensors are in memory of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from tests.support.backend_harness import tensor_specs
from tests.support.cuda import Allocation, FakeCuda

from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.tensor import Array, Tensor
from conch.memory.cuda import CudaDevices
from conch.memory.cuda_regions import cuda_opener
from conch.memory.region_bindings import RegionBindings
from conch.memory.regions import Regions

AB = tensor_specs(A=("FP32", (2,)), B=("FP32", (2,)))
SUM_DIFF = tensor_specs(SUM=("FP32", (2,)), DIFF=("FP32", (2,)))


class Client:
    """Has memory on a GPU that is registered as a region, a slot of 256 bytes for each tensor."""

    def __init__(self, cuda: FakeCuda, devices: CudaDevices, device: int = 1) -> None:
        self.regions = Regions(open_cuda=cuda_opener(lambda: devices))
        self.memory: Allocation = cuda.allocate(np.zeros((32, 64), np.float32), device)
        self.regions.register_cuda("r", self.memory.handle, device, self.memory.array.nbytes)
        self.answers: list[InferenceResponse] = []
        self._slots = iter(range(32))

    def request(
        self,
        inputs: Mapping[str, Array],
        outputs: Sequence[str] = (),
        host: Mapping[str, Array] | None = None,
        shift: int = 0,
    ) -> tuple[InferenceRequest, dict[str, Array]]:
        """A request with inputs in memory of the GPU, others in the message, and outputs on the GPU.

        Returns:
            The request, and a view of each output's slot.
        """
        uses = RegionBindings(self.regions)
        tensors: dict[str, Tensor] = {}
        for name, array in inputs.items():
            slot = next(self._slots)
            start = slot * 64 + shift
            self.memory.array.reshape(-1)[start : start + array.size] = array.reshape(-1)
            tensors[name] = uses.input("r", start * 4, array.nbytes, name, "FP32", array.shape)
        for name, array in (host or {}).items():
            tensors[name] = Tensor.from_array(name, array)
        places: dict[str, Array] = {}
        for name in outputs:
            slot = next(self._slots)
            uses.output("r", slot * 256, 256, name)
            places[name] = self.memory.array[slot]
        request = InferenceRequest("m", "", tensors, self.respond, 0)
        request.batch_size = next(iter(tensors.values())).shape[0]
        uses.attach(request)
        return request, places

    def respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        assert response is not None
        assert response.error is None, response.error
        self.answers.append(response)


def batch_of(*requests: InferenceRequest) -> Batch:
    return Batch(list(requests), sum(request.batch_size for request in requests))


def run(instance: Any, batch: Batch) -> None:
    for request, response in zip(batch.requests, instance.execute(batch), strict=True):
        request.respond(response)


@pytest.fixture
def client(cuda: FakeCuda, devices: CudaDevices) -> Client:
    return Client(cuda, devices)
