"""Counts the bytecodes and calls of a request, by function: ``python -m bench.bytecodes [--walk NAME]``.

Times on a small or busy machine differ by more than most changes save; counts do not: limits of time are
lifted where it counts (see `bench/tracing`), and what a function runs seldom or by time is no part of a walk.
Counts leave out what C code does, gRPC's above all, so a change that saves bytecodes still has to be timed.
`bench.ratchet` compares the same counts with those on record.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from bench.protocol import Probe
from bench.servers import COMMON, FRONT, REPOSITORIES, ROOT, BenchServer, Command, Ports, conch_command

ROUTED = (REPOSITORIES / "routed",)
TRACING = ROOT / "bench" / "tracing"
WRITE_DEADLINE = 60.0
_WARM_UP = 30
"""Requests before those that count."""


@dataclass(frozen=True)
class Function:
    """Work of one function for a request; `depth` is the deepest stack of conch's frames at its calls."""

    bytecodes: float
    calls: float
    depth: int
    name: str

    @property
    def ours(self) -> bool:
        """True if the function is conch's."""
        return self.name.startswith(("services/", "control/"))

    @property
    def file(self) -> str:
        """Path of its file."""
        return self.name.rpartition(":")[0]


@dataclass(frozen=True)
class Walk:
    """A kind of request: a model and what makes a function that asks once, with what its server has."""

    model: str
    prepare: Callable[[BenchServer, Probe, str], Callable[[], object]]
    flags: tuple[str, ...] = ()
    key: str = ""
    repositories: tuple[Path, ...] = COMMON


def _values(probe: Probe, model: str) -> npt.NDArray[np.float32]:
    return np.ones((*(1 for _ in range(probe.dimensions(model) - 1)), 16), np.float32)


def _by_grpc(server: BenchServer, probe: Probe, model: str) -> Callable[[], object]:
    values = _values(probe, model)
    return lambda: probe.infer(model, values)


def _by_http(server: BenchServer, probe: Probe, model: str) -> Callable[[], object]:
    values = _values(probe, model)
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": values.shape, "data": values.ravel().tolist()}
    body = json.dumps({"inputs": [tensor]})
    connection = http.client.HTTPConnection(server.http)

    def once() -> None:
        connection.request("POST", f"/v2/models/{model}/infer", body)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status}: {content!r}")

    return once


def _loads(server: BenchServer, probe: Probe, model: str) -> Callable[[], object]:
    return lambda: probe.load(model)


WALKS = {
    "grpc": Walk("identity_fp32", _by_grpc),
    "http": Walk("identity_fp32", _by_http),
    "worker": Walk("identity_worker", _by_grpc),
    "chain": Walk("chain_1", _by_grpc),
    "access": Walk(
        "identity_fp32", _by_grpc, (f"--access-policy={ROOT}/bench/access.toml",), "bench-key-of-steady"
    ),
    "chance": Walk("routed_by_chance", _by_grpc, repositories=ROUTED),
    "sticky": Walk("routed_by_key", _by_grpc, repositories=ROUTED),
    "load": Walk("identity_fp32", _loads, ("--model-control-mode=explicit", "--load-model=identity_fp32")),
}


def measure(walk: Walk, clients: int, requests: int) -> dict[str, list[Function]]:
    """Puts load on a server that counts.

    Args:
        walk: The requests, and flags of the server.
        clients: Number of requests in flight.
        requests: Number of requests that each client makes while the server counts.

    Returns:
        The functions of each process that had to do with the requests, those with the most bytecodes first.
    """
    with tempfile.TemporaryDirectory() as folder:
        server = BenchServer("conch-bytecodes", lambda ports: _counting(ports, folder, walk))
        server.start()
        try:
            server.wait_for_http()
            with _clients(server, walk, clients) as ask:
                ask(_WARM_UP)
                for asked in (_WARM_UP, requests):  # once more with limits of time lifted
                    pids = _pids(server)
                    _tell(pids, folder, signal.SIGUSR2, "begun")
                    ask(asked)
                files = _tell(pids, folder, signal.SIGUSR1, "counts")
        finally:
            server.stop()
        read = {name: _read(path, clients * requests) for name, path in files.items()}
        return {name: functions for name, functions in read.items() if total(functions) > 10}


def _counting(ports: Ports, folder: str, walk: Walk) -> Command:
    inherited = "--backend-config=python,pass-environment=CONCH_BYTECODES"
    command = conch_command(ports, walk.repositories, [inherited, *walk.flags])
    path = os.pathsep.join(filter(None, (str(TRACING), os.environ.get("PYTHONPATH"))))
    return Command(command.arguments, {"PYTHONPATH": path, "CONCH_BYTECODES": folder})


@contextmanager
def _clients(server: BenchServer, walk: Walk, count: int) -> Iterator[Callable[[int], None]]:
    """Clients of a server; what it gives has each make so many requests, one after the other."""
    with ExitStack() as stack, ThreadPoolExecutor(count) as threads:
        probes = [stack.enter_context(Probe(server.address, walk.key)) for _ in range(count)]
        asks = [walk.prepare(server, probe, walk.model) for probe in probes]

        def repeat(once: Callable[[], object], times: int) -> None:
            for _ in range(times):
                once()

        def all_repeat(times: int) -> None:
            for done in [threads.submit(repeat, once, times) for once in asks]:
                done.result()

        yield all_repeat


def _pids(server: BenchServer) -> dict[str, int]:
    assert server.pid is not None
    found = {"server": server.pid}
    children = psutil.Process(server.pid).children()  # fronts, and what workers are forked from
    fronts = [child for child in children if FRONT in child.cmdline()]
    workers = [worker for child in children for worker in child.children(recursive=True)]
    found |= {f"front {number}": one.pid for number, one in enumerate(fronts)}
    found |= {f"worker {number}": one.pid for number, one in enumerate(workers)}
    return found


def _tell(pids: dict[str, int], folder: str, number: signal.Signals, kind: str) -> dict[str, Path]:
    """Sends a signal to processes; returns the files that they answer with."""
    for pid in pids.values():
        os.kill(pid, number)
    return {name: _written(Path(folder, f"{pid}.{kind}")) for name, pid in pids.items()}


def _written(path: Path) -> Path:
    end = time.monotonic() + WRITE_DEADLINE
    pause = threading.Event()
    while not (path.exists() and path.read_text().endswith(".\n")):
        if time.monotonic() > end:
            raise TimeoutError(f"{path.name} was not written within {WRITE_DEADLINE:.0f} s")
        pause.wait(0.02)
    return path.rename(path.with_suffix(".done"))


def _read(path: Path, requests: int) -> list[Function]:
    lines = (line.split("\t") for line in path.read_text().splitlines()[:-1])
    functions = [
        Function(int(bytecodes) / requests, int(calls) / requests, int(depth), _short(name))
        for bytecodes, calls, depth, name in lines
    ]
    return sorted(functions, key=lambda one: -one.bytecodes)


def _short(name: str) -> str:
    for root in (f"{ROOT}{os.sep}", f"site-packages{os.sep}", f"lib{os.sep}"):
        name = name.rpartition(root)[2]
    return name


def total(functions: list[Function]) -> float:
    """Bytecodes per request of some functions."""
    return sum(one.bytecodes for one in functions)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--walk", choices=WALKS, default="worker")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--requests", type=int, default=200, help="of each client")
    parser.add_argument("--flag", action="append", default=[], help="one more flag of the server")
    parser.add_argument("--top", type=int, default=30, help="how many functions to print for each process")
    options = parser.parse_args()
    walk = WALKS[options.walk]
    walk = replace(walk, flags=(*walk.flags, *options.flag))
    processes = measure(walk, options.clients, options.requests)
    for name, functions in processes.items():
        calls = sum(one.calls for one in functions if one.ours)
        print(f"\n{name}: {total(functions):,.0f} bytecodes and {calls:.0f} calls of conch per request")
        for one in functions[: options.top]:
            print(f"{one.bytecodes:9.1f} {one.calls:6.2f} {one.depth:4}  {one.name}")


if __name__ == "__main__":
    main()
