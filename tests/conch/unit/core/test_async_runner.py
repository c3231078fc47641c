"""Instances that begin batches: the threads that begin and finish them, and instances that are away."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.conch.unit.core.sequences import sequence_request, sequence_spec
from tests.support.async_instance import Begins, BeginsModel, Done, Kept, at_once, make_beginning
from tests.support.core import WAIT_S, Answers, echo, make_request, make_spec

from conch.core.clock import monotonic_ns
from conch.core.errors import CancelledError, DeadlineExceededError, InvalidArgumentError, UnavailableError
from conch.core.execution.rate_limiter import RateLimiter
from conch.core.execution.runner import bypassing_claims
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import InlineClaim
from conch.core.spec import (
    DynamicBatching,
    InstanceGroup,
    ModelSpec,
    Resource,
    WarmupInput,
    WarmupSample,
)

MS = 1_000_000
DEEP = 3 * sys.getrecursionlimit()
SAMPLE = WarmupSample("w", (WarmupInput("IN", "FP32", (16,)),))


def model_threads() -> int:
    return sum(thread.name.startswith("conch-m-") for thread in threading.enumerate())


def texts(answers: Answers) -> list[str]:
    """The errors, in the order they came; empty texts for successes."""
    return [
        "" if response is None or response.error is None else response.error.message
        for _, response, _ in answers.calls
    ]


def end(model: Model, loaded: BeginsModel) -> None:
    assert model.close(WAIT_S)
    assert loaded.problems == []
    counted = model.statistics.snapshot()
    assert (counted.pending, counted.running) == (0, 0)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("may_claim", [False, True])
def test_who_submits_begins(decoupled: bool, may_claim: bool) -> None:
    kept = Kept()
    model, loaded = make_beginning(make_spec(instances=2, decoupled=decoupled), kept)
    answers = Answers()
    for number in range(3):
        claim = model.submit(make_request(answers), may_claim)
        assert (claim is not None) is (may_claim and number < 2)
        if claim is not None:
            assert claim.fast
            claim.run_inline(0)
    assert (len(kept.batches), model.pending, model_threads()) == (2, 1, 0)
    assert model.statistics.snapshot().running == 2
    kept.finish(1)  # the one that finishes it begins the next
    assert (len(kept.batches), model.pending, answers.finals) == (2, 0, 1)
    kept.finish()
    kept.finish()
    assert (answers.finals, model_threads()) == (3, 0)
    counted = model.statistics.snapshot()
    assert (counted.success.count, counted.execution_count, counted.inference_count) == (3, 3, 3)
    end(model, loaded)


def test_instances_that_take_several_batches_get_them_in_turn() -> None:
    kept = Kept()
    loaded = BeginsModel(lambda: Begins(kept, 2))
    model = Model.create(make_spec(instances=2), loaded)
    answers = Answers()
    for _ in range(5):
        model.submit(make_request(answers))
    first, second = loaded.instances
    assert [(first.begun, second.begun), model.pending] == [(2, 2), 1]
    kept.finish()
    assert (model.pending, answers.finals, model.statistics.snapshot().running) == (0, 1, 4)
    for _ in range(4):
        kept.finish()
    end(model, loaded)


def test_releasing_begins_too() -> None:
    kept = Kept()
    model, loaded = make_beginning(make_spec(), kept)
    claim = model.submit(make_request(), may_claim=True)
    assert claim is not None
    claim.release()
    assert (len(kept.batches), model_threads()) == (1, 0)
    kept.finish()
    end(model, loaded)


def test_a_delay_is_kept_by_the_models_own_thread() -> None:
    kept = Kept()
    model, loaded = make_beginning(make_spec(4, batching=DynamicBatching((4,), 5 * MS)), kept)
    answers = Answers()
    model.submit(make_request(answers, 1))
    kept.wait(1)
    kept.finish()
    assert texts(answers) == [""]
    end(model, loaded)


@pytest.mark.parametrize("instances", [1, 2])
def test_a_claimant_keeps_to_its_budget(instances: int) -> None:
    model, loaded = make_beginning(make_spec(instances=instances), at_once)
    others = loaded.instances[1:]
    for instance in others:
        instance.go()
    answers = Answers()
    model.submit(make_request(answers))
    assert answers.finals == 1
    claim = led(model, answers)
    for _ in range(3):
        model.submit(make_request(answers))
    for instance in others:
        assert instance.set_aside
        instance.come_back()
    for answered in (2, 3, 4):
        assert claim.run_inline(0) is True
        assert answers.finals == answered
    assert claim.run_inline(0) is False
    assert (answers.finals, model_threads()) == (5, 0)
    end(model, loaded)


def test_done_elsewhere_before_begin_returns() -> None:
    """Its requests are answered meanwhile; the instance gets the next batch when `begin` has returned."""
    inside, go_on = threading.Event(), threading.Event()
    begun: list[Batch] = []
    with ThreadPoolExecutor(2) as pool:

        def begin(batch: Batch, done: Done) -> None:
            begun.append(batch)
            if len(begun) == 1:
                pool.submit(done, echo(batch)).result(WAIT_S)
                inside.set()
                assert go_on.wait(WAIT_S)
            else:
                done(echo(batch))

        model, loaded = make_beginning(make_spec(), begin)
        answers = Answers()
        first = pool.submit(model.submit, make_request(answers))
        assert inside.wait(WAIT_S)
        model.submit(make_request(answers))
        assert (answers.finals, len(begun), model.pending) == (1, 1, 1)
        assert not model.close(0.0)
        go_on.set()
        assert first.result(WAIT_S) is None
    assert answers.finals == 2
    end(model, loaded)


class TestBadOnes:
    """Instances that do not keep to the rules: one answer each all the same."""

    @pytest.fixture(autouse=True)
    def quiet(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.CRITICAL)

    @pytest.mark.parametrize("decoupled", [False, True])
    @pytest.mark.parametrize(
        "error", [ValueError("no luck"), SystemExit("no luck"), UnavailableError("no luck")]
    )
    def test_raising_in_begin(self, decoupled: bool, error: BaseException) -> None:
        def begin(batch: Batch, done: Done) -> None:
            raise error

        model, loaded = make_beginning(make_spec(decoupled=decoupled), begin)
        answers = Answers()
        for _ in range(3):
            model.submit(make_request(answers))
        assert answers.finals == len(answers.calls) == 3
        assert all("no luck" in text for text in texts(answers))
        counted = model.statistics.snapshot()
        assert (counted.success.count, counted.fail.count, counted.execution_count) == (0, 3, 0)
        end(model, loaded)

    def test_raising_when_it_is_done(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.ERROR)

        def begin(batch: Batch, done: Done) -> None:
            done(echo(batch))
            raise ValueError("too late")

        model, loaded = make_beginning(make_spec(), begin)
        answers = Answers()
        model.submit(make_request(answers))
        assert texts(answers) == [""]
        assert "after it had answered" in caplog.text
        end(model, loaded)

    def test_done_twice_also_when_the_next_batch_runs(self) -> None:
        dones: list[tuple[Done, Batch]] = []
        model, loaded = make_beginning(make_spec(), lambda batch, done: dones.append((done, batch)))
        answers = Answers()
        for _ in range(2):
            model.submit(make_request(answers))
        ((done, batch),) = dones
        done(echo(batch))
        assert len(dones) == 2
        loaded.instances[0].free(False)  # it is: the call below is for the first batch
        done(echo(batch))
        done(ValueError("no"))
        assert (answers.finals, model.statistics.snapshot().running) == (1, 1)
        dones[1][0](echo(dones[1][1]))
        assert texts(answers) == ["", ""]
        assert model.statistics.snapshot().success.count == 2
        end(model, loaded)

    @pytest.mark.parametrize("outcome", [[], [None, None], 7])
    def test_outcomes_that_are_none(self, outcome: object) -> None:
        model, loaded = make_beginning(make_spec(), lambda batch, done: done(outcome))  # type: ignore[arg-type]
        answers = Answers()
        model.submit(make_request(answers))
        (text,) = texts(answers)
        assert text
        end(model, loaded)

    def test_not_knowing_whether_it_is_available(self) -> None:
        class Confused(Begins):
            def available(self, again: object) -> bool:
                raise ValueError("who knows")

        loaded = BeginsModel(lambda: Confused(at_once))
        model = Model.create(make_spec(), loaded)
        answers = Answers()
        model.submit(make_request(answers))
        assert texts(answers) == [""]
        end(model, loaded)


class TestStack:
    """Work that is done while other work begins, or is done, does not nest."""

    def test_a_queue_that_is_done_at_once(self) -> None:
        model, loaded = make_beginning(make_spec(instances=2), at_once)
        for instance in loaded.instances:
            instance.go()
        answers = Answers()
        for _ in range(DEEP):
            model.submit(make_request(answers))
        for instance in loaded.instances:
            instance.come_back()
        assert answers.wait(DEEP)
        end(model, loaded)

    def test_answers_that_are_followed_by_requests(self) -> None:
        """Also to another model, and back."""
        one, ones = make_beginning(make_spec(), at_once)
        two, twos = make_beginning(make_spec(), at_once)
        count = 0

        def answer(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
            nonlocal count
            count += 1
            if count < DEEP:
                (one, two)[count % 2].submit(make_request(answer))

        one.submit(make_request(answer))
        assert count == DEEP
        end(one, ones)
        end(two, twos)

    def test_answers_that_are_followed_by_requests_to_ever_other_models(self) -> None:
        models = [make_beginning(make_spec(), at_once) for _ in range(sys.getrecursionlimit() // 4)]
        left = iter(models)
        answered = 0

        def answer(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
            nonlocal answered
            answered += 1
            for model, _ in left:
                model.submit(make_request(answer))
                break

        next(left)[0].submit(make_request(answer))
        assert answered == len(models)
        for model, loaded in models:
            end(model, loaded)

    def test_a_batch_that_is_done_while_the_next_begins(self) -> None:
        """One loop for two instances: what it begins has it finish what was begun before."""
        earlier: list[tuple[Batch, Done]] = []
        lock = threading.Lock()

        def begin(batch: Batch, done: Done) -> None:
            with lock:
                earlier.append((batch, done))
                if len(earlier) == 1:
                    return
                before, tell = earlier.pop(0)
            tell(echo(before))

        model, loaded = make_beginning(make_spec(instances=2), begin)
        for instance in loaded.instances:
            instance.go()
        answers = Answers()
        for _ in range(DEEP):
            model.submit(make_request(answers))
        for instance in loaded.instances:
            instance.come_back()
        assert answers.wait(DEEP - 1)
        ((batch, done),) = earlier
        done(echo(batch))
        assert answers.wait(DEEP)
        end(model, loaded)


class TestAway:
    """Instances that are not available."""

    def test_set_aside_from_the_start_until_it_comes(self) -> None:
        def make() -> Begins:
            instance = Begins(at_once)
            instance.go()
            return instance

        loaded = BeginsModel(make)
        model = Model.create(make_spec(), loaded)
        answers = Answers()
        queued = [make_request(answers) for _ in range(3)]
        for request in queued[:2]:
            model.submit(request)
        assert loaded.instances[0].set_aside
        assert model.submit(queued.pop(), may_claim=True) is None
        counted = model.statistics.snapshot()
        assert (counted.pending, counted.running, model_threads()) == (3, 0, 0)
        assert model.cancel(queued[1]), "what waits can be cancelled"
        loaded.instances[0].come_back()
        assert answers.wait(3)
        assert model.statistics.snapshot().success.count == 2
        end(model, loaded)

    def test_one_that_goes_while_it_is_idle_is_found_out_with_the_next_batch(self) -> None:
        kept = Kept()
        model, loaded = make_beginning(make_spec(instances=2), kept)
        one, two = loaded.instances
        one.go()
        answers = Answers()
        for _ in range(2):
            model.submit(make_request(answers))
        assert (one.set_aside, one.begun, two.begun, model.pending) == (True, 0, 1, 1)
        one.come_back()
        kept.wait(2)
        assert (one.begun, two.begun) == (1, 1)
        for _ in range(2):
            kept.finish()
        end(model, loaded)

    def test_what_waits_for_it_keeps_its_deadline(self) -> None:
        model, loaded = make_beginning(make_spec(), at_once)
        loaded.instances[0].go()
        answers = Answers()
        request = make_request(answers)
        request.deadline_ns = time.monotonic_ns() + 5 * MS
        model.submit(request)
        assert answers.wait(1)
        assert isinstance(answers.response(request).error, DeadlineExceededError)
        end(model, loaded)

    def test_coming_back_twice(self) -> None:
        agains: list[Callable[[], None]] = []

        class Insisting(Begins):
            def available(self, again: Callable[[], None]) -> bool:
                agains.append(again)
                return len(agains) != 1

        kept = Kept()
        loaded = BeginsModel(lambda: Insisting(kept))
        model = Model.create(make_spec(), loaded)
        answers = Answers()
        model.submit(make_request(answers))
        assert len(agains) == 1
        agains[0]()
        kept.wait(1)
        for again in agains:
            again()
        model.submit(make_request(answers))
        assert (len(kept.batches), model.pending) == (1, 1), "one batch at a time"
        kept.finish()
        kept.finish()
        end(model, loaded)

    def test_close(self) -> None:
        model, loaded = make_beginning(make_spec(), at_once)
        loaded.instances[0].go()
        answers = Answers()
        model.submit(make_request(answers))
        assert not model.close(0.01), "it waits for what is queued"
        assert answers.finals == loaded.instances[0].closed == 0
        loaded.instances[0].come_back()
        assert answers.wait(1)
        end(model, loaded)

    def test_close_does_not_wait_for_those_that_are_away(self) -> None:
        model, loaded = make_beginning(make_spec(), at_once)
        loaded.instances[0].go()
        request = make_request()
        model.submit(request)
        assert loaded.instances[0].set_aside
        assert model.cancel(request)
        end(model, loaded)

    def test_giving_up_what_waits(self) -> None:
        model, loaded = make_beginning(make_spec(), at_once)
        loaded.instances[0].go()
        answers = Answers()
        model.submit(make_request(answers))
        assert not model.close(0.0)
        assert model.fail_queued(UnavailableError("Server exiting")) == 1
        assert texts(answers) == ["Server exiting"]
        end(model, loaded)

    @pytest.mark.parametrize("limited", [False, True])
    @pytest.mark.parametrize("strategy", ["DIRECT", "OLDEST"])
    def test_sequences_wait_for_their_instance(self, strategy: str, limited: bool) -> None:
        spec = sequence_spec(1, strategy=strategy, max_candidates=1, max_idle_ns=10**12)
        resources = (Resource("R", 1),) if limited else ()
        spec = replace(spec, instance_groups=(InstanceGroup("g", count=2, resources=resources),))
        loaded = BeginsModel(lambda: Begins(at_once))
        limiter = RateLimiter()
        model = Model.create(spec, loaded, limiter=limiter)
        answers = Answers()
        model.submit(sequence_request(1, "S", answers))
        model.submit(sequence_request(2, "S", answers))
        assert answers.wait(2)
        first = next(one for one in loaded.instances if one.begun)
        first.go()
        sequences = [sequence_request(each, "", answers) for each in (1, 2)]
        for request in sequences:
            model.submit(request)
        assert answers.wait(3), "the other one goes on"
        (waiting,) = [request for request in sequences if not answers.finals_of(request)]
        assert (first.set_aside, first.begun, model.pending) == (True, 1, 1)
        goes_on = next(request for request in sequences if request is not waiting).correlation_id
        for flags in ("", "E"):
            model.submit(sequence_request(goes_on, flags, answers))
        assert answers.wait(5)
        first.come_back()
        assert answers.wait(6)
        assert first.begun == 2
        model.submit(sequence_request(waiting.correlation_id, "E", answers))
        assert answers.wait(7)
        assert texts(answers) == [""] * 7
        end(model, loaded)
        assert limiter.units_in_use == 0


class TestResize:
    """Instances that come and go for good."""

    @staticmethod
    def spec(count: int) -> ModelSpec:
        return replace(make_spec(), instance_groups=(InstanceGroup("g", count=count),))

    def test_those_that_are_away_leave_first(self) -> None:
        kept = Kept()
        model, loaded = make_beginning(self.spec(3), kept)
        answers = Answers()
        model.submit(make_request(answers))
        busy = next(one for one in loaded.instances if one.begun)
        away, idle = [one for one in loaded.instances if one is not busy]
        away.go()
        model.submit(make_request(answers))
        kept.finish()
        kept.finish()
        resize = model.prepare_resize(self.spec(2))
        resize.commit()
        resize.finish()
        assert [one.closed for one in (busy, idle, away)] == [0, 0, 1]
        away.forget()
        away.come_back()
        for _ in range(3):
            model.submit(make_request(answers))
        assert len(kept.batches) == 2
        for _ in range(3):
            kept.finish()
        assert texts(answers) == [""] * 5
        end(model, loaded)

    def test_a_busy_one_goes_when_its_batch_is_done(self) -> None:
        each: list[Kept] = []

        def make() -> Begins:
            each.append(Kept())
            return Begins(each[-1])

        loaded = BeginsModel(make)
        model = Model.create(self.spec(2), loaded)
        answers = Answers()
        for _ in range(3):
            model.submit(make_request(answers))
        resize = model.prepare_resize(self.spec(1))
        resize.commit()
        staying, going = loaded.instances
        with ThreadPoolExecutor(1) as pool:
            gone = pool.submit(resize.finish)
            each[1].finish()
            gone.result(WAIT_S)
        assert (going.closed, staying.closed, going.begun, model.pending) == (1, 0, 1, 1)
        each[0].finish()
        each[0].finish()
        assert texts(answers) == [""] * 3
        end(model, loaded)

    def test_new_ones_that_are_not_there_yet(self) -> None:
        made: list[Begins] = []

        def make() -> Begins:
            instance = Begins(at_once)
            if made:
                instance.go()
            made.append(instance)
            return instance

        loaded = BeginsModel(make)
        model = Model.create(self.spec(1), loaded)
        resize = model.prepare_resize(self.spec(2))
        resize.commit()
        resize.finish()
        answers = Answers()
        model.submit(make_request(answers))
        assert made[1].set_aside
        assert (made[0].begun, made[1].begun) == (1, 0)
        made[1].come_back()
        end(model, loaded)


class TestResources:
    """Instances that share resources with others."""

    @staticmethod
    def model(name: str, limiter: RateLimiter, begin: Kept) -> tuple[Model, BeginsModel]:
        loaded = BeginsModel(lambda: Begins(begin))
        group = InstanceGroup("g", resources=(Resource("R", 1),))
        spec = replace(make_spec(name=name), instance_groups=(group,))
        return Model.create(spec, loaded, limiter=limiter), loaded

    def test_they_are_held_until_a_batch_is_done(self) -> None:
        limiter, kept = RateLimiter(), Kept()
        one, ones = self.model("m", limiter, kept)
        two, twos = self.model("m", limiter, kept)
        answers = Answers()
        for model in (one, two, one, two):
            model.submit(make_request(answers))
        for _ in range(4):
            kept.wait(1)
            assert (len(kept.batches), limiter.units_in_use) == (1, 1)
            kept.finish()
        assert texts(answers) == [""] * 4
        end(one, ones)
        end(two, twos)
        assert limiter.units_in_use == 0

    def test_one_that_is_away_leaves_them_to_the_others(self) -> None:
        limiter, kept = RateLimiter(), Kept()
        one, ones = self.model("m", limiter, kept)
        two, twos = self.model("m", limiter, kept)
        answers = Answers()
        ones.instances[0].go()
        one.submit(make_request(answers))
        assert (ones.instances[0].set_aside, limiter.units_in_use) == (True, 0)
        two.submit(make_request(answers))
        kept.finish()
        ones.instances[0].come_back()
        kept.wait(1)
        kept.finish()
        assert texts(answers) == [""] * 2
        end(one, ones)
        end(two, twos)

    def test_one_that_goes_while_it_waits_for_them(self) -> None:
        limiter, kept = RateLimiter(), Kept()
        one, ones = self.model("m", limiter, kept)
        two, twos = self.model("m", limiter, kept)
        answers = Answers()
        two.submit(make_request(answers))
        one.submit(make_request(answers))
        ones.instances[0].go()
        one.submit(make_request(answers))
        two.submit(make_request(answers))
        for number in range(4):
            kept.wait(1)
            kept.finish()
            if number == 2:
                ones.instances[0].come_back()
        assert texts(answers) == [""] * 4
        end(one, ones)
        end(two, twos)
        assert limiter.units_in_use == 0


class TestCancel:
    """Instances that want to be told."""

    def test_told_once_and_with_no_lock_held(self) -> None:
        told: list[InferenceRequest] = []

        def begin(batch: Batch, done: Done) -> None:
            for request in batch.requests:

                def on_cancel(request: InferenceRequest) -> None:
                    told.append(request)
                    done(CancelledError(""))  # takes the model's lock

                request.on_cancel = on_cancel

        model, loaded = make_beginning(make_spec(), begin)
        answers = Answers()
        first, second = make_request(answers), make_request(answers)
        model.submit(first)
        model.submit(second)
        assert model.cancel(second), "it is queued"
        assert told == []
        assert not model.cancel(first)
        assert not model.cancel(first)
        assert told == [first]
        assert answers.finals == 2
        assert model.statistics.snapshot().cancelled == {"queued": 1, "running": 1}
        end(model, loaded)

    def test_cancelled_before_the_instance_could_say_whom_to_tell(self) -> None:
        told: list[InferenceRequest] = []

        def begin(batch: Batch, done: Done) -> None:
            (request,) = batch.requests
            model.cancel(request)  # another thread could do that now

            def on_cancel(_: InferenceRequest) -> None:
                told.append(request)
                done(CancelledError(""))

            request.on_cancel = on_cancel

        model, loaded = make_beginning(make_spec(), begin)
        answers = Answers()
        model.submit(make_request(answers))
        assert (len(told), answers.finals) == (1, 1)
        end(model, loaded)

    def test_nobody_is_told_of_what_is_answered(self) -> None:
        told: list[InferenceRequest] = []

        def begin(batch: Batch, done: Done) -> None:
            (request,) = batch.requests
            request.on_cancel = told.append
            done(echo(batch))

        model, loaded = make_beginning(make_spec(), begin)
        request = make_request()
        model.submit(request)
        assert not model.cancel(request)
        assert told == []
        end(model, loaded)

    def test_a_decoupled_request_that_goes_on_after_its_batch(self) -> None:
        def begin(batch: Batch, done: Done) -> None:
            (request,) = batch.requests
            request.on_cancel = lambda request: request.respond(None, True)
            done(None)

        model, loaded = make_beginning(make_spec(decoupled=True), begin)
        answers = Answers()
        request = make_request(answers)
        model.submit(request)
        assert (answers.finals, model.statistics.snapshot().running) == (0, 1)
        model.cancel(request)
        assert answers.finals == 1
        end(model, loaded)

    def test_raising_when_told(self, caplog: pytest.LogCaptureFixture) -> None:
        def raising(_: InferenceRequest) -> None:
            raise ValueError("no luck")

        kept = Kept()

        def begin(batch: Batch, done: Done) -> None:
            batch.requests[0].on_cancel = raising
            kept(batch, done)

        model, loaded = make_beginning(make_spec(), begin)
        request = make_request()
        model.submit(request)
        assert not model.cancel(request)
        assert "no luck" in caplog.text
        kept.finish()
        end(model, loaded)


def test_a_close_that_does_not_wait_for_what_is_never_done() -> None:
    kept = Kept()
    model, loaded = make_beginning(make_spec(), kept)
    answers = Answers()
    model.submit(make_request(answers))
    assert not model.close(0.01)
    assert (loaded.instances[0].closed, loaded.closed) == (0, 0)
    kept.finish()
    assert answers.finals == 1
    end(model, loaded)


def test_warm_up_waits_for_what_is_done_elsewhere() -> None:
    with ThreadPoolExecutor(1) as pool:
        loaded = BeginsModel(lambda: Begins(lambda batch, done: (pool.submit(done, echo(batch)), None)[1]))
        model = Model.create(make_spec(), loaded, warmup=[replace(SAMPLE, count=3)])
        assert loaded.instances[0].begun == 3
        end(model, loaded)


def test_a_warm_up_that_fails() -> None:
    loaded = BeginsModel(lambda: Begins(lambda batch, done: done(UnavailableError("no luck"))))
    with pytest.raises(InvalidArgumentError, match="no luck"):
        Model.create(make_spec(), loaded, warmup=[SAMPLE])
    assert (loaded.instances[0].closed, loaded.closed) == (1, 1)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_batch_that_can_not_be_finished_holds_up_no_other(
    decoupled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As where there is no memory for what is counted: its requests are failed, and the next batch begins."""
    failures: list[Exception] = []

    def clock() -> int:
        if failures:
            raise failures.pop()
        return monotonic_ns()

    kept = Kept()
    model, loaded = make_beginning(make_spec(decoupled=decoupled), kept, clock)
    answers = Answers()
    first, second = make_request(answers, id="a"), make_request(answers)
    model.submit(first)
    model.submit(second)
    failures.append(MemoryError("no memory"))
    kept.finish()
    assert answers.wait(1)
    error = answers.response(first).error
    assert error is not None
    assert error.message == "[request id: a] the request could not be handled"
    kept.finish()
    assert answers.wait(2)
    assert answers.response(second).error is None
    assert "a batch that was done could not be finished" in caplog.text
    assert "no memory" in caplog.text
    assert model.close(WAIT_S)
    assert loaded.problems == []


# --- inline runs --------------------------------------------------------------------------------------------


def led(model: Model, answers: Answers) -> InlineClaim:
    claim = model.submit(make_request(answers), may_claim=True)
    assert claim is not None
    return claim


@pytest.mark.parametrize("budget_ns", [MS, None])
def test_who_runs_inline_starts_what_is_due_and_waits_for_nothing(budget_ns: int | None) -> None:
    kept, answers = Kept(), Answers()
    model, loaded = make_beginning(make_spec(instances=2), kept)
    assert not led(model, answers).run_inline(budget_ns)
    claim = led(model, answers)
    model.submit(make_request(answers), may_claim=True)
    assert not claim.run_inline(budget_ns)
    assert (len(kept.batches), answers.finals) == (2, 0)
    kept.finish()  # the thread that finishes it begins the next one
    assert (len(kept.batches), answers.finals) == (2, 1)
    kept.finish()
    kept.finish()
    assert (answers.finals, model_threads()) == (3, 0)
    end(model, loaded)


def test_who_can_not_run_inline_leaves_it_to_others() -> None:
    reads = math.inf

    def clock() -> int:
        nonlocal reads
        reads -= 1
        if reads < 0:
            raise RuntimeError("the clock has stopped")
        return time.monotonic_ns()

    kept, answers = Kept(), Answers()
    model, loaded = make_beginning(make_spec(), kept, clock)
    claim = led(model, answers)
    reads = 0
    with pytest.raises(RuntimeError, match="the clock has stopped"):
        claim.run_inline(MS)
    reads = math.inf
    claim.release()  # as a poller does then
    kept.finish()
    assert answers.finals == 1
    end(model, loaded)


def test_what_is_urgent_waits_for_no_claim() -> None:
    """A model that is called: the thread that has claimed to run it inline may wait for its caller."""
    kept, answers = Kept(), Answers()
    model, loaded = make_beginning(make_spec(instances=2), kept)
    led(model, answers)  # claimed, and not led yet
    with bypassing_claims():
        assert model.submit(make_request(answers), may_claim=True) is None
    assert len(kept.batches) == 2
    kept.finish()
    kept.finish()
    assert answers.finals == 2
    end(model, loaded)
