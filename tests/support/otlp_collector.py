"""A collector of OpenTelemetry in memory, which also misbehaves on demand."""

from __future__ import annotations

import base64
import gzip
import json
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tests.support.waiting import PATIENCE_S

WAIT_S = PATIENCE_S
_KINDS: dict[str, tuple[Any, Any]] = {
    "traces": (trace_service_pb2.ExportTraceServiceRequest, trace_service_pb2.ExportTraceServiceResponse),
    "metrics": (
        metrics_service_pb2.ExportMetricsServiceRequest,
        metrics_service_pb2.ExportMetricsServiceResponse,
    ),
    "logs": (logs_service_pb2.ExportLogsServiceRequest, logs_service_pb2.ExportLogsServiceResponse),
}
_SERVICES = {
    "traces": "trace.v1.TraceService",
    "metrics": "metrics.v1.MetricsService",
    "logs": "logs.v1.LogsService",
}
_IDS = ("traceId", "spanId", "parentSpanId")


class Collector:
    """Exports so far, and the answers to the next ones.

    Attributes:
        port: Port on which it listens.
        traces: Requests with spans that were taken; all of those that came are in `seen`.
        metrics: The same with metrics.
        logs: The same with lines of logs.
        seen: Kind, headers (or metadata) and message of each request, whatever its answer.
        answers: Answers to the next requests, one each: ``hang``, ``close``, ``rubbish``, a status with
            its headers, or the number of spans that are refused. Without one, a request is taken.
    """

    def __init__(self) -> None:
        self.port = 0
        self.traces: list[Any] = []
        self.metrics: list[Any] = []
        self.logs: list[Any] = []
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        self.answers: deque[Any] = deque()
        self.ended = threading.Event()
        self._changed = threading.Condition()

    @property
    def url(self) -> str:
        """The address of traces."""
        return self.address("traces")

    def address(self, kind: str) -> str:
        """The address of a signal."""
        return f"http://127.0.0.1:{self.port}/v1/{kind}"

    @property
    def spans(self) -> list[Span]:
        """All spans that were taken."""
        with self._changed:
            return [span for request in self.traces for span in spans_of(request)]

    def wait_spans(self, number: int) -> list[Span]:
        """Waits for at least so many spans; returns all."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: sum(len(spans_of(request)) for request in self.traces) >= number, WAIT_S
            )
        assert arrived, f"{len(self.spans)} spans of {number}"
        return self.spans

    def wait_seen(self, number: int) -> None:
        """Waits for so many requests, whatever their answers."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= number, WAIT_S), len(self.seen)

    def take(self, kind: str, headers: dict[str, str], message: Any) -> Any:
        """Notes a request; returns how it is answered, None if it was taken."""
        with self._changed:
            answer = self.answers.popleft() if self.answers else None
            self.seen.append((kind, headers, message))
            if answer is None or isinstance(answer, int):
                getattr(self, kind).append(message)
            self._changed.notify_all()
        return answer


def spans_of(request: Any) -> list[Span]:
    """The spans of a request."""
    return [
        span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans
    ]


def from_json(kind: str, body: bytes) -> Any:
    """A message from OTLP's JSON, whose ids are hexadecimal."""
    content = json.loads(body)

    def mend(value: Any) -> None:
        if isinstance(value, dict):
            for name in _IDS:
                if name in value:
                    value[name] = base64.b64encode(bytes.fromhex(value[name])).decode()
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                mend(each)

    mend(content)
    return json_format.ParseDict(content, _KINDS[kind][0]())


@contextmanager
def http_collector(port: int = 0) -> Iterator[Collector]:
    """A collector over HTTP."""
    collector = Collector()
    connections: list[socket.socket] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            connections.append(self.connection)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Content-Encoding"] == "gzip":
                body = gzip.decompress(body)
            kind = self.path.rpartition("/")[2]
            as_json = self.headers["Content-Type"] == "application/json"
            message = from_json(kind, body) if as_json else _KINDS[kind][0].FromString(body)
            answer = collector.take(kind, dict(self.headers), message)
            if answer == "hang":
                collector.ended.wait()
            if answer in ("hang", "close"):
                self.close_connection = True
                return
            response = _KINDS[kind][1]()
            if isinstance(answer, int):
                response.partial_success.rejected_spans = answer
                response.partial_success.error_message = "too many"
            content = (
                json_format.MessageToJson(response).encode() if as_json else response.SerializeToString()
            )
            status, headers = answer if isinstance(answer, tuple) else (200, {})
            if answer == "rubbish":
                content = b"[" * 60_000 if as_json else b"\xff\xff rubbish"
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # closing waits for them

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that has gone

    with Server(("127.0.0.1", port), Handler) as server:
        collector.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield collector
        finally:
            collector.ended.set()
            server.shutdown()
            thread.join()
            for connection in connections:  # clients may keep them
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """A collector over gRPC."""
    collector = Collector()

    def export(kind: str, request: Any, context: grpc.ServicerContext) -> Any:
        metadata: Sequence[tuple[str, str]] = context.invocation_metadata()
        answer = collector.take(kind, dict(metadata), request)
        if answer == "hang":
            collector.ended.wait()
        if isinstance(answer, tuple):
            code, trailing = answer
            context.set_trailing_metadata(tuple(trailing.items()))
            context.abort(code, "not now")
        response = _KINDS[kind][1]()
        if isinstance(answer, int):
            response.partial_success.rejected_spans = answer
        return response

    pool = ThreadPoolExecutor(2)
    pool.submit(int).result()  # its thread is there before what is tested
    server = grpc.server(pool)
    for kind, (request, response) in _KINDS.items():
        name = f"opentelemetry.proto.collector.{_SERVICES[kind]}"
        handler = grpc.unary_unary_rpc_method_handler(
            partial(export, kind), request.FromString, response.SerializeToString
        )
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {"Export": handler})])
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector
    finally:
        collector.ended.set()
        server.stop(None).wait()
        pool.shutdown()
