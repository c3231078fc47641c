"""Cost of tracing: ``python -m bench.traces``, see bench/README.md.

Conch and Triton serve the same model with tracing off and on, every server with flags of its own; a collector
on the same machine takes the spans. `conch perf` makes the load, in rounds of all servers.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

from bench import facts
from bench.measurement import MeasurementError
from bench.perf import measure
from bench.scenes import Scene, choose_scenes, load_scenes
from bench.servers import ROOT, BenchServer, Command, Ports, ServerError, conch_command, triton_command

HEADER = (
    "| server | requests/s | of those without tracing | CPU per request, µs | more than without |\n"
    + "|---" * 5
    + "|"
)
OFF = "off"
_COMMANDS: dict[str, Callable[..., Command]] = {"conch": conch_command, "triton": triton_command}


class Collector(BaseHTTPRequestHandler):
    """Takes whatever is posted."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Reads a body and answers that it was taken."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing."""


def collect() -> None:
    """Runs a collector in this process, and prints its port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        print(server.server_port, flush=True)
        server.serve_forever()


def contestants(port: int, folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Servers and flags by name; those without tracing come first, and twice to show what is noise."""

    def flags(*settings: str) -> list[str]:
        return ["--trace-config=level=TIMESTAMPS", *(f"--trace-config={setting}" for setting in settings)]

    collector = ("mode=opentelemetry", f"opentelemetry,url=http://127.0.0.1:{port}/v1/traces")
    found: dict[str, tuple[str, list[str]]] = {}
    for server in _COMMANDS:
        found[f"{server}, {OFF}"] = (server, [])
        found[f"{server}, {OFF} again"] = (server, [])
        if server == "conch":
            found["conch, OTLP, 1 %"] = (server, flags("rate=100", *collector))
        found[f"{server}, OTLP, all"] = (server, flags("rate=1", *collector))
        # Several files, as Triton keeps all traces of one in memory.
        file = folder / f"{server}.json"
        found[f"{server}, file, all"] = (
            server,
            flags("rate=1", f"triton,file={file}", "triton,log-frequency=10000"),
        )
    return found


def row(
    name: str, rates: list[float], costs: list[float], of_rates: list[float], of_costs: list[float]
) -> str:
    """A line of the table: medians and spreads, beside the same server without tracing."""
    ratios = [rate / of_rate for rate, of_rate in zip(rates, of_rates, strict=True)]
    more = [cost - of_cost for cost, of_cost in zip(costs, of_costs, strict=True)]
    spread = f"{median(ratios):.3f} [{min(ratios):.3f}-{max(ratios):.3f}]"
    added = f"{median(more):+.0f} [{min(more):+.0f} to {max(more):+.0f}]"
    return f"| {name} | {median(rates):,.0f} | {spread} | {median(costs):.0f} | {added} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rounds, prints a table, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.traces", description=__doc__.split("\n")[0])
    parser.add_argument("--scene", default="unary_32", help="a scene of scenes.toml (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all servers (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on request counts (%(default)s)")
    parser.add_argument("--servers", default="conch,triton", help="who takes part (%(default)s)")
    chosen = parser.parse_args(arguments)
    scene: Scene = choose_scenes(chosen.scene, load_scenes())[0]
    requests = max(int(scene.requests * chosen.scale), 10)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="conch-traces-")))
        collector = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", "from bench.traces import collect; collect()"],
                stdout=subprocess.PIPE,
                cwd=ROOT,
            )
        )
        stack.callback(collector.kill)
        assert collector.stdout is not None
        servers: dict[str, BenchServer] = {}
        for name, (kind, flags) in contestants(int(collector.stdout.readline()), folder).items():
            if kind not in chosen.servers.split(","):
                continue

            def command(ports: Ports, kind: str = kind, flags: Sequence[str] = flags) -> Command:
                return _COMMANDS[kind](ports, flags=flags)

            server = servers[name] = BenchServer(f"traces-{len(servers)}", command)
            stack.callback(server.stop)
            server.start()
        for fact, value in {**facts.machine(), **facts.versions(), "revision": facts.revision(ROOT)}.items():
            print(f"- {fact}: {value}")
        print(f"- load: {replace(scene, requests=requests).load}\n")
        rates: dict[str, list[float]] = {name: [] for name in servers}
        costs: dict[str, list[float]] = {name: [] for name in servers}
        out: set[str] = set()
        for number in range(chosen.rounds + 1):
            for name in [name for name in servers if name not in out]:
                try:
                    one = measure(
                        scene, scene.model, servers[name], requests if number else max(requests // 4, 10)
                    )
                except (MeasurementError, ServerError) as error:
                    print(f"{name} is out: {error}", flush=True)
                    servers[name].stop()  # it may take a core of the others
                    out.add(name)
                    continue
                print(f"{name}: {one.throughput:,.0f}/s, CPU {one.cpu_per_request:.0f} us", flush=True)
                if number:  # the first one warms up
                    rates[name].append(one.throughput)
                    costs[name].append(one.cpu_per_request)
                for file in folder.iterdir():
                    file.unlink()
        print(f"\n{HEADER}")
        for name in servers:
            off = f"{name.partition(',')[0]}, {OFF}"
            if rates[name] and len(rates[name]) == len(rates[off]):
                print(row(name, rates[name], costs[name], rates[off], costs[off]), flush=True)
            else:
                print(f"| {name} | failed after {len(rates[name])} rounds | | | |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
