"""`conch serve`: runs a server in this process until a signal ends it."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from platform import python_version

from conch import __version__
from conch.backends import load_backend
from conch.cli.settings.settings_reader import read_flags
from conch.cli.settings.settings_reference import help_parser
from conch.core.compiled import build
from conch.core.errors import ConchError, error_text
from conch.core.execution.placement import Devices
from conch.core.process_setup import raise_descriptor_limit, register_stack_dump
from conch.observability.logging.process_logs import LogFileError, Logs, open_logs
from conch.process.allocator import keep_large_blocks, trim_when_idle
from conch.process.banner import failure_announcement
from conch.process.gpu_discovery import find_gpus
from conch.process.main_thread import run_until_signal
from conch.server import InferenceServer
from conch.server_options import PartOptions
from conch.server_settings import build_options
from conch.settings.option import FlagError, Settings
from conch.workers.backend_directory import backends_within

log = logging.getLogger(__name__)


def run(
    arguments: Sequence[str],
    command: str = "conch serve",
    *,
    as_triton: bool = False,
    defaults: Mapping[str, Sequence[str]] | None = None,
) -> int:
    """Runs the command, perhaps under another name and with defaults of its own; returns the exit code."""
    if "--help" in arguments or "-h" in arguments:
        help_parser(command).print_help()
        return 0
    try:
        settings = read_flags(arguments, as_triton=as_triton, defaults=defaults)
        if not any(settings[name] for name in ("model-repository", "model-store", "sagemaker-multi-model")):
            raise FlagError("--model-repository must be specified")
        options = build_options(settings)
    except FlagError as error:
        print(f"{command}: {error}\ntry {command} --help", file=sys.stderr)
        return 1
    try:
        logs = open_logs(options.log, options.access_log, options.audit_log)
    except LogFileError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 1
    with logs:
        return serve(settings, options, logs)


def serve(settings: Settings, options: PartOptions, logs: Logs) -> int:
    """Serves until a signal; returns the process's exit code."""
    log.info("conch %s (%s), Python %s", __version__, build(), python_version())
    for text in settings.warnings:
        log.warning("%s", text)
    for text in settings.notes:
        log.info("%s", text)
    for text in options.warnings:
        log.warning("Warning: %s", text)
    keep_large_blocks()
    register_stack_dump()
    trim_when_idle()
    raise_descriptor_limit()
    capability = options.server.min_compute_capability
    control = replace(options.control, devices=Devices(find_gpus(capability), capability))
    server: InferenceServer | None = None
    try:
        server = InferenceServer(
            replace(options, control=control),
            logs.control,
            logs.access,
            logs.audit,
            get_backend=backends_within(
                control.backend_directory,
                load_backend,
                control.told,
                bool(control.devices.gpus),
                control.host_policies,
            ),
        )

        def started() -> None:
            # Objects of the start live as long as the process; the collector need not scan them again.
            gc.collect()
            gc.freeze()
            announcement = server.announcement()
            logs.announce(announcement.text, announcement.lines)

        return run_until_signal(server, started, logs.flush)
    except ConchError as error:
        head = f"error: creating server: {error_text(error)}"
        notes = [head, *(f"  {note}" for note in getattr(error, "__notes__", ()))]
        models = [] if server is None else server.models_at_failure
        failure = failure_announcement(models, *notes)
        logs.announce(failure.text, failure.lines)
        if logs.only_json:
            print(head, file=sys.stderr)  # for scripts that look for Triton's text
        return 1
