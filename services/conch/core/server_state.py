"""The state of a server that front ends share: models, stage, readiness and drain.

Owns: the `ServerStages`; creates an `Admission` for each front end.
Threads and locks: any thread; the registry and the stages do their own locking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conch.core.admission import Admission, HeldBytes
from conch.core.cold_models import ColdModelError
from conch.core.errors import ConchError, UnavailableError
from conch.core.model_control import ClientModelControl
from conch.core.registry import Registry
from conch.core.request import InferenceRequest
from conch.core.request_log import RequestLog
from conch.core.servable import Readiness, Servable, all_ready
from conch.core.server_stage import ServerStages, Stage, model_ready, server_live, server_ready

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


class ServerState:
    """Models, stage and readiness of one server.

    Attributes:
        registry: The models.
        server_id: Name of the server in its metadata.
        version: Version of the server in its metadata.
        stages: The stage of the server.
        request_log: Logs and traces requests; None for neither.

    Args:
        agent: The control plane.
        models_ready: True once all initial models are loaded.
        strict_readiness: True if readiness requires `models_ready` and the models' own readiness checks.
        new_admission: Makes admissions that clients use; takes the arguments of `Admission`.
        bind: Binds the regions of clients' requests; see `Admission`.
    """

    def __init__(
        self,
        registry: Registry,
        agent: ClientModelControl,
        server_id: str,
        version: str,
        models_ready: Callable[[], bool],
        strict_readiness: bool = True,
        request_log: RequestLog | None = None,
        new_admission: Callable[..., Admission] = Admission,
        bind: Callable[[InferenceRequest], None] | None = None,
    ) -> None:
        self.registry = registry
        self._new_admission = new_admission
        self._bind = bind
        self._agent = agent
        self.server_id = server_id
        self.version = version
        self.stages = ServerStages()
        self.request_log = request_log
        self._models_ready = models_ready
        self._strict = strict_readiness

    def admission(
        self, protocol: str, request_log: RequestLog | None = None, held: HeldBytes | None = None
    ) -> Admission:
        """The way in for one front end; `protocol` is its name in the request log."""
        log = request_log or self.request_log
        return self._new_admission(self.registry, protocol, self.stages, log, self._bind, held)

    @property
    def agent(self) -> ClientModelControl:
        """The control plane. Raises UnavailableError: the start failed."""
        self.check_started()
        return self._agent

    @property
    def live(self) -> bool:
        """True if the server is live. Raises UnavailableError: the server is stopping."""
        self.check_running()
        return self.alive

    @property
    def alive(self) -> bool:
        """As `live`, but False instead of an error while the server stops."""
        return server_live(self.stages.stage)

    @property
    def ready(self) -> bool:
        """True if the server is ready. Raises UnavailableError: the server is stopping."""
        self.check_running()
        return self.serving

    @property
    def serving(self) -> bool:
        """As `ready`, but False instead of an error while the server stops."""
        return server_ready(self.stages.stage, self._strict, self._all_ready)

    @property
    def loaded(self) -> bool:
        """As `serving`, but without the models' own readiness checks, which may take seconds."""
        return server_ready(self.stages.stage, self._strict, self._models_ready)

    def model_ready(self, name: str, version: str) -> bool:
        """True if a model is ready, or is loaded by a request for it.

        Raises:
            UnavailableError: The server is stopping, or its start failed.
            InvalidArgumentError: The version is neither a number nor a label of the model.
        """
        if self.stages.stage in (Stage.FAILED, Stage.STOPPING):
            raise UnavailableError("Server not ready")
        self.registry.version_number(name, version)

        def ready() -> bool:
            try:
                model = self.model(name, version)
            except ColdModelError:
                return True  # a request for it loads it; clients look before they send one
            except ConchError:
                return False
            return all_ready(model.readiness)

        return model_ready(self.stages.stage, ready)

    def _all_ready(self) -> bool:
        return self._models_ready() and all_ready(self.readiness())

    def readiness(self) -> Iterator[Readiness]:
        """The readiness checks of all loaded models."""
        for models in self.registry.checked.values():
            for model in models:
                yield from model.readiness

    def started(self) -> None:
        """Enters SERVING: the initial models are loaded."""
        self.stages.advance(Stage.SERVING)

    def failed(self) -> None:
        """Enters FAILED: the server is neither live nor ready and refuses all requests."""
        self.stages.advance(Stage.FAILED)
        self.stages.refusing = True

    def drain(self) -> bool:
        """Enters DRAINING: not ready, but still serving; returns False if it was entered before."""
        return self.stages.advance(Stage.DRAINING)

    def stopping(self) -> None:
        """Enters STOPPING: neither live nor ready."""
        self.stages.advance(Stage.STOPPING)

    def refuse_new(self) -> None:
        """Refuses all requests except those of open sequences."""
        self.stages.refusing = True

    @property
    def sequences(self) -> int:
        """Number of live sequences of all models."""
        models = [model for entry in self.registry.entries.values() for model in entry.ready.values()]
        draining = [model for models in self.registry.draining.values() for model in models]
        return sum(model.live_sequences for model in {*models, *draining})

    def end_sequence(self, name: str, correlation_id: int | str) -> None:
        """Ends a live sequence of a model, also of a draining version, without a further request."""
        entries = self.registry.entries
        ready = [model for each in self.registry.identifiers(name) for model in entries[each].ready.values()]
        for model in (*ready, *self.registry.draining_of(name)):
            model.end_sequence(correlation_id)

    def check_running(self) -> None:
        """Raises UnavailableError once the server is stopping."""
        if self.stages.stage is Stage.STOPPING:
            raise UnavailableError("Server exiting")

    def check_started(self) -> None:
        """Raises UnavailableError if the start failed."""
        if self.stages.stage is Stage.FAILED:
            raise UnavailableError("Server not ready")

    def model(self, name: str, version: str = "") -> Servable:
        """Resolves a name and version; see `Registry.resolve` for the errors."""
        self.check_started()
        return self.registry.resolve(name, version)
