"""Counts what a request costs in bytecodes: ``python -m bench.bytecodes [--model M] [--clients N]``.

Times on a small or busy machine differ by more than most changes save. How many bytecodes the server and its
workers run for a request hardly differs at all. It leaves out what C code does, gRPC's above all, so a change
that saves bytecodes still has to be timed.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from bench.protocol import Probe
from bench.servers import COMMON, ROOT, Command, Ports, Server, conch_command

TRACING = ROOT / "bench" / "tracing"
WRITE_DEADLINE = 30.0


@dataclass(frozen=True)
class Function:
    """What one function has run, per request."""

    bytecodes: float
    calls: float
    name: str


def measure(model: str, clients: int, seconds: float) -> tuple[float, dict[str, list[Function]]]:
    """Puts load on a server that counts.

    Args:
        model: One of those in ``bench/repositories/common`` with one FP32 input.
        clients: How many requests are in flight.
        seconds: For how long.

    Returns:
        The mean number of requests in a batch, and the functions of each process that had to do with the
        requests, those with the most bytecodes first.
    """
    with tempfile.TemporaryDirectory() as folder:
        server = Server("conch-bytecodes", lambda ports: _counting(ports, folder))
        server.start()
        try:
            with _load(server.address, model, clients):
                threading.Event().wait(seconds / 2)  # until it runs evenly
                pids = _pids(server)
                _tell(pids, signal.SIGUSR2)
                before = _counts(server.address, model)
                threading.Event().wait(seconds)
                _tell(pids, signal.SIGUSR1)
                after = _counts(server.address, model)
                files = {name: _written(Path(folder, str(pid))) for name, pid in pids.items()}
        finally:
            server.stop()
        requests, batches = after[0] - before[0], after[1] - before[1]
        read = {name: _read(path, requests) for name, path in files.items()}
        busy = {name: functions for name, functions in read.items() if _total(functions) > 10}
        return requests / max(batches, 1), busy


def _counting(ports: Ports, folder: str) -> Command:
    flags = ["--backend-config=python,pass-environment=CONCH_BYTECODES"]
    command = conch_command(ports, COMMON, flags)
    path = os.pathsep.join(filter(None, (str(TRACING), os.environ.get("PYTHONPATH"))))
    return Command(command.arguments, {"PYTHONPATH": path, "CONCH_BYTECODES": folder})


@contextmanager
def _load(address: str, model: str, clients: int) -> Iterator[None]:
    over = threading.Event()
    threads = [threading.Thread(target=_ask, args=(address, model, over)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _ask(address: str, model: str, over: threading.Event) -> None:
    with Probe(address) as probe:
        values = np.ones((*(1 for _ in range(probe.dimensions(model) - 1)), 16), np.float32)
        while not over.is_set():
            probe.infer(model, values)


def _counts(address: str, model: str) -> tuple[int, int]:
    with Probe(address) as probe:
        return probe.batches(model)


def _pids(server: Server) -> dict[str, int]:
    assert server.pid is not None
    workers = psutil.Process(server.pid).children(recursive=True)
    return {"server": server.pid, **{f"worker {number}": one.pid for number, one in enumerate(workers)}}


def _tell(pids: dict[str, int], number: signal.Signals) -> None:
    for pid in pids.values():
        os.kill(pid, number)


def _written(path: Path) -> Path:
    end = time.monotonic() + WRITE_DEADLINE
    pause = threading.Event()
    while not (path.exists() and path.read_text().endswith("\n.\n")):
        if time.monotonic() > end:
            raise TimeoutError(
                f"process {path.name} has not written its counts within {WRITE_DEADLINE:.0f} s"
            )
        pause.wait(0.05)
    kept = path.with_suffix(".done")
    return path.rename(kept)


def _read(path: Path, requests: int) -> list[Function]:
    lines = (line.split("\t") for line in path.read_text().splitlines()[:-1])
    functions = [
        Function(int(bytecodes) / requests, int(calls) / requests, _short(name))
        for bytecodes, calls, name in lines
    ]
    return sorted(functions, key=lambda one: -one.bytecodes)


def _short(name: str) -> str:
    for root in (f"{ROOT}{os.sep}", f"site-packages{os.sep}", f"lib{os.sep}"):
        name = name.rpartition(root)[2]
    return name


def _total(functions: list[Function]) -> float:
    return sum(one.bytecodes for one in functions)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="identity_worker")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--top", type=int, default=30, help="how many functions to print for each process")
    options = parser.parse_args()
    batch, processes = measure(options.model, options.clients, options.seconds)
    print(f"{options.model}, {options.clients} clients, {batch:.1f} requests in a batch")
    for name, functions in processes.items():
        print(f"\n{name}: {_total(functions):,.0f} bytecodes per request; per function, with calls")
        for one in functions[: options.top]:
            print(f"{one.bytecodes:9.1f} {one.calls:6.2f}  {one.name}")


if __name__ == "__main__":
    main()
