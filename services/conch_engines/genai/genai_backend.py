"""`GenAiBackend`: models of OpenVINO GenAI; each instance runs a Python model, mostly in a worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conch.backends.python.api.pb_model_config import auto_complete
from conch.backends.python.python_settings import OWN_HANG, PARAMETERS
from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.spec import ModelSpec
from conch_engines.genai import (
    embedding_model,
    engine_settings,
    genai_model,
    rerank_model,
    vector_settings,
)
from conch_engines.genai.engine_settings import EngineSettings
from conch_engines.genai.model_on_disk import EMBED, GENERATE, SCORE, TASK, find_model, find_task
from conch_engines.genai.vector_settings import VectorSettings
from conch_engines.model_config import parameter_texts
from conch_engines.worker_engine import WorkerEngineBackend
from conch_llm.contract import ADAPTERS
from conch_llm.models.adapter import adapt
from conch_llm.models.answer_parsers import Parsers

_ENGINE = "openvino_genai"
_HANG_S = "60"
_LONGEST = "max_model_len"
_MODULES = {GENERATE: genai_model, EMBED: embedding_model, SCORE: rerank_model}


class GenAiBackend(WorkerEngineBackend):
    """The backend ``openvino_genai``."""

    default_model_file = ""
    parameters = (
        *(*PARAMETERS, "EXECUTION_ENV_PATH", TASK, "chat_template", "tokenizer"),
        *(*engine_settings.PARAMETERS, *vector_settings.PARAMETERS),
    )

    def __init__(self) -> None:
        super().__init__(Path(__file__).parent)

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Adds the tensors and the declaration of a model with methods for text, and its context's length."""
        name, parameters = config.get("name", ""), parameter_texts(config)
        task = find_task(version_directory, name, parameters)
        adapted = adapt(_MODULES[task].TritonPythonModel)
        assert adapted is not None
        completed = auto_complete(adapted, config)
        if _LONGEST not in parameters:
            with suppress(ConchError):  # `check` raises it
                longest = find_model(version_directory, name, task).context_length
                if longest is not None:
                    completed.setdefault("parameters", {})[_LONGEST] = {"string_value": str(longest)}
        return completed

    def check(self, spec: ModelSpec) -> None:
        """Validates settings, and finds the model's files."""
        super().check(spec)
        task = find_task(spec.version_directory, spec.name, spec.parameters)
        if task == GENERATE:
            Parsers.of(spec.parameters)
            EngineSettings.of(spec.parameters)
            for name in sorted(spec.parameters.keys() & set(vector_settings.PARAMETERS)):
                raise InvalidArgumentError(
                    f"parameter '{name}' has no effect for a model that generates text"
                )
        else:
            VectorSettings.of(spec.parameters, task, spec.version_directory)
        if ADAPTERS in spec.parameters:
            raise InvalidArgumentError(
                f"parameter '{ADAPTERS}': OpenVINO GenAI has one adapter for all requests of a batch, so "
                f"none can be chosen by name: merge it into the weights, or use backend 'vllm'"
            )
        find_model(spec.version_directory, spec.name, task)
        if spec.max_batch_size:
            raise InvalidArgumentError(
                f"model '{spec.name}': max_batch_size must be 0, as the engine batches by itself"
            )

    def warnings(self, spec: ModelSpec) -> Iterator[str]:
        """Says so if the engine is not installed, unless the model has an environment of its own."""
        if find_spec(_ENGINE) is None and not self.has_environment(spec):
            yield "package openvino-genai is not installed: pip install 'conch[genai]'"

    def _with_file(self, spec: ModelSpec) -> ModelSpec:
        task = find_task(spec.version_directory, spec.name, spec.parameters)
        options = {OWN_HANG: _HANG_S, **spec.backend_options}
        return replace(spec, model_file=str(_MODULES[task].__file__), backend_options=options)
