"""Execution providers of ONNX Runtime from a model's config and an instance's placement.

Names, keys and texts of ``execution_accelerators`` are Triton's. A provider that the installed ONNX Runtime
lacks may come as a plug-in package, which is registered once in the process.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch.core.execution.placement import Placement
from conch.core.spec import ModelSpec
from conch_engines.model_config import boolean, child, integer, threads_per_instance

PROVIDERS_PARAMETER = "CONCH_ORT_PROVIDERS"
"""Model parameter: execution providers in order of preference, comma separated, such as ``cuda,cpu``."""

CUDA = "CUDAExecutionProvider"
"""Default provider of instances on a GPU."""

CPU = "CPUExecutionProvider"
"""Provider that is always there; it runs what the others do not support."""

ON_A_DEVICE = (CUDA, "TensorrtExecutionProvider")
"""Providers that run on one GPU."""

PARAMETERS = (
    PROVIDERS_PARAMETER,
    *("cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream"),
)

_OPENVINO = "OpenVINOExecutionProvider"
_TENSORRT = "TensorrtExecutionProvider"
_ACCELERATORS = {"tensorrt": _TENSORRT, "cuda": CUDA, "openvino": _OPENVINO}
_PLUGINS = {_OPENVINO: "onnxruntime_ep_openvino"}
"""Packages with plug-ins: functions ``get_library_path`` and ``get_ep_name``."""

_PRECISIONS = {
    "FP32": None,
    "FP16": "trt_fp16_enable",
    "BF16": "trt_bf16_enable",
    "INT8": "trt_int8_enable",
}
_RENAMED = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_INTEGERS = frozenset(
    {
        "max_workspace_size_bytes",
        "trt_max_partition_iterations",
        "trt_min_subgraph_size",
        "trt_dla_core",
        "trt_builder_optimization_level",
        "trt_auxiliary_streams",
        "trt_ep_context_embed_mode",
    }
)
_BOOLEANS = frozenset(
    {
        "int8_use_native_calibration_table",
        "trt_dla_enable",
        "trt_engine_cache_enable",
        "trt_dump_subgraphs",
        "trt_force_sequential_engine_build",
        "trt_context_memory_sharing_enable",
        "trt_layer_norm_fp32_fallback",
        "trt_timing_cache_enable",
        "trt_force_timing_cache",
        "trt_detailed_build_log",
        "trt_build_heuristics_enable",
        "trt_sparsity_enable",
        "trt_cuda_graph_enable",
        "trt_dump_ep_context_model",
    }
)
_TEXTS = frozenset(
    {
        "int8_calibration_table_name",
        "trt_engine_cache_path",
        "trt_engine_cache_prefix",
        "trt_timing_cache_path",
        "trt_tactic_sources",
        "trt_extra_plugin_lib_paths",
        "trt_profile_min_shapes",
        "trt_profile_max_shapes",
        "trt_profile_opt_shapes",
        "trt_ep_context_file_path",
    }
)
_CUDA_BOOLEANS = ("do_copy_in_default_stream", "use_ep_level_unified_stream")
# Model parameters of an older way, with ONNX Runtime's names of their numbers.
_CUDA_CHOICES = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
}

Providers = list[tuple[str, dict[str, str]]]


class Plugins:
    """Providers that come as packages of their own; registered with ONNX Runtime when first asked for."""

    def __init__(self, ort: Any) -> None:
        self._ort = ort
        self._lock = threading.Lock()  # guards the registration
        self._devices: dict[str, Sequence[Any]] = {}

    def devices(self, name: str) -> Sequence[Any]:
        """The devices of a plug-in; none if it is not installed, or supports no device of this machine."""
        package = _PLUGINS.get(name)
        if package is None:
            return ()
        with self._lock:
            devices = self._devices.get(name)
            if devices is None:
                try:
                    plugin = importlib.import_module(package)
                except ModuleNotFoundError:
                    return ()
                self._ort.register_execution_provider_library(name, plugin.get_library_path())
                found = self._ort.get_ep_devices()
                devices = [each for each in found if each.ep_name == plugin.get_ep_name()]
                self._devices[name] = devices
            return devices

    def advice(self, name: str) -> str:
        """Remedy for a missing provider, as the end of an error text."""
        package = _PLUGINS.get(name)
        if package is None:
            return ""
        if name in self._devices:
            return f"; the plug-in '{package}' supports no device of this machine"
        return f"; `pip install {package.replace('_', '-')}` adds it"

    def add(self, options: Any, providers: Providers) -> Providers | None:
        """Adds plug-ins to session options; returns what the session itself takes, None if nothing."""
        plugins = [name for name, _ in providers if name not in self._ort.get_available_providers()]
        if not plugins:
            return providers
        for name, settings in providers:
            if name in plugins:
                options.add_provider_for_devices(list(self.devices(name))[:1], settings)
            elif name != CPU:  # always there, and last
                options.add_provider(name, settings)
        return None


def execution_providers(ort: Any, spec: ModelSpec, placement: Placement, plugins: Plugins) -> Providers:
    """The execution providers of one instance with their options, in order of preference."""
    available: list[str] = ort.get_available_providers()
    named = spec.parameters.get(PROVIDERS_PARAMETER, "")
    chosen: Providers
    if named.strip():
        by_name = {key.lower(): key for key in ort.get_all_providers()}
        chosen = [(_full_name(name.strip(), by_name), {}) for name in named.split(",") if name.strip()]
    else:
        chosen = _accelerators(spec, placement)
        if placement.kind == "GPU" and all(name != CUDA for name, _ in chosen):
            chosen.append((CUDA, {}))
        chosen.append((CPU, {}))
    for name, options in chosen:
        if name not in available and not plugins.devices(name):
            raise InvalidArgumentError(
                f"model '{spec.name}' needs the execution provider '{name}', which the installed onnxruntime "
                f"does not have; it has: {', '.join(available)}{plugins.advice(name)}"
            )
        if name in ON_A_DEVICE:
            options.setdefault("device_id", str(placement.device_id))
        if name == CUDA:
            _add_cuda_options(spec, options)
        elif name == _TENSORRT:
            _add_engine_cache(ort, spec, options)
        elif name == _OPENVINO:
            _add_threads(spec, options, plugin=name not in available)
    return chosen


def _full_name(name: str, by_name: Mapping[str, str]) -> str:
    for candidate in (name, f"{name}ExecutionProvider"):
        found = by_name.get(candidate.lower())
        if found is not None:
            return found
    raise InvalidArgumentError(
        f"unknown execution provider '{name}' in parameter '{PROVIDERS_PARAMETER}', known ones are: "
        f"{', '.join(by_name.values())}"
    )


def _accelerators(spec: ModelSpec, placement: Placement) -> Providers:
    """The config's execution accelerators for the instance's kind of device."""
    accelerators = child(child(spec.config, "optimization"), "execution_accelerators")
    key = "gpu_execution_accelerator" if placement.kind == "GPU" else "cpu_execution_accelerator"
    entries = accelerators.get(key)
    chosen: Providers = []
    for entry in entries if isinstance(entries, list) else []:
        name = str(entry.get("name", ""))
        provider = _ACCELERATORS.get(name)
        if provider is None:
            raise InvalidArgumentError(f"unknown Execution Accelerator '{name}' is requested")
        given = {str(k): str(v) for k, v in (entry.get("parameters") or {}).items()}
        if name == "tensorrt":
            given = _tensorrt_options(given)
        elif name == "cuda":
            given |= {key: str(int(boolean(given, key, False))) for key in _CUDA_BOOLEANS if key in given}
        chosen.append((provider, given))
    return chosen


def _tensorrt_options(given: Mapping[str, str]) -> dict[str, str]:
    """Translates Triton's TensorRT parameters to ONNX Runtime's."""
    options: dict[str, str] = {}
    for key, value in given.items():
        if key == "precision_mode":
            if value not in _PRECISIONS:
                raise InvalidArgumentError(f"unsupported precision mode '{value}' is requested")
            flag = _PRECISIONS[value]
            if flag is not None:
                options[flag] = "1"
        elif key in _INTEGERS:
            options[_RENAMED.get(key, key)] = str(integer(given, key, 0))
        elif key in _BOOLEANS:
            options[_RENAMED.get(key, key)] = str(int(boolean(given, key, False)))
        elif key in _TEXTS:
            options[_RENAMED.get(key, key)] = value
        else:
            raise InvalidArgumentError(
                f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator"
            )
    return options


def _add_engine_cache(ort: Any, spec: ModelSpec, options: dict[str, str]) -> None:
    """Keeps engines between loads, as building one takes minutes; ONNX Runtime names files by GPU."""
    if "trt_engine_cache_path" not in options and options.get("trt_engine_cache_enable", "1") == "1":
        options["trt_engine_cache_enable"] = "1"
        path = spec.version_directory / spec.model_file
        options["trt_engine_cache_path"] = str(_engine_cache(path, ort.__version__))


def _engine_cache(model: Path, version: str) -> Path:
    """The folder of a model file's engines, named by the file's content and ONNX Runtime's version."""
    digest = hashlib.sha256(version.encode())
    if model.is_file():
        with model.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    # The XDG base directory specification says to ignore a relative path.
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    folder = root / "conch" / "onnxruntime-tensorrt" / digest.hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _add_cuda_options(spec: ModelSpec, options: dict[str, str]) -> None:
    for key, names in _CUDA_CHOICES.items():
        if key in spec.parameters and key not in options:
            number = integer(spec.parameters, key, 0)
            if not 0 <= number < len(names):
                raise InvalidArgumentError(f"unsupported {key} value '{number}' is requested")
            options[key] = names[number]
    if "gpu_mem_limit" in spec.parameters:
        options.setdefault("gpu_mem_limit", str(integer(spec.parameters, "gpu_mem_limit", 0, least=1)))
    if "do_copy_in_default_stream" in spec.parameters:
        chosen = boolean(spec.parameters, "do_copy_in_default_stream", True)
        options.setdefault("do_copy_in_default_stream", str(int(chosen)))


def _add_threads(spec: ModelSpec, options: dict[str, str], plugin: bool) -> None:
    """Shares out the cores, as OpenVINO would take all of them for each instance."""
    threads = threads_per_instance(spec)
    if plugin:
        options.setdefault("load_config", json.dumps({"CPU": {"INFERENCE_NUM_THREADS": threads}}))
    else:
        options.setdefault("device_type", "CPU")
        options.setdefault("num_of_threads", str(threads))
