"""BLS: requests that models make of their server, for inference on other models and for model control.

`ServerCalls` is implemented here over the registry and in workers over the socket. `Waiter` and `Wait` show
what threads wait for, which deadlock detection reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from conch.core.admission import Admission
from conch.core.cold_models import ColdModelError
from conch.core.errors import ConchError, UnavailableError
from conch.core.model_control import LoadParameter, ModelControl
from conch.core.registry import Registry
from conch.core.request import InferenceRequest
from conch.core.servable import InlineClaim, Servable, all_ready

FactFinder = Callable[[str, str, str], object]
"""Finds a fact; the arguments are those of `ServerCalls.fact`."""


class Wait(Protocol):
    """A call that a thread waits for."""

    @property
    def caller(self) -> Waiter:
        """The instance that calls."""

    @property
    def core(self) -> InferenceRequest:
        """The request."""

    @property
    def parents(self) -> Sequence[InferenceRequest] | None:
        """The requests that the instance executes; None if unknown."""

    @property
    def since_ns(self) -> int:
        """Monotonic time of the call."""


class Waiter(Protocol):
    """An instance that may wait for its calls."""

    @property
    def name(self) -> str:
        """The instance's name."""

    @property
    def known_server(self) -> ServerCalls | None:
        """The server that it calls, if it has one."""

    @property
    def model(self) -> tuple[str, int]:
        """The model's identifier and version."""

    @property
    def thread(self) -> int:
        """Id of the thread that executes its batches."""

    @property
    def waiting(self) -> Wait | None:
        """The call that this thread waits for; None if none is known."""

    @property
    def loads(self) -> str:
        """The model whose load it waits for while the instance is created; empty for none."""

    @property
    def known_as(self) -> tuple[str, str]:
        """Names of its own model, with and without its namespace."""


class ServerCalls(Protocol):
    """The server as its models see it; thread-safe."""

    @property
    def waiters(self) -> set[Waiter]:
        """The instances in worker processes, with what they wait for."""

    @property
    def passes_blocks(self) -> bool:
        """True if blocks with tensors of workers may be shared with front processes, without a copy."""

    def find(self, request: InferenceRequest) -> Servable:
        """Resolves the model of a request. Raises ConchError: there is no such model."""

    def submit(
        self,
        request: InferenceRequest,
        may_claim: bool = False,
        model: Servable | None = None,
        *,
        parent: InferenceRequest | None = None,
    ) -> InlineClaim | None:
        """Admits a request; see `conch.core.admission.Admission.admit`."""

    def cancel(self, request: InferenceRequest) -> None:
        """Cancels a request."""

    def model_ready(self, name: str, version: str) -> bool:
        """True if a model is ready. Raises InvalidArgumentError: its version is no number and no label."""

    def fact(self, kind: str, name: str = "", version: str = "") -> object:
        """A fact of the server or of a model, as the HTTP API has it; may block.

        Args:
            kind: ``live``, ``ready``, ``server``, ``model``, ``statistics``, ``index``, ``ready_index``, or
                ``metrics``, which are Prometheus' text.
            name: The model of ``model`` and ``statistics``; empty for the statistics of all.
            version: Its version; empty for any.

        Raises:
            ConchError: There is no such model, or no server.
        """

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Loads or reloads a model, and returns when it is ready; see `ModelControl.load`."""

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Starts unloading a model; see `ModelControl.unload`."""


class Calls:
    """`ServerCalls` over a registry; without a `repository`, models can't load or unload others.

    `facts` finds what models ask of the server; None without one.
    """

    def __init__(
        self,
        registry: Registry,
        repository: ModelControl | None = None,
        passes_blocks: bool = False,
        facts: FactFinder | None = None,
    ) -> None:
        self.waiters: set[Waiter] = set()
        self.passes_blocks = passes_blocks
        self._facts = facts
        self._repository = repository
        self._registry = registry
        admission = Admission(registry, "model-call")
        self.find = admission.resolve
        self.submit = admission.admit
        self.cancel = admission.cancel

    def model_ready(self, name: str, version: str) -> bool:
        """See `ServerCalls.model_ready`."""
        self._registry.version_number(name, version)
        try:
            model = self._registry.resolve(name, version)
        except ColdModelError:
            return True
        except ConchError:
            return False
        return all_ready(model.readiness)

    def fact(self, kind: str, name: str = "", version: str = "") -> object:
        """See `ServerCalls.fact`."""
        if self._facts is None:
            raise UnavailableError("there is no server to ask")
        return self._facts(kind, name, version)

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """See `ServerCalls.load`."""
        self._loads().load(name, parameters)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """See `ServerCalls.unload`."""
        self._loads().unload(name, unload_dependents)

    def _loads(self) -> ModelControl:
        if self._repository is None:
            raise UnavailableError("models can't be loaded or unloaded from here")
        return self._repository
