"""A small collector of OpenTelemetry's spans: prints each trace that it gets as a waterfall."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WIDTH = 48
US = 1000


def waterfalls(spans: Sequence[Span]) -> Iterator[str]:
    """A text for each trace, whose spans must all be there."""
    traces: dict[bytes, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_time_unix_nano):
        traces[span.trace_id].append(span)
    for trace_id, members in traces.items():
        yield "\n".join([f"trace {trace_id.hex()}", *bars(members)])


def bars(spans: Sequence[Span]) -> Iterator[str]:
    """A line for each span of a trace, given in the order of their starts; parents before their children."""
    known = {span.span_id for span in spans}
    children: dict[bytes, list[Span]] = defaultdict(list)
    for span in spans:
        children[span.parent_span_id if span.parent_span_id in known else b""].append(span)
    begin = spans[0].start_time_unix_nano
    whole = max(span.end_time_unix_nano for span in spans) - begin or 1

    def below(parent: bytes, depth: int) -> Iterator[str]:
        for span in children[parent]:
            start = span.start_time_unix_nano - begin
            length = span.end_time_unix_nano - span.start_time_unix_nano
            first = min(start * WIDTH // whole, WIDTH - 1)
            bar = " " * first + "=" * max(min(length * WIDTH // whole, WIDTH - first), 1)
            name = "  " * depth + span.name
            yield f"{name:<22}|{bar:<{WIDTH}}| {start / US:9.1f} us {length / US:9.1f} us"
            yield from below(span.span_id, depth + 1)

    return below(b"", 0)


class Collector(BaseHTTPRequestHandler):
    """Answers exports over HTTP with protobuf."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Prints the traces of a request, and answers that they were taken."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for text in waterfalls(scope.spans):
                    print(text, end="\n\n", flush=True)
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints no line for a request."""


def main() -> None:
    """Listens until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=4318)
    with ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Collector) as server:
        print(f"listening on http://127.0.0.1:{server.server_port}/v1/traces", file=sys.stderr, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
