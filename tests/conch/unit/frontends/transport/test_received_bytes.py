"""The bound of received bytes, without connections."""

from __future__ import annotations

from dataclasses import dataclass

from conch.core.admission import HeldBytes
from conch.frontends.grpc.transport.received_bytes import ReceivedBytes


@dataclass(eq=False)
class Call:
    """A call; also its own connection."""

    stream_id: int
    wanted: bool = True
    counted: int = 0

    def release_crowded(self) -> None:
        pass


def test_only_the_oldest_message_may_end_over_the_bound() -> None:
    received = ReceivedBytes(HeldBytes(16))
    oldest, other = Call(1), Call(3)
    received.count(oldest, oldest, 10, True)
    received.count(other, other, 6, True)
    assert not received.refuses(other)
    received.count(oldest, oldest, 11, True)
    assert (received.refuses(oldest), received.refuses(other)) == (False, True)
    oldest.wanted = False
    assert received.refuses(oldest), "its handler does not read"
