"""ONNX Runtime sessions as functions of arrays: on a CPU, on a GPU, and into memory of clients."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, cast

import numpy as np

from conch.backends.device_arrays import ALIGNMENT, Places, overlap
from conch.backends.gather import ARRAY_DTYPES, array_of
from conch.backends.signature import Signature, made_tensors, scalar_dims
from conch.core.device import DeviceMemory, DeviceTensor
from conch.core.engine_text import engine_text
from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.core.spec import ModelSpec
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, POSITIONS, Array

_BRAIN_FLOAT = 16
"""ONNX's number of the element type."""
MAPS = frozenset(f"seq(map({key},tensor(float)))" for key in ("int64", "string"))
"""Types of an output of ZipMap, which is served as rows of its numbers, classes in ascending order."""

_STATUS = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


class SessionFunction:
    """An ONNX Runtime session as a function of arrays."""

    def __init__(self, session: Any, options: Any, spec: ModelSpec, signature: Signature) -> None:
        from onnxruntime.capi import _pybind_state

        self._session = session
        self._options = options  # shared by all runs: creating one takes a third of a small run
        # `InferenceSession.run` adds name checks and a provider fallback that take as long as a small model.
        self._run = native(session).run
        self._binding = _pybind_state.SessionIOBinding
        kind = _pybind_state.OrtDevice
        self._host = kind(kind.cpu(), kind.default_memory(), 0)
        self._strings = frozenset(tensor.name for tensor in spec.model_inputs if tensor.datatype == "BYTES")
        self._strings_out = frozenset(each.name for each in spec.model_outputs if each.datatype == "BYTES")
        # Their arrays have the elements' bits, which ONNX Runtime takes by address and not in `run`.
        tensors = (*spec.model_inputs, *made_tensors(spec), *spec.model_outputs)
        self._brain_floats = frozenset(each.name for each in tensors if each.datatype == "BF16")
        dims = {each.name: each.dims for each in (*signature.inputs, *signature.initialized)}
        dims_out = {each.name: each.dims for each in signature.outputs}
        self._scalars = frozenset(
            each.name for each in spec.model_inputs if scalar_dims(spec, each, dims[each.name])
        )
        self._scalars_out = frozenset(
            each.name for each in spec.model_outputs if scalar_dims(spec, each, dims_out[each.name])
        )

        types = {each.name: each.type for each in session.get_outputs()}
        self._maps = {
            each.name: each.backend_dims[-1] for each in spec.model_outputs if types[each.name] in MAPS
        }

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> Mapping[str, Array]:
        """Runs the session once."""
        self._shape_inputs(inputs)
        try:
            run = self._run_at_addresses if self._brain_floats else self._run
            results = run(outputs, inputs, self._options)
        except Exception as error:  # of the engine
            raise InternalError(status_text(error)) from error
        found = dict(zip(outputs, results, strict=True))
        for name in self._strings_out:
            if name in found:
                found[name] = _encoded(found[name])
        for name, width in self._maps.items():
            if name in found:
                found[name] = _rows(found[name], width)
        return found

    def _run_at_addresses(
        self, outputs: tuple[str, ...], inputs: dict[str, Array], options: Any
    ) -> list[Array]:
        """As ONNX Runtime's `run`, for inputs of all types but strings."""
        session = native(self._session)
        binding = self._binding(session)
        given = {name: np.asarray(array, order="C") for name, array in inputs.items()}
        for name, array in given.items():
            self._bind(binding.bind_input, name, array, array.shape)
        for name in outputs:
            binding.bind_output(name, self._host)
        session.run_with_iobinding(binding, options)
        return [_fetched(value) for value in binding.get_outputs()]

    def _bind(self, bind: Callable[..., None], name: str, array: Array, shape: tuple[int, ...]) -> None:
        """Binds a tensor to the memory of an array."""
        kind = _BRAIN_FLOAT if name in self._brain_floats else array.dtype.type
        bind(name, self._host, kind, shape, array.__array_interface__["data"][0])

    def _shape_inputs(self, inputs: dict[str, Array]) -> None:
        """Converts strings and scalars to ONNX's form."""
        for name in self._strings:
            if name in inputs:
                inputs[name] = _text(name, inputs[name])
        for name in self._scalars:
            if name in inputs:
                inputs[name] = inputs[name].reshape(())

    def close(self) -> None:
        """Frees the session by dropping the last references to it."""
        del self._session, self._run


class DeviceSessionFunction(SessionFunction):
    """A session on a GPU; tensors that are on the device, or wanted there, stay there."""

    def __init__(
        self, session: Any, options: Any, spec: ModelSpec, signature: Signature, device: str, device_id: int
    ) -> None:
        super().__init__(session, options, spec, signature)
        self.device_id = device_id
        self._device = device, device_id
        self._batches = spec.max_batch_size > 0
        self._outputs = {tensor.name: tensor for tensor in spec.model_outputs}

    def on_device(
        self, inputs: Mapping[str, Array | DeviceTensor], outputs: tuple[str, ...], places: Places
    ) -> Mapping[str, Array | DeviceTensor]:
        """Runs the session once."""
        arrays = {name: value for name, value in inputs.items() if not isinstance(value, DeviceTensor)}
        unbound_in = self._strings | self._scalars | self._brain_floats
        unbound_out = self._strings_out.union(self._scalars_out, self._brain_floats, self._maps)
        if not (unbound_out.isdisjoint(outputs) and unbound_in.isdisjoint(inputs)):
            # Strings cannot be bound and scalars change shape: copy everything through host memory.
            arrays |= {
                name: array_of(value) for name, value in inputs.items() if isinstance(value, DeviceTensor)
            }
        elif places or len(arrays) < len(inputs):
            try:
                return self._run_bound(inputs, outputs, places)
            except ConchError:
                raise
            except Exception as error:  # of the engine
                raise InternalError(status_text(error)) from error
        return self(arrays, outputs)

    def _run_bound(
        self, inputs: Mapping[str, Array | DeviceTensor], outputs: tuple[str, ...], places: Places
    ) -> dict[str, Array | DeviceTensor]:
        """Runs the session once with tensors bound to memory by address."""
        binding = self._session.io_binding()
        for name, value in inputs.items():
            if isinstance(value, DeviceTensor):
                binding.bind_input(name, *self._device, value.dtype, value.shape, value.memory.pointer)
            else:
                binding.bind_cpu_input(name, np.ascontiguousarray(value))
        rows = next((value.shape[0] for value in inputs.values()), None) if self._batches else None
        used = [value.memory for value in inputs.values() if isinstance(value, DeviceTensor)]
        written: dict[str, DeviceTensor] = {}
        for name in outputs:
            if name not in places:
                binding.bind_output(name, "cpu")
                continue
            target = self._in_place(name, places[name], rows)
            # Do not overwrite memory that is still to be read or already written.
            if target is None or any(overlap(target.memory, other) for other in used):
                binding.bind_output(name, *self._device)
                continue
            binding.bind_output(name, *self._device, target.dtype, target.shape, target.memory.pointer)
            written[name] = target
            used.append(target.memory)
        self._session.run_with_iobinding(binding, self._options)
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
        return DeviceTensor(name, datatype, shape, places[0].view_owned_by(value.data_ptr(), nbytes, value))


class WritingSessionFunction(SessionFunction):
    """A CPU session without strings that writes outputs to given memory."""

    def run_into(self, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        """Runs the session once."""
        self._shape_inputs(inputs)
        session = native(self._session)
        given = {name: np.asarray(array, order="C") for name, array in inputs.items()}
        try:
            binding = self._binding(session)
            for bind, arrays in ((binding.bind_input, given), (binding.bind_output, outputs)):
                for name, array in arrays.items():
                    shape = () if name in self._scalars_out else array.shape
                    self._bind(bind, name, array, shape)
            session.run_with_iobinding(binding, self._options)
        except Exception as error:  # of the engine
            raise InternalError(status_text(error)) from error


def native(session: Any) -> Any:
    """ONNX Runtime's own session, inside that of its Python package."""
    return getattr(session, "_sess", session)


def _fetched(value: Any) -> Array:
    """The content of a tensor of ONNX Runtime in host memory, as an array of `ARRAY_DTYPES`."""
    if value.element_type() != _BRAIN_FLOAT:
        return cast(Array, value.numpy())
    bits = np.empty(value.shape(), ARRAY_DTYPES["BF16"])
    ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return bits


def _text(name: str, array: Array) -> Array:
    """BYTES as ONNX strings; ONNX Runtime would print a `bytes` object with its quotes."""
    text = np.empty(array.size, dtype=object)
    try:
        text[:] = [bytes(element).decode() for element in array.flat]
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"input '{name}' has an element that is not UTF-8: {error}") from error
    return text.reshape(array.shape)


def _encoded(array: Array) -> Array:
    """ONNX strings as BYTES."""
    elements = np.empty(array.size, dtype=object)
    elements[:] = [element.encode() for element in array.flat]
    return elements.reshape(array.shape)


def _rows(maps: list[dict[Any, float]], width: int) -> Array:
    """Maps of numbers by class, of which ONNX Runtime orders the keys, as an array."""
    if not maps:
        return np.empty((0, max(width, 0)), np.float32)
    return np.array([list(each.values()) for each in maps], np.float32)


def status_text(error: Exception) -> str:
    """An ONNX Runtime exception as Triton's backend prints its status."""
    text = engine_text(error)
    match = _STATUS.search(text)
    if match is None:
        return f"onnx runtime error: {text}"
    return f"onnx runtime error {match[1]}: {match[2].strip()}"
