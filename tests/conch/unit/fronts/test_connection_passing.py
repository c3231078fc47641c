"""Connections that go to a front."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from itertools import islice

import pytest

from conch.fronts.connection_passing import ConnectionReceiver, ConnectionSender


def test_a_lost_front_takes_along_what_it_has_taken() -> None:
    with ExitStack() as owned:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        taken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        sender, receiver = ConnectionSender[int](ours, taken), ConnectionReceiver(theirs, taken)
        clients = []
        for number in range(5):
            client, accepted = socket.socketpair()
            client.setblocking(False)
            clients.append(owned.enter_context(client))
            assert sender.send(accepted, b"%d" % number, number)
        for number, (packet, descriptor) in enumerate(islice(receiver.receive(), 3)):
            assert packet == b"%d" % number and descriptor is not None
            os.close(descriptor)
        theirs.close()
        sender.close()
        back = [(owned.enter_context(accepted), number) for accepted, number in sender.take_back()]
        assert [number for _, number in back] == [3, 4]
        assert sender.take_back() == []
        assert [client.recv(1) for client in clients[:3]] == [b""] * 3
        for client in clients[3:]:
            with pytest.raises(BlockingIOError):
                client.recv(1)
