"""The backend interface: a `Backend` loads models, a `BackendModel` creates instances, these run batches.

A backend is found by name in the entry-point group ``conch.backends`` and imported for the first model that
needs it. A backend that maps arrays to arrays derives from `conch.backends.arrays.ArrayBackend` in about 30
lines; one that handles requests implements `Backend` itself.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from conch.core.execution.placement import Placement
from conch.core.request import InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import Readiness, WorkerStatus
from conch.core.spec import ModelSpec

if TYPE_CHECKING:
    from conch.core.bls import ServerCalls

log = logging.getLogger(__name__)

_MOST_NOTES = 64
_MOST_NOTE_CHARACTERS = 1_000

BatchOutcome = Sequence[InferenceResponse | None] | BaseException | None
"""The result of `BackendInstance.execute`, or the exception that it raises."""


class ConfigNotes:
    """Deviations of a served version from its config: logged once, shown in the index; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: list[str] = []

    @property
    def texts(self) -> Sequence[str]:
        """The notes, oldest first."""
        with self._lock:
            return tuple(self._texts)

    def add(self, text: str) -> None:
        """Logs and keeps a note, unless it is a duplicate."""
        text = text[:_MOST_NOTE_CHARACTERS]
        with self._lock:
            if text in self._texts or len(self._texts) >= _MOST_NOTES:
                return
            self._texts.append(text)
        log.warning("%s", text)


class Pending:
    """The type of `PENDING`."""

    __slots__ = ()


PENDING = Pending()
"""Returned by `BackendInstance.start` if the outcome comes later."""

Done = Callable[[Batch, BatchOutcome], None]
"""Takes the outcome of a started batch; see `BackendInstance.start`."""


class BackendInstance:
    """One instance of a model: runs its batches possibly on another thread each time.

    A synchronous instance implements `execute`; one whose batches run elsewhere implements `start`.

    Attributes:
        allows_inline: True if the thread that received a request may run its batch. False for instances that
            hold the calling thread for long without computing.
        blocks: True if `start` returns only when the batch has run.
        most_batches: Batches that it takes at a time. More than one only if it does not block, needs no
            resources, and its batches do not name it: `start` is then called on several threads at a time.
        readiness: Its own readiness check, or None.
        warmup_runs: Least number of runs of each warm-up sample, for engines that compile in the first ones.
    """

    allows_inline: ClassVar[bool] = True
    blocks: ClassVar[bool] = True
    most_batches: int = 1
    readiness: Readiness | None = None
    warmup_runs: int = 1

    def execute(self, batch: Batch) -> Sequence[InferenceResponse | None] | None:
        """Runs a batch on the calling thread.

        May set ``compute_input_end_ns`` and ``compute_output_start_ns`` of the batch; without them, all its
        time counts as inference.

        Returns:
            One response for each request, in their order; an error in one does not affect the others. None
            in place of one means that the model calls `InferenceRequest.respond` itself; without
            ``compute_output_start_ns`` the execution then lasts until the first such call. A decoupled model
            returns None and responds itself to all requests.

        Raises:
            Exception: The batch failed; every request in it gets the error.
        """
        raise NotImplementedError

    def start(self, batch: Batch, done: Done) -> BatchOutcome | Pending:
        """Starts a batch; the base class executes it.

        Called with no lock held. An instance that does not block is started by any thread, also one that
        must not wait. It may set `on_cancel` of the requests.

        Args:
            batch: The batch; the instance gets no more than `most_batches` before one of them is done and
                its `start` has returned.
            done: Called once, with the batch and its outcome, if this returns `PENDING`; from any thread and
                possibly before this returns, without locks that `start` or `available` take. It sends the
                responses, may start the next batch, and never raises.

        Returns:
            The outcome: what `execute` returns, or the error that it raises. An error that this raises is
            the outcome, too.
        """
        return self.execute(batch)

    def available(self, on_available: Callable[[], None]) -> bool:
        """True if the instance can take a batch now; called before each batch if instances do not block.

        Called with a lock of the model held, so it must not wait; possibly several times for one batch.

        Args:
            on_available: Called from any thread once the instance is available, if it is not; but not from
                within this, nor while holding locks that this takes. Not called if it was available.
        """
        return True

    def set_warm_up(self, warm_up: Callable[[BackendInstance], None]) -> None:
        """Sets how to warm it up again; for instances that survive a restart of what was warmed up.

        Args:
            warm_up: Called, before requests reach the restarted instance, with an instance that runs batches
                there; raises if one fails.
        """

    def worker(self) -> WorkerStatus | None:
        """The state of its process; None if it has none of its own."""
        return None

    def cancel_running(self) -> None:
        """Cancels what it runs, if it can; all requests still get their responses."""

    def close(self) -> None:
        """Frees the instance; called once, when nothing runs on it."""


class BackendModel(ABC):
    """A model version loaded by a backend; what its instances share.

    Attributes:
        creates_in_parallel: True if several threads may create instances at the same time. Long steps check
            `load_cancelled`.
        notes: Ways in which the model deviates from its config; None where the backend takes none.
        unload_grace_s: Time after which an unload cancels running requests; None for never.
    """

    unload_grace_s: float | None = None
    creates_in_parallel: ClassVar[bool] = False
    notes: ConfigNotes | None = None

    @abstractmethod
    def create_instance(self, placement: Placement) -> BackendInstance:
        """Creates an instance on a device.

        Raises:
            ConchError: The instance can't be created; the load fails with the message.
        """

    def close(self) -> None:
        """Frees what the instances shared; called once, after they were closed."""


class FindBackend(Protocol):
    """Finds backends by name."""

    def __call__(self, name: str, runtime: str = "", directory: Path | None = None, /) -> Backend:
        """The backend of a model.

        Args:
            name: The backend's name.
            runtime: The config's ``runtime``: the file of the backend's code, possibly empty.
            directory: The model's directory, which may have that file; None for any model.

        Raises:
            InvalidArgumentError: There is no such backend.
            UnavailableError: A package that it needs is not installed, or can't be imported.
        """


class Backend(ABC):
    """Runs models of one kind.

    Attributes:
        default_model_file: Name of the file, or folder, in a version directory.
        platform: The config's ``platform`` of the backend's models, if it has one.
        cpu_instance_count: Default number of instances of a CPU group.
        needs_model_file: True if a version directory without the file is an error.
        completion_runs_code: True if `complete_config` may run code of the model.
        resizes: True if a loaded model can create and close single instances; if not, it is loaded again when
            their number changes.
        parameters: The parameters that it reads in a config; a trailing ``_`` or ``.`` marks a prefix.
        passes_parameters: True if models get the parameters, so that a name without ``CONCH_`` may mean
            something to them. If not, `conch check` warns of each that `parameters` does not list.
        takes_host_policies: True if instances run as host policies say.
    """

    default_model_file: ClassVar[str]
    platform: ClassVar[str] = ""
    cpu_instance_count: ClassVar[int] = 1
    needs_model_file: ClassVar[bool] = True
    completion_runs_code: ClassVar[bool] = False
    resizes: ClassVar[bool] = True
    parameters: ClassVar[tuple[str, ...]] = ()
    passes_parameters: ClassVar[bool] = True
    takes_host_policies: ClassVar[bool] = False

    @property
    def uses_gpus(self) -> bool:
        """True if instance groups of kind AUTO are placed on GPUs, if there are any."""
        return True

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Completes the config from the model file.

        Args:
            config: The config in JSON form (snake_case keys, enum names); may be changed in place.
            version_directory: Directory of a version to look at.
            options: The backend's options from the command line.

        Returns:
            The completed config.

        Raises:
            ConchError: The file can't be read, or contradicts the config.
        """
        return config

    def check(self, spec: ModelSpec) -> None:
        """Checks a model version without loading it on a device or running its code.

        Raises:
            ConchError: The version can't be loaded; the text says why.
        """

    def warnings(self, spec: ModelSpec) -> Iterable[str]:
        """Warnings of a load that will probably fail here, or serve the model in one of several ways."""
        return ()

    @abstractmethod
    def load(self, spec: ModelSpec) -> BackendModel:
        """Loads a model version.

        Raises:
            ConchError: The version can't be loaded; the text says why.
        """

    def load_within(self, spec: ModelSpec, calls: ServerCalls) -> BackendModel:
        """As `load`, for backends whose models may call the server."""
        return self.load(spec)
