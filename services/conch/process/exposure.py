"""Describes in one sentence what a server opens to which clients, for log and banner. Used by: `server`."""

from __future__ import annotations

from collections.abc import Iterable

from conch.frontends.access_policy import is_loopback
from conch.frontends.grpc.grpc_front_end import GrpcOptions
from conch.frontends.http.http_server import HttpOptions
from conch.observability.metrics.metrics_options import MetricsOptions
from conch.server_options import ServerOptions
from conch_console.console_options import ConsoleOptions
from conch_control.control_options import ControlMode
from conch_control.remote_api.connection_options import ControlPortOptions

_ALL = "all clients"
_LOCAL = "this machine"
_CERTIFIED = "clients with a certificate"
_PRINCIPALS = "principals of the access policy"


def exposure(
    options: ServerOptions,
    mode: ControlMode,
    grpc: GrpcOptions | None = None,
    http: HttpOptions | None = None,
    metrics: MetricsOptions | None = None,
    control_port: ControlPortOptions | None = None,
    platforms: Iterable[HttpOptions] = (),
    console: ConsoleOptions | None = None,
) -> str:
    """The sentence for these options; None for a port that is off."""
    ports = _ports(grpc, http)
    policy = options.access_policy is not None
    routed = [(each.title, each) for each in platforms]

    def open_to(group: str, more: Iterable[tuple[str, HttpOptions]] = ()) -> str:
        return _joined(
            (_PRINCIPALS if policy else _clients(each, group), name) for name, each in (*ports, *more)
        )

    parts = [f"inference to {open_to('inference', routed)}"] if ports or routed else []
    if mode == "explicit" and options.allow_model_control:
        loading = routed if options.archives is not None else ()
        if ports or loading:
            parts.append(f"loading models to {open_to('model-repository', loading)}")
    if ports and mode == "explicit" and options.allow_model_control:
        files = _joined((_PRINCIPALS if policy else _uploaders(each), name) for name, each in ports)
        parts.append(f"with files to {files}")
    if ports and options.allow_client_shm:
        parts.append(f"shared memory to {open_to('shared-memory')}")
    if metrics is not None:
        # The metrics port uses the REST port's TLS.
        certified = metrics.tls is not None and http is not None and http.mutual
        others = _CERTIFIED if certified else _reach(metrics.address)
        parts.append(f"metrics to {_PRINCIPALS if policy else others}")
    if control_port is not None:
        parts.append(f"the control port to {_operators(control_port)}")
    if console is not None:
        parts.append(f"the console to {_viewers(console)}")
    return f"open: {'; '.join(parts)}" if parts else "open: nothing"


def open_control_warning(
    options: ServerOptions,
    mode: ControlMode,
    grpc: GrpcOptions | None = None,
    http: HttpOptions | None = None,
) -> str:
    """A line for the log if clients of other machines may load models, and with them code; else empty."""
    if mode != "explicit" or not options.allow_model_control or options.access_policy is not None:
        return ""
    open_ports = [
        f"{name} on {port.target}"
        for name, port in _ports(grpc, http)
        if _clients(port, "model-repository") == _ALL
    ]
    if not open_ports:
        return ""
    return (
        f"all clients that reach {' and '.join(open_ports)} may load and unload models: "
        f"--allow-model-control=false closes this, --access-policy opens it to chosen clients only"
    )


def _ports(grpc: GrpcOptions | None, http: HttpOptions | None) -> list[tuple[str, GrpcOptions | HttpOptions]]:
    ports: tuple[tuple[str, GrpcOptions | HttpOptions | None], ...] = (("gRPC", grpc), ("HTTP", http))
    return [(name, each) for name, each in ports if each is not None]


def _clients(port: GrpcOptions | HttpOptions, group: str) -> str:
    """The clients that may call the operations of a restriction group."""
    if port.mutual:
        return _CERTIFIED
    secret = port.restrictions.get(group)
    return _reach(port.address) if secret is None else f"clients with the key '{secret[0]}'"


def _uploaders(port: GrpcOptions | HttpOptions) -> str:
    clients = _clients(port, "model-repository")
    return _LOCAL if clients == _ALL and not port.allow_model_upload else clients


def _operators(port: ControlPortOptions) -> str:
    if port.policy:
        return _PRINCIPALS if port.token is None else f"{_PRINCIPALS} and clients with the token"
    if port.token is not None:
        return "clients with the token"
    return _CERTIFIED if port.mutual else _reach(port.address)


def _viewers(console: ConsoleOptions) -> str:
    if console.policy:
        return _PRINCIPALS
    if console.tokens is not None:
        return "users with a token"
    return _CERTIFIED if console.mutual else _reach(console.address)


def _reach(address: str) -> str:
    """The clients that can reach an address."""
    local = address == "localhost" or address.startswith("unix:") or is_loopback(address.strip("[]"))
    return _LOCAL if local else _ALL


def _joined(entries: Iterable[tuple[str, str]]) -> str:
    """Clients with their ports, such as ``all clients (gRPC, HTTP)``."""
    ports: dict[str, list[str]] = {}
    for clients, port in entries:
        ports.setdefault(clients, []).append(port)
    return " and ".join(f"{clients} ({', '.join(names)})" for clients, names in ports.items())
