"""Model control: repository operations of the control plane, and the cancellation of loads.

A context variable carries the cancellation check of a load. Steps that take long, such as the installation of
packages, call `check_load_cancelled`; backends need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from conch.core.errors import UnavailableError

LoadParameter = bool | int | str | bytes
"""A parameter of a load; bytes are the content of a file."""
NOT_RESIDENT = "not resident"
"""Reason of models that are not in memory, and are loaded for their first request."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository index; a model that was never loaded has only a name.

    Attributes:
        labels: The labels of the version, sorted.
        traffic: The percentage of requests without a version that a route gives it; None without a route.
    """

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
    labels: tuple[str, ...] = ()
    traffic: float | None = None


class ModelControl(Protocol):
    """Index, load and unload of models."""

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """All models of the repositories with the state of each version."""

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Loads or reloads a model, and returns when it is ready.

        Raises:
            ConchError: The model can't be loaded; the text is Triton's.
        """

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Starts to unload a model; does nothing if it is not loaded.

        Raises:
            ConchError: Unloading is not allowed.
        """

    def set_label(self, name: str, label: str, version: int | None) -> None:
        """Has a label of a model name a ready version; None removes it.

        Raises:
            ConchError: There is no such model, version or label, or labels can't be changed this way.
        """


class ClientModelControl(ModelControl, Protocol):
    """Model control for clients, whose rights may differ."""

    def load(self, name: str, parameters: Mapping[str, LoadParameter], may_upload: bool = True) -> None:
        """Loads or reloads a model; `may_upload` tells whether this client may send files.

        Raises:
            ConchError: The model can't be loaded, or not by this client.
        """


class ArchiveControl(Protocol):
    """Models in directories that are registered while the server runs."""

    def register(self, name: str, directory: Path, main: str = "") -> str:
        """Loads the model of a directory under a name; returns its identifier.

        Args:
            name: Name for the model.
            directory: One model, or a repository with one model or one ensemble and its parts.
            main: Directory of the model, where several could be meant.

        Raises:
            AlreadyExistsError: The directory is registered.
            ConchError: The model can't be loaded; nothing stays registered.
        """

    def unregister(self, model: str, timeout_s: float) -> bool:
        """Unloads a model by its identifier; True if it has left memory in time."""


LoadCancelled = Callable[[], bool]
"""Returns True once the load is cancelled."""


def never() -> bool:
    """A `LoadCancelled` for loads that can't be cancelled."""
    return False


_cancelled: ContextVar[LoadCancelled] = ContextVar("cancelled", default=never)


def load_cancelled() -> LoadCancelled:
    """The cancellation check of the load on this thread; always False outside of loads."""
    return _cancelled.get()


def check_load_cancelled() -> None:
    """Raises UnavailableError if the load on this thread is cancelled; called between its steps."""
    if load_cancelled()():
        raise UnavailableError("the load was stopped")


@contextmanager
def cancellable_load(cancelled: LoadCancelled) -> Iterator[None]:
    """Runs a load on this thread that ends once `cancelled` returns True."""
    token = _cancelled.set(cancelled)
    try:
        yield
    finally:
        _cancelled.reset(token)
