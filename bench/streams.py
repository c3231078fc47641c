"""Times streams of a decoupled model in a worker: ``python -m bench.streams [--baseline DIR] [--rounds N]``.

The model is a stand-in for an engine: in each step it makes a token for every stream. It floods, makes a step
every 5 ms, or leaves the pace to the streams, which then are not in step. Clients of generate_stream begin a
new stream as soon as one has ended. Prints tokens per second, microseconds of processor time per token of the
server and of the worker, and the time to the first token. A baseline takes turns with this checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from bench.servers import Command, Ports, Server, baseline_command, conch_command

MODEL = """
import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.streams = set()
        self.engine = None

    async def execute(self, requests):
        await asyncio.gather(*[self.stream(request) for request in requests])

    async def stream(self, request):
        numbers = [
            int(pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0])
            for name in ("TOKENS", "STEP_US", "OWN_US")
        ]
        tokens, step_us, own_us = numbers
        sender = request.get_response_sender()
        queue = asyncio.Queue()
        if not own_us:
            self.streams.add(queue)
            if self.engine is None or self.engine.done():
                self.engine = asyncio.ensure_future(self.run(step_us))
        for number in range(tokens):
            if own_us:
                await asyncio.sleep(own_us / 1e6)
            else:
                await queue.get()
            if sender.is_cancelled():
                break
            word = np.array([b" word"], object)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", word)]))
        self.streams.discard(queue)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def run(self, step_us):
        while self.streams:
            for queue in self.streams:
                queue.put_nowait(None)
            await asyncio.sleep(step_us / 1e6)
"""
CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "TOKENS" data_type: TYPE_INT32 dims: [ 1 ] }
input { name: "STEP_US" data_type: TYPE_INT32 dims: [ 1 ] }
input { name: "OWN_US" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
parameters { key: "CONCH_PLACEMENT" value { string_value: "worker" } }
"""


class Scene(NamedTuple):
    """Streams at a time, tokens of each, and the pause of a step or of each stream's tokens."""

    streams: int
    tokens: int
    step_us: int = 0
    own_us: int = 0


SCENES = {
    "1 flooded": Scene(1, 256),
    "32 flooded": Scene(32, 256),
    "64 in steps of 5 ms": Scene(64, 64, step_us=5000),
    "64 paced at 5 ms": Scene(64, 64, own_us=5000),
}


class Result(NamedTuple):
    """What a scene has cost."""

    tokens_s: float
    server_us: float
    worker_us: float
    first_p50_ms: float
    first_p99_ms: float


class Clients:
    """Clients of generate_stream, one stream each at a time."""

    def __init__(self, address: str, scene: Scene) -> None:
        self._host, port = address.rsplit(":", 1)
        self._port = int(port)
        body = f'{{"TOKENS": {scene.tokens}, "STEP_US": {scene.step_us}, "OWN_US": {scene.own_us}}}'
        head = f"POST /v2/models/streams/generate_stream HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}"
        self._request = f"{head}\r\n\r\n{body}".encode()
        self._streams = scene.streams
        self._end = 0.0
        self.tokens = 0
        self.first_s: list[float] = []

    def run(self, seconds: float) -> None:
        """Runs them for so long, and until their streams have ended."""
        self._end = time.monotonic() + seconds
        asyncio.run(self._all())

    async def _all(self) -> None:
        await asyncio.gather(*[self._client() for _ in range(self._streams)])

    async def _client(self) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        while time.monotonic() < self._end:
            begun = time.monotonic()
            writer.write(self._request)
            first = True
            tail = b""
            while not tail.endswith(b"\r\n0\r\n\r\n"):
                data = await reader.read(65536)
                if not data:
                    raise RuntimeError("the server has closed the connection")
                count = data.count(b"data: {")
                self.tokens += count
                if first and count:
                    self.first_s.append(time.monotonic() - begun)
                    first = False
                tail = (tail + data)[-16:]
        writer.close()


def measured(server: Server, scene: Scene, seconds: float) -> Result:
    """Runs a scene."""
    clients = Clients(server.http, scene)
    before, began = cpu(server), time.monotonic()
    clients.run(seconds)
    after, took = cpu(server), time.monotonic() - began
    first = sorted(clients.first_s)
    server_us, worker_us = [
        (end - start) * 1e6 / clients.tokens for start, end in zip(before, after, strict=True)
    ]
    p99 = first[min(len(first) - 1, int(len(first) * 0.99))]
    return Result(clients.tokens / took, server_us, worker_us, median(first) * 1e3, p99 * 1e3)


def cpu(server: Server) -> tuple[float, float]:
    """Processor seconds of the server and of its other processes so far."""
    main = psutil.Process(server.pid)
    others = main.children(recursive=True)
    return spent(main), sum(map(spent, others))


def spent(process: psutil.Process) -> float:
    """Processor seconds of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Measures every scene in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baseline", type=Path, help="another checkout, which takes turns with this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "streams")
        Path(model, "1").mkdir(parents=True)
        Path(model, "1", "model.py").write_text(MODEL)
        Path(model, "config.pbtxt").write_text(CONFIG)
        repositories = [Path(folder)]
        commands: dict[str, Callable[[Ports], Command]] = {
            "streams": lambda ports: conch_command(ports, repositories)
        }
        if asked.baseline is not None:
            commands["baseline"] = baseline_command(asked.baseline, repositories)
        servers = [Server(name, command) for name, command in commands.items()]
        try:
            for server in servers:
                server.start()
                measured(server, SCENES["32 flooded"], 0.5)
            for title, scene in SCENES.items():
                rounds = {server.name: list[Result]() for server in servers}
                for _ in range(asked.rounds):
                    for server in servers:
                        rounds[server.name].append(measured(server, scene, asked.seconds))
                for name, results in rounds.items():
                    shown = Result(*[median(column) for column in zip(*results, strict=True)])
                    print(
                        f"{title:20} {name:9} {shown.tokens_s:7.0f} tokens/s  server {shown.server_us:6.1f} "
                        f"worker {shown.worker_us:6.1f} us/token  first {shown.first_p50_ms:6.1f} ms, "
                        f"p99 {shown.first_p99_ms:6.1f} ms",
                        flush=True,
                    )
        finally:
            for server in servers:
                server.stop()


if __name__ == "__main__":
    main()
