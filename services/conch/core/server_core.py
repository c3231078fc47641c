"""The one door into the core for every front end: find the model, check, queue, answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from conch.core.errors import UnavailableError
from conch.core.instances.runner import Runner, RunnerClosedError
from conch.core.model import Model
from conch.core.registry import Registry
from conch.core.request import InferenceRequest

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
        self.agent = agent
        self.server_id = server_id
        self.version = version
        self._models_ready = models_ready
        self._stopping = False
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
        return self.live and self._models_ready()

    def started(self) -> None:
        """Says that the models of the start have been loaded."""
        self._started = True

    def stopping(self) -> None:
        """Says that the server stops: from now on it is neither live nor ready."""
        self._stopping = True

    def check_running(self) -> None:
        """Raises UnavailableError once the server is stopping."""
        if self._stopping:
            raise UnavailableError("Server exiting")

    def model(self, name: str, version: str = "") -> Model:
        """The model that serves a name and version; see `Registry.resolve` for the errors."""
        return self.registry.resolve(name, version)

    def submit(
        self, request: InferenceRequest, may_lead: bool = False, model: Model | None = None
    ) -> Runner | None:
        """Runs a request; its responder gets every outcome except those raised here.

        Args:
            request: The request.
            may_lead: Whether the caller is willing to run batches soon.
            model: The model its name and version stand for, if the caller has looked it up.

        Returns:
            What the caller has to lead or hand over soon, only if it may lead; else None.

        Raises:
            ConchError: There is no such model, or the request does not fit it.
        """
        while True:
            if model is None:
                model = self.registry.resolve(request.model_name, request.model_version)
            try:
                return model.submit(request, may_lead)
            except RunnerClosedError:
                # Replaced between the look-up and the call: its successor is published before it
                # closes, so looking again finds that, or says that the model is gone.
                decoupled = model.spec.decoupled
                model = self.registry.resolve(request.model_name, request.model_version)
                if model.spec.decoupled is not decoupled:
                    # The front end has made up its mind how to answer by what it knew of the old one.
                    raise UnavailableError(
                        f"model '{request.model_name}' has become {'' if decoupled is False else 'not '}"
                        f"decoupled while the request came in; send it again"
                    ) from None

    def cancel(self, request: InferenceRequest) -> None:
        """Says that nobody waits for a request any more."""
        if request.model is not None:
            request.model.cancel(request)
        else:
            request.cancelled = True
