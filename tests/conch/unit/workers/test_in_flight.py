"""The table of what a worker has, and the errors of requests whose worker is lost: without workers."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.core import make_spec
from tests.support.workers import Begun, batch_of, request_of

from conch.core.errors import ConchError, UnavailableError
from conch.core.request import InferenceRequest
from conch.core.scheduling.sequence.controls import FillerRequest
from conch.workers.connection.in_flight import InFlightTable, KeptRequest, SentBatch
from conch.workers.connection.model_readiness import ReadinessCheck, ReadinessChecks
from conch.workers.connection.worker_responses import OpenRequest, ResponseDelivery
from conch.workers.supervision.crash_report import CrashRecord


class Entered:
    """A table, and what becomes of what does not come into it."""

    def __init__(self) -> None:
        self.refused: list[SentBatch] = []
        self.cancelled: list[int] = []
        self.table = InFlightTable(self._opened, self.cancelled.append, self.refused.append)

    def add(self, *requests: InferenceRequest) -> SentBatch:
        sent = self.table.add_batch(batch_of(*requests), Begun(batch_of()).done)
        assert sent is not None
        return sent

    @staticmethod
    def _opened(request: InferenceRequest, number: int) -> OpenRequest:
        return OpenRequest(request, number, ResponseDelivery(make_spec()), None)


def one(request_id: str) -> InferenceRequest:
    return request_of(request_id, IN=np.zeros(1, np.float32))[0]


def test_a_batch_is_there_until_it_is_taken_and_its_requests_until_they_are_over() -> None:
    entered = Entered()
    table = entered.table
    a, b, over = one("a"), one("b"), one("over")
    over.completed = True
    first, second = entered.add(a, FillerRequest(a, dict(a.inputs)), over), entered.add(b)
    assert first.number != second.number
    assert table.batches == {first.number: first, second.number: second}
    assert table.open == {first.numbers[0]: a, second.numbers[0]: b}
    assert [each.request_ids for each in table.in_flight()] == [("a", "over"), ("b",)]
    assert table.end_batch(first, [0]) and not table.end_batch(first)
    # A request outlasts its batch, until it is answered.
    entry = table.entry(first.numbers[0])
    assert entry is not None and entry.request is a
    entry.since_ns = first.since_ns
    assert [each.request_ids for each in table.in_flight()] == [("a",), ("b",)]
    assert [entry.request for entry in table.open_requests_of(first.batch)] == [a]
    assert table.request(first.numbers[0]) is a and table.request(first.numbers[2]) is None
    a.completed = True
    assert [each.request_ids for each in table.in_flight()] == [("b",)]


def test_a_request_that_runs_again_keeps_its_number_with_the_worker_that_kept_it() -> None:
    here, there = Entered(), Entered()
    a, b = one("a"), one("b")
    for _ in range(3):
        there.add(one("other"))
    sent = here.add(a, b)
    entry = here.table.entry(sent.numbers[0])
    assert entry is not None
    for request, number in zip((a, b), sent.numbers, strict=True):
        request.backend_state = KeptRequest(here.table, number)
        here.table.rescheduled.add(number)
    there.table.rescheduled.add(1)
    assert there.add(b).former_numbers is None
    again = here.add(a, one("new"))
    assert again.former_numbers == {0: sent.numbers[0]}
    assert a.backend_state is None and here.table.entry(sent.numbers[0]) is entry
    # The other one does not come back; once it is answered elsewhere it is forgotten.
    assert here.table.rescheduled == {sent.numbers[1]}
    assert list(here.table.completed()) == []
    b.completed = True
    assert list(here.table.completed()) == [sent.numbers[1]]
    assert here.table.rescheduled == set() and sent.numbers[1] not in here.table.open


def test_what_hands_responses_over_is_made_once_and_goes_with_its_request() -> None:
    entered = Entered()
    table = entered.table
    sent = entered.add(one("a"), one("b"), one("c"))
    first, second, third = sent.numbers
    entry = table.entry(first)
    assert entry is not None and table.entry(first) is entry
    assert table.entry(99) is None
    table.finish(first)
    table.finish(second)
    assert table.entry(first) is None and table.entry(second) is None and list(table.open) == [third]
    last = table.entry(third)
    _, opened = table.close()
    assert opened == {third: last}
    assert table.entry(third) is None


def test_who_cancels_a_request_that_runs_tells_its_worker() -> None:
    entered = Entered()
    a, over, b = one("a"), one("over"), one("b")
    over.completed = True
    sent = entered.add(a, over, b)
    for request in (b, over, a, a):
        request.notify_cancelled()
    assert entered.cancelled == [sent.numbers[2], sent.numbers[0]]


def test_a_closed_table_takes_nothing_and_tells_what_there_was() -> None:
    entered = Entered()
    sent = entered.add(one("a"))
    batches, opened = entered.table.close()
    assert batches == [sent] and list(opened) == sent.numbers
    assert (entered.table.batches, entered.table.open) == ({}, {})
    late = batch_of(one("late"))
    assert entered.table.add_batch(late, Begun(late).done) is None
    assert [each.batch for each in entered.refused] == [late]
    assert [each.request_ids for each in entered.table.in_flight()] == [("a",)]


@pytest.mark.parametrize("explanation", [None, UnavailableError("killed")])
def test_what_comes_late_waits_for_the_explanation(explanation: ConchError | None) -> None:
    loss = CrashRecord("m_0_0")
    assert loss.begin("it hangs") and not loss.begin("really")
    assert loss.reason == "it hangs"
    begun = [Begun(batch_of()) for _ in range(2)]
    late, later = (SentBatch(1, each.batch, each.done, 0) for each in begun)
    loss.refuse(late)
    assert begun[0].outcomes == []
    assert "(it hangs)" in loss.error().message
    if explanation is not None:
        explanation.retry_after_ms = 7
    assert loss.explained(explanation) == [late]
    assert begun[0].outcomes == []  # the caller ends it
    loss.refuse(later)
    with pytest.raises(UnavailableError, match="it hangs" if explanation is None else "killed") as raised:
        begun[1].result()
    assert raised.value is not explanation
    assert raised.value.retry_after_ms == (None if explanation is None else 7)


def test_questions_for_readiness_get_their_own_answers_and_none_is_asked_in_the_end() -> None:
    sent: list[int] = []
    checks = ReadinessChecks(sent.append)
    asked = [checks.ask() for _ in range(3)]
    checks.completed(sent[1], {"ready": True})
    checks.completed(sent[0], {"ready": 1})
    checks.completed(99, {"ready": True})
    assert [check.open for check in asked] == [False, False, True]
    assert (asked[0].wait(), asked[1].wait()) == (False, True)
    assert checks.close() == [asked[2]]
    late: ReadinessCheck = checks.ask()
    assert not late.open and not late.wait()
    assert len(sent) == 3
