"""The one door into the core for every front end: find the model, check, queue, answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from conch.core.dispatch import Dispatcher
from conch.core.errors import UnavailableError
from conch.core.readiness import Readiness
from conch.core.registry import Registry
from conch.core.request import InferenceRequest
from conch.core.servable import Leadable, Servable

EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
"""Protocol extensions in the order Triton lists them."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository index; a model that was never loaded has only a name."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


LoadParameter = bool | int | str | bytes


class RepositoryAgent(Protocol):
    """What front ends ask of the control plane."""

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """All models of the repositories with the state of each version."""

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Loads or reloads a model, and returns when it is ready.

        Raises:
            ConchError: The model can't be loaded; the text is Triton's.
        """

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Starts unloading a model; one that is not loaded is no error.

        Raises:
            ConchError: Unloading is not allowed.
        """


class ServerCore:
    """What a front end needs: models by name, and a way to run requests on them.

    Attributes:
        registry: The models.
        agent: The control plane's side of the repository.
        server_id: Name of the server in its metadata.
        version: Version of the server in its metadata.
        model_for: Looks up the model for a request; see `Dispatcher.find`.
    """

    def __init__(
        self,
        registry: Registry,
        agent: RepositoryAgent,
        server_id: str,
        version: str,
        models_ready: Callable[[], bool],
    ) -> None:
        self.registry = registry
        self._dispatcher = Dispatcher(registry)
        self.model_for = self._dispatcher.find
        self.agent = agent
        self.server_id = server_id
        self.version = version
        self._models_ready = models_ready
        self._stopping = False
        self._draining = False
        self._started = False

    @property
    def live(self) -> bool:
        """Whether the server has started and is not stopping.

        Raises:
            UnavailableError: The server is stopping.
        """
        self.check_running()
        return self._started

    @property
    def ready(self) -> bool:
        """Whether the server takes requests for all the models it should have.

        Raises:
            UnavailableError: The server is stopping.
        """
        return self.live and not self._draining and self._models_ready()

    def readiness(self) -> Iterator[Readiness]:
        """The checks that the loaded models make of themselves."""
        for entry in self.registry.entries.values():
            for model in entry.ready.values():
                yield from model.readiness

    def started(self) -> None:
        """Says that the models of the start have been loaded."""
        self._started = True

    def draining(self) -> None:
        """Says that no more requests are wanted: the server is not ready, but goes on answering them."""
        self._draining = True

    def stopping(self) -> None:
        """Says that the server stops: from now on it is neither live nor ready."""
        self._stopping = True

    def check_running(self) -> None:
        """Raises UnavailableError once the server is stopping."""
        if self._stopping:
            raise UnavailableError("Server exiting")

    def model(self, name: str, version: str = "") -> Servable:
        """The model that serves a name and version; see `Registry.resolve` for the errors."""
        return self.registry.resolve(name, version)

    def submit(
        self, request: InferenceRequest, may_lead: bool = False, model: Servable | None = None
    ) -> Leadable | None:
        """Runs a request; see `Dispatcher.submit`."""
        return self._dispatcher.submit(request, may_lead, model)

    def cancel(self, request: InferenceRequest) -> None:
        """Says that nobody waits for a request any more."""
        self._dispatcher.cancel(request)
