"""File descriptors: how many connections ports may hold, so that the rest of the server never runs out.

Workers, models, shared memory, logs and the control port need descriptors too. A quarter of the process's
limit is left to them, whatever clients do; each port for clients has a share of its own, so that one that is
full takes nothing from the others.
"""

from __future__ import annotations

import resource

_MOST_DESCRIPTORS = 64 * 1024
_SHARES = 8
_LEAST_CONNECTIONS = 16

GRPC_SHARES = 3
"""Eighths of the descriptors that connections to the gRPC port may take."""

HTTP_SHARES = 3
"""Eighths of the descriptors that connections to the HTTP port may take."""


def raise_descriptor_limit() -> int:
    """Raises the process's soft limit of descriptors as far as its hard limit lets it, to 65,536 at most.

    Returns:
        The limit after that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def most_connections(shares: int) -> int:
    """How many connections a port may hold.

    Args:
        shares: Eighths of the process's descriptors that belong to the port.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _MOST_DESCRIPTORS)
    return max(limit * shares // _SHARES, _LEAST_CONNECTIONS)
