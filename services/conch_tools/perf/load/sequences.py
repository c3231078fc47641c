"""The live sequences of one load process: what each slot sends next; pure.

A slot has one sequence at a time, and a sequence one request at a time. The first request has START, the last
one END. A request that fails begins its sequence again with the same id, which is right whether the server
still has the sequence or not: START ends an old one of that id.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from conch_tools.perf.load.ready_requests import ReadyRequest, sequence_mark


@dataclass(frozen=True)
class SequencePlan:
    """The sequences of all processes.

    Attributes:
        streams: Requests of each sequence, in turn; a longer sequence begins its requests again.
        ids: Ids that sequences may have.
        text_ids: True to send ids as text.
        length: Requests of a sequence; 0 for those of its stream.
        variation: Share of the length by which a sequence may be shorter or longer.
    """

    streams: Sequence[Sequence[ReadyRequest]]
    ids: range
    text_ids: bool = False
    length: int = 0
    variation: float = 0.0


class _Live:
    """A sequence.

    Attributes:
        sent: Its requests so far.
        waits: True if the last of them has no answer yet.
        failed: True if the server may have begun it although `sent` is 0.
    """

    __slots__ = ("failed", "id", "length", "middle", "sent", "stream", "waits")

    def __init__(self, number: int, stream: Sequence[ReadyRequest], length: int) -> None:
        self.id = number
        self.stream = stream
        self.length = length
        self.middle = b""
        self.sent = 0
        self.waits = self.failed = False


class Sequences:
    """The sequences of one process of several.

    Args:
        plan: Sequences of all processes.
        http: True if requests are those of HTTP.
        slots: Sequences that are alive at the same time.
        share: Number of the process.
        shares: Number of processes.
        seed: Seed of the lengths.
    """

    def __init__(
        self, plan: SequencePlan, http: bool, slots: int, share: int, shares: int, seed: int
    ) -> None:
        self._plan = plan
        self._http = http
        self._ids = plan.ids[share::shares]
        self._next_id = 0
        self._used: set[int] = set()
        self._stream = share
        self._shares = shares
        self._chance = random.Random(seed * shares + share)
        self._live: list[_Live | None] = [None] * slots

    def next_request(self, slot: int) -> ReadyRequest:
        """The next request of a slot, whose last one has ended."""
        live = self._live[slot]
        if live is None:
            live = self._live[slot] = self._begin()
        return self._request(live, live.sent + 1 == live.length)

    def ended(self, slot: int, error: str) -> bool:
        """Tells of the end of a slot's request; returns whether its sequence has ended."""
        live = self._live[slot]
        assert live is not None, "it has a request"
        live.waits = False
        if error:
            live.sent, live.failed = 0, True
            return False
        if live.sent < live.length:
            return False
        self._used.discard(live.id)
        self._live[slot] = None
        return True

    def unfinished(self) -> list[int]:
        """Slots whose sequence waits for no answer, and which the server may have."""
        return [
            slot
            for slot, live in enumerate(self._live)
            if live is not None and not live.waits and (live.sent or live.failed)
        ]

    def last_request(self, slot: int) -> ReadyRequest:
        """A request that ends the sequence of a slot before its time."""
        live = self._live[slot]
        assert live is not None, "it is unfinished"
        live.length = live.sent + 1
        return self._request(live, True)

    def _begin(self) -> _Live:
        plan = self._plan
        stream = plan.streams[self._stream % len(plan.streams)]
        self._stream += self._shares
        while (number := self._ids[self._next_id % len(self._ids)]) in self._used:
            self._next_id += 1
        self._next_id += 1
        self._used.add(number)
        length = len(stream)
        if plan.length:
            length = max(1, round(plan.length * (1 + self._chance.uniform(-plan.variation, plan.variation))))
        live = _Live(number, stream, length)
        live.middle = self._mark(live, False, False)
        return live

    def _request(self, live: _Live, last: bool) -> ReadyRequest:
        request = live.stream[live.sent % len(live.stream)]
        mark = live.middle if live.sent and not last else self._mark(live, not live.sent, last)
        live.sent += 1
        live.waits = True
        return request.marked(mark, live.id)

    def _mark(self, live: _Live, first: bool, last: bool) -> bytes:
        return sequence_mark(self._http, str(live.id) if self._plan.text_ids else live.id, first, last)
