"""Batches for functions that read and write tensors in the memory of their device.

Tensors that are on the device stay there; those in host memory are copied by the framework as usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from conch.backends.gather import gather_for, join_rows, needs_host_arrays
from conch.core.device import DeviceMemory, DeviceTensor, concatenated
from conch.core.request import InferenceRequest
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec
from conch.core.tensor import POSITIONS, Array

ALIGNMENT = 256
"""Required alignment of addresses, in bytes: kernels that read many elements at once rely on it."""

Places = Mapping[str, tuple[DeviceMemory, ...]]
"""Destinations on the device, one per request, of outputs that all requests of a batch want there."""


def overlap(one: DeviceMemory, other: DeviceMemory) -> bool:
    """True if two pieces of device memory have bytes in common."""
    return one.pointer < other.pointer + other.nbytes and other.pointer < one.pointer + one.nbytes


class DeviceFunction(Protocol):
    """A function of arrays that can also use the memory of its device.

    Attributes:
        device_id: Number of the device.
    """

    device_id: int

    def on_device(
        self, inputs: Mapping[str, Array | DeviceTensor], outputs: tuple[str, ...], places: Places
    ) -> Mapping[str, Array | DeviceTensor]:
        """Runs the model once.

        Args:
            inputs: As for `ArrayFunction`; those on the device are passed as they are.
            outputs: The requested outputs.
            places: Outputs that are wanted on the device. For a batch of one request the function may write
                to the place, where it fits exactly.

        Returns:
            At least the requested outputs; computation on the device has finished.
        """


class DeviceGatherer:
    """Gathers batches for the device of a function."""

    def __init__(self, spec: ModelSpec, device_id: int) -> None:
        self._device_id = device_id
        self._gather = gather_for(spec)
        # Padded, ragged and derived inputs are built in host memory.
        self._joins = not needs_host_arrays(spec)
        # Outputs that are split, or kept as sequence state, differ from what the client gets.
        self._leaves = self._joins and not (spec.batch_outputs or spec.sequence)

    def inputs(self, batch: Batch, requests: list[InferenceRequest]) -> dict[str, Array | DeviceTensor]:
        """The inputs of a batch; those at least partly on the device are joined there."""
        on_device: dict[str, DeviceTensor] = {}
        if self._joins:
            for name in requests[0].inputs:
                tensor = self._joined(batch, requests, name)
                if tensor is not None:
                    on_device[name] = tensor
        if not on_device:
            return {**self._gather(batch, requests)}
        values: dict[str, Array | DeviceTensor] = {**on_device}
        for name in requests[0].inputs:
            if name not in on_device:
                batch.bytes_copied += sum([request.inputs[name].fetch() for request in requests])
                values[name] = join_rows(batch, requests, name)
        return values

    def places(self, requests: list[InferenceRequest], outputs: tuple[str, ...]) -> Places:
        """Places of the outputs that all requests want on this device."""
        places: dict[str, tuple[DeviceMemory, ...]] = {}
        if not self._leaves or any(request.region_bindings is None for request in requests):
            return places
        # A cache or log in front of the bindings must not see memory of the client.
        bindings = [
            request.region_bindings
            for request in requests
            if request.region_bindings is not None and request.responder is request.region_bindings
        ]
        for name in outputs:
            wanted = tuple([memory for binding in bindings if (memory := binding.device(name)) is not None])
            if len(wanted) == len(requests) and all(m.device_id == self._device_id for m in wanted):
                places[name] = wanted
        return places

    def _joined(self, batch: Batch, requests: list[InferenceRequest], name: str) -> DeviceTensor | None:
        """One input in device memory; None if none of it is there or memory is short."""
        tensors = [request.inputs[name] for request in requests]
        device_id = self._device_id
        if not any(isinstance(t, DeviceTensor) and t.memory.device_id == device_id for t in tensors):
            return None
        first = tensors[0]
        if (
            len(tensors) == 1
            and isinstance(first, DeviceTensor)
            and not first.memory.pointer % ALIGNMENT
            # Kernels check positions before use, so the client must not change them.
            and first.datatype not in POSITIONS
        ):
            return first
        joined = concatenated(name, tensors, device_id)
        if joined is not None:
            batch.bytes_copied += joined.nbytes
        return joined
