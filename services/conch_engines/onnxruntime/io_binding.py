"""Runs a session with inputs and outputs bound to device memory by address."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from conch.backends.device_arrays import ALIGNMENT, Places
from conch.core.device import DeviceMemory, DeviceTensor
from conch.core.spec import ModelSpec
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, POSITIONS, Array


class Binder:
    """Binds session inputs and outputs to memory; `device` is ONNX Runtime's name for the kind of device."""

    def __init__(self, spec: ModelSpec, session: Any, device: str, device_id: int) -> None:
        self._session = session
        self._device = device
        self._device_id = device_id
        self._batches = spec.max_batch_size > 0
        self._outputs = {tensor.name: tensor for tensor in spec.model_outputs}

    def run(
        self,
        options: Any,
        inputs: Mapping[str, Array | DeviceTensor],
        outputs: tuple[str, ...],
        places: Places,
    ) -> dict[str, Array | DeviceTensor]:
        """Runs the session once; see `DeviceFunction.on_device`."""
        binding = self._session.io_binding()
        for name, value in inputs.items():
            if isinstance(value, DeviceTensor):
                where = self._device, self._device_id
                binding.bind_input(name, *where, value.dtype, value.shape, value.memory.pointer)
            else:
                binding.bind_cpu_input(name, np.ascontiguousarray(value))
        rows = _rows(inputs) if self._batches else None
        written: dict[str, DeviceTensor] = {}
        for name in outputs:
            if name not in places:
                binding.bind_output(name, "cpu")
                continue
            target = self._in_place(name, places[name], rows)
            others = (*inputs.values(), *written.values())
            # Do not overwrite memory that is still to be read or already written.
            if target is None or any(_overlap(target, other) for other in others):
                binding.bind_output(name, self._device, self._device_id)
                continue
            where = self._device, self._device_id
            binding.bind_output(name, *where, target.dtype, target.shape, target.memory.pointer)
            written[name] = target
        self._session.run_with_iobinding(binding, options)
        binding.synchronize_outputs()
        results: dict[str, Array | DeviceTensor] = {**written}
        for name, value in zip(outputs, binding.get_outputs(), strict=True):
            if name not in written:
                results[name] = self._owned(name, value, places[name]) if name in places else value.numpy()
        return results

    def _in_place(self, name: str, places: tuple[DeviceMemory, ...], rows: int | None) -> DeviceTensor | None:
        """The place of an output if the session can write there directly."""
        spec = self._outputs[name]
        shape = spec.backend_dims if rows is None else (rows, *spec.backend_dims)
        place = places[0]
        if len(places) > 1 or -1 in shape or place.pointer % ALIGNMENT or spec.datatype in POSITIONS:
            return None  # positions: the model may read back what it wrote
        nbytes = prod(shape) * ELEMENT_SIZES[spec.datatype]
        if nbytes > place.nbytes:
            return None  # the later copy reports the error
        return DeviceTensor(name, spec.datatype, shape, place.part(0, nbytes))

    def _owned(self, name: str, value: Any, places: tuple[DeviceMemory, ...]) -> DeviceTensor:
        """An output in ONNX Runtime's own memory."""
        datatype = self._outputs[name].datatype
        shape = tuple(value.shape())
        nbytes = prod(shape) * NUMPY_DTYPES[datatype].itemsize
        return DeviceTensor(name, datatype, shape, places[0].owned(value.data_ptr(), nbytes, value))


def _overlap(target: DeviceTensor, value: Array | DeviceTensor) -> bool:
    if not isinstance(value, DeviceTensor):
        return False
    one, other = target.memory, value.memory
    return one.pointer < other.pointer + other.nbytes and other.pointer < one.pointer + one.nbytes


def _rows(inputs: Mapping[str, Array | DeviceTensor]) -> int | None:
    return next((value.shape[0] for value in inputs.values()), None)
