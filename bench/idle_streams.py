"""Streams whose model pauses: `python -m bench.idle_streams`, see bench/README.md.

CPU time, memory and threads of a server and its worker with many open streams, against none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing

import psutil

from bench import facts
from bench.servers import REPOSITORIES, BenchServer, conch_command

REPOSITORY = (REPOSITORIES / "pauses",)
PAUSES_S = (60, 5, 1)
HEADER = (
    "| streams | pause s | CPU ms/s: server | worker | KiB/stream: server | worker "
    "| threads: server | worker | events |\n" + "|---" * 9 + "|"
)


class Stream(asyncio.Protocol):
    """A connection with one request."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Counts events."""
        self.events += data.count(b"data: ")
        if self.events and not self.begun.done():
            self.begun.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Fails a stream that has not begun."""
        if not self.begun.done():
            self.begun.set_exception(error or ConnectionError("the server has closed the connection"))


class Processes:
    """The server and its worker."""

    def __init__(self, server: BenchServer) -> None:
        main = psutil.Process(server.pid)
        # Its children are templates, and theirs the workers.
        (worker,) = (each for child in main.children() for each in child.children())
        self.all = (main, worker)

    def cpu_s(self) -> list[float]:
        """Processor time so far."""
        return [sum(process.cpu_times()[:2]) for process in self.all]

    def memory(self) -> list[int]:
        """Memory of their own."""
        return [process.memory_full_info().uss for process in self.all]

    def threads(self) -> list[int]:
        """Threads."""
        return [process.num_threads() for process in self.all]


async def measure(server: BenchServer, streams: int, pause_s: int, seconds: float) -> str:
    """A line of the table."""
    processes = Processes(server)
    host, _, port = server.http.partition(":")
    body = json.dumps({"model": "pauses", "prompt": str(pause_s), "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {server.http}\r\ncontent-length: {len(body)}\r\n\r\n"
    request = (head + body).encode()
    loop = asyncio.get_running_loop()
    before = processes.memory()
    with ExitStack() as stack:
        opened = []
        for _ in range(streams):
            transport, stream = await loop.create_connection(lambda: Stream(request), host, int(port))
            stack.enter_context(closing(transport))
            opened.append(stream)
            await stream.begun
        await asyncio.sleep(1)
        events, cpu = sum(stream.events for stream in opened), processes.cpu_s()
        await asyncio.sleep(seconds)
        costs = [1000 * (now - then) / seconds for now, then in zip(processes.cpu_s(), cpu, strict=True)]
        grown = [
            (now - then) / max(streams, 1) / 1024
            for now, then in zip(processes.memory(), before, strict=True)
        ]
        threads = processes.threads()
        events = sum(stream.events for stream in opened) - events
    await asyncio.sleep(1)
    numbers = [*(f"{each:.1f}" for each in (*costs, *grown)), *map(str, threads), f"{events:,}"]
    return f"| {streams:,} | {pause_s} | {' | '.join(numbers)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.idle_streams", description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=1000, help="%(default)s")
    parser.add_argument("--seconds", type=float, default=10, help="length of each measurement (%(default)s)")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped
    print("; ".join(f"{name} {value}" for name, value in facts.machine().items()), end="\n\n")
    print(HEADER)
    for streams, pause_s in [(0, PAUSES_S[0]), *((chosen.streams, pause) for pause in PAUSES_S)]:
        # Memory grows with the first streams of a server alone.
        server = BenchServer("idle-streams", lambda ports: conch_command(ports, REPOSITORY))
        server.start()
        try:
            server.wait_for_http()
            print(asyncio.run(measure(server, streams, pause_s, chosen.seconds)), flush=True)
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
