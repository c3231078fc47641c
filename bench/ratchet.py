"""Compares the cost of a request and of a start with the record: ``python -m bench.ratchet [--update]``.

The record is ``bench/ratchet.toml``. For each walk: bytecodes and calls of conch's functions per request, the
number of their files and the deepest stack; for a start with the example models: anonymous memory. A figure
that grows by more than its tolerance fails; `--update` records the new figures. No figure depends on what
else the machine does.
"""

from __future__ import annotations

import argparse
import sys
import tomllib

import psutil

from bench.bytecodes import WALKS, measure
from bench.servers import ROOT, BenchServer, conch_command

RECORD = ROOT / "bench" / "ratchet.toml"
EXAMPLES = ROOT / "examples" / "models" / "basic"
_REQUESTS = 100
_STARTS = 3

TOLERANCES = {
    "bytecodes": 1.05,
    "calls": 1.05,
    "files": 1.04,  # one more
    "depth": 1.08,
    "anonymous_mb": 1.05,
}

Figures = dict[str, float]


def walk(name: str) -> Figures:
    """The figures of a walk. What runs for few requests only, such as timers, is no part of it."""
    found = measure(WALKS[name], 1, _REQUESTS).values()
    functions = [one for process in found for one in process if round(one.calls)]
    ours = [one for one in functions if one.ours]
    return {
        "bytecodes": round(sum(one.bytecodes for one in functions)),
        "calls": sum(round(one.calls) for one in ours),
        "files": len({one.file for one in ours}),
        "depth": max(one.depth for one in ours),
    }


def start() -> Figures:
    """The memory that a server holds once it is ready, the least of a few starts."""
    anonymous = []
    for _ in range(_STARTS):
        server = BenchServer("conch-start", lambda ports: conch_command(ports, (EXAMPLES,)))
        server.start()
        try:
            assert server.pid is not None
            memory = psutil.Process(server.pid).memory_info()
            # How much of a mapped file is resident depends on the page cache.
            anonymous.append((memory.rss - memory.shared) / 1e6)
        finally:
            server.stop()
    return {"anonymous_mb": round(min(anonymous), 1)}


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
