"""The rules of the sequence batcher by example, with the texts clients see."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.conch.unit.core.sequences import (
    CONTROLS,
    IDLE_NS,
    MS,
    STATE,
    make_batcher,
    sequence_request,
    sequence_spec,
    told,
)
from tests.support.core import Answers, make_model, make_request, make_spec

from conch.core.errors import ConchError, InternalError, InvalidArgumentError, QueueLimitError
from conch.core.model_version import scheduler_for
from conch.core.request import InferenceRequest, InferenceResponse, RequestState
from conch.core.scheduling.scheduler import IDLE, Batch, WaitUntil
from conch.core.scheduling.sequence.batcher import SequenceBatcher
from conch.core.scheduling.sequence.controls import Controls
from conch.core.scheduling.sequence.implicit_state import SequenceStates
from conch.core.scheduling.sequence.table import LiveSequence
from conch.core.spec import ControlTensor, StateSpec, TensorSpec
from conch.core.tensor import Tensor

NOW = 1_000 * MS


def submit(
    batcher: SequenceBatcher, correlation_id: int | str, flags: str = "", now: int = NOW, **changes: Any
) -> InferenceRequest:
    request = sequence_request(correlation_id, flags, **changes)
    batcher.submit(request, now)
    return request


def take(batcher: SequenceBatcher, now: int = NOW) -> Batch:
    batch = batcher.next_batch(now)
    assert isinstance(batch, Batch)
    return batch


def run(batcher: SequenceBatcher, now: int = NOW) -> list[InferenceRequest]:
    """Runs one batch; gives its requests, fillers left out."""
    batch = take(batcher, now)
    batcher.complete(batch, now)
    return [request for request in batch.requests if not request.filler]


def rows(batch: Batch) -> list[int | str | None]:
    """The sequence in each row; None for a filler."""
    return [None if request.filler else request.correlation_id for request in batch.requests]


def refusal(batcher: SequenceBatcher, request: InferenceRequest) -> ConchError:
    with pytest.raises(ConchError) as caught:
        batcher.submit(request, NOW)
    assert request.state is RequestState.NEW
    return caught.value


class TestSubmit:
    @pytest.mark.parametrize(
        ("request_", "text"),
        [
            (
                sequence_request(3, "S", rows=2, batch_size=2),
                "inference request to model 'm' must specify batch-size 1 due to requirements of sequence "
                "batcher",
            ),
            (
                sequence_request(0, "S"),
                "inference request to model 'm' must specify a non-zero or non-empty correlation ID",
            ),
            (
                sequence_request("", "SE"),
                "inference request to model 'm' must specify a non-zero or non-empty correlation ID",
            ),
            (
                sequence_request(3),
                "inference request for sequence 3 to model 'm' must specify the START flag on the first "
                "request of the sequence",
            ),
            (
                sequence_request("three", "E"),
                "inference request for sequence three to model 'm' must specify the START flag on the first "
                "request of the sequence",
            ),
        ],
    )
    def test_texts(self, request_: InferenceRequest, text: str) -> None:
        batcher = make_batcher()
        error = refusal(batcher, request_)
        assert (type(error), error.message) == (InvalidArgumentError, text)
        assert (batcher.pending, batcher.live_sequences) == (0, 0)

    def test_a_full_queue_begins_no_sequence(self) -> None:
        batcher = make_batcher(max_queue_size=1)
        submit(batcher, 1, "S")
        assert type(refusal(batcher, sequence_request(2, "S"))) is QueueLimitError
        assert type(refusal(batcher, sequence_request(1))) is QueueLimitError
        assert (batcher.pending, batcher.live_sequences) == (1, 1)
        run(batcher)
        submit(batcher, 2, "S")
        assert batcher.live_sequences == 2

    def test_numbers_and_texts_are_different_ids(self) -> None:
        batcher = make_batcher()
        submit(batcher, 3, "S")
        assert type(refusal(batcher, sequence_request("3"))) is InvalidArgumentError
        submit(batcher, "3", "S")
        assert batcher.live_sequences == 2

    def test_nothing_follows_the_end(self) -> None:
        batcher = make_batcher()
        submit(batcher, 1, "S")
        submit(batcher, 1, "E")
        assert "START flag" in refusal(batcher, sequence_request(1)).message
        run(batcher)
        assert "START flag" in refusal(batcher, sequence_request(1)).message

    def test_a_sequence_of_one_request(self) -> None:
        batcher = make_batcher(controls=CONTROLS)
        request = submit(batcher, 1, "SE")
        assert run(batcher) == [request]
        assert (told(request, "START"), told(request, "END")) == (1, True)
        assert batcher.live_sequences == 0

    def test_one_at_a_time_in_order(self) -> None:
        for strategy in ("DIRECT", "OLDEST"):
            batcher = make_batcher(strategy=strategy)
            requests = [submit(batcher, 1, flags) for flags in ("S", "", "E")]
            for request in requests:
                batch = take(batcher)
                assert batch.requests == [request]
                assert batcher.next_batch(NOW) is IDLE, "while the one before runs"
                batcher.complete(batch, NOW)
            assert (batcher.pending, batcher.live_sequences) == (0, 0)


class TestStartAgain:
    def test_what_is_queued_still_runs_before(self, caplog: pytest.LogCaptureFixture) -> None:
        batcher = make_batcher(controls=CONTROLS, states=(STATE,))
        old = [submit(batcher, 1, "S"), submit(batcher, 1)]
        with caplog.at_level(logging.WARNING):
            new = submit(batcher, 1, "S")
        assert caplog.messages == [
            "sequence 1 of model 'm' was started again before it had ended; what is queued of it still runs"
        ]
        later = submit(batcher, 1)
        first = take(batcher)
        assert first.requests == [old[0]]
        assert isinstance(old[0].sequence, LiveSequence)
        old[0].sequence.states["STATE_IN"] = Tensor.from_array("STATE_IN", np.array([[7]]))
        batcher.complete(first, NOW)
        assert [run(batcher) for _ in range(3)] == [[old[1]], [new], [later]]
        assert [told(each, "STATE_IN") for each in (*old, new)] == [0, 7, 0]
        assert batcher.live_sequences == 1

    def test_after_the_end_nobody_is_warned(self, caplog: pytest.LogCaptureFixture) -> None:
        batcher = make_batcher(4)
        ending, new = submit(batcher, 1, "SE"), submit(batcher, 1, "S")
        batch = take(batcher)
        assert batch.requests == [ending]
        assert batcher.next_batch(NOW) is IDLE, "never two of one id at a time"
        batcher.complete(batch, NOW)
        assert run(batcher) == [new]
        assert not caplog.messages

    def test_an_idle_sequence_makes_room_at_once(self) -> None:
        batcher = make_batcher(1)
        submit(batcher, 1, "S")
        run(batcher)
        other = submit(batcher, 2, "SE")
        again = submit(batcher, 1, "S")
        assert [run(batcher), run(batcher)] == [[other], [again]], "in the order of their turns"

    def test_cancelling_the_new_one_does_not_bring_the_old_one_back(self) -> None:
        batcher = make_batcher()
        old = submit(batcher, 1, "S")
        new = submit(batcher, 1, "S")
        assert batcher.cancel(new) == [new]
        assert "START flag" in refusal(batcher, sequence_request(1)).message
        assert run(batcher) == [old]
        assert batcher.live_sequences == 0


class TestBacklog:
    def test_whole_sequences_first_come_first_served(self) -> None:
        for strategy in ("DIRECT", "OLDEST"):
            batcher = make_batcher(1, strategy=strategy, max_candidates=1)
            first = submit(batcher, 1, "S")
            second = [submit(batcher, 2, "S"), submit(batcher, 2)]
            third = submit(batcher, 3, "SE")
            second.append(submit(batcher, 2, "E"))
            assert run(batcher) == [first]
            assert batcher.next_batch(NOW) is IDLE
            last = submit(batcher, 1, "E")
            order = [run(batcher) for _ in range(5)]
            assert order == [[last], *([each] for each in second), [third]]
            assert batcher.live_sequences == 0

    def test_a_timeout_takes_the_whole_sequence(self) -> None:
        batcher = make_batcher(1)
        submit(batcher, 1, "S", timeout_us=1)
        waiting = [submit(batcher, 2, "S"), submit(batcher, 2, timeout_us=5_000), submit(batcher, 2, "E")]
        other = submit(batcher, 3, "S", timeout_us=9_000)
        assert batcher.expiries.next_ns <= NOW + 5 * MS
        assert batcher.expired(NOW + 5 * MS - 1) == []
        taken = batcher.expired(NOW + 5 * MS)
        assert len(taken) == 3 and set(taken) == set(waiting)
        text = "timeout of the corresponding sequence has been expired"
        assert batcher.expiry_text(waiting[0]) == text
        assert "START flag" in refusal(batcher, sequence_request(2)).message
        assert batcher.expired(NOW + 9 * MS) == [other]
        assert (batcher.pending, batcher.live_sequences) == (1, 1)

    def test_a_timeout_does_not_count_in_a_slot(self) -> None:
        batcher = make_batcher(1)
        submit(batcher, 1, "SE")
        waiting = submit(batcher, 2, "S", timeout_us=5_000)
        batch = take(batcher)
        batcher.complete(batch, NOW)
        assert batcher.expired(NOW + 6 * MS) == []
        assert run(batcher, NOW + 6 * MS) == [waiting]

    def test_a_deadline_counts_everywhere(self) -> None:
        batcher = make_batcher(1)
        requests = [submit(batcher, 1, "S"), submit(batcher, 1, deadline_ns=NOW + 5 * MS), submit(batcher, 1)]
        batch = take(batcher)
        assert batcher.expired(NOW + 5 * MS) == requests[1:]
        batcher.complete(batch, NOW + 5 * MS)
        later = submit(batcher, 1, now=NOW + 6 * MS)
        assert run(batcher, NOW + 6 * MS) == [later], "the sequence goes on"


class TestIdle:
    def test_the_slot_goes_to_the_next(self) -> None:
        batcher = make_batcher(1)
        submit(batcher, 1, "S")
        run(batcher)
        waiting = submit(batcher, 2, "S")
        assert batcher.next_batch(NOW) is IDLE
        assert batcher.expiries.next_ns <= NOW + IDLE_NS
        assert batcher.expired(NOW + IDLE_NS - 1) == []
        assert batcher.live_sequences == 2
        assert batcher.expired(NOW + IDLE_NS) == []
        assert run(batcher, NOW + IDLE_NS) == [waiting]
        assert "START flag" in refusal(batcher, sequence_request(1)).message

    def test_a_long_execution_is_not_idle(self) -> None:
        batcher = make_batcher(1)
        submit(batcher, 1, "S")
        batch = take(batcher)
        late = NOW + 10 * IDLE_NS
        assert batcher.expired(late) == []
        batcher.complete(batch, late)
        assert batcher.expired(late + IDLE_NS - 1) == []
        assert batcher.live_sequences == 1
        assert batcher.expired(late + IDLE_NS) == []
        assert batcher.live_sequences == 0

    def test_nothing_is_to_be_looked_for_without_sequences(self) -> None:
        batcher = make_batcher(1)
        never = batcher.expiries.next_ns
        submit(batcher, 1, "SE")
        assert batcher.expiries.next_ns < never
        run(batcher)
        assert batcher.expired(NOW + IDLE_NS) == []
        assert batcher.expiries.next_ns == never

    def test_a_tiny_limit_does_not_keep_anybody_busy(self) -> None:
        batcher = make_batcher(1, max_idle_ns=1_000)
        submit(batcher, 1, "S")
        take(batcher)
        assert batcher.expired(NOW + MS) == []
        assert batcher.expiries.next_ns == NOW + 2 * MS


class TestCancel:
    def test_all_that_is_queued_of_a_sequence_goes(self) -> None:
        batcher = make_batcher(2)
        mine = [submit(batcher, 1, "S"), submit(batcher, 1), submit(batcher, 1, "E")]
        other = submit(batcher, 2, "S")
        assert list(batcher.cancel(mine[1])) == [mine[1], mine[0], mine[2]]
        assert not any(batcher.cancel(request) for request in mine)
        assert (batcher.pending, batcher.live_sequences) == (1, 1)
        assert "START flag" in refusal(batcher, sequence_request(1)).message
        assert run(batcher) == [other]

    def test_a_running_sequence_goes_on(self) -> None:
        batcher = make_batcher(1)
        running, ending = submit(batcher, 1, "S"), submit(batcher, 1, "E")
        batch = take(batcher)
        assert not batcher.cancel(running)
        assert batcher.cancel(ending) == [ending]
        after = submit(batcher, 1)
        batcher.complete(batch, NOW)
        assert run(batcher) == [after]
        assert batcher.live_sequences == 1
        assert batcher.expired(NOW + IDLE_NS) == [] and batcher.live_sequences == 0

    def test_the_slot_is_freed_once(self) -> None:
        batcher = make_batcher(1)
        first = submit(batcher, 1, "S")
        waiting = [submit(batcher, number, "S") for number in (2, 3)]
        batcher.cancel(first)
        batcher.cancel(first)
        assert run(batcher) == [waiting[0]]
        assert batcher.next_batch(NOW) is IDLE, "the only slot is taken"
        assert batcher.pending == 1


class TestDirect:
    def test_rows_stay_and_gaps_are_filled(self) -> None:
        batcher = make_batcher(4, controls=CONTROLS, states=(STATE,))
        for number in (1, 2, 3):
            submit(batcher, number, "S", value=float(number))
        batch = take(batcher)
        assert rows(batch) == [1, 2, 3]
        assert (batch.size, batch.fillers) == (3, 0)
        batcher.complete(batch, NOW)
        request = submit(batcher, 3, value=9.0)
        batch = take(batcher)
        assert rows(batch) == [None, None, 3]
        assert (batch.size, batch.fillers, batch.instance) == (3, 2, 0)
        for filler in batch.requests[:2]:
            assert filler.inputs.keys() == request.inputs.keys()
            assert filler.inputs["IN"].shape == (1, 16)
            assert not filler.inputs["IN"].numpy().any()
            assert not filler.inputs["STATE_IN"].numpy().any()
            assert told(filler, "READY") == -1.0
            assert (told(filler, "START"), told(filler, "END"), told(filler, "CORRID")) == (0, False, 0)
        assert batch.requests[0].inputs is not batch.requests[1].inputs
        assert told(request, "READY") == 2.0
        batcher.complete(batch, NOW)
        submit(batcher, 1)
        assert rows(take(batcher)) == [1], "rows after the last request are left out"

    def test_a_freed_row_is_used_again(self) -> None:
        batcher = make_batcher(3)
        submit(batcher, 1, "SE")
        submit(batcher, 2, "S")
        run(batcher)
        submit(batcher, 3, "S")
        submit(batcher, 2)
        assert rows(take(batcher)) == [3, 2]

    def test_strings_are_filled_with_empty_ones(self) -> None:
        batcher = make_batcher(2, controls=(ControlTensor("ID", "CORRID", "BYTES"),))
        for name in ("a", "b"):
            submit(batcher, name, "S")
        run(batcher)
        request = sequence_request("b")
        request.inputs["TEXT"] = Tensor.from_array("TEXT", np.array([["x", "yz"]], object))
        batcher.submit(request, NOW)
        filler, real = take(batcher).requests
        assert filler.inputs["TEXT"].numpy().tolist() == [[b"", b""]]
        assert filler.inputs["ID"].numpy().tolist() == [[b""]]
        assert real.inputs["ID"].numpy().tolist() == [[b"b"]]

    def test_shapes_that_differ_run_apart_the_oldest_first(self) -> None:
        batcher = make_batcher(4)
        for number, key in enumerate("baab", 1):
            submit(batcher, number, "S", now=NOW + (number == 1), batch_key=key)
        batch = take(batcher, NOW + 1)
        assert rows(batch) == [None, 2, 3]
        batcher.complete(batch, NOW + 1)
        assert rows(take(batcher, NOW + 1)) == [1, None, None, 4]

    @pytest.mark.parametrize("most", [0, 1])
    def test_a_single_row(self, most: int) -> None:
        batcher = make_batcher(most, instances=2, controls=CONTROLS)
        shape = (1, 1) if most else (1,)
        requests = [submit(batcher, n, "S", rows=1 if most else None) for n in (1, 2, 3)]
        batches = [take(batcher), take(batcher)]
        assert [batch.requests for batch in batches] == [[requests[0]], [requests[1]]]
        assert [batch.instance for batch in batches] == [0, 1]
        assert all(batch.fillers == 0 for batch in batches)
        assert requests[0].inputs["CORRID"].shape == shape
        assert requests[0].inputs["START"].shape == shape

    def test_sequences_go_where_most_slots_are_free(self) -> None:
        batcher = make_batcher(2, instances=2)
        for number in (1, 2, 3, 4):
            submit(batcher, number, "S")
        batches = [take(batcher), take(batcher)]
        assert {batch.instance: rows(batch) for batch in batches} == {0: [1, 3], 1: [2, 4]}

    def test_utilization_or_the_delay(self) -> None:
        batcher = make_batcher(4, min_slot_utilization=0.5, max_queue_delay_ns=5 * MS)
        submit(batcher, 1, "S")
        decision = batcher.next_batch(NOW)
        assert isinstance(decision, WaitUntil) and decision.time_ns == NOW + 5 * MS
        assert batcher.due_ns(NOW) == NOW + 5 * MS
        submit(batcher, 2, "S", now=NOW + MS)
        assert len(run(batcher, NOW + MS)) == 2
        late = NOW + 10 * MS
        submit(batcher, 2, now=late)
        assert isinstance(batcher.next_batch(late + 5 * MS - 1), WaitUntil)
        assert len(run(batcher, late + 5 * MS)) == 1

    @pytest.mark.parametrize("settings", [{"min_slot_utilization": 1.0}, {"max_queue_delay_ns": 5 * MS}])
    def test_either_alone_waits_for_nobody(self, settings: dict[str, Any]) -> None:
        batcher = make_batcher(4, **settings)
        request = submit(batcher, 1, "S")
        assert run(batcher) == [request]


class TestOldest:
    def test_first_requests_of_the_candidates_are_batched(self) -> None:
        batcher = make_batcher(8, strategy="OLDEST", max_candidates=3)
        first = [submit(batcher, number, "S", now=NOW + number) for number in (1, 2, 3, 4)]
        second = submit(batcher, 1, now=NOW + 5)
        assert run(batcher, NOW + 5) == first[:3]
        ends = [submit(batcher, number, "E", now=NOW + 6) for number in (3, 2)]
        assert run(batcher, NOW + 6) == [second, *ends]
        assert run(batcher, NOW + 6) == [first[3]]

    def test_preferred_sizes_and_the_delay(self) -> None:
        batcher = make_batcher(
            8, strategy="OLDEST", max_candidates=8, preferred_sizes=(2,), max_queue_delay_ns=5 * MS
        )
        requests = [submit(batcher, 1, "S")]
        assert isinstance(batcher.next_batch(NOW), WaitUntil)
        requests.append(submit(batcher, 2, "S", now=NOW + MS))
        assert run(batcher, NOW + MS) == requests
        alone = submit(batcher, 1, now=NOW + 2 * MS)
        assert batcher.due_ns(NOW + 2 * MS) == NOW + 7 * MS
        assert run(batcher, NOW + 7 * MS) == [alone]

    def test_a_long_queue_goes_behind_the_others_after_each_request(self) -> None:
        batcher = make_batcher(1, strategy="OLDEST", max_candidates=2)
        many = [submit(batcher, 1, "S"), submit(batcher, 1), submit(batcher, 1)]
        few = [submit(batcher, 2, "S"), submit(batcher, 2)]
        order = [run(batcher)[0] for _ in range(5)]
        assert order == [many[0], few[0], many[1], few[1], many[2]]

    def test_no_instance_is_forgotten_by_one_thread_that_runs_all(self) -> None:
        batcher = make_batcher(1, instances=2, strategy="OLDEST", max_candidates=1)
        submit(batcher, 1, "S")
        other = submit(batcher, 2, "S")
        ran = []
        for step in range(4):
            ran += run(batcher, NOW + step)
            submit(batcher, 1, now=NOW + step)
        assert other in ran


class TestIterative:
    def test_a_request_is_a_sequence_of_its_own(self) -> None:
        batcher = make_batcher(controls=CONTROLS, iterative=True)
        requests = [submit(batcher, 0), submit(batcher, "")]
        ids = [request.correlation_id for request in requests]
        assert all(isinstance(each, int) and each for each in ids) and len(set(ids)) == 2
        assert run(batcher) == requests
        assert [told(each, "START") for each in requests] == [1, 1]
        assert batcher.live_sequences == 0

    def test_it_runs_again_in_its_row_until_the_model_is_done(self) -> None:
        batcher = make_batcher(2, controls=CONTROLS, states=(STATE,), iterative=True)
        requests = [submit(batcher, 0), submit(batcher, 0)]
        waiting = submit(batcher, 0)
        for step in range(3):
            batch = take(batcher)
            assert batch.requests == requests
            assert [told(each, "START") for each in requests] == [step == 0] * 2
            assert [told(each, "STATE_IN") for each in requests] == [step] * 2
            for each in requests:
                assert isinstance(each.sequence, LiveSequence)
                each.sequence.states["STATE_IN"] = Tensor.from_array("STATE_IN", np.array([[step + 1]]))
                each.inputs["IN"] = each.inputs["IN"].reshaped((1, 4, 4))  # as a reshape would
                each.rescheduled = True
            batcher.complete(batch, NOW)
            assert [each.inputs["IN"].shape for each in requests] == [(1, 16)] * 2
            assert [each.rescheduled for each in requests] == [False] * 2
        assert run(batcher) == requests
        assert run(batcher) == [waiting]
        assert batcher.live_sequences == 0

    def test_cancelled_while_it_runs_it_runs_again_and_while_it_waits_it_goes(self) -> None:
        batcher = make_batcher(1, iterative=True)
        request = submit(batcher, 0)
        batch = take(batcher)
        assert not batcher.cancel(request)
        request.cancelled = request.rescheduled = True
        batcher.complete(batch, NOW)
        assert batcher.pending == 1
        assert batcher.cancel(request) == [request]
        assert (batcher.pending, batcher.live_sequences) == (0, 0)

    def test_what_has_its_last_answer_does_not_run_again(self) -> None:
        batcher = make_batcher(1, iterative=True)
        answers = Answers()
        request = submit(batcher, 0, answers=answers)
        batch = take(batcher)
        request.rescheduled = True
        request.respond(InferenceResponse([]))
        batcher.complete(batch, NOW)
        assert (batcher.pending, batcher.live_sequences, answers.finals) == (0, 0, 1)

    def test_a_deadline_counts_between_the_runs(self) -> None:
        batcher = make_batcher(1, iterative=True)
        request = submit(batcher, 0, deadline_ns=NOW + MS)
        batch = take(batcher)
        assert batcher.expired(NOW) == []
        request.rescheduled = True
        batcher.complete(batch, NOW)
        assert batcher.expired(NOW + MS) == [request]
        assert batcher.live_sequences == 0

    def test_other_models_do_not_run_anything_again(self) -> None:
        batcher = make_batcher(1)
        request = submit(batcher, 1, "SE")
        batch = take(batcher)
        request.rescheduled = True
        batcher.complete(batch, NOW)
        assert (batcher.pending, batcher.live_sequences) == (0, 0)

    def test_its_ids_leave_those_of_clients_alone(self) -> None:
        batcher = make_batcher(4, iterative=True)
        own = 1 << 63
        submit(batcher, own + 1, "S")
        submit(batcher, 1, "S")
        assert submit(batcher, 0).correlation_id == own + 2


class TestClosing:
    def test_only_live_sequences_go_on(self) -> None:
        batcher = make_batcher()
        submit(batcher, 1, "S")
        submit(batcher, 2, "S")
        submit(batcher, 2, "E")
        batcher.begin_closing(NOW)
        going_on = {each: batcher.continues(sequence_request(each)) for each in (0, 1, 2, 3)}
        assert going_on == {0: False, 1: True, 2: False, 3: False}
        assert not batcher.continues(sequence_request(1, "S"))

    def test_drain_forgets_everything(self) -> None:
        batcher = make_batcher(1)
        submit(batcher, 1, "S")
        batch = take(batcher)
        queued = [
            submit(batcher, 1),
            submit(batcher, 2, "S"),
            submit(batcher, 2, "S"),
            submit(batcher, 3, "S"),
        ]
        taken = batcher.drain()
        assert len(taken) == 4 and set(taken) == set(queued)
        assert (batcher.pending, batcher.live_sequences) == (0, 1), "one still runs"
        assert "START flag" in refusal(batcher, sequence_request(1)).message
        batcher.complete(batch, NOW)
        assert batcher.live_sequences == 0
        submit(batcher, 1, "S")
        run(batcher)
        assert batcher.live_sequences == 1
        assert batcher.drain() == []
        assert batcher.live_sequences == 0


class TestControls:
    @pytest.mark.parametrize(
        ("datatype", "correlation_id", "says"),
        [
            ("UINT64", 2**64 - 1, 2**64 - 1),
            ("INT64", 2**64 - 1, -1),
            ("INT64", 5, 5),
            ("UINT32", 2**40 + 7, 7),
            ("INT32", 2**32 - 1, -1),
            ("BYTES", "a name", b"a name"),
            ("BYTES", "ü", "ü".encode()),
            ("BYTES", 7, b"7"),
        ],
    )
    def test_ids(self, datatype: str, correlation_id: int | str, says: object) -> None:
        controls = Controls((ControlTensor("ID", "CORRID", datatype),), False)
        tensor = controls.identity(correlation_id)["ID"]
        assert (tensor.datatype, tensor.shape) == (datatype, (1,))
        assert tensor.numpy().tolist() == [says]

    def test_what_clients_sent_is_left_alone(self) -> None:
        batcher = make_batcher(controls=CONTROLS)
        request = sequence_request(1, "S")
        sent = request.inputs
        batcher.submit(request, NOW)
        run(batcher)
        assert sent.keys() == {"IN"}
        assert request.inputs.keys() == {"IN", "START", "READY", "END", "CORRID"}

    def test_without_any_there_is_nothing_to_add(self) -> None:
        batcher = make_batcher()
        request = sequence_request(1, "S")
        sent = request.inputs
        batcher.submit(request, NOW)
        run(batcher)
        assert request.inputs is sent

    def test_a_model_that_writes_to_them_changes_nobody_elses(self) -> None:
        batcher = make_batcher(controls=CONTROLS)
        request = submit(batcher, 1, "S")
        run(batcher)
        for name in ("START", "READY", "END", "CORRID"):
            with pytest.raises(ValueError, match="read-only"):
                request.inputs[name].numpy()[:] = 0


class TestStates:
    SPEC = sequence_spec(
        4,
        outputs=(TensorSpec("OUT", "FP32", (16,)), TensorSpec("SEEN", "INT64", (1,))),
        states=(
            STATE,
            StateSpec("SEEN_IN", "SEEN", "INT64", (1,), (1,), (5).to_bytes(8, "little")),
            StateSpec("WORDS_IN", "WORDS", "BYTES", (-1,), (1,)),
        ),
    )

    def _live(self) -> InferenceRequest:
        batcher = SequenceBatcher(self.SPEC, 1)
        request = submit(batcher, 1, "S")
        take(batcher)
        return request

    def test_first_values(self) -> None:
        request = self._live()
        assert request.inputs["STATE_IN"].numpy().tolist() == [[0]]
        assert request.inputs["SEEN_IN"].numpy().tolist() == [[5]]
        assert request.inputs["WORDS_IN"].numpy().tolist() == [[b""]]
        flat = SequenceStates(replace(self.SPEC, max_batch_size=0))
        assert flat.initial["SEEN_IN"].shape == (1,)

    def test_states_are_kept_and_hidden(self) -> None:
        request = self._live()
        whole = np.arange(4, dtype=np.int64).reshape(4, 1)
        words = np.array([["a", "b"]], object)
        response = InferenceResponse(
            [
                Tensor.from_array("OUT", np.zeros((1, 16), np.float32)),
                Tensor.from_array("STATE_OUT", whole[2:3]),
                Tensor.from_array("SEEN", whole[3:4]),
                Tensor.from_array("WORDS", words),
            ]
        )
        SequenceStates(self.SPEC).collect(request, response)
        assert [tensor.name for tensor in response.outputs] == ["OUT", "SEEN"]
        assert isinstance(request.sequence, LiveSequence)
        states = request.sequence.states
        assert {name: each.name for name, each in states.items()} == {name: name for name in states}
        whole[:] = 99
        words[:] = "changed"
        assert states["STATE_IN"].numpy().tolist() == [[2]]
        assert states["SEEN_IN"].numpy().tolist() == [[3]]
        assert states["WORDS_IN"].numpy().tolist() == [[b"a", b"b"]]
        assert states["STATE_IN"].numpy().base is None, "it must not keep the batch's array alive"

    def test_a_state_in_wire_form(self) -> None:
        request = self._live()
        message = bytearray((8).to_bytes(8, "little"))
        response = InferenceResponse([Tensor("STATE_OUT", "INT64", (1, 1), memoryview(message))])
        SequenceStates(self.SPEC).collect(request, response)
        message[:] = bytes(8)
        assert isinstance(request.sequence, LiveSequence)
        assert request.sequence.states["STATE_IN"].numpy().tolist() == [[8]]

    def test_a_visible_state_that_nobody_asked_for_is_hidden(self) -> None:
        request = self._live()
        request.requested = ("OUT",)
        response = InferenceResponse([Tensor.from_array("SEEN", np.array([[1]]))])
        SequenceStates(self.SPEC).collect(request, response)
        assert response.outputs == []
        assert isinstance(request.sequence, LiveSequence)
        assert request.sequence.states["SEEN_IN"].numpy().tolist() == [[1]]

    def test_an_error_leaves_them_as_they_were(self) -> None:
        request = self._live()
        assert isinstance(request.sequence, LiveSequence)
        before = dict(request.sequence.states)
        response = InferenceResponse([Tensor.from_array("SEEN", np.array([[1]]))], InternalError("no"))
        SequenceStates(self.SPEC).collect(request, response)
        assert request.sequence.states == before

    @pytest.mark.parametrize(
        ("array", "got"),
        [
            (np.zeros((1, 2), np.int64), "INT64 with shape [1,2]"),
            (np.zeros((1, 1), np.int32), "INT32 with shape [1,1]"),
            (np.zeros((1,), np.int64), "INT64 with shape [1]"),
        ],
    )
    def test_one_that_does_not_fit_is_an_error(self, array: Any, got: str) -> None:
        request = self._live()
        assert isinstance(request.sequence, LiveSequence)
        before = dict(request.sequence.states)
        response = InferenceResponse(
            [Tensor.from_array("SEEN", np.array([[1]])), Tensor.from_array("STATE_OUT", array)]
        )
        SequenceStates(self.SPEC).collect(request, response)
        assert response.outputs == []
        assert isinstance(response.error, InternalError)
        assert response.error.message == (
            f"state 'STATE_OUT' of model 'm' is {got}, but the model configuration specifies INT64 with "
            f"shape [1,1]"
        )
        assert request.sequence.states == before

    def test_what_belongs_to_no_sequence_keeps_nothing(self) -> None:
        request = make_request(None, 1)
        response = InferenceResponse([Tensor.from_array("STATE_OUT", np.array([[1]]))])
        SequenceStates(self.SPEC).collect(request, response)
        assert response.outputs == [] and response.error is None

    def test_sequences_do_not_share_them(self) -> None:
        batcher = SequenceBatcher(self.SPEC, 1)
        first = submit(batcher, 1, "S")
        run(batcher)
        response = InferenceResponse([Tensor.from_array("STATE_OUT", np.array([[4]]))])
        SequenceStates(self.SPEC).collect(first, response)
        others = [submit(batcher, 2, "S"), submit(batcher, 1)]
        run(batcher)
        assert [told(each, "STATE_IN") for each in others] == [0, 4]


def test_the_config_chooses_the_batcher() -> None:
    scheduler = scheduler_for(sequence_spec(2, max_queue_size=9), 3)
    assert isinstance(scheduler, SequenceBatcher)
    for number in range(7):
        submit(scheduler, number + 1, "S")
    batches = [take(scheduler) for _ in range(3)]
    assert sum(len(batch.requests) for batch in batches) == 6


def test_a_filler_is_asked_for_what_its_neighbour_is_asked_for() -> None:
    batcher = make_batcher(2)
    model = make_model(make_spec(2))
    submit(batcher, 1, "S")
    submit(batcher, 2, "S")
    run(batcher)
    real = submit(batcher, 2, requested=("OUT",), model=model, deadline_ns=NOW + MS, id="x")
    filler, _ = take(batcher).requests
    assert filler.filler and not real.filler
    assert filler.requested is real.requested
    assert filler.model is model
    assert (filler.deadline_ns, filler.id, filler.correlation_id) == (None, "", 0)
    assert filler.state is RequestState.RUNNING
    filler.respond(None)
    assert model.close()
