"""The API between planners, operators and the agent.

The planner calls it in the server process; the ModelControl service exposes it to other processes. Errors
are `ConchError`; texts are Triton's where it has one. Implemented by `Agent` and `RemoteAgent`; may be called
from any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from conch.core.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from conch.core.model_control import LoadParameter
from conch.core.rollouts import RolloutControl, RolloutReport
from conch_control.events import EventLog
from conch_control.managed_rollouts import ManagedBy, ManagedReport
from conch_control.version_phase import Phase


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """Status of one version.

    Attributes:
        reason: Text for operators; may be empty.
        seconds: Unix time of the last transition.
        host_bytes: Growth of process memory by the load; None if unknown.
        done_bytes: Staged bytes; 0 unless staging.
        total_bytes: Bytes to stage; 0 unless staging.
    """

    version: int
    phase: Phase
    reason: str = ""
    seconds: float = 0.0
    host_bytes: int | None = None
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Status of a model that is in a repository or still loaded.

    Attributes:
        location: Its source; empty if no repository has it now.
        versions: Versions that were ever attempted, ascending.
        reason: Reason for which no version could be attempted, if so.
        labels: Names of versions.
        rollout: Its rollout, without counters and history; None for none.
    """

    name: str
    location: str
    versions: tuple[VersionStatus, ...] = ()
    reason: str = ""
    labels: Mapping[str, int] = field(default_factory=dict)
    rollout: RolloutReport | None = None


@dataclass(frozen=True, slots=True)
class Index:
    """All models at one moment; `revision` is the last event included, `draining` as in `AgentApi`."""

    epoch: str
    revision: int
    models: tuple[ModelStatus, ...]
    draining: bool = False


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """Instances of one group on one device.

    Attributes:
        kind: ``KIND_CPU``, ``KIND_GPU`` or ``KIND_MODEL``.
        device: GPU number; -1 for none.
    """

    group: str
    kind: str
    device: int
    count: int


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Status, effective config and instances of one model.

    Attributes:
        status: Its versions and their states.
        config_json: Effective config of the default version in JSON; empty if none is ready.
        origins: Source of each config value by field path: ``config.pbtxt``, ``override``, ``model``
            (completed from the model's files) or ``default``.
        instances: Instances of the default version.
    """

    status: ModelStatus
    config_json: str
    origins: Mapping[str, str]
    instances: tuple[InstanceStatus, ...]


class AgentApi(RolloutControl, Protocol):
    """Interface of an agent for planners and operators."""

    @property
    def events(self) -> EventLog:
        """Event log; see `EventLog.after`."""

    @property
    def draining(self) -> bool:
        """True once the server drains or stops; `EventLog.wake` follows the change."""

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Loads or reloads a model and returns when it is ready; does nothing if nothing has changed.

        Raises:
            ConchError: It can't be loaded; the previous versions still serve.
        """

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Unpublishes a model; requests in flight finish in the background. Unknown models are ignored."""

    def set_label(self, name: str, label: str, version: int | None) -> None:
        """Has a label of a model name a ready version; None removes it.

        Raises:
            FailedPreconditionError: A file or the repository declares the labels of this model.
            ConchError: There is no such model, version or label.
        """

    def manage_rollout(
        self, name: str, declaration: Mapping[str, Any], managed_by: ManagedBy
    ) -> ManagedReport:
        """Takes over what the manager of a fleet says of a model's rollout; the model need not be loaded.

        Raises:
            InvalidArgumentError: Declaration or state is wrong.
        """

    def models(self) -> Index:
        """All models with their states."""

    def progress(self, names: Collection[str]) -> Sequence[ModelStatus]:
        """Staging progress of some models, by name; does not access storage."""

    def describe(self, name: str) -> ModelDescription:
        """Status, effective config and instances of one model.

        Raises:
            NotFoundError: There is no such model.
        """

    def drain(self) -> None:
        """Makes the server not ready; it still answers requests."""


_WILL_FAIL_AGAIN = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def is_transient(error: BaseException) -> bool:
    """True if a retry may succeed without any change to the files."""
    return any(
        isinstance(each, UnavailableError | DeadlineExceededError | ResourceExhaustedError)
        or (isinstance(each, OSError) and not isinstance(each, _WILL_FAIL_AGAIN))
        for each in (error, error.__cause__)
    )
