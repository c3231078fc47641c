"""The order in which the responses of a decoupled worker model are delivered, without a worker."""

from __future__ import annotations

import threading
from contextlib import closing

from conch.workers.connection.worker_responses import ResponseDispatcher, ResponseQueue

WAIT_S = 20.0


def test_a_queue_delivers_in_order_and_holds_up_no_other() -> None:
    """The requests of a sequence share a queue: the second waits while a slow client holds the first."""
    released, ended = threading.Event(), threading.Semaphore(0)
    delivered: list[str] = []

    def deliver(name: str, waits: bool = False) -> None:
        if waits:
            assert released.wait(WAIT_S)
        delivered.append(name)
        ended.release()

    with closing(ResponseDispatcher("m")) as hands:
        sequence, other = ResponseQueue(hands), ResponseQueue(hands)
        sequence.put(lambda: deliver("first", waits=True))
        sequence.put(lambda: deliver("second"))
        other.put(lambda: deliver("other"))
        assert ended.acquire(timeout=WAIT_S)
        assert delivered == ["other"]
        released.set()
        assert ended.acquire(timeout=WAIT_S) and ended.acquire(timeout=WAIT_S)
        assert delivered == ["other", "first", "second"]
