"""`TensorRTBackend`: completes, checks and loads plans.

A plan is deserialised once per device; its instances there share the engine. Owns: per version, the engines.
"""

from __future__ import annotations

import gc
import importlib
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from conch.backends.arrays import ArrayInstance
from conch.core.backend import Backend, BackendInstance, BackendModel
from conch.core.engine_text import engine_text
from conch.core.errors import ConchError, InternalError, InvalidArgumentError, ResourceExhaustedError
from conch.core.execution.placement import Placement
from conch.core.spec import ModelSpec
from conch_engines.model_config import lists_tensors
from conch_engines.tensorrt.engine_description import (
    EngineDescription,
    complete_from_engine,
    describe_engine,
    validate_against_engine,
)
from conch_engines.tensorrt.gpu_buffers import Gpu
from conch_engines.tensorrt.plan_runtime import PlanRuntime, check_plan, import_tensorrt, plan_name
from conch_engines.tensorrt.tensorrt_settings import (
    PARAMETERS,
    TensorRTSettings,
    check_kinds,
    host_code_allowed,
    plugins,
    profile_index,
)
from conch_engines.tensorrt.trt_function import SharedEngine, TensorRTFunction

log = logging.getLogger(__name__)


class TensorRTBackend(Backend):
    """The backend ``tensorrt``."""

    default_model_file = "model.plan"
    platform = "tensorrt_plan"
    # The file's name may depend on the GPU.
    needs_model_file = False
    parameters = PARAMETERS
    passes_parameters = False

    def __init__(self) -> None:
        # Imported late: configs can be read without them.
        self._trt = import_tensorrt()
        self._cupy: Any = importlib.import_module("cupy")
        self._runtime = PlanRuntime(self._trt)

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Takes inputs, outputs and batching from the engine, for which it needs a GPU."""
        if lists_tensors(config):
            return config
        name = config.get("name", "")
        groups = config.get("instance_group") or ()
        gpus = [int(gpu) for group in groups for gpu in group.get("gpus") or ()]
        named = {profile_index(str(text)) for group in groups for text in group.get("profile") or ()}
        default = config.get("default_model_filename") or self.default_model_file
        gpu = Gpu(self._cupy, gpus[0] if gpus else 0)
        path = version_directory / default
        try:
            path = version_directory / plan_name(config, default, gpu.compute_capability)
            check_plan(path, name)
            with gpu.current():
                engine = self._runtime.engine(path, name, host_code_allowed(options), plugins(options))
                described = describe_engine(self._trt, engine, name)
        except ConchError as error:
            raise type(error)(_completion_text(path, error)) from error
        except Exception as error:  # of cupy: no GPU, or one that does not work
            raise InternalError(_completion_text(path, error)) from error
        return complete_from_engine(config, described, named or {0}, options)

    def check(self, spec: ModelSpec) -> None:
        """Checks settings and that the plans are some; comparing them with the config needs their GPU."""
        TensorRTSettings.of(spec)
        for group in spec.instance_groups:
            for text in group.profiles:
                profile_index(text)
        names = spec.config.get("cc_model_filenames")
        for capability in names if isinstance(names, Mapping) else ("",):
            name = plan_name(spec.config, spec.model_file, capability)
            check_plan(spec.version_directory / name, spec.name)

    def warnings(self, spec: ModelSpec) -> Iterable[str]:
        """Instances that are not on a GPU, as without one; the config may be for another machine."""
        try:
            check_kinds(spec)
        except InvalidArgumentError as error:
            yield error.message

    def load(self, spec: ModelSpec) -> BackendModel:
        """Loads a model version; its plan is read for the first instance on each device."""
        check_kinds(spec)
        return _PlanModel(self._trt, self._cupy, self._runtime, spec)


class _PlanModel(BackendModel):
    """A loaded version: an engine per device."""

    def __init__(self, trt: Any, cupy: Any, runtime: PlanRuntime, spec: ModelSpec) -> None:
        self._trt = trt
        self._cupy = cupy
        self._runtime = runtime
        self._spec = spec
        self._settings = TensorRTSettings.of(spec)
        self._engines: dict[int, SharedEngine] = {}

    def create_instance(self, placement: Placement) -> BackendInstance:
        shared = self._engines.get(placement.device_id)
        if shared is None:
            shared = self._engines[placement.device_id] = self._load(placement.device_id)
        try:
            function = TensorRTFunction(shared, self._spec, self._settings, placement)
        except ConchError:
            raise
        except Exception as error:  # of TensorRT or cupy
            kind = ResourceExhaustedError if isinstance(error, MemoryError) else InternalError
            raise kind(f"unable to create {placement.name}: {engine_text(error)}") from error
        return ArrayInstance(self._spec, function)

    def _load(self, device: int) -> SharedEngine:
        spec, settings = self._spec, self._settings
        gpu = Gpu(self._cupy, device)
        started = time.monotonic()
        try:
            name = plan_name(spec.config, spec.model_file, gpu.compute_capability)
            with gpu.current():
                engine = self._runtime.engine(
                    spec.version_directory / name, spec.name, settings.host_code_allowed, settings.plugins
                )
                described: EngineDescription = describe_engine(self._trt, engine, spec.name)
        except ConchError:
            raise
        except Exception as error:  # of cupy: no such device
            raise InternalError(
                f"unable to load model '{spec.name}' on GPU {device}: {engine_text(error)}"
            ) from error
        validate_against_engine(spec, described)
        log.info(
            "model '%s': plan '%s' loaded to GPU %d in %.2f s; a context takes %d bytes of its memory",
            spec.name,
            name,
            device,
            time.monotonic() - started,
            engine.device_memory_size_v2,
        )
        return SharedEngine(self._trt, self._runtime, engine, described, gpu)

    def close(self) -> None:
        """Frees the engines, and the memory that cupy keeps for later."""
        while self._engines:
            _, shared = self._engines.popitem()
            with shared.gpu.current():
                gpu = shared.gpu
                del shared
                gc.collect()
                gpu.free_unused()


def _completion_text(path: Path, error: Exception) -> str:
    reason = error.message if isinstance(error, ConchError) else engine_text(error)
    return f"unable to load plan file to auto complete config: {path}: {reason}"
