"""`conch control`: runs the planner in this process, for the control port of one server."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import FrameType

from conch.cli.command_parser import CommandParser
from conch.cli.control_connection import (
    OK,
    USAGE,
    UsageError,
    add_connection_flags,
    connection_options,
    failure,
)
from conch.core.errors import ConchError
from conch.observability.logging.log_handler import configure, unconfigure
from conch.observability.logging.log_settings import LogOptions
from conch_control.control_options import ControlOptions
from conch_control.planner.planner_loop import Planner, PlannerOptions
from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ConnectionOptions
from conch_control.remote_api.messages import UnreachableError
from conch_control.remote_api.remote_agent import RemoteAgent
from conch_control.repository.repositories import Repositories, open_repositories

log = logging.getLogger(__name__)

_SIGNAL_INTERVAL_S = 0.5
_STOP_S = 10.0


def run(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Runs the command until a signal; returns the process's exit code."""
    values = make_parser().parse_args(list(arguments))
    try:
        options = connection_options(values, environment)
        settings = PlannerOptions(
            values.model_control_mode, values.repository_poll_secs, values.repository_settle_secs
        )
        repositories = open_repositories(
            ControlOptions(tuple(values.model_repository), namespacing=values.model_namespacing)
        )
        repositories.check()
    except UsageError as error:
        print(f"conch control: {error}", file=sys.stderr)
        return USAGE
    except ConchError as error:
        print(f"conch control: --model-repository: {error.message}", file=sys.stderr)
        return USAGE
    handler = configure(LogOptions(verbose=values.log_verbose))
    try:
        with closing(repositories):
            return _run(options, repositories, settings)
    finally:
        unconfigure(handler)


def _run(
    options: ConnectionOptions,
    repositories: Repositories,
    settings: PlannerOptions,
) -> int:
    with _until_signalled() as stop, closing(RemoteAgent(ModelControlClient(options))) as agent:
        try:
            agent.models()
        except UnreachableError as error:
            # The server may start later, or restart.
            log.warning("%s; trying again", error.message)
        except ConchError as error:
            code, text = failure(error, options)
            print(f"conch control: {text}", file=sys.stderr)
            return code
        agent.start()
        planner = Planner(agent, repositories, settings)
        planner.start()
        log.info("planning for %s", options.target)
        # Waits in steps: a signal just before an endless wait would be noticed late.
        while not stop.wait(_SIGNAL_INTERVAL_S):
            pass
        planner.stop(_STOP_S)
    return OK


@contextmanager
def _until_signalled() -> Iterator[threading.Event]:
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)  # a second signal ends at once
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds")
    return value


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="conch control",
        description="Watches repositories, and has a running server load and unload their models through "
        "its control port. The server should run with --model-control-mode=explicit.",
        epilog="Exit codes: 0 ended by a signal, 1 refused by the server, 2 wrong usage.",
    )
    parser.add_argument(
        "--model-repository",
        action="append",
        required=True,
        metavar="LOCATION",
        help="directory of models, which the server must have under the same path, or URL of an object "
        "store; may be repeated",
    )
    parser.add_argument(
        "--model-namespacing",
        action="store_true",
        help="several repositories may have models of one name; for servers with that flag",
    )
    parser.add_argument(
        "--model-control-mode",
        choices=("poll", "watch"),
        default="poll",
        help="poll: look every --repository-poll-secs; watch: go by events of the file system "
        "(default: poll)",
    )
    parser.add_argument(
        "--repository-poll-secs",
        type=_seconds,
        default=15.0,
        metavar="SECONDS",
        help="seconds between two looks (default: 15)",
    )
    parser.add_argument(
        "--repository-settle-secs",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="seconds without a change after which a model's files count as complete (default: 1)",
    )
    parser.add_argument(
        "--log-verbose", type=int, default=0, metavar="LEVEL", help="level of verbose logging"
    )
    add_connection_flags(parser)
    return parser
