"""The one API between those who decide what runs and the agent that carries it out.

The planner uses it inside the server's process, and the ModelControl service offers it to operators and to
planners in other processes. Errors are `ConchError`, whose texts are Triton's where Triton has one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from conch.core.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from conch.core.model_control import LoadParameter
from conch_control.events import EventLog
from conch_control.lifecycle.version_phase import Phase


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """One version of a model.

    Attributes:
        version: The version.
        phase: What it is in.
        reason: Why, where there is something to say.
        seconds: Since when, in seconds since 1970, for people to read.
        host_bytes: By how much the process has grown while it was loaded; None where nobody measured.
        done_bytes: Bytes of its files that have been fetched; 0 unless it is being staged.
        total_bytes: Bytes to fetch; 0 unless it is being staged.
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
    """A model of the repositories, or one that runs without being in them any more.

    Attributes:
        name: Model name.
        location: Where it comes from; empty for one that is nowhere now.
        versions: Its versions that were ever attempted, ascending.
        reason: Why none of them was attempted, where it should have been.
    """

    name: str
    location: str
    versions: tuple[VersionStatus, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Index:
    """All models at one moment.

    Attributes:
        epoch: The life of the server that revisions belong to.
        revision: The last event that the models' states have taken in.
        models: The models, by name.
    """

    epoch: str
    revision: int
    models: tuple[ModelStatus, ...]


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """Instances of one kind in one place.

    Attributes:
        group: Name of the instance group.
        kind: ``KIND_CPU``, ``KIND_GPU`` or ``KIND_MODEL``.
        device: Number of the GPU; -1 for none.
        count: How many there are.
    """

    group: str
    kind: str
    device: int
    count: int


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """All there is to say about one model.

    Attributes:
        status: Its versions and their states.
        config_json: The effective config of the newest ready version, in JSON; empty if none is ready.
        origins: Where each value of the config comes from, by field path, such as ``max_batch_size``:
            ``config.pbtxt``, ``override``, ``model`` (completed from the model's files) or ``default``.
        instances: The instances of the newest ready version.
    """

    status: ModelStatus
    config_json: str
    origins: Mapping[str, str]
    instances: tuple[InstanceStatus, ...]


class AgentPort(Protocol):
    """What an agent offers to planners and operators."""

    @property
    def events(self) -> EventLog:
        """What has happened to the models; see `EventLog.after`."""

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Loads or reloads a model, and returns when it is ready; nothing happens if nothing has changed.

        Raises:
            ConchError: It can't be loaded; what served before still does.
        """

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Takes a model out of service; its requests finish in the background. Unknown ones are no error."""

    def models(self) -> Index:
        """All models with their states."""

    def progress(self, names: Collection[str]) -> Sequence[ModelStatus]:
        """Some models with how far their files are fetched, by name, without a look at the storage."""

    def describe(self, name: str) -> ModelDescription:
        """All there is to say about one model.

        Raises:
            NotFoundError: There is no such model.
        """

    def drain(self) -> None:
        """Makes the server not ready, so that nobody sends it more; it goes on answering what comes."""


_WILL_FAIL_AGAIN = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def is_transient(error: BaseException) -> bool:
    """Whether an error, or what has caused it, may be gone later although nothing is done about it."""
    return any(
        isinstance(each, UnavailableError | DeadlineExceededError | ResourceExhaustedError)
        or (isinstance(each, OSError) and not isinstance(each, _WILL_FAIL_AGAIN))
        for each in (error, error.__cause__)
    )
