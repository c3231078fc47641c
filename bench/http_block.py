"""Health probes while large bodies are parsed: `python -m bench.http_block`, see bench/README.md.

One client asks for the server's health all the time, over a connection that it keeps. Meanwhile another
process uploads tensors of 64 MB, as JSON and as bytes, and downloads the answers.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from bench import facts
from bench.delays import Ended, Http, curl, delays_alone, delays_during, spread_ms
from bench.servers import ROOT, BenchServer, ServerError, conch_command, triton_command

COMMANDS = {"conch": conch_command, "triton": triton_command}
HEALTH = "/v2/health/live"
INFER = "/v2/models/identity_fp32/infer"
MOST_S = 0.05
ELEMENT = b"0.12345,"
"""A number as the JSON body has it, which is made of nothing else."""
HEADER = (
    "| server | body | the request itself | health probes meanwhile | of them | < 50 ms |\n"
    + "|---" * 6
    + "|"
)


def write_json(path: Path, size: int) -> None:
    """A request whose tensor is JSON, a little below the size in all."""
    count = (size - 1024) // len(ELEMENT)
    tensor = f'"name":"INPUT0","datatype":"FP32","shape":[1,{count}]'
    with path.open("wb") as file:
        file.write(f'{{"inputs":[{{{tensor},"data":['.encode())
        file.write(ELEMENT * (count - 1) + ELEMENT[:-1])
        file.write(b"]}]}")


def write_binary(path: Path, size: int) -> int:
    """A request whose tensor follows the JSON; returns the length of the JSON."""
    count = size // 4
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, count]}
    output = {"name": "OUTPUT0", "parameters": {"binary_data": True}}
    head = json.dumps(
        {"inputs": [{**tensor, "parameters": {"binary_data_size": count * 4}}], "outputs": [output]}
    ).encode()
    with path.open("wb") as file:
        file.write(head)
        np.zeros(count, np.float32).tofile(file)
    return len(head)


def measure(name: str, folder: Path, size: int, rounds: int) -> Iterator[str]:
    """The rows of one server."""
    written = folder / "json", folder / "binary"
    write_json(written[0], size)
    length = write_binary(written[1], size)
    headers = {"json": [], "binary": ["--header", f"Inference-Header-Content-Length: {length}"]}
    server = BenchServer(f"http-block-{name}", COMMANDS[name])
    server.start()
    try:
        server.wait_for_http()
        with closing(Http(server.http, "GET", HEALTH)) as probe:
            alone = delays_alone(1.0, probe)
            yield f"| {name} | none | | {spread_ms(alone)} | {len(alone)} | |"
        for kind in written:
            if not server.running():
                server.restart()
                server.wait_for_http()
            body = f"{kind.stat().st_size / 1e6:,.0f} MB {kind.name}"
            try:
                took, probes = _upload(server, kind, headers[kind.name], rounds)
            except (Ended, OSError, http.client.HTTPException) as error:
                yield f"| {name} | {body} | {server.how_it_ended() or error} | | | |"
                continue
            kept = "yes" if max(probes) < MOST_S else "**no**"
            yield f"| {name} | {body} | {spread_ms(took)} | {spread_ms(probes)} | {len(probes)} | {kept} |"
    finally:
        server.stop()


def _upload(
    server: BenchServer, body: Path, headers: Sequence[str], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of each request with this body, and of the probes meanwhile."""
    # Without the second header curl waits for a permission to send that not every server gives.
    more = ["--data-binary", f"@{body}", "--header", "Expect:", *headers]
    command = curl(*more, f"http://{server.http}{INFER}")
    took: list[float] = []
    probes: list[float] = []
    with closing(Http(server.http, "GET", HEALTH)) as probe:
        for _ in range(rounds):
            elapsed, delays = delays_during(command, probe)
            took.append(elapsed)
            probes += delays
    return took, probes


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and writes a results file if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.http_block", description=__doc__)
    parser.add_argument("--servers", default="conch,triton", help="who is asked (%(default)s)")
    parser.add_argument("--megabytes", type=float, default=64.0, help="of each body (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="requests of each kind (%(default)s)")
    parser.add_argument("--out", type=Path, help="results file to write")
    options = parser.parse_args(arguments)
    names = options.servers.split(",")
    if unknown := set(names) - COMMANDS.keys():
        parser.error(f"--servers: unknown {', '.join(sorted(unknown))}; there are {', '.join(COMMANDS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    known = {**facts.machine(), **facts.versions(), "revision": facts.revision(ROOT)}
    rows: list[str] = []
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory(prefix="conch-http-block-") as folder:
        for name in names:
            try:
                for row in measure(name, Path(folder), round(options.megabytes * 1e6), options.rounds):
                    print(row, flush=True)
                    rows.append(row)
            except (OSError, ServerError) as error:
                print(f"bench: {name}: {error}", file=sys.stderr)
                return 1
    if options.out is not None:
        described = "\n".join(f"| {name} | {value} |" for name, value in known.items())
        table = "\n".join(rows)
        options.out.write_text(
            f"# Benchmark: health probes beside large bodies\n\n| | |\n|---|---|\n{described}\n\nOne "
            f"connection asks for the server's health all the time, while curl sends one large request after "
            f"the other. Median and worst. `python -m bench.http_block`.\n\n{HEADER}\n{table}\n",
            encoding="utf-8",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
