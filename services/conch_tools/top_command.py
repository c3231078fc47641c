"""`conch top`: what a running server does now, in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from conch.cli.command_parser import CommandParser
from conch_tools.connection import Endpoint, UrlError, add_connection_flags, endpoint_of
from conch_tools.top.table import SORTS, head_lines, table_lines

if TYPE_CHECKING:
    from conch_tools.top.watching import TopView

DONE, REFUSED, USAGE, UNREACHED, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes."""

_URL = "http://localhost:8002"
_VARIABLE = "CONCH_METRICS_URL"


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="conch top",
        description="Shows the models of a running server in the terminal, from its metrics: requests and "
        "failures a second, latencies, queue, batches, workers, memory. Keys: q ends it, s sorts by the next "
        "column.",
        epilog="exit codes: 0 done, 1 no metrics there, 2 wrong usage, 3 no server, 130 interrupted",
    )
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between two views (1)"
    )
    parser.add_argument("--sort", choices=SORTS, default="req/s", help="column to sort by (req/s)")
    parser.add_argument("--once", action="store_true", help="print the table of one interval, and end")
    parser.add_argument(
        "--json", action="store_true", help="print JSON, a line for each interval; with --once one line"
    )
    add_connection_flags(parser, _URL, _VARIABLE, "http[s]://HOST:PORT of the metrics port")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the process's exit code."""
    options = make_parser().parse_args(arguments)
    try:
        endpoint = _endpoint(options)
        if not (options.once or options.json):
            _check_terminal()
    except UrlError as error:
        print(f"conch top: {error}", file=sys.stderr)
        return USAGE
    try:
        if options.once or options.json:
            return _print(endpoint, options)
        from conch_tools.top.live import show_live

        code, missed = show_live(endpoint, options.interval, options.sort)
        return code if missed is None else _failed(missed)
    except KeyboardInterrupt:
        return INTERRUPTED


def _endpoint(options: argparse.Namespace) -> Endpoint:
    """The metrics port, whose URL may have its path."""
    url = options.url if "://" in options.url else f"http://{options.url}"
    options.url = url.removesuffix("/metrics")
    endpoint = endpoint_of(options)
    if endpoint.protocol != "http":
        raise UrlError(f"conch top reads the metrics port, over http:// or https://, not '{url}'")
    if urlsplit(options.url).port is None:
        raise UrlError(f"'{url}' has no port, such as 8002")
    return endpoint


def _check_terminal() -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        raise UrlError("this is no terminal: --once prints one table, --json a line for each interval")


def _print(endpoint: Endpoint, options: argparse.Namespace) -> int:
    """Prints views with rates, as JSON or as one table."""
    from conch_tools.top.watching import top

    seen = False
    for view in top(endpoint, options.interval):
        if view.error is not None and (options.once or not seen):
            return _failed(view)
        seen = True
        if view.error is None and view.seconds is None:
            continue
        if options.json:
            print(json.dumps(as_json(view), ensure_ascii=False), flush=True)
        else:
            # A pipe has all columns.
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
            lines = [*head_lines(view, None, width), "", *table_lines(view.models, options.sort, width)]
            print("\n".join(lines))
        if options.once:
            return DONE
    return DONE


def _failed(view: TopView) -> int:
    """Says why the first view has no server; returns the exit code."""
    assert view.error is not None, "its server is not there"
    print(f"conch top: {view.error}; --url or {_VARIABLE} names the metrics port", file=sys.stderr)
    return REFUSED if view.error.reached else UNREACHED


def as_json(view: TopView) -> dict[str, Any]:
    """A view as an object for JSON."""
    found: dict[str, Any] = {
        "time": view.time.isoformat(),
        "url": view.url,
        "seconds": view.seconds,
    }
    if view.error is not None:
        return {**found, "error": str(view.error)}
    assert view.server is not None, "there is no error"
    return {**found, "server": asdict(view.server), "models": [asdict(model) for model in view.models]}


def _seconds(text: str) -> float:
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.1 to 3600, got '{text}'")
    return value
