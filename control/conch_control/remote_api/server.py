"""The control port: a gRPC server separate from the data port."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from conch.core.errors import UnavailableError
from conch_control.port import AgentPort
from conch_control.remote_api.call_metadata import TokenGuard
from conch_control.remote_api.connection_options import ControlPortOptions, ServerTls, is_loopback
from conch_control.remote_api.handlers import MOST_LOADS, MOST_WATCHES, QUICK_THREADS, ModelControl

log = logging.getLogger(__name__)

_MOST_CALLS = 512
_ABORTS_S = 0.5
_ARGUMENTS = (
    ("grpc.so_reuseport", 0),
    # File overrides are large single messages.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Detect dead clients of watches.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


class ControlPort:
    """Serves an agent's API on one port.

    Raises:
        InvalidArgumentError: The port would be open to everyone.
    """

    def __init__(
        self,
        port: AgentPort,
        options: ControlPortOptions,
        watches: int = MOST_WATCHES,
        loads: int = MOST_LOADS,
    ) -> None:
        options.check()
        self._options = options
        self._service = ModelControl(port, watches, loads)
        self._threads = ThreadPoolExecutor(watches + loads + QUICK_THREADS, "conch-control-port")
        self._server: Any = None

    def start(self) -> int:
        """Starts the server; returns the port in use, which has no meaning for a Unix socket.

        Raises:
            UnavailableError: The address or the certificates are unusable.
        """
        options = self._options
        in_the_clear = options.token is not None and options.tls is None and not options.is_unix
        if in_the_clear and not is_loopback(options.address):
            log.warning("the control port lets tokens travel in plain text: use --control-use-ssl")
        handlers = self._service.handlers()
        if options.token is not None:
            handlers = TokenGuard(handlers, options.token)
        server = grpc.server(
            self._threads, handlers=(handlers,), options=_ARGUMENTS, maximum_concurrent_rpcs=_MOST_CALLS
        )
        try:
            if options.tls is None:
                port = server.add_insecure_port(options.target)
            else:
                port = server.add_secure_port(options.target, _credentials(options.tls))
        except (RuntimeError, ValueError) as error:
            # Only a started server releases its resources.
            server.start()
            server.stop(None).wait()
            raise UnavailableError(f"control port {options.target} can't be listened on: {error}") from None
        server.start()
        self._server = server
        return int(port)

    def refuse_changes(self) -> None:
        """Refuses changes from now on, before the server stops."""
        self._service.refuse_changes()

    def stop(self, grace_s: float) -> bool:
        """Ends all watches and waits for calls in flight; returns True if all have ended.

        Args:
            grace_s: Time for calls in flight; a longer load continues in the agent.
        """
        if self._server is None:
            return True
        self._service.stopping()
        ended = bool(self._server.stop(grace_s).wait(grace_s + _ABORTS_S))
        # gRPC forgets cancelled calls, but their handlers may still run.
        ended = self._service.wait_idle(_ABORTS_S) and ended
        self._threads.shutdown(wait=ended, cancel_futures=True)
        return ended


def _credentials(tls: ServerTls) -> Any:
    pair = (tls.private_key, tls.certificate)
    return grpc.ssl_server_credentials([pair], tls.client_root, tls.client_root is not None)
