"""Times of one principal beside another one that is far over its limit: ``python -m bench.access``.

A steady client sends 100 requests a second. Beside it, in turn: nothing; a client that sends 20 times as many
as its limit allows; and one that sends as many without a limit. All send at fixed times, whether they have
been answered or not, so that a slow answer delays no later request. Rounds are interleaved.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import Future, ThreadPoolExecutor

from bench.servers import COMMON, ROOT, BenchServer, conch_command
from conch_tools.connection import parse_url
from conch_tools.perf.measure.results import Load, Point
from conch_tools.perf.measuring import run_perf
from conch_tools.perf.perf_settings import PerfSettings

POLICY = ROOT / "bench" / "access.toml"
KEY = "bench-key-of-{}"
MODEL = "identity_fp32"
STEADY_PER_S = 100
GREEDY_PER_S = 300
SCENES = ("alone", "greedy", "unlimited")
_WIDTH = 16


def load(address: str, principal: str, per_s: int, seconds: int) -> Point:
    """Sends requests at a fixed rate, from a process of its own."""
    settings = PerfSettings(
        parse_url(f"grpc://{address}", {"authorization": f"Bearer {KEY.format(principal)}"}),
        MODEL,
        loads=[Load("rate", per_s)],
        seconds=seconds,
        warm_up=0,
        shapes={"INPUT0": [_WIDTH]},
        processes=1,
    )
    return run_perf(settings).points[0]


def measure(server: BenchServer, scene: str, seconds: int, other: ThreadPoolExecutor) -> tuple[Point, str]:
    """The steady client's load, and what the other one got."""
    beside: Future[Point] | None = None
    if scene != "alone":
        beside = other.submit(load, server.address, scene, GREEDY_PER_S, seconds + 1)
    point = load(server.address, "steady", STEADY_PER_S, seconds)
    if point.errors:
        raise RuntimeError(f"the steady client got {dict(point.errors)}")
    return point, "" if beside is None else str({"OK": beside.result().answered, **beside.result().errors})


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=3)
    options = parser.parse_args()
    flags = [f"--access-policy={POLICY}"]
    server = BenchServer("conch-access", lambda ports: conch_command(ports, COMMON, flags))
    rounds: dict[str, list[tuple[float, float]]] = {scene: [] for scene in SCENES}
    with ThreadPoolExecutor(1) as other:
        server.start()
        try:
            measure(server, "alone", 1, other)
            for number in range(options.rounds):
                for scene in SCENES[number % 3 :] + SCENES[: number % 3]:
                    point, got = measure(server, scene, options.seconds, other)
                    p50, p99 = (point.latency.quantile_ns(share) / 1e6 for share in (0.5, 0.99))
                    rounds[scene].append((p50, p99))
                    print(f"{scene:9} p50 {p50:6.2f} ms, p99 {p99:6.2f} ms  {got}", flush=True)
        finally:
            server.stop()
    print("\n| beside it | p50, ms | p99, ms |\n|---|---|---|")
    for scene, found in rounds.items():
        columns = [
            f"{statistics.median(each):.2f} [{min(each):.2f}-{max(each):.2f}]"
            for each in zip(*found, strict=True)
        ]
        print(f"| {scene} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
