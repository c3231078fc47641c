"""Cost of the console: `python -m bench.console`, see bench/README.md.

A server with many models, with one viewer of its console and without any, in turns: the CPU time it takes
while nothing else happens, and the latency of requests meanwhile. Then what a browser makes of it.
"""

from __future__ import annotations

import argparse
import http.client
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import psutil

from bench import facts
from bench.control import HEADER, Row, serving, write_models
from bench.protocol import Probe
from bench.servers import ROOT, ServerError

CPU_MOST = 0.005
RATE = 400
"""Requests a second of a busy round."""
P99_MOST = 1.02
PAINT_MOST_MS = 200
TICK_MOST_MS = 100
_SETTLE_S = 3.0
_PAUSE = threading.Event()  # never set: waits sleep on it


def free_port() -> int:
    """Returns a free port."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def viewer(port: int) -> Iterator[list[int]]:
    """One open page, as far as the server is concerned; the sizes of what it gets each second."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/api/live?model=model_0000")
    response = connection.getresponse()
    if response.status != 200:
        raise ServerError(f"the console answers {response.status}")
    sizes: list[int] = []

    def read() -> None:
        size = 0
        with suppress(OSError):  # the end of the block breaks the connection
            while line := response.readline():
                size += len(line)
                if line == b"\n":
                    sizes.append(size)
                    size = 0

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield sizes
    finally:
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
        reader.join()
        connection.close()


@contextmanager
def no_viewer(port: int) -> Iterator[list[int]]:
    """Runs without a viewer."""
    yield []


def measure_server(models: int, rounds: int, seconds: float, requests: int) -> Iterator[Row]:
    """CPU while idle and latency under load, with and without a viewer."""
    port = free_port()
    flags = (f"--console-port={port}", "--backend-config=python,placement=in_process")
    with tempfile.TemporaryDirectory(prefix="conch-console-") as folder:
        repository = Path(folder)
        names = write_models(repository, models)
        with serving("console", repository, *flags) as server, Probe(server.address) as probe:
            process = psutil.Process(_pid(port))
            values = np.zeros((1, 16), np.float32)
            for name in names:
                probe.infer(name, values)
            _PAUSE.wait(_SETTLE_S)
            idle = _in_turns(port, rounds, partial(_cpu, process, seconds))
            yield _cpu_row(f"CPU of one viewer, {models} models, idle", idle)
            ask = partial(_latencies, probe, names, values, requests)
            busy = _in_turns(port, rounds, partial(_cpu_and_latencies, process, ask))
            yield _cpu_row(
                f"CPU of one viewer, {models} models, {RATE} requests/s in turns over them",
                {kind: [cpu for cpu, _ in found] for kind, found in busy.items()},
            )
            for share, percent in ((0.5, 50), (0.99, 99)):
                ratios = [
                    _quantile(one, share) / _quantile(other, share)
                    for (_, one), (_, other) in zip(busy["with"], busy["without"], strict=True)
                ]
                yield Row(
                    f"p{percent} of requests with a viewer by that without, {rounds} rounds",
                    f"{median(ratios):.3f} [{min(ratios):.3f}-{max(ratios):.3f}]",
                    "at most 2 % more" if percent == 99 else "",
                    median(ratios) <= P99_MOST if percent == 99 else None,
                )
            alone = [_quantile(taken, 0.99) for _, taken in busy["without"]]
            noise = [one / other for one, other in pairwise(alone)]
            yield Row(
                "p99 of a round without a viewer by that of the one before it",
                f"{median(noise):.3f} [{min(noise):.3f}-{max(noise):.3f}]",
            )
            with viewer(port) as sizes:
                ends = time.monotonic() + 3
                while time.monotonic() < ends:
                    for name in names[:50]:
                        probe.infer(name, values)
            yield Row(
                "bytes of a second in which 50 models are busy",
                f"{max(sizes[2:]):,}",
                "at most 2,048",
                max(sizes[2:]) <= 2048,
            )


def _pid(port: int) -> int:
    """The process that listens on a port."""
    for each in psutil.net_connections("tcp"):
        listens = each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
        if listens and each.pid is not None:
            return int(each.pid)
    raise ServerError(f"no process listens on {port}")


def _in_turns(port: int, rounds: int, measure: Callable[[], Any]) -> dict[str, list[Any]]:
    """Measures with and without a viewer; which is first changes."""
    found: dict[str, list[Any]] = {"with": [], "without": []}
    for number in range(rounds):
        for kind in ("with", "without") if number % 2 else ("without", "with"):
            with (viewer if kind == "with" else no_viewer)(port):
                _PAUSE.wait(1.0)
                found[kind].append(measure())
    return found


def _cpu(process: psutil.Process, seconds: float) -> float:
    """The share of a processor that a process takes."""
    began, before = time.monotonic(), sum(process.cpu_times()[:2])
    _PAUSE.wait(seconds)
    return (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)


def _cpu_and_latencies(process: psutil.Process, ask: Callable[[], list[float]]) -> tuple[float, list[float]]:
    before = sum(process.cpu_times()[:2])
    began = time.monotonic()
    taken = ask()
    return (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began), taken


def _latencies(
    probe: Probe, names: Sequence[str], values: np.ndarray[Any, np.dtype[np.float32]], requests: int
) -> list[float]:
    taken = []
    due = time.perf_counter()
    for name, _ in zip(cycle(names), range(requests), strict=False):
        due += 1 / RATE  # the same load in each round, so that shares of a processor compare
        _PAUSE.wait(max(due - time.perf_counter(), 0.0))
        began = time.perf_counter()
        probe.infer(name, values)
        taken.append(time.perf_counter() - began)
    return taken


def _quantile(taken: Sequence[float], share: float) -> float:
    return quantiles(taken, n=1000)[round(share * 1000) - 1]


def _cpu_row(what: str, found: dict[str, list[float]]) -> Row:
    more = [one - other for one, other in zip(found["with"], found["without"], strict=True)]
    return Row(
        what,
        f"{median(more) * 100:.2f} % of a core [{min(more) * 100:.2f}-{max(more) * 100:.2f}]",
        "at most 0.5 %",
        median(more) <= CPU_MOST,
    )


_TICK = """
async () => {
  const main = [...document.scripts].find((each) => each.type === "module").src;
  const { store } = await import(main.replace("main.js", "store.js"));
  const names = [...store.models.keys()].map((name, number) => [number, name, 1]);
  const taken = [];
  for (let second = 0; second < 20; second += 1) {
    const m = names.map(([number]) => [number, 0, second % 3, 1, "Hk4I1eJ2"]);
    const began = performance.now();
    store.take("tick", { t: Date.now() / 1000, names, m, rss: 1, process_cpu: 0, state: store.state });
    await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
    taken.push(performance.now() - began);
  }
  return [names.length, taken];
}
"""


def measure_browser(models: int, visits: int) -> Iterator[Row]:
    """First paints on loopback, and what a second with so many models costs the page."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("no Playwright: nothing is measured in a browser", file=sys.stderr)
        return
    chromium = shutil.which("chromium")
    if chromium is None:
        print("no Chromium: nothing is measured in a browser", file=sys.stderr)
        return
    port = free_port()
    flags = (f"--console-port={port}", "--model-control-mode=explicit")
    with tempfile.TemporaryDirectory(prefix="conch-console-") as folder:
        repository = Path(folder)
        write_models(repository, models)
        with serving("console-pages", repository, *flags), sync_playwright() as driver:
            browser = driver.chromium.launch(
                executable_path=chromium, args=["--headless=new", "--no-sandbox", "--disable-gpu"]
            )
            paints = []
            for _ in range(visits):
                context = browser.new_context()
                page = context.new_page()
                page.goto(f"http://127.0.0.1:{port}/#/models")
                page.get_by_text(f"{models} models").wait_for()
                entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
                paints.append(float(page.evaluate(entry)))
                context.close()
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{port}/#/models")
            page.get_by_text(f"{models} models").wait_for()
            count, taken = page.evaluate(_TICK)
            browser.close()
    yield Row(
        "first paint, without a cache",
        f"{median(paints):.0f} ms [{min(paints):.0f}-{max(paints):.0f}]",
        "under 200 ms",
        median(paints) < PAINT_MOST_MS,
    )
    yield Row(
        f"the page's work for a second with {count} busy models, until it is drawn",
        f"{median(taken):.0f} ms [{min(taken):.0f}-{max(taken):.0f}]",
        "under 100 ms",
        median(taken) < TICK_MOST_MS,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and writes a results file if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.console", description=__doc__)
    parser.add_argument("--models", type=int, default=100, help="that are served (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="with and without a viewer (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of an idle round (%(default)s)")
    parser.add_argument("--requests", type=int, default=2_000, help="of a busy round (%(default)s)")
    parser.add_argument("--visits", type=int, default=9, help="of the browser (%(default)s)")
    parser.add_argument("--out", type=Path, help="results file to write")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    known = {**facts.machine(), **facts.versions(), "revision": facts.revision(ROOT)}
    print(HEADER, flush=True)
    rows: list[Row] = []
    parts = (
        measure_server(options.models, options.rounds, options.seconds, options.requests),
        measure_browser(500, options.visits),
    )
    try:
        for part in parts:
            for row in part:
                print(row, flush=True)
                rows.append(row)
    except (OSError, ServerError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if options.out is not None:
        described = "\n".join(f"| {name} | {value} |" for name, value in known.items())
        table = "\n".join(map(str, rows))
        options.out.write_text(
            f"# Benchmark: the console\n\n| | |\n|---|---|\n{described}\n\nMedian and range of the rounds. "
            f"`python -m bench.console`.\n\n{HEADER}\n{table}\n",
            encoding="utf-8",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
