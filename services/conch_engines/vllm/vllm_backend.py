"""`VllmBackend`: completes and checks configs without vLLM, which a worker runs in its own environment."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conch.backends.python.api.pb_model_config import ModelConfig
from conch.backends.python.python_settings import PARAMETERS
from conch.core.backend import BackendModel
from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec
from conch.workers.python_based import PythonBasedBackend
from conch_engines.model_config import boolean, parameter_texts
from conch_engines.vllm.worker.vllm_files import MISSING, FileError, ModelFiles

if TYPE_CHECKING:
    from conch.core.bls import ServerCalls

_CODE = Path(__file__).parent / "worker" / "vllm_model.py"
_NATIVE = "CONCH_VLLM_NATIVE"
_DECLARATION = "CONCH_LLM"
_SERVED_NAMES = "served_model_name"
_ADAPTERS = "CONCH_LLM_ADAPTERS"
_CONTEXT = "max_model_len"
_UNLOAD_GRACE_S = "30"
_SWITCHES = ("REPORT_CUSTOM_METRICS", "ENABLE_VLLM_HEALTH_CHECK", _NATIVE)

_REQUIRED = {"text_input": ("TYPE_STRING", [1])}
_OPTIONAL = {
    "image": ("TYPE_STRING", [-1]),
    "stream": ("TYPE_BOOL", [1]),
    "sampling_parameters": ("TYPE_STRING", [1]),
    "exclude_input_in_output": ("TYPE_BOOL", [1]),
    "return_finish_reason": ("TYPE_BOOL", [1]),
    "return_cumulative_logprob": ("TYPE_BOOL", [1]),
    "return_logprobs": ("TYPE_BOOL", [1]),
    "return_num_input_tokens": ("TYPE_BOOL", [1]),
    "return_num_output_tokens": ("TYPE_BOOL", [1]),
    "embedding_request": ("TYPE_STRING", [1]),
}
_OUTPUTS = {
    "text_output": ("TYPE_STRING", [-1]),
    "finish_reason": ("TYPE_STRING", [-1]),
    "cumulative_logprob": ("TYPE_FP32", [-1]),
    "logprobs": ("TYPE_STRING", [-1]),
    "num_input_tokens": ("TYPE_UINT32", [1]),
    "num_output_tokens": ("TYPE_UINT32", [-1]),
}


class VllmBackend(PythonBasedBackend):
    """The backend ``vllm``; each instance is a worker with an engine."""

    default_model_file = "model.json"
    completion_runs_code = False
    passes_parameters = False
    parameters = (
        *PARAMETERS,
        *_SWITCHES,
        *("GPU_DEVICE_IDS", "EXECUTION_ENV_PATH"),
        *(_DECLARATION, _SERVED_NAMES, _ADAPTERS, _CONTEXT),
    )

    def __init__(self) -> None:
        super().__init__(_CODE.parent)

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Adds missing inputs and outputs, and what follows from the files."""
        completed = ModelConfig(json.dumps(config))
        known = completed.as_dict()
        try:
            for name, (datatype, dims) in {**_REQUIRED, **_OPTIONAL}.items():
                if all(each["name"] != name for each in known["input"]):
                    tensor = {"name": name, "data_type": datatype, "dims": dims}
                    completed.add_input(tensor if name in _REQUIRED else {**tensor, "optional": True})
            for name, (datatype, dims) in _OUTPUTS.items():
                if all(each["name"] != name for each in known["output"]):
                    completed.add_output({"name": name, "data_type": datatype, "dims": dims})
            completed.set_model_transaction_policy({"decoupled": True})
            completed.set_max_batch_size(0)
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from error
        for key in ("input", "output", "model_transaction_policy", "max_batch_size"):
            config[key] = known[key]
        if not config.get("instance_group"):
            config["instance_group"] = [{"count": 1, "kind": "KIND_MODEL"}]
        texts = parameter_texts(config)
        added = {}
        if boolean(texts, _NATIVE, True):
            added[_DECLARATION] = "native"
        files = _files(config.get("name", ""), version_directory)
        if files.served_names:
            added[_SERVED_NAMES] = ",".join(files.served_names)
        if files.adapters:
            added[_ADAPTERS] = ",".join(files.adapters)
        if isinstance(length := files.engine.get(_CONTEXT), int):
            added[_CONTEXT] = str(length)
        config["parameters"] = {
            **{key: {"string_value": value} for key, value in added.items()},
            **(config.get("parameters") or {}),
        }
        return config

    def check(self, spec: ModelSpec) -> None:
        """Validates settings and files."""
        super().check(spec)
        where = f"model '{spec.name}'"
        if spec.parameters.get("CONCH_PLACEMENT", "worker") != "worker":
            raise InvalidArgumentError(
                f"{where}: vLLM runs in a worker only; remove parameter 'CONCH_PLACEMENT'"
            )
        if not spec.decoupled or spec.max_batch_size:
            raise InvalidArgumentError(
                f"{where}: vLLM responds to single requests at any time, and batches by itself: set "
                f"model_transaction_policy {{ decoupled: true }} and max_batch_size: 0"
            )
        for key in _SWITCHES:
            boolean(spec.parameters, key, True)
        _files(spec.name, spec.version_directory)

    def warnings(self, spec: ModelSpec) -> Iterator[str]:
        """Yields the lack of vLLM in the server's own environment, if the model would run there."""
        if not self.has_environment(spec) and importlib.util.find_spec("vllm") is None:
            yield MISSING

    def load(self, spec: ModelSpec) -> BackendModel:
        """Loads a model version."""
        self.check(spec)
        return super().load(_with_grace(spec))

    def load_within(self, spec: ModelSpec, calls: ServerCalls) -> BackendModel:
        """As `load`."""
        self.check(spec)
        return super().load_within(_with_grace(spec), calls)

    def _file(self, version_directory: Path, name: str) -> str:
        return str(_CODE)


def _with_grace(spec: ModelSpec) -> ModelSpec:
    """A stream may last for hours, so an unload aborts it unless an option or a parameter says otherwise."""
    return replace(spec, backend_options={"unload-grace-seconds": _UNLOAD_GRACE_S, **spec.backend_options})


def _files(model: str, version_directory: Path) -> ModelFiles:
    try:
        return ModelFiles.read(version_directory)
    except FileError as error:
        raise InvalidArgumentError(f"unable to load model '{model}': {error}") from error
