"""Composes the server of `conch.Server` from its keyword arguments."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from conch.backends import load_backend
from conch.cli.settings.settings_reader import read_keywords
from conch.core.backend import Backend
from conch.core.custom_metrics import CustomFamilies
from conch.core.execution.placement import Devices
from conch.core.request_log import REQUESTS
from conch.observability.logging.access_log import AccessLog
from conch.observability.logging.audit_log import AuditLog
from conch.process.gpu_discovery import find_gpus
from conch.server import InferenceServer
from conch.server_settings import build_options
from conch.settings.option import FlagError
from conch.workers.backend_directory import backends_within
from conch_api.function_backend import FunctionBackend
from conch_api.function_config import BACKEND
from conch_api.function_repository import BoundRepository
from conch_control.control_options import WILDCARD

log = logging.getLogger(__name__)

_PORTS = {"grpc_port": "allow_grpc", "http_port": "allow_http", "metrics_port": "allow_metrics"}


class ServerSettings:
    """The settings of one server, resolved and checked.

    Args:
        keywords: Settings by keyword; a port of None is not opened.

    Attributes:
        options: The options of the server's parts.

    Raises:
        FlagError: One is unknown, wrong, or contradicts another one.
    """

    def __init__(self, keywords: Mapping[str, Any]) -> None:
        given = dict(keywords)
        for name in given:
            if name.startswith("log_"):
                raise FlagError(
                    f"{name}: logging belongs to the program; configure the loggers 'conch' and "
                    f"'conch_control' instead"
                )
        for port, switch in _PORTS.items():
            if port in given and given[port] is None:
                given[switch] = False
        self.options = build_options(read_keywords(given))

    def compose(self, bound: BoundRepository, stack: ExitStack) -> InferenceServer:
        """Makes a server that is not started yet; `stack` closes what it leaves after its stop."""
        REQUESTS.on = log.isEnabledFor(logging.DEBUG)
        options = self.options
        control = options.control
        if control.loads_by_name and WILDCARD not in control.startup_models:
            names = dict.fromkeys((*control.startup_models, *bound.names))
            control = replace(control, startup_models=tuple(names))
        if control.repositories:  # functions choose their devices themselves
            capability = options.server.min_compute_capability
            control = replace(control, devices=Devices(find_gpus(capability), capability))
        backend = FunctionBackend(bound.find)
        find = backends_within(
            control.backend_directory,
            load_backend,
            control.told,
            bool(control.devices.gpus),
            control.host_policies,
        )

        def get_backend(name: str, runtime: str = "", directory: Path | None = None, /) -> Backend:
            return backend if name == BACKEND else find(name, runtime, directory)

        request_log = None
        if options.access_log is not None:
            try:
                request_log = AccessLog(options.access_log, lambda: log.isEnabledFor(logging.DEBUG))
            except OSError as error:
                raise FlagError(f"access_log can't be opened: {error}") from None
            stack.callback(request_log.close)
        audit_log = None
        if options.audit_log is not None:
            try:
                audit_log = AuditLog(options.audit_log.file)
            except OSError as error:
                raise FlagError(f"audit_log can't be opened: {error}") from None
            stack.callback(audit_log.close)
        return InferenceServer(
            replace(options, control=control),
            access_log=request_log,
            audit_log=audit_log,
            get_backend=get_backend,
            repositories=(bound,),
            families=CustomFamilies(),
        )
