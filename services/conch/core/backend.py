"""The interface between the core and whatever runs models.

A backend is found by name through the entry-point group ``conch.backends`` and imported when the first
model needs it. A backend that maps arrays to arrays derives from `conch.backends.arrays.ArrayBackend`
and is about thirty lines; one that wants to see requests implements `Backend` itself.
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
"""What `BackendInstance.execute` returns, or raises."""


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
    """A batch whose outcome a thread may receive itself; see `BackendInstance.start_awaitable`."""

    def wait(self, timeout_ns: int) -> None:
        """Receives it, unless it takes longer than that; where it has not come then, it comes elsewhere."""

    def detach(self) -> None:
        """Has it come elsewhere. Either of the two is to be called, once, from any thread."""


class BackendInstance(ABC):
    """One instance of a model: runs one batch at a time, possibly on another thread each time.

    Attributes:
        leads: Whether the thread that received a request may run its batch. False for instances that
            hold the calling thread for long without computing.
        begins: Whether its batches are begun with `begin`, which does not wait for them.
        readiness: A check that it makes of itself when somebody asks whether it is ready, or None.
    """

    allows_inline: ClassVar[bool] = True
    starts_async: ClassVar[bool] = False
    readiness: Readiness | None = None

    @abstractmethod
    def execute(self, batch: Batch) -> Sequence[InferenceResponse | None] | None:
        """Runs a batch.

        May set ``compute_input_end_ns`` and ``compute_output_start_ns`` of the batch; where it does not,
        all its time counts as inference.

        Returns:
            One response for each request, in their order; an error in one of them does not touch the
            others, and None in place of one says that the model calls `InferenceRequest.respond` for that
            request itself; if ``compute_output_start_ns`` is not set then, the execution goes on until
            that happens for the first time. A decoupled model returns None and does so for all of them.

        Raises:
            Exception: The batch failed; every request in it is answered with the error.
        """

    def start(self, batch: Batch, done: Callable[[Outcome], None]) -> None:
        """Begins a batch and returns at once: for instances that run somewhere else, as in another process.

        Called with no lock held, by any thread, also one that must not be held up. May set `on_cancel` of
        the requests. What it raises counts as the batch's outcome.

        Args:
            batch: The batch; the instance gets no other one before it is done and this has returned.
            done: To be called exactly once, from any thread and possibly before this returns, with what
                `execute` would have returned or raised. It answers the requests, possibly begins the next
                batch, and never raises; to be called without holding locks that `begin` or `available` take.
        """
        raise NotImplementedError

    def start_awaitable(self, batch: Batch, done: Callable[[Outcome], None]) -> AwaitableOutcome | None:
        """As `begin`, but has the outcome come to a thread that waits for it, if there is such a way.

        For threads that have time: the detour over another thread costs more than a quick batch.

        Args:
            batch: The batch.
            done: To be called exactly once, as for `begin`; by who waits or, when time is up, elsewhere.

        Returns:
            What the caller is to wait with soon, or to leave; None where the outcome comes as for `begin`.
        """
        self.start(batch, done)
        return None

    def available(self, again: Callable[[], None]) -> bool:
        """Whether it can be given a batch now; asked of instances with `begins` before each batch.

        Asked with a lock of the model held, so it must not wait; possibly several times for one batch.

        Args:
            again: Called once it can, if it can't now; from any thread, but not from within this, and not
                while holding locks that this takes. Those given when it could are not to be called.
        """
        return True

    def set_warm_up(self, warm_up: Callable[[BackendInstance], None]) -> None:
        """Says how it was warmed up; for instances that lose what that was for, and go on after a new start.

        Args:
            warm_up: To be called before requests of others reach the instance again, with an instance that
                runs batches where they would; raises if one fails.
        """

    def worker(self) -> WorkerStatus | None:
        """What its process is in, if it has one of its own."""
        return None

    def close(self) -> None:
        """Frees what the instance holds; called once, when nothing runs on it any more."""


class BackendModel(ABC):
    """A model version loaded by a backend; what its instances share.

    Attributes:
        creates_in_parallel: Whether several threads may make instances at the same time. What takes long asks
            `load_cancelled`.
        notes: What it does against its config; None where the backend takes none.
    """

    creates_in_parallel: ClassVar[bool] = False
    notes: ConfigNotes | None = None

    @abstractmethod
    def create_instance(self, placement: Placement) -> BackendInstance:
        """Makes an instance for a device.

        Raises:
            ConchError: The instance can't be made; the model's load fails with the message.
        """

    def close(self) -> None:
        """Frees what the instances shared; called once, after all of them were closed."""


class Backend(ABC):
    """Runs models of one kind.

    Attributes:
        default_model_file: Name of the file, or folder, in a version directory.
        platform: Value of the config's ``platform``, where the backend has one.
        cpu_instance_count: Instances of a group on the CPU whose config names no count.
        needs_model_file: Whether a version directory without the file is an error.
        completion_runs_code: Whether `complete_config` may run code that comes with the model.
        parameters: The parameters with ``CONCH_`` that it reads in a config; one that ends with ``_`` is the
            beginning of any number of names.
    """

    default_model_file: ClassVar[str]
    platform: ClassVar[str] = ""
    cpu_instance_count: ClassVar[int] = 1
    needs_model_file: ClassVar[bool] = True
    completion_runs_code: ClassVar[bool] = False
    parameters: ClassVar[tuple[str, ...]] = ()

    @property
    def uses_gpus(self) -> bool:
        """Whether a group that leaves its kind open goes to the GPUs, where there are any."""
        return True

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Fills in what the config leaves out and the model's file can tell.

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
        """Checks what can be checked of a model version without loading it on a device or running its code.

        Raises:
            ConchError: It could not be loaded; the text says why.
        """

    def doubts(self, spec: ModelSpec) -> Iterable[str]:
        """Finds what a load will probably fail of on this machine, without running the model's code."""
        return ()

    @abstractmethod
    def load(self, spec: ModelSpec) -> BackendModel:
        """Loads a model version.

        Raises:
            ConchError: It can't be loaded; the text says why.
        """

    def load_within(self, spec: ModelSpec, calls: ServerCalls) -> BackendModel:
        """The same, for backends whose models may call the server that they run in."""
        return self.load(spec)
