"""The backends ``identity``, ``repeat`` and ``square``: one file of code for all models of each.

They run in the server's process unless an option says otherwise, as their code is conch's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from conch.core.backend import BackendModel
from conch.core.spec import ModelSpec
from conch.workers.python_based import PythonBasedBackend

if TYPE_CHECKING:
    from conch.core.bls import ServerCalls


class _SimpleBackend(PythonBasedBackend):
    code: ClassVar[str]
    completion_runs_code = False
    passes_parameters = False
    checks_names = False
    uses_gpus = False  # tensors are copied in host memory

    def __init__(self) -> None:
        super().__init__(Path(__file__).parent)

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Configs must be complete."""
        return config

    def check(self, spec: ModelSpec) -> None:
        """Validates settings of placement."""
        super().check(_in_process(spec))

    def load_within(self, spec: ModelSpec, calls: ServerCalls) -> BackendModel:
        """Loads a model; its config is checked by each instance."""
        return super().load_within(_in_process(spec), calls)

    def load(self, spec: ModelSpec) -> BackendModel:
        """As `load_within`."""
        return super().load(_in_process(spec))

    def _file(self, version_directory: Path, name: str) -> str:
        return str(Path(__file__).with_name(self.code))


def _in_process(spec: ModelSpec) -> ModelSpec:
    return replace(spec, backend_options={"placement": "in_process", **spec.backend_options})


class IdentityBackend(_SimpleBackend):
    """Returns each ``INPUT<i>`` as ``OUTPUT<i>``."""

    code = "identity_model.py"
    parameters = (
        *("execute_delay_ms", "instance_wise_delay_multiplier", "creation_delay_sec"),
        *("enable_custom_tracing", "nested_span_count", "single_activity_frequency"),
    )


class RepeatBackend(_SimpleBackend):
    """Responds with each element of ``IN``, after its delay."""

    code = "repeat_model.py"


class SquareBackend(_SimpleBackend):
    """Responds ``IN`` times with ``IN``."""

    code = "square_model.py"
    parameters = (
        *("CUSTOM_INFER_DELAY_NS", "CUSTOM_OUTPUT_DELAY_NS", "CUSTOM_CANCEL_DELAY_NS"),
        *("CUSTOM_FAIL_COUNT", "CUSTOM_EMPTY_COUNT"),
    )
