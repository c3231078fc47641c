"""What a model may ask of the server that it runs in: other models, and what is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from conch.core.dispatch import Dispatcher
from conch.core.errors import ConchError, UnavailableError
from conch.core.readiness import all_ready
from conch.core.registry import Registry, parse_version
from conch.core.request import InferenceRequest
from conch.core.servable import Leadable, Servable
from conch.core.server_core import LoadParameter, RepositoryAgent


class Wait(Protocol):
    """A call for which a thread waits."""

    @property
    def caller(self) -> Waiter:
        """Who calls."""

    @property
    def core(self) -> InferenceRequest:
        """The request."""

    @property
    def parents(self) -> Sequence[InferenceRequest] | None:
        """The requests for which it is made; None where that is not known."""

    @property
    def since_ns(self) -> int:
        """When it was made."""


class Waiter(Protocol):
    """An instance of a model, as one that may wait for what it asks of the server."""

    @property
    def name(self) -> str:
        """The instance's name."""

    @property
    def known_server(self) -> ServerCalls | None:
        """The server that it calls."""

    @property
    def model(self) -> tuple[str, int]:
        """The model's identifier and version."""

    @property
    def thread(self) -> int:
        """What identifies the thread that executes its batches."""

    @property
    def waiting(self) -> Wait | None:
        """The call that this thread waits for; None where it is not known to wait for one."""

    @property
    def loads(self) -> str:
        """The model that it waits for, to be loaded, while it is being made itself; empty for none."""

    @property
    def known_as(self) -> tuple[str, str]:
        """What its own model is known as, with its namespace and without."""


class ServerCalls(Protocol):
    """The server, for its models; usable from any thread."""

    @property
    def waiters(self) -> set[Waiter]:
        """The instances that run in processes of their own: nobody else knows what these wait for."""

    def find(self, request: InferenceRequest) -> Servable:
        """The model that a request would go to.

        Raises:
            ConchError: There is no such model.
        """

    def submit(
        self, request: InferenceRequest, may_lead: bool = False, model: Servable | None = None
    ) -> Leadable | None:
        """Runs a request through the scheduler of its model; see `conch.core.dispatch.Dispatcher.submit`."""

    def cancel(self, request: InferenceRequest) -> None:
        """Says that nobody waits for a request any more."""

    def model_ready(self, name: str, version: str) -> bool:
        """Whether a model is ready.

        Raises:
            InvalidArgumentError: The version is not a number.
        """

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Loads or reloads a model, and returns when it is ready; see `RepositoryAgent.load`."""

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Starts unloading a model; see `RepositoryAgent.unload`."""


class Calls:
    """`ServerCalls` over a registry.

    Args:
        registry: The models.
        repository: What loads and unloads models; None where models must not.
    """

    def __init__(self, registry: Registry, repository: RepositoryAgent | None = None) -> None:
        self.waiters: set[Waiter] = set()
        self._repository = repository
        self._registry = registry
        dispatcher = Dispatcher(registry)
        self.find = dispatcher.find
        self.submit = dispatcher.submit
        self.cancel = dispatcher.cancel

    def model_ready(self, name: str, version: str) -> bool:
        """See `ServerCalls.model_ready`."""
        parse_version(version)
        try:
            model = self._registry.resolve(name, version)
        except ConchError:
            return False
        return all_ready(model.readiness)

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """See `ServerCalls.load`."""
        self._loads().load(name, parameters)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """See `ServerCalls.unload`."""
        self._loads().unload(name, unload_dependents)

    def _loads(self) -> RepositoryAgent:
        if self._repository is None:
            raise UnavailableError("models can't be loaded or unloaded from here")
        return self._repository
