"""Settings of a Python model from its config's ``parameters`` and the backend's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec

Placement = Literal["in_process", "worker"]
DEFAULT_PLACEMENT: Placement = "worker"
PARAMETERS = (
    *("CONCH_PLACEMENT", "CONCH_MAX_INFLIGHT", "CONCH_MAX_EXECUTION_SECONDS", "CONCH_MEMORY_LIMIT_MB"),
    *(
        "CONCH_PROCESS_LIMIT",
        "CONCH_HANG_SECONDS",
        "CONCH_START_TIMEOUT_SECONDS",
        "CONCH_UNLOAD_GRACE_SECONDS",
        "CONCH_STRICT_OUTPUTS",
        "CONCH_PASS_ENVIRONMENT",
        "CONCH_ENV_",
    ),
)
"""Parameters of Python models."""
OWN_HANG = "own-hang-seconds"
"""Option that a backend sets for models without `CONCH_HANG_SECONDS`."""
_MOST = 2**43 - 1
"""Upper bound of whole numbers: the largest memory limit that can be set, in MiB."""
_MOST_SECONDS = 1_000_000_000
_SHOWN = 40
"""Characters shown of an invalid value."""
_WORKER_ONLY = (
    ("MAX_EXECUTION_SECONDS", "max-execution-seconds"),
    ("MEMORY_LIMIT_MB", "memory-limit-mb"),
    ("PROCESS_LIMIT", "process-limit"),
    ("HANG_SECONDS", "hang-seconds"),
    ("UNLOAD_GRACE_SECONDS", "unload-grace-seconds"),
)


class NeedsWorkerError(InvalidArgumentError):
    """A model is placed in the server's process but needs a worker.

    Attributes:
        need: The model and what it needs a worker for.
    """

    def __init__(self, need: str, advice: str) -> None:
        super().__init__(f"{need}, {advice}")
        self.need = need


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one model; a parameter in its config overrides an option of the backend.

    Attributes:
        placement: In process or in workers (``CONCH_PLACEMENT``, ``--backend-config=python,placement=...``).
        max_inflight: Concurrent batches per instance of a model with a coroutine `execute`
            (``CONCH_MAX_INFLIGHT``, ``max-inflight``); None for the default: 1, or unlimited for a decoupled
            model.
        max_execution_s: Seconds after which an execution counts as hung and its worker is killed
            (``CONCH_MAX_EXECUTION_SECONDS``, ``max-execution-seconds``); None for no limit.
        memory_limit_mb: Memory limit of a worker in MiB (``CONCH_MEMORY_LIMIT_MB``, ``memory-limit-mb``);
            None for no limit.
        process_limit: Most processes of a worker, itself included (``CONCH_PROCESS_LIMIT``,
            ``process-limit``); None for no limit.
        start_timeout_s: Seconds until a worker must have loaded the model (``CONCH_START_TIMEOUT_SECONDS``,
            ``start-timeout-seconds``); None for no limit.
        unload_grace_s: Seconds after which an unload cancels running requests
            (``CONCH_UNLOAD_GRACE_SECONDS``, ``unload-grace-seconds``); None for never.
        strict_outputs: True if outputs whose datatype or rank contradicts the config are refused
            (``CONCH_STRICT_OUTPUTS``, ``strict-outputs``) rather than served and noted.
        hang_s: Seconds without an answer of a worker's loop after which the worker is replaced
            (``CONCH_HANG_SECONDS``, ``hang-seconds``); None to report it only.
    """

    placement: Placement = DEFAULT_PLACEMENT
    max_inflight: int | None = None
    max_execution_s: float | None = None
    memory_limit_mb: int | None = None
    process_limit: int | None = None
    start_timeout_s: float | None = None
    unload_grace_s: float | None = None
    strict_outputs: bool = False
    hang_s: float | None = None

    @classmethod
    def of(cls, spec: ModelSpec) -> Settings:
        """The settings of a model version.

        Raises:
            InvalidArgumentError: A value is invalid; the text names the parameter or option.
        """
        return cls.read(spec.name, spec.parameters, spec.backend_options)

    @classmethod
    def read(cls, name: str, parameters: Mapping[str, str], options: Mapping[str, str]) -> Settings:
        """Reads the settings from a config's parameters and a backend's options."""
        values = _Values(name, parameters, options)
        return cls(
            values.placement(),
            values.integer("MAX_INFLIGHT", "max-inflight"),
            values.seconds("MAX_EXECUTION_SECONDS", "max-execution-seconds"),
            values.integer("MEMORY_LIMIT_MB", "memory-limit-mb"),
            values.integer("PROCESS_LIMIT", "process-limit"),
            values.seconds("START_TIMEOUT_SECONDS", "start-timeout-seconds"),
            values.seconds("UNLOAD_GRACE_SECONDS", "unload-grace-seconds"),
            values.boolean("STRICT_OUTPUTS", "strict-outputs"),
            values.seconds("HANG_SECONDS", "hang-seconds") or values.seconds("", OWN_HANG),
        )

    def check_in_process(self, spec: ModelSpec) -> None:
        """Rejects settings that only a worker supports.

        Raises:
            NeedsWorkerError: One is set; the text names it.
        """
        values = _Values(spec.name, spec.parameters, spec.backend_options)
        for parameter, option in _WORKER_ONLY:
            found = values.find(parameter, option)
            if found is not None:
                raise NeedsWorkerError(
                    f"{found[1]} needs a process of the model's own",
                    "and the model runs in the server's: set parameter 'CONCH_PLACEMENT' to 'worker'",
                )


class _Values:
    def __init__(self, name: str, parameters: Mapping[str, str], options: Mapping[str, str]) -> None:
        self._name = name
        self._parameters = parameters
        self._options = options

    def find(self, parameter: str, option: str) -> tuple[str, str] | None:
        """The value and its source."""
        key = f"CONCH_{parameter}"
        if key in self._parameters:
            return self._parameters[key], f"model '{self._name}': parameter '{key}'"
        if option in self._options:
            return self._options[option], f"--backend-config=python,{option}"
        return None

    def placement(self) -> Placement:
        found = self.find("PLACEMENT", "placement")
        if found is None:
            return DEFAULT_PLACEMENT
        for known in get_args(Placement):
            if found[0] == known:
                placement: Placement = known
                return placement
        raise InvalidArgumentError(f"{found[1]} must be 'in_process' or 'worker', not '{found[0]}'")

    def boolean(self, parameter: str, option: str) -> bool:
        found = self.find(parameter, option)
        if found is None:
            return False
        if found[0] not in ("true", "false"):
            raise InvalidArgumentError(f"{found[1]} must be 'true' or 'false', not '{_shortened(found[0])}'")
        return found[0] == "true"

    def integer(self, parameter: str, option: str) -> int | None:
        found = self.find(parameter, option)
        if found is None:
            return None
        text = found[0]
        plain = text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST))
        if not plain or not 0 < int(text) <= _MOST:
            raise InvalidArgumentError(
                f"{found[1]} must be a whole number above 0 and up to {_MOST}, not '{_shortened(text)}'"
            )
        return int(text)

    def seconds(self, parameter: str, option: str) -> float | None:
        found = self.find(parameter, option)
        if found is None:
            return None
        try:
            seconds = float(found[0]) if found[0].isascii() else 0.0
        except ValueError:
            seconds = 0.0
        if not 0.0 < seconds <= _MOST_SECONDS:
            raise InvalidArgumentError(
                f"{found[1]} must be a number of seconds above 0 and up to {_MOST_SECONDS}, not "
                f"'{_shortened(found[0])}'"
            )
        return seconds


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
