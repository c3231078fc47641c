"""`PythonBackend`: chooses between instances in process and in workers."""

from __future__ import annotations

import ast
import importlib.util
import logging
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from conch.backends.python.python_settings import PARAMETERS, Settings
from conch.core.backend import Backend, BackendInstance, BackendModel, ConfigNotes
from conch.core.errors import InvalidArgumentError
from conch.core.execution.placement import Placement
from conch.core.spec import ModelSpec

if TYPE_CHECKING:
    from conch.core.bls import ServerCalls
    from conch.workers.supervision.worker_placement import Workers

log = logging.getLogger("conch.backends.python")

_OF_SHELLS = frozenset(";|&$`<>()[]{}\\\"'*?~#!")
"""Characters that Triton refuses in names of Python models and their instances."""


class PythonBackend(Backend):
    """Loads models from a file with a class `TritonPythonModel`.

    Attributes:
        checks_names: False if Triton has no Python model for the backend, and takes all names.
    """

    default_model_file = "model.py"
    completion_runs_code = True
    parameters: ClassVar[tuple[str, ...]] = PARAMETERS
    checks_names: ClassVar[bool] = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: Workers | None = None

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Calls the model's `auto_complete_config` in a temporary load of the file."""
        self._check_names([config.get("name", "")])
        file_name = config.get("default_model_filename") or self.default_model_file
        parameters = config.get("parameters") or {}
        texts = {key: str(value.get("string_value", "")) for key, value in parameters.items()}
        workers = self._get_workers()
        if workers.run_completion(config, version_directory, file_name, texts, options):
            return workers.complete(config, version_directory, file_name, texts, options)
        from conch.backends.python.api.pb_model_config import auto_complete
        from conch.backends.python.runtime.python_instance import load_code

        code, model_class = load_code(config.get("name", ""), version_directory, file_name)
        try:
            return auto_complete(model_class, config)
        finally:
            code.close()

    def check(self, spec: ModelSpec) -> None:
        """Validates names, placement and settings; neither runs model code nor makes environments."""
        self._check_names_of(spec)
        if not self._get_workers().run(spec):
            Settings.of(spec).check_in_process(spec)

    def warnings(self, spec: ModelSpec) -> Iterator[str]:
        """Yields the model file's imports that are not installed."""
        from conch.workers.environment_spec import EnvironmentSpec

        if EnvironmentSpec.of(spec).own is not None:
            return  # it has its own packages
        source = spec.version_directory / spec.model_file
        for line, name in _missing_imports(source, (spec.version_directory, spec.directory)):
            yield (
                f"{source.name}:{line}: imports '{name}', which is not installed: install it beside conch, "
                f"or list its package in '{spec.directory.name}/requirements.txt', and the model gets an "
                f"environment that has it"
            )

    def load(self, spec: ModelSpec) -> BackendModel:
        """Loads a model without access to the server."""
        return self._load(spec, None)

    def load_within(self, spec: ModelSpec, calls: ServerCalls) -> BackendModel:
        """Loads a model that may call the server."""
        return self._load(spec, calls)

    def _load(self, spec: ModelSpec, calls: ServerCalls | None) -> BackendModel:
        # Nothing is loaded here: each instance loads the file itself, in process or in a worker.
        self._check_names_of(spec)
        if spec.batch_inputs or spec.batch_outputs:
            log.warning(
                "model '%s': 'batch_input' and 'batch_output' have no effect, as a Python model gets each "
                "request as it is and answers it by itself",
                spec.name,
            )
        workers = self._get_workers()
        if workers.run(spec):
            return workers.load(spec, calls)
        Settings.of(spec).check_in_process(spec)
        return _PythonModel(spec, calls)

    def _check_names_of(self, spec: ModelSpec) -> None:
        self._check_names([spec.name, *(group.name for group in spec.instance_groups)])

    def _check_names(self, names: Sequence[str]) -> None:
        """Raises InvalidArgumentError: Triton would not start an instance of such a name."""
        for name in names if self.checks_names else ():
            if found := "".join(sorted(_OF_SHELLS.intersection(name))):
                raise InvalidArgumentError(
                    f"Invalid stub name: contains invalid characters: rename model or instance group "
                    f"'{name}' without {found}"
                )

    def _get_workers(self) -> Workers:
        from conch.workers.supervision.worker_placement import Workers

        with self._lock:
            if self._workers is None:
                self._workers = Workers()
            return self._workers


class _PythonModel(BackendModel):
    creates_in_parallel: ClassVar[bool] = True

    notes: ConfigNotes

    def __init__(self, spec: ModelSpec, calls: ServerCalls | None) -> None:
        self._spec = spec
        self._calls = calls
        self.notes = ConfigNotes()

    def create_instance(self, placement: Placement) -> BackendInstance:
        from conch.backends.python.runtime.python_instance import open_instance

        return open_instance(self._spec, placement, self._calls, self.notes.add)


def _missing_imports(source: Path, directories: Sequence[Path]) -> Iterator[tuple[int, str]]:
    """Yields line and top-level name of each missing import; nothing for a file with syntax errors.

    Counts only module-level imports outside `try`, functions and conditions, which always run. `directories`
    hold the model's own modules. Runs no code of the model.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the model's code
            tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    seen: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if top not in seen and not _is_importable(top, directories):
                yield node.lineno, top
            seen.add(top)


def _is_importable(name: str, directories: Sequence[Path]) -> bool:
    if any((each / f"{name}.py").is_file() or (each / name).is_dir() for each in directories):
        return True
    if any(next(each.glob(f"{name}.*.so"), None) for each in directories):
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
