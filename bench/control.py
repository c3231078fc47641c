"""Cost of following a large repository: `python -m bench.control`, see bench/README.md.

A repository of many small models, all of them really loaded, by servers in modes none, poll and watch. What a
mode costs is its server's CPU time less that of the one in mode none, which idles beside it. One pass of poll
is also timed by itself in this process, with the code that the server runs.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from bench import facts
from bench.protocol import Probe
from bench.servers import REPOSITORIES, ROOT, BenchServer, conch_command
from conch_control.control_options import ControlOptions
from conch_control.planner.plan import PlannerPlan
from conch_control.planner.snapshot import SnapshotReader
from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ConnectionOptions
from conch_control.repository.local import LocalRepository
from conch_control.repository.repositories import Repositories

TEMPLATE = REPOSITORIES / "common" / "identity_fp32"
POLL_S = 15.0
SETTLED = 50
"""Cycles after which a server has what it needs for one more."""
AFTER_START_S = 3.0
"""Seconds after a server's start in which planners do their first pass."""
MODES = ("none", "poll", "watch")


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        what: Name of the measurement.
        measured: The figures, as text.
        goal: Target of the figures; empty for none.
        kept: True if the goal was reached; None without a goal.
    """

    what: str
    measured: str
    goal: str = ""
    kept: bool | None = None

    def __str__(self) -> str:
        kept = "" if self.kept is None else ("yes" if self.kept else "**no**")
        return f"| {self.what} | {self.measured} | {self.goal} | {kept} |"


HEADER = "| what | measured | goal | reached |\n|---|---|---|---|"


def write_models(repository: Path, count: int) -> list[str]:
    """Fills a repository with copies of one small Python model; their names."""
    config = (TEMPLATE / "config.pbtxt").read_text()
    names = [f"model_{number:04d}" for number in range(count)]
    for name in names:
        shutil.copytree(TEMPLATE, repository / name)
        (repository / name / "config.pbtxt").write_text(config.replace(TEMPLATE.name, name))
    return names


@contextmanager
def serving(name: str, repository: Path, *flags: str) -> Iterator[BenchServer]:
    """A server that has loaded what it loads at its start."""
    server = BenchServer(f"control-{name}", partial(conch_command, repositories=(repository,), flags=flags))
    server.start()
    try:
        yield server
    finally:
        server.stop()


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Seconds that each of some calls takes."""
    call()  # warms up
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return taken


def milliseconds(taken: Sequence[float]) -> str:
    """Median and worst."""
    return f"{median(taken) * 1e3:,.1f} ms [max {max(taken) * 1e3:,.1f}]"


def measure_index(server: BenchServer, target: str, count: int, calls: int) -> list[Row]:
    """The index over both ports, and the command that prints it."""
    with Probe(server.address) as probe:
        assert probe.index() == count
        taken = timed(probe.index, calls)
    with closing(ModelControlClient(ConnectionOptions(target, None, None), 60.0)) as client:
        assert len(client.models().models) == count
        control = timed(client.models, calls)
    command = [str(Path(sys.executable).with_name("conch")), "models", "list", f"--target={target}"]

    def run() -> None:
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        assert done.stdout.count("model_") >= count

    whole = timed(run, max(calls // 10, 3))
    return [
        Row(
            f"RepositoryIndex over gRPC, {count} models, all loaded",
            milliseconds(taken),
            "< 50 ms",
            max(taken) < 0.05,
        ),
        Row("index over the control port", milliseconds(control)),
        Row("`conch models list`, the whole process with the start of Python", milliseconds(whole)),
    ]


def measure_pass(repository: Path, count: int, passes: int) -> list[Row]:
    """One pass of mode poll: a snapshot of everything, without changes."""
    repositories = Repositories([LocalRepository(repository)])
    reader, plan = (
        SnapshotReader(repositories, ControlOptions(()), lambda source: None),
        PlannerPlan(10**9, 4),
    )
    plan.adopt(reader.poll(None, lambda: False), time.monotonic_ns())
    busy: list[float] = []

    def poll() -> None:
        begin = time.thread_time()
        now = time.monotonic_ns()
        operations = plan.snapshot_taken(reader.poll(None, lambda: False), now, now)
        busy.append(time.thread_time() - begin)
        assert not list(operations)

    taken = timed(poll, passes)
    share = median(busy) / POLL_S
    return [
        Row(
            f"a poll pass over {count} models, in this process", milliseconds(taken), "< 1 s", max(taken) < 1
        ),
        Row(
            f"its CPU time, as a share of a core at {POLL_S:g} s between passes",
            f"{median(busy) * 1e3:,.1f} ms, {share:.2%}",
            "< 5 %",
            share < 0.05,
        ),
    ]


def measure_idle(servers: dict[str, BenchServer], seconds: float, watch_seconds: float) -> list[Row]:
    """CPU time of servers without requests, over the same time."""
    used: dict[str, list[float]] = {}
    pause = threading.Event()
    pause.wait(AFTER_START_S)
    begin = time.monotonic()
    before = {mode: server.cpu_seconds() for mode, server in servers.items()}
    for until in (watch_seconds, seconds):
        pause.wait(max(begin + until - time.monotonic(), 0.0))
        for mode, server in servers.items():
            used.setdefault(mode, []).append(server.cpu_seconds() - before[mode])
    elapsed = time.monotonic() - begin
    poll = (used["poll"][-1] - used["none"][-1]) / elapsed
    watch = used["watch"][0] - used["none"][0]
    resolution = 0.02  # two ticks of the clock by which the kernel counts
    spread = 0.1 * used["none"][0]  # servers in mode none do not agree better than that
    return [
        Row(
            f"idle in mode none over {watch_seconds:g} s (gRPC's and the server's timers)",
            f"{used['none'][0]:.2f} s of CPU, {used['none'][0] / watch_seconds:.2%}",
        ),
        Row(
            f"mode watch beyond that, over {watch_seconds:g} s",
            f"{watch:+.2f} s of CPU, {watch / watch_seconds:+.2%}",
            f"0 (±{resolution + spread:.2f} s can't be told from it)",
            watch <= resolution + spread,
        ),
        Row(
            f"mode poll beyond that, over {elapsed:.0f} s at {POLL_S:g} s between passes",
            f"{used['poll'][-1] - used['none'][-1]:+.2f} s of CPU, {poll:+.2%} of a core",
            "< 5 %",
            poll < 0.05,
        ),
    ]


def measure_cycles(server: BenchServer, model: str, beside: int, cycles: int) -> list[Row]:
    """Memory, threads and files of a server after many loads and unloads of a model, beside other models."""
    assert server.pid is not None
    process = psutil.Process(server.pid)
    values = np.zeros((1, 16), np.float32)
    held: list[tuple[int, int, int]] = []
    begin = time.perf_counter()
    with Probe(server.address) as probe:
        for cycle in range(1, cycles + 1):
            probe.load(model)
            probe.infer(model, values)
            probe.unload(model)
            if cycle in (SETTLED, cycles):
                probe.wait_unloaded(model)
                held.append((process.memory_info().rss, process.num_threads(), process.num_fds()))
    taken = (time.perf_counter() - begin) / cycles
    (memory, threads, files), (memory_then, threads_then, files_then) = held
    growth = memory_then / memory - 1
    return [
        Row(
            f"memory after {SETTLED} and {cycles} cycles of load, request, unload; {beside} models beside it",
            f"{memory / 2**20:.1f}, {memory_then / 2**20:.1f} MiB: {growth:+.1%}; {taken * 1e3:.1f} ms each",
            "< 5 %",
            growth < 0.05,
        ),
        Row(
            "threads and descriptors then",
            f"{threads} and {files}, {threads_then} and {files_then}",
            "none left",
            threads_then <= threads + 2 and files_then <= files,
        ),
    ]


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All measurements, one after the other."""
    with tempfile.TemporaryDirectory(prefix="conch-control-") as folder, ExitStack() as stack:
        repository = Path(folder, "models")
        repository.mkdir()
        names = write_models(repository, options.models)
        target = f"unix:{folder}/control"
        servers = {}
        for mode in MODES:
            flags = [f"--model-control-mode={mode}"]
            flags += [f"--control-address={target}"] if mode == "poll" else []
            begin = time.perf_counter()
            servers[mode] = stack.enter_context(serving(mode, repository, *flags))
            took = time.perf_counter() - begin
            yield Row(f"start in mode {mode}, {options.models} Python models loaded", f"{took:.1f} s")
        yield from measure_idle(servers, options.seconds, min(options.watch_seconds, options.seconds))
        yield from measure_index(servers["poll"], target, options.models, options.calls)
        for server in servers.values():
            server.stop()
        yield from measure_pass(repository, options.models, options.calls)
        alone = Path(folder, "alone")
        alone.mkdir()
        write_models(alone, 1)
        for beside, place in ((0, alone), (options.models - 1, repository)):
            with serving("explicit", place, "--model-control-mode=explicit") as server:
                yield from measure_cycles(server, names[0], beside, options.cycles)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and writes a results file if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.control", description=__doc__)
    parser.add_argument("--models", type=int, default=500, help="in the repository (%(default)s)")
    parser.add_argument("--calls", type=int, default=50, help="calls and passes of each kind (%(default)s)")
    parser.add_argument("--cycles", type=int, default=1000, help="of load and unload (%(default)s)")
    parser.add_argument("--seconds", type=float, default=61.0, help="of idling in mode poll (%(default)s)")
    parser.add_argument("--watch-seconds", type=float, default=30.0, help="in mode watch (%(default)s)")
    parser.add_argument("--out", type=Path, help="results file to write")
    options = parser.parse_args(arguments)
    if options.cycles <= SETTLED:
        parser.error(f"--cycles: more than {SETTLED} are needed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    known = {**facts.machine(), **facts.versions(), "revision": facts.revision(ROOT)}
    print(HEADER, flush=True)
    rows = []
    for row in measure(options):
        print(row, flush=True)
        rows.append(row)
    if options.out is not None:
        described = "\n".join(f"| {name} | {value} |" for name, value in known.items())
        table = "\n".join(map(str, rows))
        options.out.write_text(
            f"# Benchmark: the control plane\n\n| | |\n|---|---|\n{described}\n\n{options.models} copies of "
            f"one small Python model; three servers idle side by side, the rest is measured one after the "
            f"other. `python -m bench.control`.\n\n{HEADER}\n{table}\n",
            encoding="utf-8",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
