"""`conch control`: runs the planner in this process, for the control ports of one or more servers."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

from conch.access.access_guard import Access
from conch.access.policy_reload import PolicyReload
from conch.cli.command_parser import CommandParser
from conch.cli.control_connection import (
    OK,
    USAGE,
    UsageError,
    add_connection_flags,
    connection_options,
    failure,
    server_targets,
)
from conch.core.errors import ConchError, InvalidArgumentError
from conch.observability.logging.log_settings import AuditLogOptions, LogOptions
from conch.observability.logging.process_logs import LogFileError, open_logs
from conch.process.banner import table
from conch.settings.option import FlagError, setting_of
from conch_control.agent_api import Index
from conch_control.control_options import ControlOptions, PlannerOptions
from conch_control.managed_rollouts import LONGEST_LEASE_S
from conch_control.planner.planner_loop import Planner
from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import (
    ConnectionOptions,
    ControlPortFlags,
    ControlPortOptions,
)
from conch_control.remote_api.messages import UnreachableError
from conch_control.remote_api.remote_agent import RemoteAgent
from conch_control.remote_api.server import ControlPort
from conch_control.repository.dependency_graph import read_composing_models
from conch_control.repository.repositories import Repositories, open_repositories
from conch_fleet.fleet_agent import Fleet
from conch_fleet.fleet_server import sight_of
from conch_fleet.placement_file import FleetServer, PlacementRules, read_placement
from conch_fleet.roll import Roll

log = logging.getLogger(__name__)

_SIGNAL_INTERVAL_S = 0.5
_STOP_S = 10.0


def run(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Runs the command until a signal; returns the process's exit code."""
    values = make_parser().parse_args(list(arguments))
    try:
        rules, connections = _fleet(values, environment)
        port_options = _port_options(values)
        policy = _policy(values, port_options)
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
    audit = None
    if values.audit_log is not None:
        audit = AuditLogOptions(None if values.audit_log == "-" else Path(values.audit_log))
    try:
        with (
            open_logs(LogOptions(verbose=values.log_verbose), None, audit) as logs,
            closing(repositories),
            ExitStack() as stack,
        ):
            agents = [RemoteAgent(ModelControlClient(each)) for each in connections]
            for agent in agents:
                stack.callback(agent.close)
            indexes = _first_look(agents, connections)
            if isinstance(indexes, int):
                return indexes
            if values.plan:
                print(_plan(rules, indexes, repositories))
                return OK
            fleet = Fleet(
                agents,
                rules,
                repositories,
                values.server_lost_secs,
                values.rollout_lease,
                values.state_directory,
            )
            stack.enter_context(closing(fleet))
            planner = Planner(fleet, repositories, settings, wanted=rules.loads)
            access = None
            if policy is not None:
                access = Access(policy.state, logs.audit)
                stack.callback(policy.stop)
                policy.start(access)
            return _run(fleet, planner, port_options, access, [each.target for each in connections])
    except LogFileError as error:
        print(f"conch control: {error}", file=sys.stderr)
        return USAGE
    except ConchError as error:
        print(f"conch control: {error.message}", file=sys.stderr)
        return USAGE


def _fleet(
    values: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[PlacementRules, list[ConnectionOptions]]:
    """The servers with their rules, and the connections to them."""
    rules = PlacementRules()
    if values.placement is not None:
        try:
            rules = read_placement(values.placement)
        except InvalidArgumentError as error:
            raise UsageError(f"--placement: {error.message}") from None
    in_file = bool(rules.servers)
    if not in_file:
        targets = server_targets(values, environment)
        rules = replace(rules, servers=tuple(map(FleetServer, targets)))
    elif values.target:
        raise UsageError(f"--server: {values.placement} names the servers already; give them in one place")
    connections = []
    for server in rules.servers:
        own = {
            key: value if key == "server_name" else Path(value) for key, value in server.connection.items()
        }
        shared = argparse.Namespace(**{**vars(values), **own, "target": server.address})
        try:
            connections.append(connection_options(shared, environment))
        except UsageError as error:
            if not in_file:
                raise
            raise UsageError(f"--placement: {values.placement}: server {server.address}: {error}") from None
    return rules, connections


def _first_look(
    agents: Sequence[RemoteAgent], connections: Sequence[ConnectionOptions]
) -> dict[str, Index | None] | int:
    """The indexes of all servers, None for those that may start later; an exit code if one refuses."""

    def look(agent: RemoteAgent) -> Index | ConchError | None:
        try:
            return agent.models()
        except UnreachableError:
            return None
        except ConchError as error:
            return error

    indexes: dict[str, Index | None] = {}
    with ThreadPoolExecutor(len(agents), "conch-first-look") as pool:
        for found, options in zip(pool.map(look, agents), connections, strict=True):
            if isinstance(found, ConchError):
                code, text = failure(found, options)
                where = f"{options.target}: " if len(agents) > 1 else ""
                print(f"conch control: {where}{text}", file=sys.stderr)
                return code
            indexes[options.target] = found
    return indexes


def _plan(rules: PlacementRules, indexes: Mapping[str, Index | None], repositories: Repositories) -> str:
    """Table of each model's servers, and of those that would have to load or unload it."""
    roll = Roll(rules, 1, 0)  # no time passes: servers that are lost keep what they have
    catalogues: dict[str, frozenset[str]] = {}
    for target, index in indexes.items():
        if index is None:
            roll.lost(target, "not reached", (), 0)
        else:
            sight = sight_of(index)
            catalogues[target] = sight.catalogue
            roll.seen(target, sight, (), 0)
    models = repositories.scan().models
    names = sorted(models)
    for name in filter(rules.loads, names):
        roll.want(name, read_composing_models(models[name], ControlOptions(())), 0)
    placement, serving = roll.placement(), roll.serving
    rows = []
    for name in sorted({*names, *serving}):
        placed: Sequence[str]
        placed, now = placement.servers.get(name, ()), serving.get(name, [])
        new = [each for each in placed if each not in now]
        surplus = [each for each in now if each not in placed]
        problem = placement.problems.get(name, "")
        if not rules.loads(name):
            placed = [target for target, catalogue in catalogues.items() if name in catalogue]
            lacking = ", ".join(target for target in catalogues if target not in placed)
            problem = f"not in the catalogue of {lacking}" if lacking else ""
        cells = (placed, new, surplus)
        rows.append([name, *("\n".join(each) or "-" for each in cells), problem])
    lines = [f"{target} can't be reached" for target, index in indexes.items() if index is None]
    return "\n".join([*lines, table(["Model", "Servers", "To load on", "To unload from", "Problem"], rows)])


def _port_options(values: argparse.Namespace) -> ControlPortOptions | None:
    """The fleet's own control port; None for none. Raises UsageError: its flags are wrong."""
    given = {each.name: getattr(values, f"port_{each.name}") for each in fields(ControlPortFlags)}
    flags = {name: value for name, value in given.items() if value is not None}
    try:
        return ControlPortFlags(**flags).options(policy=values.access_policy is not None)
    except FlagError as error:
        raise UsageError(str(error)) from None


def _policy(values: argparse.Namespace, port: ControlPortOptions | None) -> PolicyReload | None:
    """The access policy of the fleet's control port; None for none. Raises UsageError: it can't hold."""
    path = values.access_policy
    if path is None:
        if values.audit_log is not None:
            raise UsageError(
                "--audit-log logs what the access policy refuses and allows: it needs --access-policy"
            )
        return None
    if port is None:
        raise UsageError("--access-policy needs --control-port, or a Unix socket in --control-address")
    try:
        policy = PolicyReload(path)
    except InvalidArgumentError as error:
        raise UsageError(f"--access-policy: {error.message}") from None
    if policy.state.policy.certificates and not port.mutual:
        raise UsageError(
            f"--access-policy: {path} names certificates of clients, which the control port does not ask "
            f"for: give --control-root-cert"
        )
    return policy


def _run(
    fleet: Fleet,
    planner: Planner,
    options: ControlPortOptions | None,
    access: Access | None,
    targets: Sequence[str],
) -> int:
    port = None if options is None else ControlPort(fleet, options, access=access)
    with _until_signalled() as stop:
        fleet.start()
        if port is not None and options is not None:
            port.start()
            log.info("the fleet's control port is %s, %s", options.target, options.security)
        planner.start()
        log.info("planning for %s", ", ".join(targets))
        # Waits in steps: a signal just before an endless wait would be noticed late.
        while not stop.wait(_SIGNAL_INTERVAL_S):
            pass
        if port is not None:
            port.refuse_changes()
        fleet.stop()
        if port is not None:
            port.stop(_STOP_S)
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


def _lease(text: str) -> float:
    value = _seconds(text)
    if not 1 <= value <= LONGEST_LEASE_S:
        raise argparse.ArgumentTypeError(f"must be from 1 to {LONGEST_LEASE_S:g} seconds, not {text}")
    return value


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="conch control",
        description="Watches repositories, and has running servers load and unload their models through "
        "their control ports, one server after the other. The servers should run with "
        "--model-control-mode=explicit.",
        epilog="Exit codes: 0 ended by a signal, 1 refused by a server, 2 wrong usage.",
    )
    parser.add_argument(
        "--model-repository",
        action="append",
        required=True,
        metavar="LOCATION",
        help="directory of models, which the servers must have under the same path, or URL of an object "
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
    parser.add_argument(
        "--placement",
        type=Path,
        metavar="FILE",
        help="TOML file of servers with their labels and memory, and of rules for where models go "
        "(default: each model on each server)",
    )
    parser.add_argument(
        "--plan", action="store_true", help="print where each model would be, change nothing, and end"
    )
    parser.add_argument(
        "--server-lost-secs",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="seconds that a server may be unreachable before its models are placed on others (default: 30)",
    )
    parser.add_argument(
        "--state-directory",
        type=Path,
        metavar="DIRECTORY",
        help="keeps the progress of rollouts (default: go on from what the servers show)",
    )
    parser.add_argument(
        "--rollout-lease",
        type=_lease,
        default=60.0,
        metavar="SECONDS",
        help="a server that does not hear from this process for so long sends a candidate no requests "
        "(default: 60)",
    )
    group = parser.add_argument_group("the fleet's own control port, for conch rollout and conch models")
    for each in fields(ControlPortFlags):
        setting = setting_of(ControlPortFlags, each.name)
        kind: dict[str, Any] = (
            {"action": "store_true", "default": None}
            if setting.is_switch
            else {"type": setting.parse, "metavar": setting.metavar}
        )
        group.add_argument(setting.flag, dest=f"port_{each.name}", help=setting.help, **kind)
    group.add_argument(
        "--access-policy",
        type=Path,
        metavar="FILE",
        help="TOML file with the principals that may call; reread when it changes; see docs/access.md",
    )
    audit = setting_of(AuditLogOptions, "file")
    group.add_argument(audit.flag, metavar="FILE", help=audit.help)
    add_connection_flags(parser, several=True)
    return parser
