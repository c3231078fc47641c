"""Client of the ModelControl service; uses the data classes and errors of `agent_api`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from conch.core.model_control import LoadParameter
from conch.core.rollouts import RolloutReport
from conch.protocol import model_control_pb2 as pb
from conch_control.agent_api import Index, ModelDescription, ModelStatus
from conch_control.events import Event
from conch_control.managed_rollouts import ManagedBy, ManagedReport
from conch_control.remote_api.connection_options import ConnectionOptions
from conch_control.remote_api.messages import (
    AUTHORIZATION,
    SCHEME,
    description_of,
    error_of,
    event_of,
    index_of,
    load_request,
    managed_by_message,
    managed_report_of,
    rollout_of,
    status_of,
)
from conch_control.remote_api.server import SERVICE

TIMEOUT_S = 60.0
"""Timeout of calls that only hanging storage delays."""

_ARGUMENTS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Reconnect soon after a restart of the server.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Detect a dead machine during loads and watches.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Never send the token to a proxy from the environment.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class After:
    """A position in the event log."""

    epoch: str
    revision: int


@dataclass(frozen=True, slots=True)
class Update:
    """A message of a watch stream.

    Attributes:
        revision: Last event included so far.
        state: All models, in the first message if requested.
        progress: Models whose staging has progressed.
        draining: The server drains or stops.
    """

    epoch: str
    revision: int
    state: Index | None
    events: tuple[Event, ...]
    progress: tuple[ModelStatus, ...]
    draining: bool = False


class WatchCall:
    """A running watch: iterate for updates; any thread may cancel it."""

    def __init__(self, call: Any, target: str) -> None:
        self._call = call
        self._target = target
        self._cancelled = False

    def __iter__(self) -> Iterator[Update]:
        """Yields updates until cancelled.

        Raises:
            OutOfRangeError: Events are lost; start again with the whole state.
            UnavailableError: The server stops, or is unreachable.
            ConchError: The server refuses the watch.
        """
        try:
            for message in self._call:
                yield Update(
                    message.epoch,
                    message.revision,
                    index_of(message.state) if message.HasField("state") else None,
                    tuple(map(event_of, message.events)),
                    tuple(map(status_of, message.progress)),
                    message.draining,
                )
        except grpc.RpcError as error:
            if not self._cancelled:
                raise error_of(error, self._target) from None
        finally:
            self._call.cancel()

    def cancel(self) -> None:
        """Cancels the watch."""
        self._cancelled = True
        self._call.cancel()


class ModelControlClient:
    """A connection to a control port; thread-safe."""

    def __init__(self, options: ConnectionOptions, timeout_s: float = TIMEOUT_S) -> None:
        self.target = options.target
        self._timeout_s = timeout_s
        self._metadata = () if options.token is None else ((AUTHORIZATION, SCHEME + options.token),)
        self._channel = _channel(options)
        self._unary = {
            name: self._channel.unary_unary(
                f"/{SERVICE}/{name}",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )
            for name, (request, response) in _METHODS.items()
        }
        self._watch = self._channel.unary_stream(
            f"/{SERVICE}/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.WatchResponse.FromString,
        )

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Loads or reloads a model and returns when it is ready; has no timeout."""
        self._call("Load", load_request(name, parameters), None)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Unpublishes a model; requests in flight finish in the background."""
        request = pb.UnloadRequest(model=name, unload_dependents=unload_dependents)
        self._call("Unload", request, self._timeout_s)

    def set_label(self, name: str, label: str, version: int | None) -> None:
        """Has a label of a model name a ready version; None removes it."""
        request = pb.SetLabelRequest(model=name, label=label, version=version)
        self._call("SetLabel", request, self._timeout_s)

    def start_rollout(self, name: str, declaration: Mapping[str, Any], again: bool = False) -> RolloutReport:
        """Declares and starts a rollout; see `RolloutControl.start_rollout`."""
        content = json.dumps(declaration) if declaration else ""
        request = pb.StartRolloutRequest(model=name, declaration_json=content, again=again)
        return rollout_of(self._call("StartRollout", request, self._timeout_s).rollout)

    def manage_rollout(
        self, name: str, declaration: Mapping[str, Any], managed_by: ManagedBy
    ) -> ManagedReport:
        """Tells the server the state of a rollout that the caller manages."""
        request = pb.StartRolloutRequest(
            model=name, declaration_json=json.dumps(declaration), managed_by=managed_by_message(managed_by)
        )
        return managed_report_of(self._call("StartRollout", request, self._timeout_s))

    def update_rollout(self, name: str, action: str, weight: float | None = None) -> RolloutReport:
        """Changes a rollout; see `RolloutControl.update_rollout`."""
        request = pb.UpdateRolloutRequest(model=name, action=action, weight=weight)
        return rollout_of(self._call("UpdateRollout", request, self._timeout_s).rollout)

    def rollout(self, name: str) -> RolloutReport:
        """A model's labels and rollout."""
        return rollout_of(self._call("GetRollout", pb.GetRolloutRequest(model=name), self._timeout_s).rollout)

    def rollouts(self) -> list[RolloutReport]:
        """Labels and rollouts of all models that have some, by name."""
        found = self._call("ListRollouts", pb.ListRolloutsRequest(), self._timeout_s)
        return [rollout_of(each) for each in found.rollouts]

    def models(self) -> Index:
        """All models with their states."""
        return index_of(self._call("Index", pb.IndexRequest(), self._timeout_s).index)

    def describe(self, name: str) -> ModelDescription:
        """Status, effective config and instances of one model."""
        request = pb.DescribeRequest(model=name)
        return description_of(self._call("Describe", request, self._timeout_s).description)

    def drain(self) -> None:
        """Makes the server not ready; it still answers requests."""
        self._call("Drain", pb.DrainRequest(), self._timeout_s)

    def watch(
        self,
        after: After | None = None,
        whole_state: bool = False,
        models: Sequence[str] = (),
        progress_ms: int = 0,
    ) -> WatchCall:
        """Starts a watch; errors are raised on iteration.

        Args:
            after: Position to continue from; None for new events only.
            whole_state: Start with all models instead.
            models: Only these models; empty for all.
            progress_ms: Interval of staging progress; 0 for none.
        """
        request = pb.WatchRequest(models=models, progress_interval_ms=progress_ms)
        if whole_state:
            request.whole_state = True
        elif after is not None:
            request.after.epoch = after.epoch
            request.after.revision = after.revision
        return WatchCall(self._watch(request, metadata=self._metadata), self.target)

    def close(self) -> None:
        """Ends all calls and closes the connection."""
        self._channel.close()

    def _call(self, method: str, request: Any, timeout_s: float | None) -> Any:
        try:
            return self._unary[method](request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            found = error_of(error, self.target)
            raise found from found.__cause__


_METHODS: Mapping[str, tuple[Any, Any]] = {
    "Load": (pb.LoadRequest, pb.LoadResponse),
    "Unload": (pb.UnloadRequest, pb.UnloadResponse),
    "Index": (pb.IndexRequest, pb.IndexResponse),
    "Describe": (pb.DescribeRequest, pb.DescribeResponse),
    "SetLabel": (pb.SetLabelRequest, pb.SetLabelResponse),
    "StartRollout": (pb.StartRolloutRequest, pb.StartRolloutResponse),
    "UpdateRollout": (pb.UpdateRolloutRequest, pb.UpdateRolloutResponse),
    "GetRollout": (pb.GetRolloutRequest, pb.GetRolloutResponse),
    "ListRollouts": (pb.ListRolloutsRequest, pb.ListRolloutsResponse),
    "Drain": (pb.DrainRequest, pb.DrainResponse),
}


def _channel(options: ConnectionOptions) -> Any:
    tls = options.tls
    if tls is None:
        return grpc.insecure_channel(options.target, _ARGUMENTS)
    credentials = grpc.ssl_channel_credentials(tls.root, tls.private_key, tls.certificate)
    arguments: list[tuple[str, int | str]] = [*_ARGUMENTS]
    if tls.server_name is not None:
        arguments.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.secure_channel(options.target, credentials, arguments)
