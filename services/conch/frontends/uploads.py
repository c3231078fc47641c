"""Which clients may bring a model's files, and with them code, with a load request."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

_ADDED_BY_PROXIES = frozenset(("forwarded", "via", "x-forwarded-for", "x-real-ip"))


@dataclass(frozen=True, slots=True)
class UploadRule:
    """Decides which callers of one port may bring files.

    Attributes:
        any_caller: Whether every caller may: the operator allows it, or the port takes loads only from
            callers with a client certificate or a restricted key.
    """

    any_caller: bool = False

    def allows(self, local: bool, headers: Iterable[str]) -> bool:
        """Whether a caller may bring files.

        Args:
            local: Whether it calls from this machine.
            headers: Names of what it has sent with the call, in lower case. A local caller that forwards the
                calls of others is as far away as they are.
        """
        return self.any_caller or (local and _ADDED_BY_PROXIES.isdisjoint(headers))


LOCAL_UPLOADS = UploadRule()
"""Takes files from this machine only."""


def is_loopback(host: str) -> bool:
    """Whether an IP address is one of this machine's own, also where IPv6 carries one of IPv4."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback if mapped is None else bool(mapped.is_loopback)


def is_local_peer(peer: str) -> bool:
    """Whether a peer as gRPC writes it, such as ``ipv4:127.0.0.1:50000``, is on this machine."""
    kind, _, rest = peer.partition(":")
    return kind in ("unix", "unix-abstract") or is_loopback(rest.rpartition(":")[0].strip("[]"))
