"""A listening socket: what waits is accepted in turns."""

from __future__ import annotations

import select
import socket
from contextlib import ExitStack
from itertools import count

from conch.frontends.connections.listener import Listener


def test_connections_that_wait_are_accepted_in_turns() -> None:
    """Each is taken in half a millisecond, and a turn has two."""
    with ExitStack() as stack:
        bound = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        bound.setblocking(False)
        taken: list[socket.socket] = []

        def take(accepted: socket.socket, address: object) -> None:
            taken.append(stack.enter_context(accepted))

        listener = Listener(bound, take, "the port", count(0, 500_000).__next__)
        for _ in range(32):
            stack.enter_context(socket.create_connection(bound.getsockname()))
        turns = []
        while len(taken) < 32:
            select.select([bound], [], [])
            before = len(taken)
            listener.on_ready(select.EPOLLIN)
            turns.append(len(taken) - before)
        assert max(turns) <= 5
