"""A server in this process.

It is made of an access policy, the registry of models, a response cache, the agent of the control plane, a
planner, tracing, the state that front ends share, and parts: ports, and what add-ons bring
(`server_components`; `conch.parts.server_part` has the order of the parts).

`server_lifecycle` starts and stops it. The order of a start:

1. the access policy is followed; all parts check their addresses
2. the parts that show loads start
3. the models load, and parts check them
4. the other parts start, then the planner

The order of a stop:

1. the server is not ready, for the drain delay; then STOPPING: loads end, changes are refused
2. live sequences end
3. the parts finish requests, close connections, and send what they have collected
4. the models are unloaded; the parts close, so that the control port and the console can show the stop
"""

from __future__ import annotations

from collections.abc import Iterable

from conch.backends import load_backend
from conch.core.backend import FindBackend
from conch.core.custom_metrics import FAMILIES, CustomFamilies
from conch.core.model_control import IndexEntry
from conch.core.registry import Registry
from conch.core.server_state import ServerState
from conch.frontends.grpc.grpc_methods import GrpcMethods, MethodOptions
from conch.observability.logging.access_log import AccessLog
from conch.observability.logging.audit_log import AuditLog
from conch.observability.logging.log_settings import LogControl
from conch.process.banner import Announcement, start_announcement
from conch.process.endpoint import Endpoint
from conch.process.exposure import exposure
from conch.server_components import build_components
from conch.server_lifecycle import Lifecycle
from conch.server_options import PartOptions
from conch_control.lifecycle.agent import Agent
from conch_control.lifecycle.startup_models import LoadFailure
from conch_control.repository.source import Repository


class InferenceServer:
    """A whole server in this process.

    Args:
        options: The options of all parts.
        logs: The log settings; None if logging belongs to the program around the server.
        access_log: Logs requests; None for no log. The caller closes it.
        audit_log: Logs what the access policy refuses and allows; None for no log. The caller closes it.
        get_backend: Finds a backend by name.
        repositories: Repositories besides those of the options.
        families: Receives the metrics that models define while they load.

    Attributes:
        core: State of the server: its models and its stage.
        agent: The control plane.
        exposure: A sentence on what is open to which clients.

    Raises:
        ConchError: The options can't work, such as a malformed location of a repository. Repositories are
            first accessed by `start`.
    """

    def __init__(
        self,
        options: PartOptions,
        logs: LogControl | None = None,
        access_log: AccessLog | None = None,
        audit_log: AuditLog | None = None,
        *,
        get_backend: FindBackend = load_backend,
        repositories: Iterable[Repository] = (),
        families: CustomFamilies = FAMILIES,
    ) -> None:
        components = build_components(
            options,
            logs,
            access_log,
            audit_log,
            get_backend=get_backend,
            repositories=repositories,
            families=families,
            drain=self.drain,
        )
        self._context = components.context
        self.core: ServerState = components.context.core.state
        self.agent: Agent = components.context.control.agent
        self.exposure = exposure(options)
        self._lifecycle = Lifecycle(components, options)

    def start(self) -> None:
        """Starts the parts that come before the models, loads these, then starts the rest.

        With `listen_while_loading` all parts start before the models.

        Raises:
            ConchError: A port is taken, a repository can't be read with `exit_without_repository`, a model
                failed with `exit_on_error`, or the server was stopped.
        """
        self._lifecycle.start()

    def drain(self) -> None:
        """Makes the server not ready; it goes on answering requests."""
        self._lifecycle.drain()

    def stop(self) -> bool:
        """Drains, finishes open requests within the exit timeout, unloads; also cancels a start.

        Returns:
            True if all open requests were finished in time.
        """
        return self._lifecycle.stop()

    @property
    def failures(self) -> list[LoadFailure]:
        """The startup models that failed to load, set by `start`."""
        return self._lifecycle.failures

    @property
    def models_at_failure(self) -> list[IndexEntry]:
        """The index of a start that failed because of models; else empty."""
        return self._lifecycle.models_at_failure

    @property
    def registry(self) -> Registry:
        """The models."""
        return self.core.registry

    @property
    def endpoints(self) -> list[Endpoint]:
        """The open ports and sockets."""
        return self._context.ports.endpoints()

    def port(self, service: str) -> int | None:
        """The port in use of a service such as ``gRPC``; None while it is not open."""
        return next((each.port for each in self.endpoints if each.service == service), None)

    def url(self, service: str) -> str:
        """The address of a service for clients on this machine; empty while it is not open."""
        return self._context.ports.url(service)

    def announcement(self) -> Announcement:
        """The loaded models and the endpoints."""
        return start_announcement(self.agent.index(False), self.endpoints, self.exposure)

    def grpc_methods(self) -> GrpcMethods:
        """Makes handlers of all RPCs for a transport other than the gRPC port; the caller closes them.

        Models run on their own threads: the transport's threads run nothing inline.
        """
        context = self._context
        return GrpcMethods(
            context.door,
            MethodOptions(),
            lambda claim: claim.release(),
            access=context.access,
        )
