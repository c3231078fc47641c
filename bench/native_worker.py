"""Processor time that a compiled backend adds to a worker.

``python -m bench.native_worker [rounds]`` runs batches of a copying backend in C and of an instance that
returns its inputs, by turns, through all that a worker does with a batch but waiting: receive, decode, run,
encode, send. Both ends of the socket are in this process; the thread's time is counted at the worker's end
only. Prints the median of the rounds in microseconds per request.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tests.support.core import make_spec
from tests.support.native_backends import NativeBackends

from conch.core.custom_metrics import CustomFamilies
from conch.core.execution.placement import Placement
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import Readiness
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Tensor
from conch.ipc.channel import Kind, PacketChannel
from conch.ipc.codec import encode_requests
from conch.ipc.spec_json import Library
from conch.ipc.tensors import MessageStream
from conch.workers.host.host_reader import HostReader
from conch.workers.host.native_model import NativeInstance, NativeModel
from conch.workers.host.response_writer import ResponseWriter
from conch.workers.host.worker_loop import HostedInstance

SCENES = ((1, 16), (8, 16), (1, 150_000))
"""Requests of a batch, and floats of each."""

_BATCHES = 1000


class Echo:
    """An instance whose outputs are its inputs."""

    readiness: Readiness | None = None

    def execute(self, batch: Batch) -> Sequence[InferenceResponse | None]:
        """Returns each input as the output."""
        responses = []
        for request in batch.requests:
            tensor = request.inputs["IN"]
            responses.append(InferenceResponse([tensor.renamed("OUT", tensor.shape)]))
        return responses

    def close(self) -> None:
        """There is nothing to free."""


class Worker:
    """A worker's end of a socket, and the server's, which sends it batches of equal requests."""

    def __init__(self, spec: ModelSpec, instance: HostedInstance) -> None:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server, self._stream = (
            MessageStream(PacketChannel(end), in_worker)
            for end, in_worker in zip(ends, (False, True), strict=True)
        )
        self._instance = instance
        reader = HostReader(lambda: None, self._stream.channel.ready)
        by_address = isinstance(instance, NativeInstance)
        self._writer = ResponseWriter(spec, self._stream, reader, by_address)
        self._number = 0

    def run(self, requests: Sequence[InferenceRequest], batches: int) -> float:
        """Runs batches; returns the worker's seconds."""
        count, total = len(requests), 0
        for _ in range(batches):
            self._number += 1
            payload = self._server.pack([request.inputs.values() for request in requests])
            fields, texts = encode_requests(requests, count, 0)
            self._server.send(Kind.EXECUTE, self._number, fields, payload, texts)
            begin = time.thread_time_ns()
            self._serve()
            total += time.thread_time_ns() - begin
            self._server.receive()
            self._server.mark_handled()
        return total / 1e9

    def _serve(self) -> None:
        """As the worker's loop."""
        received = self._stream.receive()
        number, batch = received.subject, self._writer.requests.batch(received.subject, received)
        self._stream.mark_handled()
        del received
        outcome = self._instance.execute(batch)
        encoded = self._writer.encode(number, batch, outcome)
        del batch, outcome
        self._writer.send_done(number, *encoded)


def batch_of(count: int, floats: int) -> list[InferenceRequest]:
    """Requests as the server sends them."""
    array = np.arange(floats, dtype=np.float32)[None]
    tensor = Tensor("IN", "FP32", array.shape, array.tobytes())
    return [InferenceRequest("m", "1", {"IN": tensor}, _drop, 1) for _ in range(count)]


def _drop(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """The server's requests are never answered."""


def main() -> None:
    """Prints a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    spec = replace(
        make_spec(), outputs=(TensorSpec("OUT", "FP32", (-1,)),), config={"input": [{"name": "IN"}]}
    )
    with tempfile.TemporaryDirectory() as folder:
        built = NativeBackends(Path(folder))
        library = Library("copy", built.build("copy"), {}, built.host)
        calls: Any = None  # the backend makes none
        model = NativeModel(spec, library, calls, CustomFamilies(), print)
        model.open([Placement("m_0", "CPU")])
        workers = {"compiled": Worker(spec, model.instances[0]), "echo": Worker(spec, Echo())}
        print("| requests | floats | compiled | echo | added |\n|---|---|---|---|---|")
        for count, floats in SCENES:
            requests = batch_of(count, floats)
            batches = _BATCHES // count if floats < 10_000 else 100
            times: dict[str, list[float]] = {name: [] for name in workers}
            for _ in range(rounds):
                for name, worker in workers.items():
                    times[name].append(worker.run(requests, batches) / batches / count * 1e6)
            compiled, echo = (median(each[1:]) for each in times.values())
            added = median(a - b for a, b in zip(times["compiled"][1:], times["echo"][1:], strict=True))
            print(f"| {count} | {floats} | {compiled:.1f} | {echo:.1f} | {added:.1f} |", flush=True)
        model.close()


if __name__ == "__main__":
    main()
