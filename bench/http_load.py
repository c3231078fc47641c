"""Small HTTP requests from many connections: `python -m bench.http_load`, see bench/README.md.

perf_analyzer does not end with 32 HTTP clients against Triton 2.51. So wrk makes the load here: one thread,
connections that are kept, the same binary request on all of them, and it counts the answers that are not 200.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from bench import facts
from bench.servers import ROOT, Server, conch_command, triton_command

COMMANDS = {"conch": conch_command, "triton": triton_command}
PATH = "/v2/models/identity_fp32/infer"
HEADER = (
    "| clients | conch, requests/s | triton, requests/s | ratio, median [spread] | aimed at |\n"
    + "|---" * 5
    + "|"
)
GOALS = {32: 1.1}
_RATE = re.compile(r"Requests/sec:\s+([0-9.]+)")
_WRONG = re.compile(r"Non-2xx or 3xx responses: (\d+)|Socket errors: (.*)")


def script(elements: int) -> str:
    """What has wrk send a binary request for a tensor of zeros."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, elements]}
    size = {"parameters": {"binary_data_size": elements * 4}}
    output = {"name": "OUTPUT0", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [{**tensor, **size}], "outputs": [output]})
    return (
        f'wrk.method = "POST"\nwrk.body = [==[{head}]==] .. string.rep("\\0", {elements * 4})\n'
        f'wrk.headers["Inference-Header-Content-Length"] = "{len(head)}"\n'
        f'wrk.headers["Content-Type"] = "application/octet-stream"\n'
    )


def load(server: Server, path: Path, clients: int, seconds: int) -> float:
    """Requests per second that one server answers.

    Raises:
        RuntimeError: An answer was not 200, or a connection failed.
    """
    url = f"http://{server.http}{PATH}"
    command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds}s", "-s", str(path), url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + 60)
    rate = _RATE.search(done.stdout)
    if rate is None or _WRONG.search(done.stdout):
        raise RuntimeError(f"wrk against {server.name}:\n{done.stdout}{done.stderr}")
    return float(rate[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rounds, prints a table, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.http_load", description=__doc__.split("\n")[0])
    parser.add_argument("--clients", default="8,32", help="numbers of connections (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both servers (%(default)s)")
    parser.add_argument("--seconds", type=int, default=5, help="length of each load (%(default)s)")
    parser.add_argument("--elements", type=int, default=16, help="FP32 elements of a request (%(default)s)")
    chosen = parser.parse_args(arguments)
    if shutil.which("wrk") is None:
        parser.error("wrk is not installed; on Debian: apt install wrk")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="conch-wrk-")), "post.lua")
        path.write_text(script(chosen.elements))
        servers: dict[str, Server] = {}
        for name, command in COMMANDS.items():
            server = servers[name] = Server(f"http-load-{name}", command)
            stack.callback(server.stop)
            server.start()
            server.wait_for_http()
        for fact, value in {**facts.machine(), **facts.versions(), "revision": facts.revision(ROOT)}.items():
            print(f"- {fact}: {value}")
        print(f"\n{HEADER}")
        for clients in map(int, chosen.clients.split(",")):
            rates: dict[str, list[float]] = {name: [] for name in servers}
            for server in servers.values():
                load(server, path, clients, 1)
            for _ in range(chosen.rounds):
                for name, server in servers.items():
                    rates[name].append(load(server, path, clients, chosen.seconds))
            ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
            cells = [f"{median(of):,.0f}" for of in rates.values()]
            spread = f"{median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"
            print(
                f"| {clients} | {cells[0]} | {cells[1]} | {spread} | {GOALS.get(clients, '')} |", flush=True
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
