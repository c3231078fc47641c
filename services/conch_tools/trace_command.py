"""`conch trace`: shows where time goes, from trace files of conch or Triton."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conch.cli.command_parser import CommandParser
from conch.observability.tracing.trace_reader import ReadTrace, TraceFileError, read_traces
from conch.observability.tracing.trace_summary import STAGES, Summary, slowest, stages, summarize
from conch.observability.tracing.waterfall import Row, as_svg, as_text, printable, title, waterfall
from conch.process.banner import table

OK, FAILED, USAGE = 0, 1, 2
"""Exit codes."""

_NS_PER_US = 1000


class _UsageError(Exception):
    """The files lack the trace, or the times, that were asked for."""


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the process's exit code."""
    values = make_parser().parse_args(list(arguments))
    try:
        _summary(values)
    except (TraceFileError, _UsageError) as error:
        print(f"conch trace: {error}", file=sys.stderr)
        return USAGE if isinstance(error, _UsageError) else FAILED
    return OK


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="conch trace",
        description="Shows where the time of requests goes, from trace files of conch or Triton.",
        epilog="Exit codes: 0 done, 1 a file can't be read or written, 2 wrong usage.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    text = "Shows the times of each model's stages, and the slowest requests."
    made = commands.add_parser("summary", help=text, description=text)
    made.add_argument("files", metavar="FILE", nargs="+", type=Path, help="trace files, indexed ones too")
    made.add_argument("--slowest", metavar="N", type=_number, default=5, help="requests to list; default: 5")
    made.add_argument("--waterfall", metavar="ID", type=_number, help="show the request with this trace id")
    made.add_argument(
        "--svg", metavar="FILE", type=Path, help="draw that request, or the slowest one, to a file"
    )
    made.add_argument("--json", action="store_true", help="print JSON; its shape is stable")
    return parser


def _number(text: str) -> int:
    if not (text.isdecimal() and text.isascii()):
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got '{text}'")
    return int(text)


def _summary(values: argparse.Namespace) -> None:
    traces = [trace for path in values.files for trace in read_traces(path)]
    summary, slow = summarize(traces), slowest(traces, values.slowest)
    shown: ReadTrace | None = None
    if values.waterfall is not None:
        shown = _with_number(traces, values.waterfall)
    elif values.svg is not None:
        first = slowest(traces, 1)
        if not first:
            raise _UsageError("--svg: the files have no request with times")
        shown = first[0][0]
    rows = [] if shown is None else waterfall(shown)
    if values.svg is not None and shown is not None:
        try:
            values.svg.write_text(as_svg(rows, title(shown)), "utf-8")
        except OSError as error:
            raise TraceFileError(f"--svg: {values.svg}: {error.strerror or error}") from None
    if values.json:
        content = _as_json(summary, slow)
        if shown is not None:
            content["waterfall"] = _waterfall_json(shown, rows)
        print(json.dumps(content))
        return
    if values.waterfall is not None and shown is not None:
        print(title(shown), as_text(rows), sep="\n")
        return
    print(_as_text(summary, slow, len(values.files) > 1))


def _with_number(traces: list[ReadTrace], number: int) -> ReadTrace:
    found = [trace for trace in traces if trace.number == number]
    if not found:
        raise _UsageError(f"--waterfall: no file has a trace {number}")
    if len(found) > 1:
        files = " and ".join(trace.file for trace in found)
        raise _UsageError(f"--waterfall: there is a trace {number} in {files}; give one of them")
    if not stages(found[0]):
        raise _UsageError(f"--waterfall: trace {number} has no times")
    return found[0]


def _us(ns: float) -> str:
    return f"{ns / _NS_PER_US:.1f}"


def _as_text(summary: Summary, slow: list[tuple[ReadTrace, dict[str, int]]], several: bool) -> str:
    if not summary:
        return "The files have no traces with times."
    rows = []
    for (model, version), of_model in summary.items():
        for place, (name, each) in enumerate(of_model.items()):
            head = ["", ""] if place else [printable(model), str(version)]
            numbers = map(_us, (each.mean, each.p50, each.p99, each.max))
            rows.append([*head, name, str(each.count), *numbers])
    parts = [table(["Model", "Version", "Stage", "Count", "Mean us", "p50 us", "p99 us", "Max us"], rows)]
    if slow:
        names = [name for name in STAGES if any(name in of_trace for _, of_trace in slow)]
        rows = [
            [
                *([printable(trace.file)] if several else []),
                str(trace.number),
                printable(trace.model),
                printable(trace.request_id),
                *(_us(of_trace[name]) if name in of_trace else "" for name in names),
            ]
            for trace, of_trace in slow
        ]
        head = [*(["File"] if several else []), "Trace", "Slowest requests", "Request id"]
        parts.append(table([*head, *(f"{name} us" for name in names)], rows))
    return "\n".join(parts)


def _as_json(summary: Summary, slow: list[tuple[ReadTrace, dict[str, int]]]) -> dict[str, Any]:
    return {
        "models": [
            {
                "model": model,
                "version": version,
                "stages": {
                    name: {
                        "count": each.count,
                        "mean_us": each.mean / _NS_PER_US,
                        "p50_us": each.p50 / _NS_PER_US,
                        "p99_us": each.p99 / _NS_PER_US,
                        "max_us": each.max / _NS_PER_US,
                    }
                    for name, each in of_model.items()
                },
            }
            for (model, version), of_model in summary.items()
        ],
        "slowest": [
            {
                **_trace_json(trace),
                "stages_us": {name: of_trace[name] / _NS_PER_US for name in STAGES if name in of_trace},
            }
            for trace, of_trace in slow
        ],
    }


def _waterfall_json(shown: ReadTrace, rows: list[Row]) -> dict[str, Any]:
    bars = [
        {
            "depth": row.depth,
            "label": row.label,
            "stage": row.stage,
            "start_us": row.start_ns / _NS_PER_US,
            "duration_us": row.duration_ns / _NS_PER_US,
        }
        for row in rows
    ]
    return {**_trace_json(shown), "rows": bars}


def _trace_json(trace: ReadTrace) -> dict[str, Any]:
    return {
        "file": trace.file,
        "id": trace.number,
        "model": trace.model,
        "version": trace.version,
        "request_id": trace.request_id,
    }
