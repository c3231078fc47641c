"""Runs ONNX models with ONNX Runtime: one session per instance."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from conch.backends.arrays import ArrayBackend, ArrayFunction, ArrayInstance
from conch.backends.signature import ModelTensor, Signature, complete, validate
from conch.core.backend import BackendInstance, BackendModel
from conch.core.errors import InternalError, InvalidArgumentError, UnavailableError, UnsupportedError
from conch.core.execution.placement import Placement, place
from conch.core.file_formats import ONNX, hint, identify
from conch.core.spec import ModelSpec
from conch_engines.model_config import boolean, integer, lists_tensors, parameter_texts
from conch_engines.onnxruntime.onnx_file import tensors_of_any_rank
from conch_engines.onnxruntime.ort_providers import (
    CPU,
    CUDA,
    ON_A_DEVICE,
    Plugins,
    Providers,
    execution_providers,
)
from conch_engines.onnxruntime.ort_providers import PARAMETERS as PROVIDER_PARAMETERS
from conch_engines.onnxruntime.session_function import (
    MAPS,
    DeviceSessionFunction,
    SessionFunction,
    WritingSessionFunction,
    native,
    status_text,
)
from conch_engines.onnxruntime.session_options import (
    GLOBAL_POOL,
    PARAMETERS,
    POOL_SIZES,
    finding_weights,
    run_options,
    session_options,
)
from conch_engines.onnxruntime.trial_run import settled, tried

log = logging.getLogger(__name__)

_LIBRARIES = (
    ": check that the CUDA and cuDNN libraries of its version are installed, for example by "
    "pip install 'onnxruntime-gpu[cuda,cudnn]'"
)

_ERRORS = 3  # log severity of ONNX Runtime
_ON_CPU: Providers = [(CPU, {})]

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(bfloat16)": "BF16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}

DATATYPES = frozenset(_DATATYPES.values())
"""Datatypes that the backend serves."""

_FIXES = {
    True: "; export the model with a Cast of it, for example to FP32",
    False: "; export the model without it",
}
"""Advice for unsupported element types, and for values that are not tensors."""


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
        from onnxruntime.capi import _pybind_state

        self._ort: Any = onnxruntime
        # The other class reads a model and places it on its providers at once.
        self._reading_session: Any = _pybind_state.InferenceSession
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
        if lists_tensors(config):
            return config
        file = config.get("default_model_filename") or self.default_model_file
        spec = _incomplete(config, version_directory, file)
        content = _model_path(spec).read_bytes()
        session = self._plain_session(spec, content)
        signature = signature_of(session, spec.name, tensors_of_any_rank(content))
        batches = int(config.get("max_batch_size") or 0) > 0
        on_cpu = partial(self._plain_session, spec, content, _ON_CPU)
        return complete(config, settled(self._ort, session, signature, spec.name, on_cpu, batches), options)

    def check(self, spec: ModelSpec) -> None:
        """Compares the config with the model and validates session settings."""
        placements = place(replace(group, count=1) for group in spec.instance_groups)
        # GPU instances may belong to another machine with another ONNX Runtime.
        on_cpu = next((each for each in placements if each.kind != "GPU"), None)
        providers = on_cpu and execution_providers(self._ort, spec, on_cpu, self._plugins)
        content = _model_path(spec).read_bytes()
        # Operators and weights that are missing are found where that takes no device.
        session = self._plain_session(spec, content, _ON_CPU if providers == _ON_CPU else None)
        signature = signature_of(session, spec.name, tensors_of_any_rank(content))
        self._validated(spec, session, signature, partial(self._plain_session, spec, content, _ON_CPU))

    def _validated(
        self, spec: ModelSpec, session: Any, signature: Signature, open_session: Callable[[], Any]
    ) -> Signature:
        """The signature that the config fits: that of the file, or that which a run on zeros shows."""
        try:
            validate(spec, signature, DATATYPES)
        except InvalidArgumentError:
            found = tried(self._ort, session, signature, spec.name, open_session)
            if found is None or found.outputs == signature.outputs:
                raise
            validate(spec, found, DATATYPES)
            return found
        return signature

    def _plain_session(self, spec: ModelSpec, content: bytes, providers: Providers | None = None) -> Any:
        """A session as a load makes it, with little work; see `_session`."""
        options = session_options(self._ort, spec)
        options.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        return self._session(_model_path(spec), content, options, providers)

    def open(self, spec: ModelSpec, placement: Placement) -> ArrayFunction:
        """Creates a session that shares nothing with others."""
        path = _model_path(spec)
        return self._open(spec, placement, path, path.read_bytes())

    def load(self, spec: ModelSpec) -> BackendModel:
        """Reads the model file."""
        return _OnnxModel(self, spec)

    def _open(
        self,
        spec: ModelSpec,
        placement: Placement,
        path: Path,
        content: bytes,
        found: Signature | None = None,
    ) -> ArrayFunction:
        """Creates a session; `found` is the signature where it is not that of the file."""
        options = session_options(self._ort, spec)
        if found is not None:
            options.log_severity_level = _ERRORS  # each run would warn of the shapes in the file
        if boolean(spec.backend_options, GLOBAL_POOL, False):
            self._make_pool(spec.backend_options)
            options.use_per_session_threads = False
        providers = execution_providers(self._ort, spec, placement, self._plugins)
        if placement.kind == "GPU" and hasattr(self._ort, "preload_dlls"):
            # Finds CUDA and cuDNN in NVIDIA's packages, which are not on the loader's path.
            self._ort.preload_dlls()
        session = self._session(path, content, options, providers)
        started = session.get_providers()
        log.info("model '%s' runs with %s", spec.name, ", ".join(started))
        for name, _ in providers:
            if name not in started:  # ONNX Runtime would silently fall back to the CPU
                raise UnavailableError(
                    f"model '{spec.name}' needs the execution provider '{name}', which the installed "
                    f"onnxruntime can't start{_LIBRARIES if name in ON_A_DEVICE else ''}"
                )
        declared = found or signature_of(session, spec.name, tensors_of_any_rank(content))
        signature = self._validated(spec, session, declared, lambda: session)
        if signature is not declared:
            return self._open(spec, placement, path, content, signature)
        options_of_run = run_options(self._ort, spec)
        if placement.kind == "GPU" and session.get_providers()[0] in ON_A_DEVICE:
            return DeviceSessionFunction(
                session, options_of_run, spec, signature, "cuda", placement.device_id
            )
        kind = SessionFunction if _strings_or_devices(session) else WritingSessionFunction
        return kind(session, options_of_run, spec, signature)

    def _make_pool(self, options: Mapping[str, str]) -> None:
        """Makes the threads that all sessions share, once."""
        with self._lock:
            if not self._has_pool:
                sizes = [integer(options, key, 0, least=0) for key in POOL_SIZES]
                self._ort.set_global_thread_pool_sizes(*sizes)
                self._has_pool = True

    def _session(self, path: Path, content: bytes, options: Any, providers: Providers | None) -> Any:
        """A session of the model at a path; without providers, one that has read it and can't run it."""
        try:
            if providers is None:
                return self._reading_session(options, content, False, False)
            passed = self._plugins.add(options, providers)
            with finding_weights(options, path):
                if passed is None:
                    return self._ort.InferenceSession(content, options)
                # Without its retry on the CPU, which prints the error and hides it.
                return self._ort.InferenceSession(content, options, providers=passed, enable_fallback=0)
        except Exception as error:  # of the engine, which raises its own classes
            wrong = hint(path) if identify(path) is not ONNX else ""
            raise InternalError(f"unable to load ONNX model '{path}': {status_text(error)}{wrong}") from error


class _OnnxModel(BackendModel):
    """Holds the file's content until all instances have sessions."""

    creates_in_parallel: ClassVar[bool] = True

    def __init__(self, backend: OnnxRuntimeBackend, spec: ModelSpec) -> None:
        self._backend = backend
        self._spec = spec
        self._path = _model_path(spec)
        self._content: bytes | None = self._path.read_bytes()
        self._lock = threading.Lock()  # guards the content and the count of instances to make
        self._uncreated = len(place(spec.instance_groups))

    def create_instance(self, placement: Placement) -> BackendInstance:
        with self._lock:
            content = self._content
        if content is None:  # an instance that was added later
            content = self._path.read_bytes()
        function = self._backend._open(self._spec, placement, self._path, content)
        with self._lock:
            self._uncreated -= 1
            if self._uncreated <= 0:
                self._content = None
        return ArrayInstance(self._spec, function)


def signature_of(session: Any, model: str, unranked: Collection[str] = ()) -> Signature:
    """The signature of a session of the named model; `unranked` tensors have any number of dims."""
    told = native(session)
    inputs = _tensors(told.inputs_meta, model, unranked)
    outputs = _tensors(told.outputs_meta, model, unranked, MAPS)
    initialized = _tensors(told.overridable_initializers, model, unranked)
    given = {each.datatype for each in (*inputs, *initialized)}
    if "BYTES" in given and "BF16" in given.union(each.datatype for each in outputs):
        raise UnsupportedError(
            f"model '{model}' has BF16 tensors and inputs of strings, which ONNX Runtime does not take from "
            f"Python in one run{_FIXES[True]}"
        )
    return Signature(inputs, outputs, initialized)


def _tensors(
    arguments: Iterable[Any], model: str, unranked: Collection[str], maps: Collection[str] = ()
) -> tuple[ModelTensor, ...]:
    tensors = []
    for argument in arguments:
        if argument.type in maps:
            tensors.append(ModelTensor(argument.name, "FP32", (-1, -1)))
            continue
        datatype = _DATATYPES.get(argument.type, "")
        dims = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in argument.shape or ())
        problem = "" if datatype else _problem(argument.type, argument.name, model)
        if datatype and not dims and argument.name in unranked:  # else ONNX Runtime has found the shape
            problem = (
                f"I/O '{argument.name}' of model '{model}' has any number of dimensions in the model's file; "
                f"list inputs and outputs with their dims in the config"
            )
            tensors.append(ModelTensor(argument.name, datatype, None, problem))
            continue
        tensors.append(ModelTensor(argument.name, datatype, dims, problem))
    return tuple(tensors)


def _problem(onnx_type: str, name: str, model: str) -> str:
    fix = _FIXES[onnx_type.partition("(")[0] == "tensor"]
    return (
        f"unsupported ONNX type '{onnx_type}' for I/O '{name}' of model '{model}': expected a tensor of a "
        f"type the protocol has{fix}"
    )


def _strings_or_devices(session: Any) -> bool:
    tensors = (*session.get_inputs(), *session.get_overridable_initializers(), *session.get_outputs())
    return session.get_providers() != [CPU] or any(
        tensor.type == "tensor(string)" or tensor.type in MAPS for tensor in tensors
    )


def _incomplete(config: Mapping[str, Any], version_directory: Path, file: str) -> ModelSpec:
    """A config that is not complete as a spec, which has no tensors and instances yet."""
    return ModelSpec(
        name=config.get("name", ""),
        version=0,
        platform="",
        backend="",
        max_batch_size=0,
        inputs=(),
        outputs=(),
        directory=version_directory.parent,
        version_directory=version_directory,
        model_file=file,
        instance_groups=(),
        parameters=parameter_texts(config),
        config=config,
    )


def _model_path(spec: ModelSpec) -> Path:
    path = spec.version_directory / spec.model_file
    if path.is_dir():
        # A directory holds the model and its external weights.
        path = path / "model.onnx"
    if not path.is_file():
        raise UnavailableError(f"unable to find '{path}' for model '{spec.name}'")
    return path
