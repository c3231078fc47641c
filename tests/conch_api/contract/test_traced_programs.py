"""Clients of a program continue its traces."""

from __future__ import annotations

import asyncio

import numpy as np
from opentelemetry.sdk.trace import TracerProvider
from tests.support.otlp_collector import http_collector

import conch

ROW = np.zeros((1, 1), np.float32)


async def call_async(url: str) -> None:
    async with conch.AsyncClient(url, "m") as client:
        await client.infer_batch(ROW)
        async for _ in client.stream_batch(ROW):
            pass


def test_clients_continue_the_trace_of_their_program() -> None:
    with http_collector() as collector:
        settings = ["mode=opentelemetry", "level=TIMESTAMPS", f"opentelemetry,url={collector.url}"]
        with conch.Server(grpc_port=0, http_port=0, metrics_port=None, trace_config=settings) as server:
            server.bind("m", conch.batch(lambda X: X), [conch.Tensor("X")], [conch.Tensor("Y")])
            urls = f"grpc://localhost:{server.grpc_port}", f"http://localhost:{server.http_port}"
            server.infer("m", {"X": ROW})  # outside of the span: not sampled
            with TracerProvider().get_tracer("program").start_as_current_span("work") as span:
                server.infer("m", {"X": ROW})
                for url in urls:
                    with conch.Client(url, "m") as client:
                        client.infer_batch(ROW)
                with conch.Client(urls[0], "m") as client:
                    list(client.stream_batch(ROW))
                asyncio.run(call_async(urls[0]))
        roots = [each for each in collector.spans if each.name == "InferRequest"]
    own = span.get_span_context()
    assert [(each.trace_id, each.parent_span_id) for each in roots] == 6 * [
        (own.trace_id.to_bytes(16, "big"), own.span_id.to_bytes(8, "big"))
    ]
