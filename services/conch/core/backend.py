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

Outcome = Sequence[InferenceResponse | None] | BaseException | None
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


class AwaitableOutcome(Protocol):
    """A started batch whose outcome the calling thread may receive; see `BackendInstance.start_awaitable`.

    Either method is called, once, from any thread.
    """

    def wait(self, timeout_ns: int) -> None:
        """Receives the outcome; after the timeout it comes to another thread."""

    def detach(self) -> None:
        """Lets the outcome come to another thread. Either method is called once, from any thread."""


class BackendInstance(ABC):
    """One instance of a model: runs one batch at a time, possibly on another thread each time.

    Attributes:
        allows_inline: Whether the thread that received a request may run its batch. False for instances that
            hold the calling thread for long without computing.
        starts_async: Whether `start` runs its batches, without waiting for them.
        readiness: Its own readiness check, or None.
    """

    allows_inline: ClassVar[bool] = True
    starts_async: ClassVar[bool] = False
    readiness: Readiness | None = None

    @abstractmethod
    def execute(self, batch: Batch) -> Sequence[InferenceResponse | None] | None:
        """Runs a batch.

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

    def start(self, batch: Batch, done: Callable[[Outcome], None]) -> None:
        """Starts a batch and returns at once: for instances that run elsewhere, as in another process.

        Called with no lock held, by any thread, also one that must not block. May set `on_cancel` of the
        requests. An error it raises is the batch's outcome.

        Args:
            batch: The batch; the instance gets no other one before it is done and this has returned.
            done: Called exactly once, from any thread and possibly before this returns, with what `execute`
                would have returned or raised. It completes the requests, may start the next batch, and never
                raises; called without holding locks that `start` or `available` take.
        """
        raise NotImplementedError

    def start_awaitable(self, batch: Batch, done: Callable[[Outcome], None]) -> AwaitableOutcome | None:
        """As `start`, but lets the calling thread receive the outcome, where the instance supports it.

        For threads with time: the detour over another thread costs more than a quick batch.

        Args:
            batch: The batch.
            done: As for `start`; called by the waiting thread or, after its timeout, by another one.

        Returns:
            The handle that the caller waits for or detaches soon; None if the outcome comes as for `start`.
        """
        self.start(batch, done)
        return None

    def available(self, on_available: Callable[[], None]) -> bool:
        """Whether it can take a batch now; asked before each batch of instances with `starts_async`.

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

    def close(self) -> None:
        """Frees the instance; called once, when nothing runs on it."""


class BackendModel(ABC):
    """A model version loaded by a backend; what its instances share.

    Attributes:
        creates_in_parallel: Whether several threads may create instances at the same time. Long steps check
            `load_cancelled`.
        notes: What it does against its config; None where the backend takes none.
    """

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


class Backend(ABC):
    """Runs models of one kind.

    Attributes:
        default_model_file: Name of the file, or folder, in a version directory.
        platform: The config's ``platform`` of the backend's models, if it has one.
        cpu_instance_count: Default number of instances of a CPU group.
        needs_model_file: Whether a version directory without the file is an error.
        completion_runs_code: Whether `complete_config` may run code of the model.
        parameters: The ``CONCH_`` parameters that it reads in a config; a trailing ``_`` marks a prefix.
    """

    default_model_file: ClassVar[str]
    platform: ClassVar[str] = ""
    cpu_instance_count: ClassVar[int] = 1
    needs_model_file: ClassVar[bool] = True
    completion_runs_code: ClassVar[bool] = False
    parameters: ClassVar[tuple[str, ...]] = ()

    @property
    def uses_gpus(self) -> bool:
        """Whether a group of kind AUTO goes to the GPUs, if there are any."""
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

    def doubts(self, spec: ModelSpec) -> Iterable[str]:
        """Warnings about a load that will probably fail on this machine; runs no code of the model."""
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
