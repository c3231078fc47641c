"""``grpc.health.v1.Health/Watch``: streams the status of the server and its changes.

Owns: the watching streams, and a thread while there are any. The thread polls, as models' readiness checks
do not notify.
Threads and locks: one condition guards the streams.
"""

from __future__ import annotations

import threading
from functools import partial

from google.protobuf.message import DecodeError

from conch.core.errors import InvalidArgumentError, ResourceExhaustedError
from conch.core.tensor import Buffer
from conch.door.door import Door
from conch.door.operation_handlers import HEALTH_SERVICES
from conch.frontends.grpc.operation_rpcs import MAX_REQUEST_BYTES
from conch.frontends.grpc.rpc_calls import StreamRpc
from conch.protocol import health_pb2

_POLL_S = 0.5
_STATES = health_pb2.HealthCheckResponse


class HealthWatch:
    """Handles Watch calls."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._changed = threading.Condition()
        # By stream, the status that was sent last; None for none.
        self._streams: dict[StreamRpc, health_pb2.HealthCheckResponse.ServingStatus | None] = {}
        self._thread: threading.Thread | None = None

    def __call__(self, call: StreamRpc) -> None:
        """Opens a stream."""
        call.on_drain = partial(self._drain, call)
        call.start(partial(self._take, call), partial(self._remove, call))

    def _take(self, call: StreamRpc, message: Buffer | None) -> None:
        if message is None:
            call.close(InvalidArgumentError.grpc_status, "a watch takes exactly one request, none was sent")
            return
        if len(message) > MAX_REQUEST_BYTES:
            call.close(
                ResourceExhaustedError.grpc_status, f"a watch takes requests of {MAX_REQUEST_BYTES} bytes"
            )
            return
        try:
            service = health_pb2.HealthCheckRequest.FromString(bytes(message)).service
        except DecodeError as error:
            call.close(InvalidArgumentError.grpc_status, f"the request message is malformed: {error}")
            return
        if service not in HEALTH_SERVICES:
            _send(call, _STATES.SERVICE_UNKNOWN)  # the stream stays open, as in the protocol
            return
        with self._changed:
            self._streams[call] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="conch-grpc-health", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _remove(self, call: StreamRpc) -> None:
        with self._changed:
            self._streams.pop(call, None)
            self._changed.notify()

    def _drain(self, call: StreamRpc, status: int, details: str) -> None:
        with self._changed:
            sent = self._streams.pop(call, _STATES.NOT_SERVING)
            self._changed.notify()
        if sent != _STATES.NOT_SERVING:
            _send(call, _STATES.NOT_SERVING)
        call.close(status, details)

    def _run(self) -> None:
        while True:
            status = _STATES.SERVING if self._door.serving else _STATES.NOT_SERVING
            with self._changed:
                for call, sent in self._streams.items():
                    if sent != status:
                        self._streams[call] = status
                        _send(call, status)
                if not self._streams:
                    self._thread = None
                    return
                if None not in self._streams.values():
                    self._changed.wait(_POLL_S)


def _send(call: StreamRpc, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
    call.write(_STATES(status=status).SerializeToString())
