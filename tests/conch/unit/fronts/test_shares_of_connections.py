"""Fronts share the connections of a port: one that has its share gets no more while another has not."""

from __future__ import annotations

import socket
from collections import Counter
from typing import Any

from conch.frontends.http.http_exchange import HttpExchange
from conch.frontends.http.http_loop import HttpLoop
from conch.fronts.http_fronts import HttpFronts
from conch.fronts.http_messages import PortSettings


class Link:
    """A front that takes each connection, and ends none."""

    def __init__(self) -> None:
        self.given: Counter[int] = Counter()

    def connections_of(self, port: int) -> int:
        return self.given[port]

    def give(self, port: int, accepted: socket.socket) -> bool:
        self.given[port] += 1
        return True


def test_a_front_with_its_share_of_connections_comes_last() -> None:
    """The order is by open calls, which are always fewer on the first one."""
    links: list[Any] = [Link(), Link()]
    fronts = HttpFronts(HttpLoop(), 2, lambda: links)
    ports = [
        fronts.add_port(PortSettings(None, 60.0, 3, None), HttpExchange.abort, lambda: None) for _ in range(2)
    ]
    with socket.socket() as accepted:
        for port in ports:
            for _ in range(7):
                fronts.give(port, accepted)
    assert [[link.given[port] for link in links] for port in ports] == [[4, 3], [4, 3]]
