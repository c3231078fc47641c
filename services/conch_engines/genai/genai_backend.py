"""`GenAiBackend`: language models of OpenVINO GenAI; each instance runs `genai_model`, mostly in a worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conch.backends.python.api.pb_model_config import auto_complete
from conch.backends.python.python_settings import PARAMETERS
from conch.core.backend import BackendModel
from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec
from conch.workers.python_based import PythonBasedBackend
from conch_engines.genai import engine_settings
from conch_engines.genai.engine_settings import EngineSettings
from conch_engines.genai.genai_model import TritonPythonModel
from conch_engines.genai.model_on_disk import find_model
from conch_llm.models.adapter import adapt
from conch_llm.models.answer_parsers import Parsers

if TYPE_CHECKING:
    from conch.core.bls import ServerCalls

_ENGINE = "openvino_genai"


class GenAiBackend(PythonBasedBackend):
    """The backend ``openvino_genai``."""

    default_model_file = ""
    needs_model_file = False
    completion_runs_code = False
    passes_parameters = False
    parameters = (*PARAMETERS, "EXECUTION_ENV_PATH", *engine_settings.PARAMETERS)

    def __init__(self) -> None:
        super().__init__(Path(__file__).parent)

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Adds the tensors and the declaration of a model with methods for text."""
        adapted = adapt(TritonPythonModel)
        assert adapted is not None
        return auto_complete(adapted, config)

    def check(self, spec: ModelSpec) -> None:
        """Validates settings, and finds the model's files."""
        super().check(spec)
        EngineSettings.of(spec.parameters)
        Parsers.of(spec.parameters)
        find_model(spec.version_directory, spec.name)
        if spec.max_batch_size:
            raise InvalidArgumentError(
                f"model '{spec.name}': max_batch_size must be 0, as the engine batches by itself"
            )

    def doubts(self, spec: ModelSpec) -> Iterator[str]:
        """Says so if the engine is not installed, unless the model has an environment of its own."""
        if find_spec(_ENGINE) is None and not self.has_environment(spec):
            yield "package openvino-genai is not installed: pip install 'conch[genai]'"

    def load(self, spec: ModelSpec) -> BackendModel:
        """Loads a model version."""
        self.check(spec)
        return super().load(spec)

    def load_within(self, spec: ModelSpec, calls: ServerCalls) -> BackendModel:
        """As `load`."""
        self.check(spec)
        return super().load_within(spec, calls)

    def _file(self, version_directory: Path, name: str) -> str:
        return str(Path(__file__).with_name("genai_model.py"))
