"""`conch models`: shows and changes the models of a running server through its control port."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from conch.cli.command_parser import CommandParser
from conch.cli.control_connection import (
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
from conch.cli.load_progress import Progress
from conch.cli.models_output import (
    description_json,
    description_text,
    event_json,
    event_line,
    index_json,
    model_json,
    models_table,
)
from conch.core.errors import ConchError
from conch.core.model_control import LoadParameter
from conch_control.agent_api import ModelStatus
from conch_control.remote_api.client import After, ModelControlClient
from conch_control.version_phase import Phase

_MOST_BYTES = 2**31 - 2**16
"""Limit of all files in one load, which is one gRPC message."""
_MOST_CALLS = 16
"""Most loads that one command has in progress; the server has its own limit."""
_PIN = "conch_pin"
"""Load parameter: whether the model stays until it is unloaded."""


def run(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Runs the command; returns the process's exit code."""
    parser = make_parser()
    values = parser.parse_args(list(arguments))
    try:
        options = connection_options(values, environment)
        with closing(ModelControlClient(options)) as client:
            try:
                interruptibly(lambda: values.action(client, values), client.close)
            except ConchError as error:
                code, text = failure(error, options)
                if values.json:
                    _print_json({"error": {"code": error.code, "message": error.message}})
                print(f"conch models: {text}", file=sys.stderr)
                return code
    except UsageError as error:
        print(f"conch models: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        if values.action in (_load, _preload, _unload):
            what = "unload" if values.action is _unload else "load"
            print(f"conch models: interrupted; the server goes on with the {what}", file=sys.stderr)
        return INTERRUPTED
    return OK


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="conch models",
        description="Asks a running server about its models, and to change them, through its control port.",
        epilog="Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 the server can't be reached.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, action: Callable[[ModelControlClient, argparse.Namespace], None], text: str
    ) -> Any:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(action=action)
        made.add_argument("--json", action="store_true", help="print JSON; its shape is stable")
        add_connection_flags(made)
        return made

    made = command("list", _list, "Lists all models with the states of their versions.")
    made.add_argument("--ready", action="store_true", help="only what takes requests")
    made = command(
        "describe", _describe, "Tells all about one model: config with origins, instances, memory."
    )
    made.add_argument("model")
    made = command("load", _load, "Loads or reloads a model, and waits until it is ready.")
    made.add_argument("model")
    made.add_argument(
        "--config", type=Path, metavar="FILE", help="config in JSON, instead of the model's own"
    )
    made.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="VERSION/PATH=LOCAL",
        help="use a local file as a file of the model; those given replace all of its own; may be repeated",
    )
    made = command(
        "preload",
        _preload,
        "Brings models into memory in on-demand mode, where they are evicted as if requests had loaded them.",
    )
    made.add_argument("model", nargs="+")
    made = command(
        "unload", _unload, "Takes a model out of service, and waits until its requests are finished."
    )
    made.add_argument("model")
    made.add_argument(
        "--unload-dependents", action="store_true", help="also models of an ensemble that were loaded for it"
    )
    made = command("label", _label, "Has labels name versions of a model, or removes them.")
    made.add_argument("model")
    made.add_argument(
        "label", nargs="*", metavar="LABEL=VERSION", help="a label and the ready version that it names"
    )
    made.add_argument(
        "--remove", action="append", default=[], metavar="LABEL", help="remove a label; may be repeated"
    )
    made = command("watch", _watch, "Prints what happens to models, until it is interrupted.")
    made.add_argument("model", nargs="*", help="only these models")
    made.add_argument("--state", action="store_true", help="begin with the state of all models")
    made.add_argument("--after", metavar="EPOCH:REVISION", help="go on after an event")
    command("drain", _drain, "Makes the server not ready, so that it gets no more requests.")
    return parser


def _print_json(content: Any) -> None:
    print(json.dumps(content, ensure_ascii=False), flush=True)


def _list(client: ModelControlClient, values: argparse.Namespace) -> None:
    index = client.models()
    if values.ready:
        index = type(index)(index.epoch, index.revision, _ready(index.models))
    if values.json:
        _print_json(index_json(index))
    else:
        print(models_table(index.models))


def _ready(models: tuple[ModelStatus, ...]) -> tuple[ModelStatus, ...]:
    found = []
    for model in models:
        versions = tuple(version for version in model.versions if version.phase is Phase.READY)
        if versions:
            found.append(replace(model, versions=versions))
    return tuple(found)


def _describe(client: ModelControlClient, values: argparse.Namespace) -> None:
    description = client.describe(values.model)
    if values.json:
        _print_json(description_json(description))
    else:
        print(description_text(description))


def _load(client: ModelControlClient, values: argparse.Namespace) -> None:
    parameters = _parameters(values)
    with nullcontext() if values.json else Progress(client, values.model, sys.stderr):
        client.load(values.model, parameters)
    _print_model(client, values)


def _preload(client: ModelControlClient, values: argparse.Namespace) -> None:
    names = list(dict.fromkeys(values.model))
    with ThreadPoolExecutor(min(len(names), _MOST_CALLS), "conch-preload") as pool:
        loads = {name: pool.submit(client.load, name, {_PIN: False}) for name in names}
    errors = [error for each in loads.values() if (error := each.exception()) is not None]
    models = tuple(model for model in client.models().models if model.name in loads)
    if values.json:
        if not errors:
            _print_json({"models": [model_json(model) for model in models]})
    else:
        print(models_table(models))
        for error in errors[1:]:
            print(f"conch models: {error}", file=sys.stderr)
    if errors:
        raise errors[0]


def _parameters(values: argparse.Namespace) -> dict[str, LoadParameter]:
    parameters: dict[str, LoadParameter] = {}
    if values.config is not None:
        content = read_file(values.config, "--config")
        try:
            text = content.decode()
            json.loads(text)
        except UnicodeDecodeError as error:
            raise UsageError(f"--config: {values.config} is not UTF-8: {error}") from None
        except json.JSONDecodeError as error:
            where = f"{values.config}:{error.lineno}:{error.colno}"
            raise UsageError(f"--config: {where}: not JSON: {error.msg}") from None
        parameters["config"] = text
    total = 0
    for given in values.file:
        path, equals, local = given.partition("=")
        if not (path and equals and local):
            raise UsageError(f"--file: '{given}' is not of the form VERSION/PATH=LOCAL")
        if f"file:{path}" in parameters:
            raise UsageError(f"--file: {path} is given twice")
        content = read_file(Path(local), "--file")
        parameters[f"file:{path}"] = content
        total += len(content)
    if total > _MOST_BYTES:
        raise UsageError(f"--file: the files have {total} bytes, and one load can carry {_MOST_BYTES}")
    return parameters


def _unload(client: ModelControlClient, values: argparse.Namespace) -> None:
    client.unload(values.model, values.unload_dependents)
    _wait_drained(client, values.model)
    _print_model(client, values)


def _label(client: ModelControlClient, values: argparse.Namespace) -> None:
    changes: list[tuple[str, int | None]] = []
    for given in values.label:
        label, equals, version = given.partition("=")
        if not (label and equals and version.isascii() and version.isdecimal()):
            raise UsageError(f"'{given}' is not of the form LABEL=VERSION")
        if int(version) >= 2**63:
            raise UsageError(f"'{given}': {version} is no version")
        changes.append((label, int(version)))
    changes += [(label, None) for label in values.remove]
    if not changes:
        raise UsageError("name a label: LABEL=VERSION, or --remove LABEL")
    for label, number in changes:
        client.set_label(values.model, label, number)
    _print_model(client, values)


def _wait_drained(client: ModelControlClient, model: str) -> None:
    """Waits until no version of a model has requests to finish."""
    phases: dict[int, Phase] = {}
    for update in client.watch(whole_state=True, models=[model]):
        for status in () if update.state is None else update.state.models:
            phases.update((each.version, each.phase) for each in status.versions)
        phases.update((event.version, event.phase) for event in update.events)
        if Phase.DRAINING not in phases.values():
            return


def _print_model(client: ModelControlClient, values: argparse.Namespace) -> None:
    models = tuple(model for model in client.models().models if model.name == values.model)
    if values.json:
        _print_json({"model": model_json(models[0]) if models else None})
    elif models:
        print(models_table(models))
    else:
        print(f"There is no model '{values.model}'.")


def _watch(client: ModelControlClient, values: argparse.Namespace) -> None:
    after = None
    if values.after is not None:
        epoch, colon, revision = values.after.rpartition(":")
        if not (epoch and colon and revision.isdecimal() and revision.isascii() and int(revision) < 2**64):
            raise UsageError(f"--after: '{values.after}' is not of the form EPOCH:REVISION")
        if values.state:
            raise UsageError("--state and --after exclude each other")
        after = After(epoch, int(revision))
    first = True
    for update in client.watch(after, values.state, values.model):
        if values.json:
            if first:
                kind = "start" if update.state is None else "state"
                start: dict[str, Any] = {"epoch": update.epoch, "revision": update.revision}
                _print_json({"type": kind, **(start if update.state is None else index_json(update.state))})
            for event in update.events:
                _print_json(event_json(event, update.epoch))
        else:
            if update.state is not None:
                print(models_table(update.state.models), flush=True)
            for event in update.events:
                print(event_line(event), flush=True)
        first = False


def _drain(client: ModelControlClient, values: argparse.Namespace) -> None:
    client.drain()
    if values.json:
        _print_json({"drained": True})
    else:
        print("The server is draining: it is not ready, and goes on answering what comes.")
