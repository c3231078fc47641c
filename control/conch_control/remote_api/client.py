"""A client of the ModelControl service: its methods with the agent's data classes and errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from conch.core.model_control import LoadParameter
from conch.protocol import model_control_pb2 as pb
from conch_control.events import Event
from conch_control.port import Index, ModelDescription, ModelStatus
from conch_control.remote_api.auth import AUTHORIZATION, SCHEME
from conch_control.remote_api.handlers import SERVICE
from conch_control.remote_api.messages import description_of, event_of, index_of, load_request, status_of
from conch_control.remote_api.options import ConnectionOptions
from conch_control.remote_api.status_codes import error_of

TIMEOUT_S = 60.0
"""For what the agent answers at once unless its storage hangs."""

_ARGUMENTS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # So that a server that has been started again is found soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # So that a load or a watch ends when the server's machine has gone.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A token is for the server, not for what the environment names as a proxy.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class After:
    """A place in the log: after an event."""

    epoch: str
    revision: int


@dataclass(frozen=True, slots=True)
class Update:
    """A message of a watch.

    Attributes:
        epoch: The life of the server.
        revision: The last event that is known after this message.
        state: All models, where the stream begins with them.
        events: What has happened.
        progress: Models being staged that have come further.
    """

    epoch: str
    revision: int
    state: Index | None
    events: tuple[Event, ...]
    progress: tuple[ModelStatus, ...]


class WatchCall:
    """A watch that goes on: iterate for its updates; any thread may cancel it.

    Args:
        call: The call.
        target: Where it went to, for people.
    """

    def __init__(self, call: Any, target: str) -> None:
        self._call = call
        self._target = target
        self._cancelled = False

    def __iter__(self) -> Iterator[Update]:
        """The updates, until it is cancelled.

        Raises:
            OutOfRangeError: Events can't be had; begin again with the whole state.
            UnavailableError: The server stops, or has gone.
            ConchError: It is refused.
        """
        try:
            for message in self._call:
                yield Update(
                    message.epoch,
                    message.revision,
                    index_of(message.state) if message.HasField("state") else None,
                    tuple(map(event_of, message.events)),
                    tuple(map(status_of, message.progress)),
                )
        except grpc.RpcError as error:
            if not self._cancelled:
                raise error_of(error, self._target) from None
        finally:
            self._call.cancel()

    def cancel(self) -> None:
        """Ends it."""
        self._cancelled = True
        self._call.cancel()


class ModelControlClient:
    """A connection to a control port; any thread may use it.

    Args:
        options: Where and how.
        timeout_s: How long the quick calls may take.
    """

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
        """Loads or reloads a model, however long it takes; see `AgentPort.load`."""
        self._call("Load", load_request(name, parameters), None)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Takes a model out of service; see `AgentPort.unload`."""
        request = pb.UnloadRequest(model=name, unload_dependents=unload_dependents)
        self._call("Unload", request, self._timeout_s)

    def models(self) -> Index:
        """All models with their states."""
        return index_of(self._call("Index", pb.IndexRequest(), self._timeout_s).index)

    def describe(self, name: str) -> ModelDescription:
        """All there is to say about one model; see `AgentPort.describe`."""
        request = pb.DescribeRequest(model=name)
        return description_of(self._call("Describe", request, self._timeout_s).description)

    def drain(self) -> None:
        """Makes the server not ready; see `AgentPort.drain`."""
        self._call("Drain", pb.DrainRequest(), self._timeout_s)

    def watch(
        self,
        after: After | None = None,
        whole_state: bool = False,
        models: Sequence[str] = (),
        progress_ms: int = 0,
    ) -> WatchCall:
        """Watches what happens; errors come when the result is iterated.

        Args:
            after: Where to go on; None to begin with what happens from now on.
            whole_state: Whether to begin with all models instead.
            models: Only these; none for all.
            progress_ms: How often to be told how far staging is; 0 for never.
        """
        request = pb.WatchRequest(models=models, progress_interval_ms=progress_ms)
        if whole_state:
            request.whole_state = True
        elif after is not None:
            request.after.epoch = after.epoch
            request.after.revision = after.revision
        return WatchCall(self._watch(request, metadata=self._metadata), self.target)

    def close(self) -> None:
        """Ends all calls and the connection."""
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
