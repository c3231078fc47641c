"""`HttpTransport`, `GrpcTransport`: send one export request to a collector, and return its result.

Each keeps its connection. Threads: `send` by the exporter's; `abort` ends a send from another thread.
"""

from __future__ import annotations

import base64
import gzip
import json
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Protocol

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces

from conch import __version__
from conch.core.clock import wall_seconds
from conch.core.errors import InvalidArgumentError
from conch.core.timed_response import TimedResponse
from conch.observability.exporters import LOGS, METRICS, TRACES
from conch_otlp.endpoint import GRPC, HTTP_JSON, OtlpEndpoint

_RETRIED_STATUS = frozenset({429, 502, 503, 504})
_RETRIED_CODES = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
_MOST_ANSWER = 64 * 1024
_GZIP_ABOVE = 1024
_SHOWN = 200
_IDS = ("traceId", "spanId", "parentSpanId")
_RETRY_INFO = b"google.rpc.RetryInfo\x12"


@dataclass(frozen=True, slots=True)
class _Service:
    """The messages of a signal; `items` is what a response may reject, in protobuf and in JSON."""

    method: str
    request: type[Message]
    response: type[Message]
    items: tuple[str, str]


_SERVICES = {
    TRACES: _Service(
        "trace.v1.TraceService",
        traces.ExportTraceServiceRequest,
        traces.ExportTraceServiceResponse,
        ("rejected_spans", "rejectedSpans"),
    ),
    METRICS: _Service(
        "metrics.v1.MetricsService",
        metrics.ExportMetricsServiceRequest,
        metrics.ExportMetricsServiceResponse,
        ("rejected_data_points", "rejectedDataPoints"),
    ),
    LOGS: _Service(
        "logs.v1.LogsService",
        logs.ExportLogsServiceRequest,
        logs.ExportLogsServiceResponse,
        ("rejected_log_records", "rejectedLogRecords"),
    ),
}


@dataclass(frozen=True, slots=True)
class SendOutcome:
    """The result of sending a request.

    Attributes:
        error: Reason of the refusal, or a warning of the collector; empty for none.
        taken: True if the collector took it.
        rejected: Items of it that the collector refused, such as spans.
        again: True if a retry may succeed.
        after_s: Seconds to wait before the retry, by the collector; 0 if it does not say.
    """

    error: str = ""
    taken: bool = True
    rejected: int = 0
    again: bool = False
    after_s: float = 0.0


def _failed(error: str, again: bool, after_s: float = 0.0) -> SendOutcome:
    return SendOutcome(error[:_SHOWN], False, 0, again, after_s)


def _taken(service: _Service, response: Any) -> SendOutcome:
    partial = response.partial_success
    return SendOutcome(partial.error_message[:_SHOWN], True, max(getattr(partial, service.items[0]), 0))


class Transport(Protocol):
    """Sends export requests."""

    def send(self, request: bytes, timeout_s: float) -> SendOutcome:
        """Sends a request, serialised; never raises because of the collector."""

    def abort(self) -> None:
        """Ends a send that waits; from any thread. What is sent later fails."""

    def close(self) -> None:
        """Closes the connection."""


def open_transport(endpoint: OtlpEndpoint) -> Transport:
    """The transport of a protocol; connects with the first request."""
    return GrpcTransport(endpoint) if endpoint.protocol == GRPC else HttpTransport(endpoint)


class HttpTransport:
    """Posts protobuf or JSON over a connection that is kept."""

    def __init__(self, endpoint: OtlpEndpoint) -> None:
        url = endpoint.url
        self._service = _SERVICES[endpoint.signal]
        self._json = endpoint.protocol == HTTP_JSON
        self._gzip = endpoint.gzip
        self._target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        self._address = url.hostname or "", url.port
        self._tls = _tls(endpoint) if url.scheme == "https" else None
        self._headers = {
            "Content-Type": "application/json" if self._json else "application/x-protobuf",
            "User-Agent": f"conch/{__version__}",
            **dict(endpoint.headers),
        }
        self._connection: HTTPConnection | None = None
        self._aborted = False

    def send(self, request: bytes, timeout_s: float) -> SendOutcome:
        """Posts a request."""
        body = _as_json(self._service.request.FromString(request)) if self._json else request
        headers = self._headers
        if self._gzip and len(body) > _GZIP_ABOVE:
            body = gzip.compress(body, 1)
            headers = {**headers, "Content-Encoding": "gzip"}
        deadline_s = time.monotonic() + timeout_s
        kept = self._connection is not None
        try:
            try:
                return self._post(body, headers, timeout_s)
            except (ConnectionError, HTTPException):
                # A collector may close a kept connection at any time: that says nothing of the request.
                if not kept or self._aborted:
                    raise
                self.close()
                return self._post(body, headers, max(deadline_s - time.monotonic(), 0.001))
        except (OSError, HTTPException) as error:
            self.close()
            return _failed(f"{type(error).__name__}: {error}", again=True)

    def _post(self, body: bytes, headers: dict[str, str], timeout_s: float) -> SendOutcome:
        connection = self._connected(timeout_s)
        connection.request("POST", self._target, body, headers)
        response = connection.getresponse()
        answer = response.read(_MOST_ANSWER)
        if response.will_close or not response.isclosed():
            self.close()
        if response.status == 200:
            return self._accepted(answer)
        text = f"HTTP {response.status} {response.reason}"
        return _failed(text, response.status in _RETRIED_STATUS, _retry_after_s(response))

    def _accepted(self, answer: bytes) -> SendOutcome:
        try:
            if not self._json:
                return _taken(self._service, self._service.response.FromString(answer))
            partial = json.loads(answer or b"{}").get("partialSuccess") or {}
            rejected = max(int(partial.get(self._service.items[1], 0)), 0)
            return SendOutcome(str(partial.get("errorMessage", ""))[:_SHOWN], True, rejected)
        except (DecodeError, ValueError, AttributeError, TypeError, RecursionError):
            return SendOutcome("the collector's answer can't be read")

    def _connected(self, timeout_s: float) -> HTTPConnection:
        connection = self._connection
        if connection is None:
            host, port = self._address
            if self._tls is None:
                connection = HTTPConnection(host, port, timeout=timeout_s)
            else:
                connection = HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)
            connection.response_class = TimedResponse
            connection.connect()
            self._connection = connection
        elif connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        if self._aborted:
            raise ConnectionAbortedError("stopped")
        return connection

    def abort(self) -> None:
        """Ends a post that waits."""
        self._aborted = True
        connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class GrpcTransport:
    """Calls the collector's service on one channel."""

    def __init__(self, endpoint: OtlpEndpoint) -> None:
        url = endpoint.url
        self._service = _SERVICES[endpoint.signal]
        host = url.hostname or ""
        target = f"{f'[{host}]' if ':' in host else host}:{url.port or 4317}"
        if url.scheme == "https":
            _tls(endpoint)  # raises if the file has no certificate
            root = None
            if endpoint.certificate:
                with open(endpoint.certificate, "rb") as file:
                    root = file.read()
            self._channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(root))
        else:
            self._channel = grpc.insecure_channel(target)
        self._export = self._channel.unary_unary(
            f"/opentelemetry.proto.collector.{self._service.method}/Export",
            response_deserializer=self._service.response.FromString,
        )
        self._headers = endpoint.headers
        self._compression = grpc.Compression.Gzip if endpoint.gzip else None

    def send(self, request: bytes, timeout_s: float) -> SendOutcome:
        """Calls the service."""
        try:
            response = self._export(
                request, timeout=timeout_s, metadata=self._headers, compression=self._compression
            )
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                after_s = _retry_info_s(error)
                again = after_s is not None
            else:
                after_s, again = _retry_info_s(error), code in _RETRIED_CODES
            return _failed(f"gRPC {code.name}: {error.details()}", again, after_s or 0.0)
        except ValueError:  # the channel is closed
            return _failed("stopped", again=True)
        return _taken(self._service, response)

    def abort(self) -> None:
        """Cancels a call that waits."""
        self._channel.close()

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()


def _tls(endpoint: OtlpEndpoint) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=endpoint.certificate or None)
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgumentError(
            f"certificate of the collector of {endpoint.signal}: {endpoint.certificate} is no file of "
            f"certificates in PEM: {error}"
        ) from None


def _retry_after_s(response: HTTPResponse) -> float:
    text = (response.getheader("Retry-After") or "").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        return max(parsedate_to_datetime(text).timestamp() - wall_seconds(), 0.0)
    except (ValueError, OverflowError):
        return 0.0


def _retry_info_s(error: Any) -> float | None:
    """The wait of a ``RetryInfo`` among the details of an error; None without one."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            # In its message `Any`, the name of the type is followed by the value: a length, and `RetryInfo`
            # with its one field, again with a length. Both are below 128.
            _, found, rest = value.partition(_RETRY_INFO)
            if found:
                try:
                    duration = Duration.FromString(rest[3 : 3 + rest[2]])
                except (DecodeError, IndexError):
                    return 0.0
                return max(duration.seconds + duration.nanos / 1e9, 0.0)
    return None


def _as_json(request: Message) -> bytes:
    """OTLP's JSON: that of protobuf, but with numbers for enumerations and hexadecimal ids."""
    content = MessageToDict(request, use_integers_for_enums=True)
    _write_ids(content)
    return json.dumps(content, separators=(",", ":")).encode()


def _write_ids(value: Any) -> None:
    """Writes all ids below a value as hexadecimal digits."""
    if isinstance(value, dict):
        for name in _IDS:
            if name in value:
                value[name] = base64.b64decode(value[name]).hex()
        value = value.values()
    elif not isinstance(value, list):
        return
    for each in value:
        _write_ids(each)
