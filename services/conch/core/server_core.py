"""The one door into the core for every front end: find the model, check, queue, answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from conch.core.dispatch import Dispatcher
from conch.core.errors import ConchError, UnavailableError
from conch.core.health import model_ready, server_live, server_ready
from conch.core.readiness import Readiness, all_ready
from conch.core.registry import Registry, parse_version
from conch.core.request import InferenceRequest
from conch.core.servable import Servable
from conch.core.stage import Life, Stage
from conch.core.watch import RequestLog

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


class ClientAgent(RepositoryAgent, Protocol):
    """The same for clients, some of which may do less than others."""

    def load(self, name: str, parameters: Mapping[str, LoadParameter], may_upload: bool = True) -> None:
        """Loads or reloads a model, and returns when it is ready.

        Args:
            name: Model name.
            parameters: See `RepositoryAgent.load`.
            may_upload: Whether the caller may bring files.

        Raises:
            ConchError: The model can't be loaded, or not by this caller.
        """


class ServerCore:
    """What a front end needs: models by name, and a way to run requests on them.

    Attributes:
        registry: The models.
        server_id: Name of the server in its metadata.
        version: Version of the server in its metadata.
        model_for: Looks up the model for a request; see `Dispatcher.find`.
        submit: Runs a request; see `Dispatcher.submit`.
        cancel: Says that nobody waits for a request any more; see `Dispatcher.cancel`.
        life: The stage that the server is in.
        request_log: What front ends tell of requests; None where nobody wants to know.

    Args:
        registry: The models.
        agent: The control plane's side of the repository.
        server_id: Name of the server in its metadata.
        version: Version of the server in its metadata.
        models_ready: Whether all models are loaded that are to be.
        strict_readiness: Whether the server is ready only if they are, and say so themselves.
        request_log: What front ends tell of requests.
    """

    def __init__(
        self,
        registry: Registry,
        agent: ClientAgent,
        server_id: str,
        version: str,
        models_ready: Callable[[], bool],
        strict_readiness: bool = True,
        request_log: RequestLog | None = None,
    ) -> None:
        self.registry = registry
        dispatcher = Dispatcher(registry)
        self.model_for = dispatcher.find
        self.submit = dispatcher.submit
        self.cancel = dispatcher.cancel
        self._agent = agent
        self.server_id = server_id
        self.version = version
        self.life = Life()
        self.request_log = request_log
        self._models_ready = models_ready
        self._strict = strict_readiness
        self._refusing = False

    @property
    def agent(self) -> ClientAgent:
        """The control plane's side of the repository.

        Raises:
            UnavailableError: The server could not start.
        """
        self.check_started()
        return self._agent

    @property
    def live(self) -> bool:
        """Whether the server is alive.

        Raises:
            UnavailableError: The server is stopping.
        """
        self.check_running()
        return server_live(self.life.stage)

    @property
    def ready(self) -> bool:
        """Whether the server is to be sent requests; see `conch.core.health`.

        Raises:
            UnavailableError: The server is stopping.
        """
        self.check_running()
        return server_ready(self.life.stage, self._strict, self._all_ready)

    @property
    def serving(self) -> bool:
        """The same, where being about to stop is no error."""
        return server_ready(self.life.stage, self._strict, self._all_ready)

    @property
    def loaded(self) -> bool:
        """As `serving`, but without the checks that models make of themselves, which may take seconds."""
        return server_ready(self.life.stage, self._strict, self._models_ready)

    def model_ready(self, name: str, version: str) -> bool:
        """Whether the server is to be sent requests for a model.

        Raises:
            UnavailableError: The server is stopping, or could not start.
            InvalidArgumentError: The version is not a number.
        """
        if self.life.stage in (Stage.FAILED, Stage.STOPPING):
            raise UnavailableError("Server not ready")
        parse_version(version)

        def ready() -> bool:
            try:
                model = self.model(name, version)
            except ConchError:
                return False
            return all_ready(model.readiness)

        return model_ready(self.life.stage, ready)

    def _all_ready(self) -> bool:
        return self._models_ready() and all_ready(self.readiness())

    def readiness(self) -> Iterator[Readiness]:
        """The checks that the loaded models make of themselves."""
        for entry in self.registry.entries.values():
            for model in entry.ready.values():
                yield from model.readiness

    def started(self) -> None:
        """Says that the models of the start have been loaded."""
        self.life.advance(Stage.SERVING)

    def failed(self) -> None:
        """Says that the server could not start: it is neither live nor ready, and refuses all requests."""
        self.life.advance(Stage.FAILED)
        self._refusing = True

    def drain(self) -> bool:
        """Makes the server not ready for good; it goes on answering whatever comes.

        Returns:
            Whether it was not draining before.
        """
        return self.life.advance(Stage.DRAINING)

    def stopping(self) -> None:
        """Says that the server stops: from now on it is neither live nor ready."""
        self.life.advance(Stage.STOPPING)

    def refuse_new(self) -> None:
        """Has `check_takes` refuse all requests but those that go on with a sequence."""
        self._refusing = True

    @property
    def sequences(self) -> int:
        """How many sequences are live, in all models."""
        models = [model for entry in self.registry.entries.values() for model in entry.ready.values()]
        leaving = [model for models in self.registry.draining.values() for model in models]
        return sum(model.held for model in {*models, *leaving})

    def check_running(self) -> None:
        """Raises UnavailableError once the server is stopping."""
        if self.life.stage is Stage.STOPPING:
            raise UnavailableError("Server exiting")

    def check_started(self) -> None:
        """Raises UnavailableError if the server could not start."""
        if self.life.stage is Stage.FAILED:
            raise UnavailableError("Server not ready")

    def check_takes(self, request: InferenceRequest) -> None:
        """Raises UnavailableError for a request that comes too late; see `refuse_new`."""
        if self._refusing:
            self._check_continues(request)

    def _check_continues(self, request: InferenceRequest) -> None:
        self.check_started()
        if request.correlation_id:
            if request.sequence_start:
                raise UnavailableError(
                    "Server is stopping, scheduler for model has stopped accepting new inference requests"
                )
            try:
                if self.model_for(request).continues(request):
                    return
            except ConchError:
                pass
        raise UnavailableError("Server exiting")

    def model(self, name: str, version: str = "") -> Servable:
        """The model that serves a name and version; see `Registry.resolve` for the errors."""
        self.check_started()
        return self.registry.resolve(name, version)
