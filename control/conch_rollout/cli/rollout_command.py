"""`conch rollout`: starts, shows and changes rollouts of a running server through its control port."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from conch.cli.command_parser import CommandParser
from conch.cli.control_connection import (
    FAILED,
    INTERRUPTED,
    OK,
    USAGE,
    UsageError,
    add_connection_flags,
    connection_options,
    failure,
    interruptibly,
    read_file,
)
from conch.core.errors import ConchError
from conch.core.rollouts import RolloutReport
from conch.process.banner import table
from conch_control.remote_api.client import ModelControlClient
from conch_rollout.cli.rollout_output import history_rows, report_text, rollout_line, rollouts_table
from conch_rollout.cli.rollout_page import rollout_page
from conch_rollout.cli.shadow_output import shadow_text

_PROMOTED = frozenset({"BAKING", "DONE"})
_ENDED = _PROMOTED | {"ABORTED", "FAILED", "PAUSED", "IDLE", "SPLIT"}
_SHADOW_DURATION = "10m"

Action = Callable[[ModelControlClient, argparse.Namespace], int]


def run(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Runs the command; returns the process's exit code."""
    values = make_parser().parse_args(list(arguments))
    codes: list[int] = []
    try:
        options = connection_options(values, environment)
        with closing(ModelControlClient(options)) as client:
            try:
                interruptibly(lambda: codes.append(values.action(client, values)), client.close)
            except ConchError as error:
                code, text = failure(error, options)
                if values.json:
                    _print_json({"error": {"code": error.code, "message": error.message}})
                print(f"conch rollout: {text}", file=sys.stderr)
                return code
    except UsageError as error:
        print(f"conch rollout: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        if getattr(values, "wait", False):
            print("conch rollout: interrupted; the server goes on with the rollout", file=sys.stderr)
        return INTERRUPTED
    return codes[0]


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="conch rollout",
        description="Moves the requests of a model from its stable version to a candidate, step by step, "
        "through the control port of a running server.",
        epilog="Exit codes: 0 done or promoted, 1 refused, aborted or paused, 2 wrong usage, 3 the server "
        "can't be reached.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, action: Action, text: str, model: bool = True) -> Any:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(action=action)
        if model:
            made.add_argument("model")
        made.add_argument("--json", action="store_true", help="print JSON, as GET .../rollout has it")
        add_connection_flags(made)
        return made

    made = command("start", _start, "Declares and starts a rollout.")
    made.add_argument("--candidate", metavar="VERSION", help='a version, or "newest" (default)')
    made.add_argument(
        "--steps", nargs="+", metavar="STEP", help='percent and least duration, such as "5%% 10m"'
    )
    made.add_argument(
        "--shadow", metavar="PERCENT", help=f"begin with a step of copied requests, of {_SHADOW_DURATION}"
    )
    made.add_argument(
        "--keep", metavar="DURATION", help="how long the old version stays loaded (default: 15m)"
    )
    made.add_argument(
        "--guard",
        action="append",
        default=[],
        metavar="NAME=LIMIT",
        help="a limit, such as errors=0.01, slower=0.05, p99_ms=50 or requests=500; may be repeated",
    )
    made.add_argument("--sticky", nargs="+", metavar="KEY", help="sequence, principal or header:NAME")
    made.add_argument("--match", nargs="+", metavar="RULE", help="header:NAME=VALUE or principal:PATTERN")
    made.add_argument("--group", metavar="NAME", help="models of one group give one key the same side")
    made.add_argument(
        "--split",
        nargs="+",
        metavar="VERSION=PERCENT",
        help="fixed shares of versions, such as 7=50 8=30 9=20, instead of a candidate",
    )
    made.add_argument("--override", choices=("any", "none"), help="whether conch-version chooses a version")
    made.add_argument("--file", type=Path, metavar="FILE", help="declaration, as in rollout.toml, or as JSON")
    made.add_argument("--again", action="store_true", help="also with versions that are held out")
    made.add_argument("--wait", action="store_true", help="until it is promoted, aborted or paused")
    made = command("status", _status, "Shows rollouts, with counters and verdict.", model=False)
    made.add_argument("model", nargs="?", help="only this model")
    made.add_argument("--watch", action="store_true", help="go on with each change, until it is interrupted")
    for name, text in (
        ("pause", "Keeps the weight until it is resumed."),
        ("resume", "Begins the current step again."),
        ("advance", "Goes on to the next step."),
        ("promote", "Moves all requests to the candidate, which becomes stable."),
        ("abort", "Moves all requests back to the stable version, and holds the candidate out."),
        ("rollback", "Makes the version stable again that was so before the last promotion."),
        ("delete", "Ends a rollout that a call has declared, and forgets it."),
    ):
        command(name, _changes(name), text)
    made = command("weight", _weight, "Sets the candidate's share, and pauses.")
    made.add_argument("weight", metavar="PERCENT", help="such as 10%%")
    command("history", _history, "Lists the changes of a model's rollouts.")
    made = command(
        "report", _report, "Shows all about a model's rollout: counters, verdict, declaration, history."
    )
    made.add_argument("--html", type=Path, metavar="FILE", help="write it as a page instead")
    return parser


def _print_json(content: Any) -> None:
    print(json.dumps(content, ensure_ascii=False), flush=True)


def _show(report: RolloutReport, values: argparse.Namespace) -> None:
    if values.json:
        _print_json(report.as_object())
    else:
        print(rollout_line(report), flush=True)


def _start(client: ModelControlClient, values: argparse.Namespace) -> int:
    report = client.start_rollout(values.model, _declaration(values), values.again)
    _show(report, values)
    return _wait(client, report, values) if values.wait else OK


def _declaration(values: argparse.Namespace) -> dict[str, Any]:
    """The declaration that the flags give; empty to start what is declared."""
    content: dict[str, Any] = {} if values.file is None else _read(values.file)
    rollout: dict[str, Any] = dict(content.get("rollout", {}))
    if values.candidate is not None:
        rollout["candidate"] = int(values.candidate) if values.candidate.isdecimal() else values.candidate
    if values.steps is not None:
        rollout["steps"] = values.steps
    if values.shadow is not None:
        if "steps" not in rollout:
            raise UsageError("--shadow: give the steps that follow it with --steps")
        rollout["steps"] = [f"shadow {_percent(values.shadow):g}% {_SHADOW_DURATION}", *rollout["steps"]]
    if values.split is not None:
        rollout["split"] = dict(map(_share, values.split))
    for key in ("keep", "sticky", "match", "group", "override"):
        if (given := getattr(values, key)) is not None:
            rollout[key] = given
    for given in values.guard:
        name, equals, limit = given.partition("=")
        try:
            number: float = float(limit)
        except ValueError:
            raise UsageError(f"--guard: '{given}' is not of the form NAME=LIMIT") from None
        if not (name and equals):
            raise UsageError(f"--guard: '{given}' is not of the form NAME=LIMIT")
        rollout.setdefault("guard", {})[name] = int(number) if number.is_integer() else number
    return {**content, "rollout": rollout} if rollout or values.file is not None else {}


def _share(text: str) -> tuple[str, float]:
    """A version and its percent, of ``--split``."""
    version, equals, percent = text.partition("=")
    if not (version and equals):
        raise UsageError(f"--split: '{text}' is not of the form VERSION=PERCENT, such as 8=30")
    return version, _percent(percent)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_file(path, "--file").decode()
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"--file: {path}: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"--file: {path} has no tables 'rollout' and 'labels'")
    return content


def _wait(client: ModelControlClient, started: RolloutReport, values: argparse.Namespace) -> int:
    shown = started
    for _ in client.watch(models=[values.model]):
        report = client.rollout(values.model)
        if (report.id, report.state, report.step) != (shown.id, shown.state, shown.step):
            _show(report, values)
            shown = report
        if report.state in _ENDED:
            return OK if report.state in _PROMOTED else FAILED
    return FAILED


def _status(client: ModelControlClient, values: argparse.Namespace) -> int:
    def show() -> None:
        if values.model is not None:
            report = client.rollout(values.model)
            if values.json:
                _print_json(report.as_object())
            else:
                print(report_text(report))
            return
        reports = client.rollouts()
        if values.json:
            _print_json({"rollouts": [each.as_object() for each in reports]})
        else:
            print(rollouts_table(reports) if reports else "No model has labels or a rollout.")

    if not values.watch:
        show()
        return OK
    for _ in client.watch(models=[values.model] if values.model is not None else ()):
        show()
        sys.stdout.flush()
    return OK


def _changes(name: str) -> Action:
    def change(client: ModelControlClient, values: argparse.Namespace) -> int:
        _show(client.update_rollout(values.model, name), values)
        return OK

    return change


def _weight(client: ModelControlClient, values: argparse.Namespace) -> int:
    _show(client.update_rollout(values.model, "weight", _percent(values.weight)), values)
    return OK


def _percent(text: str) -> float:
    try:
        return float(text.removesuffix("%"))
    except ValueError:
        raise UsageError(f"'{text}' is no percentage, such as 10%") from None


def _history(client: ModelControlClient, values: argparse.Namespace) -> int:
    report = client.rollout(values.model)
    if values.json:
        _print_json({"history": report.as_object()["history"]})
    else:
        print(table(*history_rows(report.history)) if report.history else "There was no rollout yet.")
    return OK


def _report(client: ModelControlClient, values: argparse.Namespace) -> int:
    if values.html is not None and values.json:
        raise UsageError("--html: --json has no effect with it; give one of them")
    report = client.rollout(values.model)
    if values.html is not None:
        try:
            values.html.write_text(rollout_page(report), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--html: {values.html} can't be written: {error.strerror}") from None
        return OK
    if values.json:
        _print_json(report.as_object())
        return OK
    print(report_text(report))
    if report.shadow_report:
        print(shadow_text(report.shadow_report))
    if report.declaration:
        print("Declaration:")
        print(json.dumps(report.declaration, indent=2, ensure_ascii=False))
    if report.history:
        print(table(*history_rows(report.history)))
    return OK
