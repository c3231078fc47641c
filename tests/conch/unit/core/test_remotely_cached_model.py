"""Models behind a cache that takes time: the threads that wait for it, how long, and the outcome."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from tests.support.caches import NetworkCache
from tests.support.core import WAIT_S, Answers, Execute, echo, make_model, make_request, make_spec
from tests.support.servers import eventually

from conch.core.clock import monotonic_ns
from conch.core.errors import CancelledError, InvalidArgumentError, UnavailableError
from conch.core.model_version import Model
from conch.core.request import InferenceRequest
from conch.core.response_cache import cache_threads as workers_module
from conch.core.response_cache.cache_service import CacheService
from conch.core.response_cache.cache_threads import CacheThreads
from conch.core.response_cache.remotely_cached_model import RemotelyCachedModel
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import ClosedError

S = 1_000_000_000


class Site:
    """A model behind a cache behind a network."""

    def __init__(
        self, execute: Execute = echo, cache: NetworkCache | None = None, clock: Any = monotonic_ns
    ) -> None:
        self.cache = cache or NetworkCache()
        self.service = CacheService(self.cache, clock=clock)
        assert self.service.shared
        model = self.service.wrap(make_model(make_spec(), execute), b"files")
        assert isinstance(model, RemotelyCachedModel)
        self.model = model
        self.closed = False

    def submit(self, **changes: Any) -> tuple[InferenceRequest, Answers]:
        answers = Answers()
        request = make_request(answers, **changes)
        claim = self.model.submit(request, True)
        if claim is not None:
            claim.run_inline()
        return request, answers

    def ask(self, value: float = 0.0, **changes: Any) -> None:
        """Submits a request and checks the answer."""
        request, answers = self.submit(value=value, **changes)
        assert answers.wait(1), "no answer"
        (output,) = answers.response(request).outputs
        assert output.numpy().tolist() == [value] * 16
        assert answers.finals == 1

    def counts(self) -> tuple[int, int, int, int]:
        """Successes, executions, hits and misses."""
        seen = self.model.statistics.snapshot()
        return seen.success.count, seen.execution_count, seen.cache_hit.count, seen.cache_miss.count

    def close(self, timeout_s: float = WAIT_S) -> bool:
        """Closes the model, as is done once it has been closed."""
        self.closed = self.closed or self.model.close(timeout_s)
        return self.closed

    def wait_kept(self, entries: int = 1) -> None:
        eventually(lambda: len(self.cache.entries) == entries, "entries are kept")


@contextmanager
def site(*arguments: Any, **settings: Any) -> Iterator[Site]:
    made = Site(*arguments, **settings)
    try:
        yield made
    finally:
        made.cache.release()
        closed = made.close()
        made.service.close()
    assert closed
    assert made.cache.closed == 1


def test_the_second_answer_comes_from_the_cache() -> None:
    with site() as made:
        made.ask(1.0)
        made.wait_kept()
        made.ask(1.0, id="new")
        assert made.counts() == (2, 1, 1, 1)
        made.ask(2.0)
        assert made.counts() == (3, 2, 1, 2)
    assert all(name.startswith("conch-cache-") for name in made.cache.threads)


def test_the_answer_does_not_wait_until_it_is_kept() -> None:
    with site(cache=NetworkCache(connections=1)) as made:
        made.ask(1.0)
        made.wait_kept()
        made.cache.hold()
        made.ask(2.0, parameters={"conch_cache": "refresh"})
        made.cache.wait_entered()
        before = made.model.statistics.snapshot().cache_miss
        made.cache.release()
        made.wait_kept(2)
        after = made.model.statistics.snapshot
        eventually(lambda: after().cache_miss.ns > before.ns, "the time to keep it is counted")
        assert after().cache_miss.count == before.count == 1


def test_a_caller_never_waits_for_the_cache() -> None:
    with site(cache=NetworkCache(connections=1)) as made:
        made.cache.hold()
        request, answers = made.submit()  # returns although the cache does not
        made.cache.wait_entered()
        assert not answers.calls
        assert request.model is made.model
        assert made.model.pending == 1
        made.cache.release()
        assert answers.wait(1)
        assert made.model.pending == 0


def test_bypass_asks_nobody_and_refresh_only_keeps() -> None:
    with site() as made:
        made.ask(parameters={"conch_cache": "bypass"})
        assert made.cache.calls == []
        made.ask(parameters={"conch_cache": "refresh"})
        made.wait_kept()
        assert made.cache.calls == ["insert"]
        assert made.counts() == (2, 2, 0, 0)
        with pytest.raises(InvalidArgumentError):
            made.submit(parameters={"conch_cache": "x"})


def test_a_request_the_model_refuses_is_answered_with_the_reason() -> None:
    with site() as made:
        request, answers = made.submit(requested=("NOPE",))
        assert answers.wait(1)
        error = answers.response(request).error
        assert isinstance(error, InvalidArgumentError)
        assert "unexpected inference output 'NOPE'" in error.message
        assert answers.finals == 1


def test_while_too_much_waits_the_model_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "MOST_WAITING", 3)
    with site(cache=NetworkCache(connections=1)) as made:
        made.cache.hold()
        waiting = [made.submit() for _ in range(1)]
        made.cache.wait_entered()
        waiting += [made.submit() for _ in range(3)]
        assert not any(answers.calls for _, answers in waiting)
        made.ask(5.0)  # the fifth finds no place
        assert made.counts() == (1, 1, 0, 0)
        made.cache.release()
        assert all(answers.wait(1) for _, answers in waiting)


def test_what_waits_to_be_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "MOST_BYTES_WAITING", 150)
    with site(cache=NetworkCache(connections=1)) as made:
        made.ask(0.0)
        made.wait_kept()
        made.cache.hold()
        for value in (1.0, 2.0, 3.0, 4.0):
            made.ask(value, parameters={"conch_cache": "refresh"})
            if value == 1.0:
                made.cache.wait_entered()  # the lookup of the first
                made.cache.wait_entered()
                made.cache.wait_entered()
        made.cache.release()
        made.wait_kept(3)  # the one being kept, and the one that had a place
    assert len(made.cache.entries) == 3


def test_a_request_that_waited_too_long_for_its_turn_goes_to_the_model() -> None:
    now = 1

    def clock() -> int:
        return now

    with site(cache=NetworkCache(connections=1, patience_ns=S), clock=clock) as made:
        made.cache.hold()
        first = made.submit(value=1.0)
        made.cache.wait_entered()
        second = made.submit(value=2.0)
        now += 2 * S
        made.cache.release()
        assert first[1].wait(1)
        assert second[1].wait(1)
        assert made.cache.calls.count("lookup") == 1
        assert made.counts() == (2, 2, 0, 1)


def test_an_outage_is_told_once_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    now = 1

    def clock() -> int:
        return now

    caplog.set_level(logging.INFO, "conch.core.response_cache")
    with site(clock=clock) as made:
        made.cache.error = ConnectionError("gone")
        made.ask(1.0)
        assert made.cache.calls == ["lookup"]
        for value in (1.0, 2.0):
            made.ask(value)  # no lookup: the cache is left alone for a while
        assert made.cache.calls == ["lookup"]
        now += S
        made.ask(1.0)
        assert made.cache.calls == ["lookup"] * 2
        made.cache.error = None
        now += S
        made.ask(1.0)
        made.wait_kept()
        made.ask(1.0)
        assert made.counts()[2] == 1
    told = [record.message for record in caplog.records]
    assert told == [
        "the response cache is out of order, models answer without it: gone",
        "the response cache answers again",
    ]


def test_an_outage_while_an_answer_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    with site() as made:
        made.ask(1.0)
        made.wait_kept()
        made.cache.error = ConnectionError("gone")
        made.ask(1.0, parameters={"conch_cache": "refresh"})
        eventually(lambda: made.cache.calls[-2:] == ["insert", "insert"], "it is tried")
        eventually(lambda: caplog.records, "and told")
        made.ask(1.0)
    assert len(caplog.records) == 1


def test_no_room_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with site() as made:
        made.cache.room = False
        made.ask(1.0)
        eventually(lambda: caplog.records, "it is told")
    assert "Failed to insert key [" in caplog.records[0].message


def test_nonsense_in_the_cache_is_no_answer() -> None:
    with site() as made:
        made.ask(1.0)
        made.wait_kept()
        (key,) = made.cache.entries
        made.cache.entries[key] = (b"nonsense", 0)
        made.ask(1.0)
        eventually(lambda: made.cache.entries[key][0] != b"nonsense", "it is replaced")


def test_a_waiting_request_can_be_cancelled() -> None:
    with site(cache=NetworkCache(connections=1)) as made:
        made.cache.hold()
        waiting = [made.submit() for _ in range(2)]
        made.cache.wait_entered()
        for request, answers in waiting:  # one is looked for, one waits
            assert made.model.cancel(request)
            assert isinstance(answers.response(request).error, CancelledError)
            assert not made.model.cancel(request)
        made.cache.release()
    assert [answers.finals for _, answers in waiting] == [1, 1]
    assert made.counts() == (0, 0, 0, 0)
    seen = made.model.statistics.snapshot()
    assert seen.fail.count == 2
    assert dict(seen.cancelled) == {"queued": 2, "running": 0}


@pytest.mark.parametrize("way", ["miss", "too late", "no place"])
def test_a_cancel_on_the_way_to_the_model_is_not_forgotten(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go = threading.Event(), threading.Event()

    def hold(batch: Batch) -> Any:
        entered.set()
        assert go.wait(WAIT_S)
        return echo(batch)

    patience = -1 if way == "too late" else 60 * S
    with site(hold, NetworkCache(connections=1, patience_ns=patience)) as made:
        made.model.model.submit(make_request(Answers()))
        assert entered.wait(WAIT_S)  # what comes now is queued
        submit = Model.submit

        def cancelled_before(model: Model, request: InferenceRequest, may_claim: bool = False) -> Any:
            assert not made.model.cancel(request)
            return submit(model, request, may_claim)

        monkeypatch.setattr(Model, "submit", cancelled_before)
        if way == "no place":
            monkeypatch.setattr(workers_module, "MOST_WAITING", 0)
        try:
            request, answers = made.submit(value=1.0)
            assert answers.wait(1), "it is answered although the model is busy"
            assert isinstance(answers.response(request).error, CancelledError)
        finally:
            go.set()
    assert answers.finals == 1
    assert dict(made.model.statistics.snapshot().cancelled) == {"queued": 1, "running": 0}


def test_a_close_waits_for_those_that_wait_for_the_cache() -> None:
    with site(cache=NetworkCache(connections=1)) as made:
        made.cache.hold()
        _, answers = made.submit()
        made.cache.wait_entered()
        assert not made.close(0.01)
        with pytest.raises(ClosedError):
            made.submit()
        closing = threading.Thread(target=made.close)
        closing.start()
        assert not answers.calls
        made.cache.release()
        assert answers.wait(1)
        closing.join(WAIT_S)
        assert not closing.is_alive()


def test_what_waits_can_be_failed() -> None:
    with site(cache=NetworkCache(connections=1)) as made:
        made.cache.hold()
        waiting = [made.submit() for _ in range(2)]
        made.cache.wait_entered()
        assert made.model.fail_queued(UnavailableError("exiting")) == 2
        made.cache.release()
    for request, answers in waiting:
        assert isinstance(answers.response(request).error, UnavailableError)
        assert answers.finals == 1


def test_as_many_calls_at_a_time_as_there_are_connections() -> None:
    with site(cache=NetworkCache(connections=3)) as made:
        made.cache.hold()
        waiting = [made.submit(value=float(value)) for value in range(5)]
        for _ in range(3):
            made.cache.wait_entered()
        assert made.cache.calls == ["lookup"] * 3
        made.cache.release()
        assert all(answers.wait(1) for _, answers in waiting)
    assert len(made.cache.threads) == 3


def test_every_request_is_answered_once_while_others_cancel_and_close() -> None:
    with site(cache=NetworkCache(connections=3)) as made:
        for value in range(7):
            made.ask(float(value))
        made.wait_kept(7)
        start = threading.Barrier(5)
        refused: list[int] = []

        def client(seed: int) -> list[tuple[InferenceRequest, Answers]]:
            start.wait(WAIT_S)
            sent = []
            for step in range(150):
                answers = Answers()
                request = make_request(answers, value=float((step + seed) % 7))
                try:
                    claim = made.model.submit(request, step % 2 == 0)
                except ClosedError:
                    refused.append(seed)
                    assert not answers.calls
                    continue
                if claim is not None:
                    claim.run_inline()
                if step % 5 == seed:
                    made.model.cancel(request)
                sent.append((request, answers))
                if seed == 0 and step == 120:
                    assert made.close()
            return sent

        with ThreadPoolExecutor(5) as pool:
            sent = [pair for pairs in pool.map(client, range(5)) for pair in pairs]
        assert refused
        for request, answers in sent:
            assert answers.wait(1)
            response = answers.response(request)
            if response.error is None:
                assert response.outputs[0].numpy().tolist() == request.inputs["IN"].numpy().tolist()
            else:
                assert isinstance(response.error, CancelledError)
        success, executions, hits, _ = made.counts()
        assert success == executions + hits
        assert success + made.model.statistics.snapshot().fail.count == len(sent) + 7
        assert hits > 0
    assert all(answers.finals == 1 for _, answers in sent)


def test_a_thread_outlives_a_call_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    workers = CacheThreads(NetworkCache(connections=1), monotonic_ns)
    done = threading.Event()
    assert workers.submit(partial(int, "x"))  # type: ignore[arg-type]
    assert workers.submit(done.set)
    assert done.wait(WAIT_S)
    workers.close()
    assert "a call to the response cache failed" in caplog.text


def _call(workers: CacheThreads) -> None:
    workers.lookup(b"k")


def test_threads_that_are_ended_drop_what_waits() -> None:
    workers = CacheThreads(cache := NetworkCache(connections=1), monotonic_ns)
    cache.hold()
    assert workers.submit(partial(_call, workers))
    cache.wait_entered()
    assert workers.submit(lambda: pytest.fail("not dropped"))
    closing = threading.Thread(target=workers.close)
    closing.start()
    eventually(lambda: not workers.submit(lambda: None), "nothing more is taken")
    cache.release()
    closing.join(WAIT_S)
    assert not closing.is_alive()
