"""Batches for functions that take and give tensors in the memory of their device.

What is there already stays there; what is in host memory goes there with the framework's own copy, as ever.
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
"""What addresses of inputs and outputs have to be multiples of: frameworks have kernels that read many
elements at once, and count on memory being where their own allocators would have it."""

Places = Mapping[str, tuple[DeviceMemory, ...]]
"""For outputs that all requests of a batch want on the device, where each of them wants it."""


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
            inputs: As for `ArrayFunction`; those that are on the device come as they are.
            outputs: The outputs that somebody wants.
            places: Which of them are wanted on the device. Those of a batch of one request may be written to
                their place, where they fit exactly.

        Returns:
            At least the outputs wanted; what is on the device has been computed.
        """


class DeviceGatherer:
    """Gathers batches for the device of a function.

    Args:
        spec: The model.
        device_id: Number of the device.
    """

    def __init__(self, spec: ModelSpec, device_id: int) -> None:
        self._device_id = device_id
        self._gather = gather_for(spec)
        # Padded and ragged inputs, and those made of others, are made in host memory.
        self._joins = not needs_host_arrays(spec)
        # Outputs that are cut or split, or kept for a sequence, are not what goes to the client.
        self._leaves = self._joins and not (spec.batch_outputs or spec.sequence)

    def inputs(self, batch: Batch, requests: list[InferenceRequest]) -> dict[str, Array | DeviceTensor]:
        """The inputs of a batch; those that are on the device, or partly, in memory of the device."""
        near: dict[str, DeviceTensor] = {}
        if self._joins:
            for name in requests[0].inputs:
                tensor = self._joined(batch, requests, name)
                if tensor is not None:
                    near[name] = tensor
        if not near:
            return {**self._gather(batch, requests)}
        values: dict[str, Array | DeviceTensor] = {**near}
        for name in requests[0].inputs:
            if name not in near:
                batch.bytes_copied += sum([request.inputs[name].fetch() for request in requests])
                values[name] = join_rows(batch, requests, name)
        return values

    def places(self, requests: list[InferenceRequest], outputs: tuple[str, ...]) -> Places:
        """The outputs that all requests want on the device, with their places."""
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
            wanted = tuple([memory for use in bindings if (memory := use.device(name)) is not None])
            if len(wanted) == len(requests) and all(m.device_id == self._device_id for m in wanted):
                places[name] = wanted
        return places

    def _joined(self, batch: Batch, requests: list[InferenceRequest], name: str) -> DeviceTensor | None:
        """One input in memory of the device; None if none of it is there, or there is no room."""
        tensors = [request.inputs[name] for request in requests]
        device_id = self._device_id
        if not any(isinstance(t, DeviceTensor) and t.memory.device_id == device_id for t in tensors):
            return None
        first = tensors[0]
        if (
            len(tensors) == 1
            and isinstance(first, DeviceTensor)
            and not first.memory.pointer % ALIGNMENT
            and first.datatype not in POSITIONS  # which kernels check before they use them
        ):
            return first
        joined = concatenated(name, tensors, device_id)
        if joined is not None:
            batch.bytes_copied += joined.nbytes
        return joined
