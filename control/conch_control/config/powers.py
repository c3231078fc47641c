"""Powers of a model: what in its config or its files is code, writes files or reaches out.

Four callers ask here: loads of clients that may not upload, models of registries, `conch check --data-only`,
and loads with a config in place of a registry's. Clients are held to what is known to be harmful, as the
model itself is the operator's; models of registries to lists of what is known to be harmless. Settings that
an engine hands on to a library (``session.``, ``CONCH_OV_``, accelerators) are held to lists in both cases:
a library's next release may have another one that names a file or a function.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.platforms import is_ensemble
from conch_control.config.problems import entry_path

_DATA_BACKENDS = frozenset({"onnxruntime", "openvino", "fil", "xgboost", "lightgbm", "sklearn", "tflite"})
"""Backends whose models are data. A SavedModel is a program: it can read and write any file."""

_ENVIRONMENT = ("EXECUTION_ENV_PATH", "CONCH_ENV_", "CONCH_PASS_ENVIRONMENT")
"""Parameters that select a worker's interpreter or variables, or begin the names of such."""

_CODE = frozenset(
    {"CONCH_ALLOW_PICKLE", "CONCH_TRUSTED_TYPES", "CPU_EXTENSION_PATH", "TORCH_COMPILE_OPTIONAL_PARAMETERS"}
)
"""Parameters that have an engine run what a file or library says, or choose its compiler."""

_WRITES = frozenset({"CACHE_DIR"})
"""Parameters with a directory that an engine writes to."""

_READS = frozenset({"chat_template", "tokenizer", "TF_INIT_OPS_FILE"})
"""Parameters with a path that is meant to be one in the model, and may lead elsewhere."""

_OPENVINO, _ONNXRUNTIME = "CONCH_OV_", "session."
_HANDED_ON: Mapping[str, frozenset[str]] = {
    _OPENVINO: frozenset(
        {
            *("PERFORMANCE_HINT", "PERFORMANCE_HINT_NUM_REQUESTS", "EXECUTION_MODE_HINT"),
            *("INFERENCE_NUM_THREADS", "COMPILATION_NUM_THREADS", "INFERENCE_PRECISION_HINT"),
            *("NUM_STREAMS", "ENABLE_CPU_PINNING", "ENABLE_CPU_RESERVATION", "ENABLE_HYPER_THREADING"),
            *("SCHEDULING_CORE_TYPE", "MODEL_PRIORITY", "MODEL_DISTRIBUTION_POLICY", "ENABLE_MMAP"),
            *("DYNAMIC_QUANTIZATION_GROUP_SIZE", "ACTIVATIONS_SCALE_FACTOR", "CPU_DENORMALS_OPTIMIZATION"),
            *("KV_CACHE_PRECISION", "KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION"),
            *("KEY_CACHE_GROUP_SIZE", "VALUE_CACHE_GROUP_SIZE", "CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE"),
            *("ALLOW_AUTO_BATCHING", "AUTO_BATCH_TIMEOUT"),
        }
    ),
    _ONNXRUNTIME: frozenset(
        {
            *("intra_op.allow_spinning", "inter_op.allow_spinning", "force_spinning_stop"),
            *("dynamic_block_base", "set_denormal_as_zero", "disable_prepacking", "use_env_allocators"),
            *("use_device_allocator_for_initializers", "disable_quant_qdq", "disable_double_qdq_remover"),
            *("enable_quant_qdq_cleanup", "qdqisint8allowed", "strict_shape_type_inference"),
            *("allow_released_opsets_only", "disable_aot_function_inlining", "disable_cpu_ep_fallback"),
            *("qdq_matmulnbits_accuracy_level", "enable_dq_matmulnbits_fusion"),
        }
    ),
}
"""By prefix: harmless settings that an engine hands on to its library."""

_ACCELERATORS: Mapping[str, frozenset[str]] = {
    "tensorrt": frozenset(
        {
            *("precision_mode", "max_workspace_size_bytes", "int8_use_native_calibration_table"),
            *("trt_max_partition_iterations", "trt_min_subgraph_size", "trt_builder_optimization_level"),
            *("trt_dla_enable", "trt_dla_core", "trt_auxiliary_streams", "trt_tactic_sources"),
            *("trt_force_sequential_engine_build", "trt_context_memory_sharing_enable"),
            *("trt_layer_norm_fp32_fallback", "trt_detailed_build_log", "trt_build_heuristics_enable"),
            *("trt_sparsity_enable", "trt_cuda_graph_enable", "trt_engine_cache_enable"),
            *("trt_profile_min_shapes", "trt_profile_max_shapes", "trt_profile_opt_shapes"),
        }
    ),
    # Not addresses of functions and streams, such as gpu_external_alloc.
    "cuda": frozenset(
        {
            *("do_copy_in_default_stream", "use_ep_level_unified_stream", "gpu_mem_limit"),
            *("arena_extend_strategy", "cudnn_conv_algo_search", "cudnn_conv_use_max_workspace"),
            *("cudnn_conv1d_pad_to_nc1d", "enable_cuda_graph", "use_tf32", "prefer_nhwc", "fuse_conv_bias"),
            *("enable_skip_layer_norm_strict_mode", "sdpa_kernel"),
        }
    ),
    "openvino": frozenset(
        {
            *("device_type", "precision", "num_of_threads", "num_streams", "model_priority"),
            *("enable_opencl_throttling", "disable_dynamic_shapes", "enable_qdq_optimizer"),
        }
    ),
}
"""By accelerator: its harmless parameters."""

_GENERAL = frozenset(
    {
        *("CONCH_CACHE_TTL", "CONCH_COLUMNS", "CONCH_MAX_QUEUE_SIZE", "CONCH_PADDING"),
        *("CONCH_MEMORY_MB", "CONCH_GPU_MEMORY_MB", "CONCH_PINNED", "CONCH_KEEP_ALIVE_SECONDS"),
    }
)
_TREES = frozenset({"cpu_nthread", "CONCH_BEST_ITERATION"})
_HARMLESS: Mapping[str, frozenset[str]] = {
    "onnxruntime": frozenset(
        {
            *("CONCH_ORT_PROVIDERS", "cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy"),
            *("do_copy_in_default_stream", "execution_mode", "intra_op_thread_count"),
            *("inter_op_thread_count", "enable_mem_arena", "enable_mem_pattern"),
            "memory.enable_memory_arena_shrinkage",
        }
    ),
    "openvino": frozenset(
        {
            *("PERFORMANCE_HINT", "INFERENCE_NUM_THREADS", "COMPILATION_NUM_THREADS", "HINT_BF16"),
            *("INFERENCE_PRECISION_HINT", "NUM_STREAMS", "TARGET_DEVICE", "RESHAPE_IO_LAYERS"),
            *("SKIP_OV_DYNAMIC_BATCHSIZE", "ENABLE_BATCH_PADDING"),
        }
    ),
    "pytorch": frozenset(
        {
            *("CONCH_WARMUP_RUNS", "DISABLE_OPTIMIZED_EXECUTION", "INFERENCE_MODE", "DISABLE_CUDNN"),
            *("ENABLE_WEIGHT_SHARING", "ENABLE_CACHE_CLEANING", "CACHE_CLEANING_ENABLED"),
            *("INTER_OP_THREAD_COUNT", "INTRA_OP_THREAD_COUNT", "ENABLE_TENSOR_FUSER"),
            *("ENABLE_JIT_EXECUTOR", "ENABLE_JIT_PROFILING", "NUM_THREADS", "NUM_INTEROP_THREADS"),
        }
    ),
    "fil": _TREES
    | {
        *("model_type", "is_classifier", "output_class", "threshold", "predict_proba"),
        *("xgboost_allow_unknown_field", "layout", "algo", "blocks_per_sm", "chunk_size", "storage_type"),
        *("threads_per_tree", "transfer_threshold", "use_experimental_optimizations"),
    },
    "xgboost": _TREES,
    "lightgbm": _TREES,
    "sklearn": frozenset({"cpu_nthread"}),
    "tflite": frozenset({"NUM_THREADS", "SIGNATURE"}),
}
"""By backend: its harmless parameters, beside those that it hands on."""

_CODE_FILE = re.compile(r"\.(py[cdowx]?|so(\.[0-9]+)*|dll|dylib)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Power:
    """A field of a config that is code, writes files or reaches out.

    Attributes:
        path: The field, such as ``parameters["CACHE_DIR"]``.
        brings: Kind of the power, such as ``a directory to write to``.
        where: The field in words, such as ``parameter 'CACHE_DIR'``.
    """

    path: str
    brings: str
    where: str

    def __str__(self) -> str:
        return f"{self.brings} ({self.where} of its config)"


def config_powers(config: ModelConfig) -> Iterator[Power]:
    """All fields that are harmful, or hand on to a library what is not known to be harmless."""
    for key in sorted(config.parameters):
        brings = _parameter_power(key, config.parameters[key].string_value)
        if brings:
            yield Power(entry_path("parameters", key), brings, f"parameter '{key}'")
    if config.runtime.lower().endswith(".so"):
        yield Power("runtime", "a library", f"runtime '{config.runtime}'")
    for number, library in enumerate(config.model_operations.op_library_filename):
        path = f"model_operations.op_library_filename[{number}]"
        yield Power(path, "a library", f"'{library}' in model_operations")
    for number, agent in enumerate(config.model_repository_agents.agents):
        path = f"model_repository_agents.agents[{number}]"
        yield Power(path, "a repository agent", f"'{agent.name}' in model_repository_agents")
    yield from _accelerator_powers(config)


def beyond_data(config: ModelConfig, backends: Collection[str] = ()) -> Iterator[Power]:
    """All fields that make more of a model than data: `config_powers`, and what is not known to be harmless.

    Args:
        config: The config, with its backend filled in.
        backends: Backends that may run beside those whose models are data: the caller has checked the files.
    """
    yield from config_powers(config)
    backend = config.backend
    if not (is_ensemble(config) or backend in _DATA_BACKENDS or backend in backends):
        yield Power("backend", "files that can be code", f"backend '{backend}'")
        return
    harmless = _GENERAL | _HARMLESS.get(backend, frozenset())
    for key in sorted(config.parameters):
        if key not in harmless and not key.startswith(tuple(_HANDED_ON)) and not _parameter_power(key, ""):
            yield Power(
                entry_path("parameters", key),
                "a setting that is not known to be harmless",
                f"parameter '{key}'",
            )


def runs_to_read(config: ModelConfig) -> Power | None:
    """The first field whose code an engine runs to read a model, before any load; None for none."""
    fields = ("parameters", "model_operations")
    return next(
        (
            each
            for each in config_powers(config)
            if each.path.startswith(fields) and each.brings in ("code", "a library")
        ),
        None,
    )


def is_code(path: str) -> bool:
    """True if a model's file is code by its name."""
    return _CODE_FILE.search(path) is not None


def _parameter_power(key: str, value: str) -> str:
    """Kind of a parameter's power; empty for none."""
    if key.startswith(_ENVIRONMENT):
        return "an environment"
    prefix = next((each for each in _HANDED_ON if key.startswith(each)), "")
    name = key.removeprefix(_OPENVINO)
    if name in _CODE:
        return "code"
    if name in _WRITES:
        return "a directory to write to"
    if key in _READS and (value.startswith("/") or ".." in value.split("/")):
        return "a file outside the model"
    if prefix and key.removeprefix(prefix) not in _HANDED_ON[prefix]:
        return "a setting that may name code or files"
    return ""


def _accelerator_powers(config: ModelConfig) -> Iterator[Power]:
    accelerators = config.optimization.execution_accelerators
    for field in ("gpu_execution_accelerator", "cpu_execution_accelerator"):
        for number, accelerator in enumerate(getattr(accelerators, field)):
            path = f"optimization.execution_accelerators.{field}[{number}].parameters"
            for key in sorted(accelerator.parameters):
                if key not in _ACCELERATORS.get(accelerator.name, ()):
                    where = f"parameter '{key}' of accelerator '{accelerator.name}'"
                    brings = "a path" if "path" in key else "a setting that may name code or files"
                    yield Power(entry_path(path, key), brings, where)
