"""Keyword arguments to a whole server: the flags of the command line, without what belongs to a program."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from conch.api.backend import BoundBackend
from conch.api.model import BACKEND
from conch.api.repository import BoundRepository
from conch.backends import load_backend
from conch.backends.python.based import backends_within
from conch.control_options import control_options, control_port_options
from conch.core.backend import Backend
from conch.core.custom_metrics import CustomFamilies
from conch.core.execution.placement import Devices
from conch.core.verbose import REQUESTS
from conch.flags import FlagError, FlagValues, read_keywords
from conch.gpus import find_gpus
from conch.http_options import http_options
from conch.observability.access import AccessLog
from conch.options import access_log_options, grpc_options, metrics_options, planner_options, server_options
from conch.server import Server
from conch_control.options import WILDCARD

log = logging.getLogger(__name__)

_PORTS = {"grpc_port": "allow_grpc", "http_port": "allow_http", "metrics_port": "allow_metrics"}


class Settings:
    """What a server is to be like, read and checked.

    Args:
        keywords: Flags by name; a port of None is one that is not opened.

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
        flags = read_keywords(given)
        self._flags = flags
        self.options = server_options(flags)
        self.control = control_options(flags)
        self.grpc = grpc_options(flags)
        self.http = http_options(flags)
        self.metrics = metrics_options(flags, self.http)
        self.planner = planner_options(flags)
        self.control_port = control_port_options(flags)
        self.access_log = access_log_options(flags)

    @property
    def ports(self) -> frozenset[int]:
        """The ports that it is to listen on, apart from those that may be any free one."""
        parts = (self.grpc, self.http, self.metrics, self.control_port)
        return frozenset(each.port for each in parts if each is not None) - {0}

    @property
    def flags(self) -> FlagValues:
        """The values of all flags."""
        return self._flags

    def compose(self, bound: BoundRepository, stack: ExitStack) -> Server:
        """Makes a server of them; nothing of it runs yet.

        Args:
            bound: Functions that are models.
            stack: Closes what the server needs besides, when it has stopped.

        Raises:
            ConchError: The settings can't work.
            FlagError: The access log can't be opened.
        """
        REQUESTS.on = log.isEnabledFor(logging.DEBUG)
        control = self.control
        if control.mode == "explicit" and WILDCARD not in control.startup_models:
            names = dict.fromkeys((*control.startup_models, *bound.names))
            control = replace(control, startup_models=tuple(names))
        if control.repositories:  # functions see to their devices themselves
            capability = self._flags["min-supported-compute-capability"]
            control = replace(control, devices=Devices(find_gpus(capability), capability))
        backend = BoundBackend(bound.find)

        find = backends_within(self._flags["backend-directory"], load_backend)

        def get_backend(name: str) -> Backend:
            return backend if name == BACKEND else find(name)

        requests = None
        if self.access_log is not None:
            try:
                requests = AccessLog(self.access_log, lambda: log.isEnabledFor(logging.DEBUG))
            except OSError as error:
                raise FlagError(f"access_log can't be opened: {error}") from None
            stack.callback(requests.close)
        return Server(
            self.options,
            control,
            self.grpc,
            self.planner,
            self.control_port,
            None,
            requests,
            http=self.http,
            metrics=self.metrics,
            get_backend=get_backend,
            repositories=(bound,),
            families=CustomFamilies(),
        )
