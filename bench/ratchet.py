"""Compares the cost of a request and of a start with the record: ``python -m bench.ratchet [--update]``.

The record is ``bench/ratchet.toml``. For each walk: bytecodes and calls of conch's functions per request, the
number of their files and the deepest stack; for a start with the example models: seconds to ready and
anonymous memory. A figure that grows by more than its tolerance fails; `--update` records the new figures.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib

import psutil

from bench.bytecodes import WALKS, Function, measure
from bench.servers import ROOT, Server, conch_command

RECORD = ROOT / "bench" / "ratchet.toml"
EXAMPLES = ROOT / "examples" / "models" / "basic"
_SECONDS = 2.0
_ROUNDS = 3
_RARE = 0.5
"""A function that runs for fewer requests is no part of the walk."""

TOLERANCES = {
    "bytecodes": 1.05,
    "calls": 1.05,
    "files": 1.04,  # one more: threads that take over from each other are seldom part of a walk
    "depth": 1.08,
    "seconds": 2.0,  # depends on the machine and on what else it does
    "anonymous_mb": 1.05,
}

Figures = dict[str, float]


def walk(name: str) -> Figures:
    """The figures of a walk: the middle one of a few rounds each, because which thread goes on is chance."""
    rounds = [_round(name) for _ in range(_ROUNDS)]
    return {figure: sorted(one[figure] for one in rounds)[_ROUNDS // 2] for figure in rounds[0]}


def _round(name: str) -> Figures:
    functions: list[Function] = []
    for found in measure(WALKS[name], 1, _SECONDS).values():
        functions += [one for one in found if one.calls >= _RARE]
    ours = [one for one in functions if one.ours]
    return {
        "bytecodes": round(sum(one.bytecodes for one in functions)),
        "calls": round(sum(one.calls for one in ours)),
        "files": len({one.file for one in ours}),
        "depth": max(one.depth for one in ours),
    }


def start() -> Figures:
    """Seconds from the start of the process to readiness and the memory it then holds, the best of a few."""
    seconds, anonymous = [], []
    for _ in range(_ROUNDS):
        server = Server("conch-start", lambda ports: conch_command(ports, (EXAMPLES,)))
        began = time.monotonic()
        server.start()
        try:
            seconds.append(time.monotonic() - began)
            assert server.pid is not None
            memory = psutil.Process(server.pid).memory_info()
            # How much of a mapped file is resident depends on the page cache.
            anonymous.append((memory.rss - memory.shared) / 1e6)
        finally:
            server.stop()
    return {"seconds": round(min(seconds), 2), "anonymous_mb": round(min(anonymous), 1)}


def worse(name: str, now: Figures, before: Figures) -> list[str]:
    """Figures that have grown beyond their tolerance, a sentence each."""
    return [
        f"{name}: {figure} {value:g}, on record {before[figure]:g}: make it cheaper, or run "
        f"`python -m bench.ratchet --update` and say in the commit what it buys"
        for figure, value in now.items()
        if figure in before and value > before[figure] * TOLERANCES[figure]
    ]


def main() -> None:
    """Measures, prints, and compares or records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help="record the figures")
    parser.add_argument("--only", choices=[*WALKS, "start"], action="append")
    options = parser.parse_args()
    record: dict[str, Figures] = tomllib.loads(RECORD.read_text()) if RECORD.exists() else {}
    failures = []
    for name in options.only or [*WALKS, "start"]:
        now = start() if name == "start" else walk(name)
        print(f"{name:7}", "  ".join(f"{figure} {value:g}" for figure, value in now.items()), flush=True)
        failures += worse(name, now, record.get(name, {}))
        record[name] = now
    if options.update:
        tables = (
            f"[{name}]\n" + "".join(f"{figure} = {value:g}\n" for figure, value in figures.items())
            for name, figures in record.items()
        )
        RECORD.write_text("# Made by `python -m bench.ratchet --update`.\n\n" + "\n".join(tables))
    elif failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
