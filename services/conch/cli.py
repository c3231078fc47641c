"""The ``conch`` command."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace

from conch import __version__
from conch.allocator import keep_large_blocks, trim_when_idle
from conch.backends import load_backend
from conch.backends.python.based import backends_within
from conch.banner import models_table
from conch.control_options import control_options, control_port_options
from conch.core.descriptors import raise_descriptor_limit
from conch.core.errors import ConchError, error_text
from conch.core.execution.placement import Devices
from conch.core.stacks import register
from conch.flags import FlagError, FlagValues, add_flags, did_you_mean, read_flags
from conch.frontends.grpc.adapter import IncompatibleGrpcError
from conch.frontends.grpc.server import GrpcOptions
from conch.frontends.http.server import HttpOptions
from conch.gpus import find_gpus
from conch.http_options import http_options
from conch.observability.metrics.options import MetricsOptions
from conch.observability.outputs import LogFileError, Logs, open_logs
from conch.options import (
    ServerOptions,
    access_log_options,
    grpc_options,
    log_options,
    metrics_options,
    planner_options,
    server_options,
)
from conch.running import run
from conch.server import Server
from conch_control.options import ControlOptions
from conch_control.remote_api.options import ControlPortOptions

log = logging.getLogger(__name__)

_COMMANDS = (
    *("serve", "demo", "models", "control", "check", "new", "dump", "completion"),
    *("--help", "--version"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the process's exit code."""
    if arguments is None:
        # Models in this process see no arguments, as in Triton, and may use argparse.
        arguments, sys.argv = sys.argv[1:], [""]
    command, *rest = arguments or ["--help"]
    if command == "serve":
        return _serve(rest)
    if command == "demo":
        return _demo(rest)
    if command == "models":
        from conch.commands import models  # the server does without

        return models.run(rest)
    if command == "control":
        from conch.commands import control

        return control.run(rest)
    if command == "check":
        from conch.commands.check import check

        return check(rest)
    if command == "completion":
        from conch.commands import completion

        return completion.run(rest)
    if command == "new":
        from conch.commands.new import new

        return new(rest)
    if command == "dump":
        from conch.commands.dump import dump

        return dump(rest)
    if command in ("--version", "version"):
        print(f"conch {__version__}")
        return 0
    if command in ("--help", "-h", "help"):
        print("usage: conch serve [flags]    serve a model repository; see conch serve --help")
        print("       conch demo [flags]     serve the example models; takes the flags of conch serve")
        print("       conch models COMMAND   ask a running server about its models, or to change them; see")
        print("                              conch models --help")
        print("       conch control [flags]  have a running server follow repositories from a process of its")
        print("                              own; see conch control --help")
        print("       conch check REPO ...   check model repositories; see conch check --help")
        print("       conch completion SHELL print a script that completes commands and flags in bash or zsh")
        print("       conch new model NAME   write a Python model to begin with, and its test")
        print("       conch dump [PID]       write the stacks of all threads of a running server")
        print("       conch --version        print the version")
        return 0
    hint = did_you_mean(command, _COMMANDS) or "; try conch --help"
    print(f"conch: unknown command '{command}'{hint}", file=sys.stderr)
    return 2


def _demo(arguments: Sequence[str]) -> int:
    from conch.commands.demo import demo_flags

    try:
        flags = demo_flags()
    except FlagError as error:
        print(f"conch demo: {error}", file=sys.stderr)
        return 1
    return _serve([*flags, *arguments])


def _serve(arguments: Sequence[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        parser = argparse.ArgumentParser(prog="conch serve", allow_abbrev=False)
        add_flags(parser)
        parser.print_help()
        return 0
    try:
        flags = read_flags(arguments)
        control = control_options(flags)
        if not control.repositories:
            raise FlagError("--model-repository must be specified")
        grpc = grpc_options(flags)
        options = server_options(flags)
        http = http_options(flags)
        metrics = metrics_options(flags, http)
        control_port = control_port_options(flags)
    except FlagError as error:
        print(f"conch serve: {error}\ntry conch serve --help", file=sys.stderr)
        return 1
    try:
        logs = open_logs(log_options(flags), access_log_options(flags))
    except LogFileError as error:
        print(f"conch serve: {error}", file=sys.stderr)
        return 1
    with logs:
        return _run(flags, options, control, grpc, http, control_port, metrics, logs)


def _run(
    flags: FlagValues,
    options: ServerOptions,
    control: ControlOptions,
    grpc: GrpcOptions | None,
    http: HttpOptions | None,
    control_port: ControlPortOptions | None,
    metrics: MetricsOptions | None,
    logs: Logs,
) -> int:
    for text in flags.warnings:
        log.warning("%s", text)
    if flags["response-cache-byte-size"] is not None:
        log.warning("--response-cache-byte-size is deprecated: use --cache-config=local,size=<bytes>")
    keep_large_blocks()
    register()
    trim_when_idle()
    raise_descriptor_limit()
    capability = flags["min-supported-compute-capability"]
    control = replace(control, devices=Devices(find_gpus(capability), capability))
    server: Server | None = None
    try:
        server = Server(
            options,
            control,
            grpc,
            planner_options(flags),
            control_port,
            logs.control,
            logs.access,
            http=http,
            metrics=metrics,
            get_backend=backends_within(flags["backend-directory"], load_backend),
        )

        def started() -> None:
            # What the start has made lives as long as the process; the collector need not look at it again.
            gc.collect()
            gc.freeze()
            logs.announce(server.banner())

        return run(server, started, logs.flush)
    except (ConchError, IncompatibleGrpcError) as error:
        text = error_text(error) if isinstance(error, ConchError) else str(error)
        head = f"error: creating server: {text}"
        lines = [head, *(f"  {note}" for note in getattr(error, "__notes__", ()))]
        if server is not None and server.models_at_failure:
            lines.insert(0, models_table(server.models_at_failure))
        logs.announce("\n".join(lines), logging.ERROR)
        if logs.only_json:
            print(head, file=sys.stderr)  # for those who look for Triton's text
        return 1
