"""Runs ONNX models with ONNX Runtime: one session per instance."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from conch.backends.arrays import ArrayBackend, ArrayFunction, ArrayInstance
from conch.backends.device_arrays import Places
from conch.backends.model_parameters import boolean, integer
from conch.backends.signature import Signature, complete, scalar_dims, validate
from conch.core.backend import BackendInstance, BackendModel
from conch.core.device import DeviceTensor
from conch.core.errors import ConchError, InternalError, InvalidArgumentError, UnavailableError
from conch.core.execution.placement import Placement, place
from conch.core.file_formats import ONNX, hint, identify
from conch.core.spec import ModelSpec
from conch.core.tensor import Array
from conch_engines.onnxruntime.io_binding import Binder
from conch_engines.onnxruntime.ort_providers import (
    CUDA,
    ON_A_DEVICE,
    Plugins,
    Providers,
    execution_providers,
)
from conch_engines.onnxruntime.ort_providers import PARAMETERS as PROVIDER_PARAMETERS
from conch_engines.onnxruntime.session_options import (
    GLOBAL_POOL,
    PARAMETERS,
    POOL_SIZES,
    run_options,
    session_options,
)
from conch_engines.onnxruntime.session_signature import DATATYPES, signature_of

log = logging.getLogger(__name__)

_LIBRARIES = (
    ": check that the CUDA and cuDNN libraries of its version are installed, for example by "
    "pip install 'onnxruntime-gpu[cuda,cudnn]'"
)

_STATUS = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


class OnnxRuntimeBackend(ArrayBackend):
    """The backend ``onnxruntime``; all sessions of a version are made from one read of the file."""

    default_model_file = "model.onnx"
    platform = "onnxruntime_onnx"
    cpu_instance_count = 2
    parameters = (*PROVIDER_PARAMETERS, *PARAMETERS)
    passes_parameters = False

    def __init__(self) -> None:
        # Some builds store usage data in the user's home; the variable is read at import.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        # Imported late: configs can be read without the framework.
        import onnxruntime

        self._ort: Any = onnxruntime
        self._plugins = Plugins(onnxruntime)
        self._lock = threading.Lock()  # guards the pool of threads
        self._has_pool = False

    @property
    def uses_gpus(self) -> bool:
        """True if the installed ONNX Runtime has CUDA."""
        return CUDA in self._ort.get_available_providers()

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Takes inputs, outputs and batching from the model unless the config has both inputs and outputs."""
        name = config.get("name", "")
        if config.get("input") and config.get("output"):
            log.info(
                "skipping model configuration auto-complete for '%s': inputs and outputs already specified",
                name,
            )
            return config
        path = _model_path(
            version_directory, config.get("default_model_filename") or self.default_model_file, name
        )
        return complete(config, self._signature(path, name), options)

    def check(self, spec: ModelSpec) -> None:
        """Compares the config with the model and validates session settings."""
        session_options(self._ort, spec)
        for placement in place(replace(group, count=1) for group in spec.instance_groups):
            # GPU instances may belong to another machine with another ONNX Runtime.
            if placement.kind != "GPU":
                execution_providers(self._ort, spec, placement, self._plugins)
        path = _model_path(spec.version_directory, spec.model_file, spec.name)
        validate(spec, self._signature(path, spec.name), DATATYPES)

    def _signature(self, path: Path, model: str) -> Signature:
        settings = self._ort.SessionOptions()
        settings.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        settings.intra_op_num_threads = 1
        return signature_of(self._session(path, str(path), settings, [("CPUExecutionProvider", {})]), model)

    def open(self, spec: ModelSpec, placement: Placement) -> ArrayFunction:
        """Creates a session that shares nothing with others."""
        return self._open(spec, placement, _model_path(spec.version_directory, spec.model_file, spec.name))

    def load(self, spec: ModelSpec) -> BackendModel:
        """Reads the model file."""
        return _OnnxModel(self, spec)

    def _open(
        self, spec: ModelSpec, placement: Placement, path: Path, content: bytes | None = None
    ) -> ArrayFunction:
        options = session_options(self._ort, spec)
        if boolean(spec.backend_options, GLOBAL_POOL, False):
            self._make_pool(spec.backend_options)
            options.use_per_session_threads = False
        if content is not None:
            # A model passed as bytes has no directory to look up external weights in.
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(path.parent)
            )
        providers = execution_providers(self._ort, spec, placement, self._plugins)
        if placement.kind == "GPU" and hasattr(self._ort, "preload_dlls"):
            # Finds CUDA and cuDNN in NVIDIA's packages, which are not on the loader's path.
            self._ort.preload_dlls()
        session = self._session(path, str(path) if content is None else content, options, providers)
        started = session.get_providers()
        log.info("model '%s' runs with %s", spec.name, ", ".join(started))
        for name, _ in providers:
            if name not in started:  # ONNX Runtime would silently fall back to the CPU
                raise UnavailableError(
                    f"model '{spec.name}' needs the execution provider '{name}', which the installed "
                    f"onnxruntime can't start{_LIBRARIES if name in ON_A_DEVICE else ''}"
                )
        signature = signature_of(session, spec.name)
        validate(spec, signature, DATATYPES)
        options_of_run = run_options(self._ort, spec)
        if placement.kind == "GPU" and session.get_providers()[0] in ON_A_DEVICE:
            return _DeviceFunction(session, options_of_run, spec, signature, "cuda", placement.device_id)
        kind = _SessionFunction if _strings_or_devices(session) else _WritingSessionFunction
        return kind(session, options_of_run, spec, signature)

    def _make_pool(self, options: Mapping[str, str]) -> None:
        """Makes the threads that all sessions share, once."""
        with self._lock:
            if not self._has_pool:
                sizes = [integer(options, key, 0, least=0) for key in POOL_SIZES]
                self._ort.set_global_thread_pool_sizes(*sizes)
                self._has_pool = True

    def _session(self, path: Path, source: str | bytes, options: Any, providers: Providers) -> Any:
        try:
            passed = self._plugins.add(options, providers)
            if passed is None:
                return self._ort.InferenceSession(source, options)
            # Without its retry on the CPU, which prints the error and hides it.
            return self._ort.InferenceSession(source, options, providers=passed, enable_fallback=0)
        except Exception as error:
            wrong = hint(path) if identify(path) is not ONNX else ""
            raise InternalError(
                f"unable to load ONNX model '{path}': {_status_text(error)}{wrong}"
            ) from error


class _OnnxModel(BackendModel):
    """Holds the file's content until all instances have sessions."""

    creates_in_parallel: ClassVar[bool] = True

    def __init__(self, backend: OnnxRuntimeBackend, spec: ModelSpec) -> None:
        self._backend = backend
        self._spec = spec
        self._path = _model_path(spec.version_directory, spec.model_file, spec.name)
        self._content: bytes | None = self._path.read_bytes()
        self._lock = threading.Lock()  # guards the content and the count of instances to make
        self._uncreated = len(place(spec.instance_groups))

    def create_instance(self, placement: Placement) -> BackendInstance:
        with self._lock:
            content = self._content
        function = self._backend._open(self._spec, placement, self._path, content)
        with self._lock:
            self._uncreated -= 1
            if self._uncreated <= 0:
                self._content = None
        return ArrayInstance(self._spec, function)


class _SessionFunction:
    """An ONNX Runtime session as a function of arrays."""

    def __init__(self, session: Any, options: Any, spec: ModelSpec, signature: Signature) -> None:
        self._session = session
        self._options = options  # shared by all runs: creating one takes a third of a small run
        # `InferenceSession.run` adds name checks and a provider fallback that take as long as a small model.
        self._run = getattr(session, "_sess", session).run
        self._strings = frozenset(tensor.name for tensor in spec.model_inputs if tensor.datatype == "BYTES")
        self._strings_out = frozenset(each.name for each in spec.model_outputs if each.datatype == "BYTES")
        dims = {each.name: each.dims for each in (*signature.inputs, *signature.initialized)}
        dims_out = {each.name: each.dims for each in signature.outputs}
        self._scalars = frozenset(
            each.name for each in spec.model_inputs if scalar_dims(spec, each, dims[each.name])
        )
        self._scalars_out = {
            each.name: shape
            for each in spec.model_outputs
            if (shape := scalar_dims(spec, each, dims_out[each.name]))
        }

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> Mapping[str, Array]:
        self._shape_inputs(inputs)
        try:
            results = self._run(outputs, inputs, self._options)
        except ConchError:
            raise
        except Exception as error:
            raise InternalError(_status_text(error)) from error
        found = dict(zip(outputs, results, strict=True))
        for name in self._strings_out:
            if name in found:
                found[name] = _encoded(found[name])
        for name, shape in self._scalars_out.items():
            if name in found:
                found[name] = found[name].reshape(shape)
        return found

    def _shape_inputs(self, inputs: dict[str, Array]) -> None:
        """Converts strings and scalars to ONNX's form."""
        for name in self._strings:
            if name in inputs:
                inputs[name] = _text(name, inputs[name])
        for name in self._scalars:
            if name in inputs:
                inputs[name] = inputs[name].reshape(())

    def close(self) -> None:
        # Dropping the last reference frees the session.
        del self._session, self._run


class _DeviceFunction(_SessionFunction):
    """A session on a GPU; tensors that are on the device, or wanted there, stay there."""

    def __init__(
        self, session: Any, options: Any, spec: ModelSpec, signature: Signature, device: str, device_id: int
    ) -> None:
        super().__init__(session, options, spec, signature)
        self.device_id = device_id
        self._binder = Binder(spec, session, device, device_id)

    def on_device(
        self, inputs: Mapping[str, Array | DeviceTensor], outputs: tuple[str, ...], places: Places
    ) -> Mapping[str, Array | DeviceTensor]:
        arrays = {name: value for name, value in inputs.items() if not isinstance(value, DeviceTensor)}
        unbound_in, unbound_out = self._strings | self._scalars, self._strings_out.union(self._scalars_out)
        if not (unbound_out.isdisjoint(outputs) and unbound_in.isdisjoint(inputs)):
            # Strings cannot be bound and scalars change shape: copy everything through host memory.
            arrays |= {
                name: value.numpy() for name, value in inputs.items() if isinstance(value, DeviceTensor)
            }
        elif places or len(arrays) < len(inputs):
            try:
                return self._binder.run(self._options, inputs, outputs, places)
            except ConchError:
                raise
            except Exception as error:
                raise InternalError(_status_text(error)) from error
        return self(arrays, outputs)

    def close(self) -> None:
        super().close()
        del self._binder


class _WritingSessionFunction(_SessionFunction):
    """A CPU session without strings that writes outputs to given memory."""

    def __init__(self, session: Any, options: Any, spec: ModelSpec, signature: Signature) -> None:
        super().__init__(session, options, spec, signature)
        from onnxruntime.capi import _pybind_state

        self._binding = _pybind_state.SessionIOBinding
        kind = _pybind_state.OrtDevice
        self._device = kind(kind.cpu(), kind.default_memory(), 0)

    def run_into(self, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        """Runs the session once; see `WritesInPlace`."""
        self._shape_inputs(inputs)
        native = getattr(self._session, "_sess", self._session)
        given = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        try:
            binding = self._binding(native)
            for bind, arrays in ((binding.bind_input, given), (binding.bind_output, outputs)):
                for name, array in arrays.items():
                    shape = () if name in self._scalars_out else array.shape
                    address = array.__array_interface__["data"][0]
                    bind(name, self._device, array.dtype.type, shape, address)
            native.run_with_iobinding(binding, self._options)
        except Exception as error:
            raise InternalError(_status_text(error)) from error


def _strings_or_devices(session: Any) -> bool:
    tensors = (*session.get_inputs(), *session.get_overridable_initializers(), *session.get_outputs())
    return session.get_providers() != ["CPUExecutionProvider"] or any(
        tensor.type == "tensor(string)" for tensor in tensors
    )


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


def _status_text(error: Exception) -> str:
    """An ONNX Runtime exception as Triton's backend prints its status."""
    match = _STATUS.search(str(error))
    if match is None:
        return f"onnx runtime error: {error}"
    return f"onnx runtime error {match[1]}: {match[2].strip()}"


def _model_path(version_directory: Path, file_name: str, model_name: str) -> Path:
    path = version_directory / file_name
    if path.is_dir():
        # A directory holds the model and its external weights.
        path = path / "model.onnx"
    if not path.is_file():
        raise UnavailableError(f"unable to find '{path}' for model '{model_name}'")
    return path
