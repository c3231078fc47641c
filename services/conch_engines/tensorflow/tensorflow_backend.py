"""`TensorFlowBackend`: SavedModels and GraphDefs, in workers unless an option places them in process.

TensorFlow keeps its memory until its process ends, takes seconds to import, and brings versions of protobuf
and numpy of its own, so a worker, possibly with an environment of its own, runs it. Configs are completed and
checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conch.backends.python.python_settings import PARAMETERS
from conch.backends.signature import complete, validate
from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.file_formats import describe
from conch.core.spec import ModelSpec
from conch_engines.model_config import boolean, integer, parameter_texts
from conch_engines.tensorflow.saved_model_file import DATATYPES, read_signature
from conch_engines.worker_engine import WorkerEngineBackend

_GRAPH = "tensorflow_graphdef"
_SAVED = "tensorflow_savedmodel"
_FILES = {_SAVED: "model.savedmodel", _GRAPH: "model.graphdef"}
_THREADS = ("TF_NUM_INTRA_THREADS", "TF_NUM_INTER_THREADS")
_ACCELERATORS = ("auto_mixed_precision", "gpu_io")


class TensorFlowBackend(WorkerEngineBackend):
    """The backend ``tensorflow``; each instance runs `saved_model_runtime`."""

    default_model_file = "model.savedmodel"
    platform = _SAVED
    needs_model_file = True
    parameters = (
        *PARAMETERS,
        *_THREADS,
        *("TF_USE_PER_SESSION_THREADS", "TF_GRAPH_TAG", "TF_SIGNATURE_DEF"),
        *("MAX_SESSION_SHARE_COUNT", "TF_INIT_OPS_FILE", "EXECUTION_ENV_PATH"),
    )

    def __init__(self) -> None:
        super().__init__(Path(__file__).parent)

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Takes inputs, outputs and batching from the signature of a SavedModel."""
        name = config.get("name", "")
        if config.get("platform") == _GRAPH or (config.get("input") and config.get("output")):
            return config
        path = version_directory / (config.get("default_model_filename") or self.default_model_file)
        return complete(config, read_signature(path, name, *_signature_of(parameter_texts(config))), options)

    def check(self, spec: ModelSpec) -> None:
        """Validates settings, and compares the config with the signature of a SavedModel."""
        super().check(spec)
        _check_settings(spec)
        if spec.platform not in _FILES:
            raise InvalidArgumentError(
                f"platform {spec.platform} not supported for TensorFlow model '{spec.name}'"
            )
        path = spec.version_directory / spec.model_file
        if not path.exists():
            raise UnavailableError(f"unable to find '{path}' for model '{spec.name}'")
        if spec.platform == _GRAPH:
            if found := describe(path):
                raise InvalidArgumentError(f"'{path}' is no GraphDef: it {found}")
        else:
            if not path.is_dir():
                raise InvalidArgumentError(f"'{path}' is no SavedModel: it {describe(path) or 'is a file'}")
            signature = read_signature(path, spec.name, *_signature_of(spec.parameters))
            validate(spec, signature, DATATYPES)

    def _file(self, version_directory: Path, name: str) -> str:
        return str(Path(__file__).with_name("saved_model_runtime.py"))


def _signature_of(parameters: Mapping[str, str]) -> tuple[str, str]:
    """Tag and name of the signature."""
    return parameters.get("TF_GRAPH_TAG", "serve"), parameters.get("TF_SIGNATURE_DEF", "serving_default")


def _check_settings(spec: ModelSpec) -> None:
    model = f"for TensorFlow model '{spec.name}'"
    for key in _THREADS:
        if integer(spec.parameters, key, 0) < 0:
            raise InvalidArgumentError(f"parameter '{key}' must be non-negative number {model}")
    if integer(spec.parameters, "MAX_SESSION_SHARE_COUNT", 1) < 1:
        raise InvalidArgumentError(f"parameter 'MAX_SESSION_SHARE_COUNT' must be positive number {model}")
    boolean(spec.parameters, "TF_USE_PER_SESSION_THREADS", False)
    optimization = spec.config.get("optimization")
    accelerators = optimization.get("execution_accelerators") if isinstance(optimization, Mapping) else None
    if not isinstance(accelerators, Mapping):
        return
    if accelerators.get("cpu_execution_accelerator"):
        raise InvalidArgumentError("CPU Execution Accelerator is not supported in TensorFlow backend")
    for entry in accelerators.get("gpu_execution_accelerator") or ():
        name = str(entry.get("name", ""))
        if name == "tensorrt":
            raise InvalidArgumentError(
                f"model '{spec.name}': TensorFlow's packages come without TensorRT (TF-TRT) today; "
                f"remove the accelerator 'tensorrt', or convert the model to ONNX and use backend "
                f'"onnxruntime" with this accelerator'
            )
        if name not in _ACCELERATORS:
            raise InvalidArgumentError(f"unknown Execution Accelerator '{name}' is requested")
