"""Places of connections, whatever clients do: bounds hold, and the quietest give way."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from conch.frontends.connections.places import RESERVED_CONNECTIONS, Place, find_place


class Client:
    """A connection; it lingers when it leaves."""

    def __init__(self, port: list[Client], now: int, reserved: bool) -> None:
        self.port = port
        self.heard_at: float = now
        self.reserved = reserved
        self.idle = True
        self.used = False
        self.leaving = False

    def leave(self) -> None:
        if self.leaving:
            self.port.remove(self)
        self.leaving = True


@given(st.sampled_from([1, 3, 64, 200]), st.integers(0, 1 << 30))
def test_bounds_hold_and_the_quietest_give_way(most: int, seed: int) -> None:
    chance = Random(seed)
    busy = chance.random()
    port: list[Client] = []
    at_once = max(most // 64, 1)
    for now in range(300):
        if port and chance.random() < 0.5:
            client = chance.choice(port)
            client.idle, client.heard_at = client.leaving or chance.random() > busy, now
            client.used = True
        before = {each for each in port if not each.leaving}
        place = find_place(list(port), sum(each.leaving for each in port), most)
        gone = {each for each in before if each.leaving}
        assert all(each.idle for each in gone)
        staying = before - gone
        if place is Place.NONE:
            assert not any(each.idle for each in before)
            continue
        if place is Place.RESERVED:
            assert not any(each.idle and not each.reserved for each in before)
        if gone:
            last = max((each.used, each.heard_at) for each in gone)
            alike = {each.reserved for each in gone}
            assert not [
                each
                for each in staying
                if each.idle and each.reserved in alike and (each.used, each.heard_at) < last
            ]
        port.append(Client(port, now, place is Place.RESERVED))
        here = [each for each in port if not each.leaving]
        assert sum(not each.reserved for each in here) <= most
        assert sum(each.reserved for each in here) <= RESERVED_CONNECTIONS
        assert len(port) - len(here) <= RESERVED_CONNECTIONS + 2 * at_once
