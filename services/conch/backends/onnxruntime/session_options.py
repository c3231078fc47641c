"""Session options and execution providers from a model's config and an instance's placement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conch.backends.model_parameters import boolean, integer, threads_per_instance
from conch.core.errors import InvalidArgumentError
from conch.core.execution.placement import Placement
from conch.core.spec import ModelSpec

PROVIDERS_PARAMETER = "CONCH_ORT_PROVIDERS"
"""Model parameter: execution providers in order of preference, comma separated, such as ``cuda,cpu``."""

PARAMETERS = (
    PROVIDERS_PARAMETER,
    *("execution_mode", "intra_op_thread_count", "inter_op_thread_count"),
    *("enable_mem_arena", "enable_mem_pattern"),
    "session.",
)
"""Model parameters that are read here; names that begin with ``session.`` are ONNX Runtime's own."""

CUDA = "CUDAExecutionProvider"
"""Default provider of instances on a GPU."""

_CPU = "CPUExecutionProvider"
_ACCELERATORS = {
    "tensorrt": "TensorrtExecutionProvider",
    "cuda": CUDA,
    "openvino": "OpenVINOExecutionProvider",
}
ON_A_DEVICE = (CUDA, "TensorrtExecutionProvider")
"""Providers that run on one GPU."""
_TENSORRT_PRECISIONS = {
    "FP32": None,
    "FP16": "trt_fp16_enable",
    "BF16": "trt_bf16_enable",
    "INT8": "trt_int8_enable",
}
_TENSORRT_KEYS = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}


def session_options(ort: Any, spec: ModelSpec) -> Any:
    """Creates the `onnxruntime.SessionOptions` of one instance.

    Raises:
        InvalidArgumentError: A parameter has an invalid value.
    """
    parameters = spec.parameters
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = {
        -1: levels.ORT_ENABLE_BASIC,
        1: levels.ORT_ENABLE_EXTENDED,
        2: levels.ORT_DISABLE_ALL,
    }.get(_graph_level(spec), levels.ORT_ENABLE_ALL)
    mode = integer(parameters, "execution_mode", 0)
    if mode not in (0, 1):
        raise InvalidArgumentError(
            f"Invalid configuration value provided. Expected values for execution_mode are 0 or 1 but got "
            f"{mode}."
        )
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if mode else ort.ExecutionMode.ORT_SEQUENTIAL
    # ONNX Runtime defaults to one spinning thread per core in each session, which suits a single model. Here
    # instances divide the cores among them, and idle threads sleep.
    options.intra_op_num_threads = integer(parameters, "intra_op_thread_count", 0) or threads_per_instance(
        spec
    )
    inter_threads = integer(parameters, "inter_op_thread_count", 0)
    if inter_threads > 0:
        options.inter_op_num_threads = inter_threads
    options.enable_cpu_mem_arena = boolean(parameters, "enable_mem_arena", True)
    options.enable_mem_pattern = boolean(parameters, "enable_mem_pattern", True)
    entries = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    entries.update((key, value) for key, value in parameters.items() if key.startswith("session."))
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


def execution_providers(ort: Any, spec: ModelSpec, placement: Placement) -> list[tuple[str, dict[str, str]]]:
    """The execution providers of one instance with their options, in order of preference.

    Raises:
        InvalidArgumentError: A requested provider is unknown, or missing in the installed ONNX Runtime.
    """
    available: list[str] = ort.get_available_providers()
    named = spec.parameters.get(PROVIDERS_PARAMETER, "")
    chosen: list[tuple[str, dict[str, str]]]
    if named.strip():
        by_name = {key.lower(): key for key in ort.get_all_providers()}
        chosen = [(_full_name(name.strip(), by_name), {}) for name in named.split(",") if name.strip()]
    else:
        chosen = _accelerators(spec, placement)
        if placement.kind == "GPU" and all(name != CUDA for name, _ in chosen):
            chosen.append((CUDA, {}))
        # The CPU runs what the others do not support.
        chosen.append((_CPU, {}))
    for name, options in chosen:
        if name not in available:
            raise InvalidArgumentError(
                f"model '{spec.name}' needs the execution provider '{name}', which the installed onnxruntime "
                f"does not have; it has: {', '.join(available)}"
            )
        if name in ON_A_DEVICE:
            options.setdefault("device_id", str(placement.device_id))
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


def _accelerators(spec: ModelSpec, placement: Placement) -> list[tuple[str, dict[str, str]]]:
    """The config's execution accelerators for the instance's kind of device."""
    accelerators = _child(_child(spec.config, "optimization"), "execution_accelerators")
    key = "gpu_execution_accelerator" if placement.kind == "GPU" else "cpu_execution_accelerator"
    entries = accelerators.get(key)
    chosen: list[tuple[str, dict[str, str]]] = []
    for entry in entries if isinstance(entries, list) else []:
        name = str(entry.get("name", ""))
        provider = _ACCELERATORS.get(name)
        if provider is None:
            raise InvalidArgumentError(f"unknown Execution Accelerator '{name}' is requested")
        given = {str(k): str(v) for k, v in (entry.get("parameters") or {}).items()}
        chosen.append((provider, _tensorrt_options(given) if name == "tensorrt" else given))
    return chosen


def _tensorrt_options(given: Mapping[str, str]) -> dict[str, str]:
    """Translates Triton's TensorRT parameters to ONNX Runtime's."""
    options: dict[str, str] = {}
    for key, value in given.items():
        if key != "precision_mode":
            options[_TENSORRT_KEYS.get(key, key)] = value
        elif value not in _TENSORRT_PRECISIONS:
            raise InvalidArgumentError(f"unsupported precision mode '{value}' is requested")
        else:
            flag = _TENSORRT_PRECISIONS[value]
            if flag is not None:
                options[flag] = "1"
    return options


def _graph_level(spec: ModelSpec) -> int:
    level = _child(_child(spec.config, "optimization"), "graph").get("level", 0)
    return int(str(level))


def _child(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}
