"""`Door`: all that a front end knows of the core.

Requests to models pass an `Admission`, one for each kind of caller. Everything else that clients ask is an
operation of the table, and passes `Door.ask`, which finds the thread for it, checks its caller, and waits
where it needs a model that is not in memory.

Threads and locks: any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from conch.access.access_guard import AccessGuard
from conch.core.admission import Admission, HeldBytes
from conch.core.model_control import ArchiveControl
from conch.core.registry import Entry
from conch.core.request_log import Caller, RequestLog
from conch.core.spec import ModelSpec
from conch.door.operation_table import Operation

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")
AnswerT = TypeVar("AnswerT")


MakeLog = Callable[[RequestLog | None], RequestLog]


class ServedModels(Protocol):
    """The models of a server, to be read."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Models by identifier; another mapping after each change."""

    def identifiers(self, name: str) -> list[str]:
        """The identifiers of a name."""

    def name_of(self, identifier: str) -> str:
        """The name of an identifier."""

    def labels(self, name: str) -> Mapping[str, int]:
        """The versions that the labels of a model name."""

    def loads_on_demand(self, name: str) -> bool:
        """True if a request has the model of a name loaded, of which no version serves.

        Raises:
            ConchError: Its load has failed a short time ago.
        """


class Door(ABC):
    """The core of a server.

    Args:
        server_id: Name of the server in its metadata.
        version: Version of the server in its metadata.
        models: The models.
        archives: Loads models from directories that a provider of routes names; None for none.
        held: Counts the bytes of clients' requests.
    """

    def __init__(
        self,
        server_id: str,
        version: str,
        models: ServedModels,
        archives: ArchiveControl | None,
        held: HeldBytes,
    ) -> None:
        self.server_id = server_id
        self.version = version
        self.models = models
        self.archives = archives
        self.held = held

    @property
    @abstractmethod
    def alive(self) -> bool:
        """True if the server is live; False while it stops."""

    @property
    @abstractmethod
    def serving(self) -> bool:
        """True if the server is ready; may ask models for their readiness, which takes seconds for some."""

    @property
    @abstractmethod
    def loaded(self) -> bool:
        """As `serving`, but without asking models."""

    @abstractmethod
    def check_running(self) -> None:
        """Raises UnavailableError if the start failed, and once the server is stopping."""

    @abstractmethod
    def admission(self, protocol: str, log: MakeLog | None = None) -> Admission:
        """The way in for requests of one front end.

        Args:
            protocol: Its name in the request log.
            log: Makes the log of its requests of that of the server; None for the server's.
        """

    @abstractmethod
    def ask(
        self,
        operation: Operation[RequestT, ResultT],
        read: Callable[[], RequestT],
        write: Callable[[ResultT], AnswerT],
        caller: Caller | None = None,
        guard: AccessGuard | None = None,
        size: int = 0,
    ) -> Future[AnswerT]:
        """Runs an operation, on the thread that its kind has.

        Args:
            operation: The operation.
            read: Makes the request, on that thread.
            write: Makes the answer of the result, on that thread too: it may be long.
            caller: The call; None for the server itself.
            guard: Checks the caller, whom the port has identified; None for no check.
            size: Bytes that the caller holds.

        Returns:
            The answer, or the error of `read`, of the operation or of `write`; a `ConchError` also if the
            server stops or too much waits. Work that has not begun is dropped if the future is cancelled.
        """

    @abstractmethod
    def check(self, operation: Operation[Any, Any], subject: str = "") -> None:
        """Checks whether an operation is allowed at all, before its request is read.

        Args:
            operation: The operation.
            subject: The model that it names; empty for none.

        Raises:
            ConchError: It is not.
        """

    @abstractmethod
    def describe(self, model: str, version: str) -> ModelSpec:
        """The description of a version in memory; any version of a route has the same inputs.

        Raises:
            ConchError: There is no such version in memory.
        """

    @abstractmethod
    def end_sequence(self, model: str, correlation_id: int | str) -> None:
        """Ends a live sequence of a model without a further request."""
