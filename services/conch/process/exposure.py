"""Describes in one sentence what a server opens to which clients, for log and banner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from conch.frontends.access_policy import is_loopback
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.frontends.http.http_options import HttpOptions
from conch.server_options import Opening, PartOptions
from conch_control.remote_api.connection_options import ControlPortOptions

INFERENCE, LOADING, FILES, SHARED_MEMORY = "inference", "loading models", "with files", "shared memory"
ROLLOUTS = "rollouts"
PRINCIPALS = "principals of the access policy"
CERTIFIED = "clients with a certificate"

_ALL = "all clients"
_LOCAL = "this machine"


def exposure(options: PartOptions) -> str:
    """The sentence for these options."""
    found: dict[str, list[Opening]] = {
        each: [] for each in (INFERENCE, LOADING, FILES, ROLLOUTS, SHARED_MEMORY)
    }
    for each in (
        *_openings(options),
        *(o for part in options.add_ons.values() for o in part.openings(options)),
    ):
        found.setdefault(each.what, []).append(each)
    parts = [f"{what} to {_joined(openings)}" for what, openings in found.items() if openings]
    return f"open: {'; '.join(parts)}" if parts else "open: nothing"


def _openings(options: PartOptions) -> Iterator[Opening]:
    """Openings of the server's own ports, without those of add-ons."""
    server = options.server
    policy = server.access_policy is not None
    for name, port in _ports(options):
        yield Opening(INFERENCE, PRINCIPALS if policy else clients_of(port, "inference"), name)
        if server.allow_model_control:
            callers = PRINCIPALS if policy else clients_of(port, "model-repository")
            if options.control.loads_by_name:
                yield Opening(LOADING, callers, name)
                uploaders = PRINCIPALS if policy else _uploaders(port)
                if uploaders:
                    yield Opening(FILES, uploaders, name)
            elif port is options.http and (policy or port.identifies("model-repository")):
                yield Opening(ROLLOUTS, callers, name)
        if server.allow_client_shm:
            yield Opening(SHARED_MEMORY, PRINCIPALS if policy else clients_of(port, "shared-memory"), name)
    metrics = options.metrics
    if metrics is not None:
        others = CERTIFIED if metrics.mutual else reach(metrics.address)
        yield Opening("metrics", PRINCIPALS if policy else others)
    if options.control_port is not None:
        yield Opening("the control port", _operators(options.control_port))


def open_control_warning(options: PartOptions) -> str:
    """A line for the log if clients of other machines may load models, and with them code; else empty."""
    server = options.server
    if (
        not options.control.loads_by_name
        or not server.allow_model_control
        or server.access_policy is not None
    ):
        return ""
    open_ports = [
        f"{name} on {port.target}"
        for name, port in _ports(options)
        if clients_of(port, "model-repository") == _ALL
    ]
    if not open_ports:
        return ""
    return (
        f"all clients that reach {' and '.join(open_ports)} may load and unload models: "
        f"--allow-model-control=false closes this, --access-policy opens it to chosen clients only"
    )


def _ports(options: PartOptions) -> list[tuple[str, GrpcOptions | HttpOptions]]:
    ports = (("gRPC", options.grpc), ("HTTP", options.http))
    return [(name, each) for name, each in ports if each is not None]


def clients_of(port: GrpcOptions | HttpOptions, group: str) -> str:
    """The clients that may call the operations of a restriction group."""
    if port.mutual:
        return CERTIFIED
    secret = port.restrictions.get(group)
    return reach(port.address) if secret is None else f"clients with the key '{secret[0]}'"


def _uploaders(port: GrpcOptions | HttpOptions) -> str:
    """The clients that may send files with a load; empty for none."""
    if port.identifies("model-repository") or port.allow_model_upload or port.address.startswith("unix:"):
        return clients_of(port, "model-repository")
    return ""


def _operators(port: ControlPortOptions) -> str:
    if port.policy:
        return PRINCIPALS if port.token is None else f"{PRINCIPALS} and clients with the token"
    if port.token is not None:
        return "clients with the token"
    return CERTIFIED if port.mutual else reach(port.address)


def reach(address: str) -> str:
    """The clients that can reach an address."""
    local = address == "localhost" or address.startswith("unix:") or is_loopback(address.strip("[]"))
    return _LOCAL if local else _ALL


def _joined(openings: Iterable[Opening]) -> str:
    """Clients with their ports, such as ``all clients (gRPC, HTTP)``."""
    ports: dict[str, list[str]] = {}
    for each in openings:
        ports.setdefault(each.clients, []).append(each.port)
    return " and ".join(
        f"{clients} ({', '.join(names)})" if any(names) else clients for clients, names in ports.items()
    )
