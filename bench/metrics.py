"""Cost of metrics: `python -m bench.metrics`, see bench/README.md.

Scrapes of a server with many models: how long they take, and how much longer the requests that are under way
meanwhile. And the same load on two servers, one of which has all metrics and one none.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from bench import facts
from bench.control import HEADER, Row, serving, timed, write_models
from bench.delays import Ended, Http, curl, delays_alone, delays_during, spread_ms
from bench.measurement import Measurement, MeasurementError, UnstableError
from bench.perf import measure
from bench.protocol import Probe
from bench.scenes import load_scenes
from bench.servers import ROOT, BenchServer, ServerError, conch_command

SCRAPE_MOST_S = 0.1
DELAY_MOST_S = 0.01
COST_MOST = 0.01
EVERYTHING = ("--allow-metrics=true",)
"""All that can be had; histograms are always among it."""
SCENE = "unary_32"


def measure_scrapes(models: int, scrapes: int) -> Iterator[Row]:
    """Scrapes of many models, each of which has answered a request."""
    with tempfile.TemporaryDirectory(prefix="conch-metrics-") as folder:
        repository = Path(folder)
        names = write_models(repository, models)
        values = np.zeros((1, 16), np.float32)
        with serving("metrics", repository, *EVERYTHING) as server, Probe(server.address) as probe:
            for name in names:
                probe.infer(name, values)
            server.wait_for_http()
            with closing(Http(server.metrics, "GET", "/metrics")) as scrape:
                lines = scrape().count(b"\n")
                taken = timed(scrape, scrapes)
            yield Row(
                f"a scrape with {models} models, {lines:,} lines",
                spread_ms(taken),
                "< 100 ms",
                max(taken) < SCRAPE_MOST_S,
            )
            yield _delays(server, "gRPC", partial(probe.infer, names[0], values), scrapes)
            with closing(_http_infer(server, names[0], values)) as ask:
                yield _delays(server, "HTTP", ask, scrapes)


def _http_infer(
    server: BenchServer, model: str, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
) -> Http:
    shape = list(values.shape)
    data = values.ravel().tolist()
    body = f'{{"inputs":[{{"name":"INPUT0","datatype":"FP32","shape":{shape},"data":{data}}}]}}'
    return Http(server.http, "POST", f"/v2/models/{model}/infer", body.encode())


def _delays(server: BenchServer, protocol: str, ask: Callable[[], object], scrapes: int) -> Row:
    """Requests during scrapes, and as many seconds without."""
    command = curl(f"http://{server.metrics}/metrics")
    during: list[float] = []
    seconds = 0.0
    ask()
    for _ in range(scrapes):
        elapsed, delays = delays_during(command, ask)
        seconds += elapsed
        during += delays
    alone = delays_alone(seconds, ask)
    more = max(during) - max(alone)
    return Row(
        f"{protocol} requests while it is scraped; without",
        f"{spread_ms(during)}; {spread_ms(alone)}",
        "worst at most 10 ms more",
        more <= DELAY_MOST_S,
    )


def measure_cost(rounds: int, scale: float) -> Iterator[Row]:
    """The same load with all metrics and with none, in turns."""
    scene = load_scenes()[SCENE]
    requests = max(int(scene.requests * scale), 10)
    kinds = {"with": EVERYTHING, "without": ("--allow-metrics=false",)}
    servers = {
        kind: BenchServer(f"metrics-{kind}", partial(conch_command, flags=kinds[kind])) for kind in kinds
    }
    pairs: list[dict[str, Measurement]] = []
    try:
        for server in servers.values():
            server.start()
        for number in range(rounds + 1):
            # The order alternates, so that an effect of the machine on the second server hits both.
            order = list(servers) if number % 2 else list(reversed(servers))
            try:
                pair = {kind: measure(scene, scene.model, servers[kind], requests) for kind in order}
            except UnstableError as error:
                print(f"round {number}: {error}", file=sys.stderr)
                continue
            if number:
                pairs.append(pair)
    finally:
        for server in servers.values():
            server.stop()
    if not pairs:
        raise MeasurementError("no round was stable")
    for what, attribute in (("requests/s", "throughput"), ("CPU per request", "cpu_per_request")):
        ratios = [getattr(pair["with"], attribute) / getattr(pair["without"], attribute) for pair in pairs]
        cost = 1 - median(ratios) if attribute == "throughput" else median(ratios) - 1
        yield Row(
            f"{what} with all metrics by those without, {scene.concurrency} in flight, {len(pairs)} rounds",
            f"{median(ratios):.3f} [{min(ratios):.3f}-{max(ratios):.3f}]",
            "at most 1 % lost" if attribute == "throughput" else "",
            cost <= COST_MOST if attribute == "throughput" else None,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and writes a results file if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.metrics", description=__doc__)
    parser.add_argument("--models", type=int, default=500, help="that are scraped (%(default)s)")
    parser.add_argument("--scrapes", type=int, default=20, help="of each kind (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="with and without metrics (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on request counts (%(default)s)")
    parser.add_argument("--out", type=Path, help="results file to write")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    known = {**facts.machine(), **facts.versions(), "revision": facts.revision(ROOT)}
    print(HEADER, flush=True)
    rows: list[Row] = []
    parts = measure_scrapes(options.models, options.scrapes), measure_cost(options.rounds, options.scale)
    try:
        for part in parts:
            for row in part:
                print(row, flush=True)
                rows.append(row)
    except (Ended, MeasurementError, OSError, ServerError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if options.out is not None:
        described = "\n".join(f"| {name} | {value} |" for name, value in known.items())
        table = "\n".join(map(str, rows))
        options.out.write_text(
            f"# Benchmark: metrics\n\n| | |\n|---|---|\n{described}\n\nMedian and worst; ratios are "
            f"those of each round, median and range. `python -m bench.metrics`.\n\n{HEADER}\n{table}\n",
            encoding="utf-8",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
