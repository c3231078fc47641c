"""The ``conch`` command."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from conch import __version__
from conch.allocator import keep_large_blocks, trim_when_idle
from conch.backends import load_backend
from conch.backends.python.based import backends_within
from conch.control_options import control_options, control_port_options
from conch.core.descriptors import raise_descriptor_limit
from conch.core.errors import ConchError, error_text
from conch.core.instances.placement import Devices
from conch.flags import FlagError, FlagValues, add_flags, read_flags
from conch.frontends.grpc.adapter import IncompatibleGrpcError
from conch.frontends.grpc.server import GrpcOptions
from conch.frontends.http.server import HttpOptions
from conch.gpus import find_gpus
from conch.http_options import http_options
from conch.observe.metrics.options import MetricsOptions
from conch.observe.outputs import LogFileError, Logs, open_logs
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
from conch.tables import table
from conch_control.options import ControlOptions
from conch_control.service.options import ControlPortOptions

log = logging.getLogger(__name__)

_REASON_WIDTH = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the process's exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command, *rest = arguments or ["--help"]
    if command == "serve":
        return _serve(rest)
    if command == "models":
        from conch.commands import models  # the server does without

        return models.run(rest)
    if command == "control":
        from conch.commands import control

        return control.run(rest)
    if command == "check":
        from conch.commands.check import check

        return check(rest)
    if command in ("--version", "version"):
        print(f"conch {__version__}")
        return 0
    if command in ("--help", "-h", "help"):
        print("usage: conch serve [flags]    serve a model repository; see conch serve --help")
        print("       conch models COMMAND   ask a running server about its models, or to change them; see")
        print("                              conch models --help")
        print("       conch control [flags]  have a running server follow repositories from a process of its")
        print("                              own; see conch control --help")
        print("       conch check REPO ...   check model repositories; see conch check --help")
        print("       conch --version        print the version")
        return 0
    print(f"conch: unknown command '{command}'; try conch --help", file=sys.stderr)
    return 2


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
        metrics = metrics_options(flags)
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
    for name in flags.without_effect:
        log.warning("%s is accepted but has no effect in this version", name)
    if flags["response-cache-byte-size"] is not None:
        log.warning("--response-cache-byte-size is deprecated: use --cache-config=local,size=<bytes>")
    keep_large_blocks()
    trim_when_idle()
    raise_descriptor_limit()
    capability = flags["min-supported-compute-capability"]
    control = replace(control, devices=Devices(find_gpus(capability), capability))
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
            logs.settle()
            _started(server, grpc, http, control_port, metrics)

        return run(server, started, logs.flush)
    except (ConchError, IncompatibleGrpcError) as error:
        text = error_text(error) if isinstance(error, ConchError) else str(error)
        log.error("%s", text)
        logs.settle()
        print(f"error: creating server: {text}", file=sys.stderr)
        return 1


def _started(
    server: Server,
    grpc: GrpcOptions | None,
    http: HttpOptions | None,
    control_port: ControlPortOptions | None,
    metrics: MetricsOptions | None,
) -> None:
    # What the start has made lives as long as the process; the collector need not look at it again.
    gc.collect()
    gc.freeze()
    print(_summary(server, grpc, http, control_port, metrics), flush=True)


def _summary(
    server: Server,
    grpc: GrpcOptions | None,
    http: HttpOptions | None,
    control_port: ControlPortOptions | None,
    metrics: MetricsOptions | None,
) -> str:
    """What is loaded, and where it is served."""
    models = [
        [
            entry.name,
            entry.version or "-",
            entry.state or "not loaded",
            textwrap.fill(entry.reason, _REASON_WIDTH),
        ]
        for entry in server.agent.index(False)
    ]
    ports = []
    if grpc is not None:
        unix = grpc.address.startswith("unix:")
        address = grpc.target if unix else f"{grpc.target.rpartition(':')[0]}:{server.grpc_port}"
        ports.append(["gRPC", address, "TLS" if grpc.tls else "plain text"])
    if http is not None:
        address = f"{http.target.rpartition(':')[0]}:{server.http_port}"
        ports.append(["HTTP", address, "TLS" if http.tls else "plain text"])
    if metrics is not None:
        address = f"{metrics.target.rpartition(':')[0]}:{server.metrics_port}"
        ports.append(["Metrics", address, "plain text"])
    if control_port is not None:
        ports.append(["Control", control_port.target, control_port.security])
    return "\n".join(
        (
            table(["Model", "Version", "Status", "Reason"], models),
            table(["Service", "Address", "Security"], ports),
        )
    )
