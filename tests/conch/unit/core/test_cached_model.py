"""Models behind a local cache: what is answered without them, what is kept, and what is counted."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.core import Answers, Execute, echo, make_model, make_request, make_spec

from conch.core.admission import Admission
from conch.core.clock import monotonic_ns
from conch.core.errors import CancelledError, InternalError, InvalidArgumentError
from conch.core.model_statistics import Duration
from conch.core.registry import Entry, Registry
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_cache.base import ResponseCache
from conch.core.response_cache.cache_key import KeyMaker
from conch.core.response_cache.cached_model import CachedModel
from conch.core.response_cache.local_cache import LocalCache
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import ClosedError, Servable
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Tensor

SPEC = make_spec()
TWO = make_spec(outputs=(TensorSpec("OUT", "FP32", (16,)), TensorSpec("TEXT", "BYTES", (1,))))


class Counting:
    """A model's function that counts its requests."""

    def __init__(self, execute: Execute = echo) -> None:
        self._execute = execute
        self.requests: list[InferenceRequest] = []

    def __call__(self, batch: Batch) -> Any:
        self.requests += batch.requests
        return self._execute(batch)


def two(batch: Batch) -> list[InferenceResponse | None]:
    """Answers with the outputs that were asked for, and a parameter."""
    responses: list[InferenceResponse | None] = []
    for request in batch.requests:
        outputs = [
            Tensor.from_array("OUT", request.inputs["IN"].numpy()),
            Tensor.from_array("TEXT", np.array([request.id.encode()], object)),
        ]
        wanted = request.requested or ("OUT", "TEXT")
        responses.append(InferenceResponse([o for o in outputs if o.name in wanted], None, {"p": 1.5}))
    return responses


class Site:
    """A model, behind a cache, that is led by the thread that submits."""

    def __init__(
        self,
        execute: Execute,
        spec: ModelSpec = SPEC,
        cache: ResponseCache | None = None,
        identity: bytes = b"load",
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        self.cache = cache or LocalCache(1_000_000)
        self.model: Servable = make_model(spec, execute)
        self.cached = CachedModel(self.model, self.cache, KeyMaker(spec, identity, hashlib.sha256), clock)

    def ask(self, **changes: Any) -> InferenceResponse:
        """Submits a request and returns the answer."""
        request = make_request(answers := Answers(), **changes)
        claim = self.cached.submit(request, True)
        if claim is not None:
            claim.run_inline()
        assert answers.wait(1)
        return answers.response(request)

    def values(self, **changes: Any) -> list[Any]:
        return [tensor.numpy().tolist() for tensor in self.ask(**changes).outputs]


@contextmanager
def site(execute: Execute = echo, **settings: Any) -> Iterator[Site]:
    made = Site(execute, **settings)
    try:
        yield made
    except BaseException:
        made.cached.close()
        raise
    assert made.cached.close()


def counts(model: Servable) -> tuple[int, int, int, int]:
    """Successes, executions, hits and misses."""
    seen = model.statistics.snapshot()
    return seen.success.count, seen.execution_count, seen.cache_hit.count, seen.cache_miss.count


def test_the_second_answer_comes_without_the_model() -> None:
    counting = Counting()
    with site(counting) as made:
        first = made.values(value=1.5)
        assert counts(made.cached) == (1, 1, 0, 1)
        request = make_request(answers := Answers(), value=1.5, id="new")
        assert made.cached.submit(request, may_claim=True) is None
        assert [tensor.numpy().tolist() for tensor in answers.response(request).outputs] == first
        assert request.model is made.cached
        assert counts(made.cached) == (2, 1, 1, 1)
        assert made.values(value=2.5) == [[2.5] * 16]
    assert len(counting.requests) == 2


def test_a_hit_is_counted_as_triton_counts_it() -> None:
    ticks = itertools.count(1_000, 10)
    with site(clock=lambda: next(ticks)) as made:
        made.ask()
        before = made.cached.statistics.snapshot()
        made.ask(received_ns=900)
        after = made.cached.statistics.snapshot()
    assert after.cache_hit == Duration(1, 10)
    assert after.queue == Duration(2, before.queue.ns)
    assert after.success.count == 2
    assert after.success.ns - before.success.ns > 100
    assert (after.compute_infer, after.compute_input, after.compute_output) == (
        before.compute_infer,
        before.compute_input,
        before.compute_output,
    )
    assert after.compute_infer.count == after.success.count - after.cache_hit.count
    assert (after.inference_count, after.execution_count, after.batches) == (
        before.inference_count,
        before.execution_count,
        before.batches,
    )
    # Once to find nothing, and once to keep the answer.
    assert before.cache_miss == Duration(1, 20)


def test_outputs_parameters_and_classes_come_back_as_they_were() -> None:
    counting = Counting(two)
    with site(counting, spec=TWO) as made:
        wishes: list[dict[str, Any]] = [
            {},
            {"requested": ("OUT",)},
            {"requested": ("TEXT",)},
            {"requested": ("OUT",), "classes": {"OUT": 2}},
            {"requested": ("OUT",), "classes": {"OUT": 3}},
        ]
        fresh = [made.ask(id="a", **wish) for wish in wishes]
        found = [made.ask(id="b", **wish) for wish in wishes]
        both = made.ask(requested=("TEXT", "OUT"))  # all there are: the same as naming none
    for one, other in zip(fresh, found, strict=True):
        assert [(t.name, t.datatype, t.shape, bytes(t.data)) for t in one.outputs] == [
            (t.name, t.datatype, t.shape, bytes(t.data)) for t in other.outputs
        ]
        assert one.parameters == other.parameters == {"p": 1.5}
    assert [len(response.outputs) for response in found] == [2, 1, 1, 1, 1]
    assert [len(response.outputs[0].numpy()) for response in found[3:]] == [2, 3]
    assert both.outputs[1].numpy().tolist() == [b"a"]
    assert len(counting.requests) == len(wishes)


def test_errors_are_not_kept() -> None:
    failing = True

    def sometimes(batch: Batch) -> Any:
        if failing:
            raise InternalError("not now")
        return echo(batch)

    with site(sometimes) as made:
        for _ in range(2):
            error = made.ask().error
            assert error is not None
            assert error.message == "not now"
        failing = False
        assert made.ask().error is made.ask().error is None
        assert counts(made.cached) == (2, 1, 1, 3)


def test_a_request_that_does_not_fit_is_refused_and_not_counted() -> None:
    with site() as made:
        made.ask()
        wrong: list[dict[str, Any]] = [{"inputs": {}}, {"requested": ("NOPE",)}]
        for changes in wrong:
            with pytest.raises(InvalidArgumentError):
                made.cached.submit(make_request(**changes))
        assert counts(made.cached) == (1, 1, 0, 1)


def test_bypass_and_refresh() -> None:
    counting = Counting(lambda batch: [InferenceResponse([Tensor("OUT", "FP32", (16,), next(numbers))])])
    numbers = (bytes([number]) * 64 for number in range(100))
    with site(counting) as made:

        def seen(order: str | None = None) -> int:
            (output,) = made.ask(parameters={"conch_cache": order} if order else None).outputs
            return bytes(output.data)[0]

        assert [seen("bypass"), seen("bypass")] == [0, 1]
        assert made.cache.snapshot().lookups == made.cache.snapshot().entries == 0  # type: ignore[attr-defined]
        assert [seen(), seen(), seen("refresh"), seen(), seen("bypass"), seen()] == [2, 2, 3, 3, 4, 3]
        assert counts(made.cached) == (8, 5, 3, 1)


@pytest.mark.parametrize("value", ["", "no", "Bypass", True, 1])
def test_an_unknown_wish_is_refused(value: object) -> None:
    with site() as made:
        with pytest.raises(InvalidArgumentError) as raised:
            made.cached.submit(make_request(parameters={"conch_cache": value}, id="r"))
        assert raised.value.message == (
            f"[request id: r] request parameter 'conch_cache' must be 'bypass' or 'refresh', got '{value}'"
        )


def test_another_load_of_the_model_does_not_see_the_entries() -> None:
    cache = LocalCache(1_000_000)
    with site(cache=cache, identity=b"1") as old:
        assert old.values() == [[0.0] * 16]
        with site(lambda batch: [InferenceResponse([Tensor("OUT", "FP32", (0,), b"")])], cache=cache) as new:
            assert new.values() == new.values() == [[]]


@pytest.mark.parametrize(
    ("own", "of_cache", "valid"), [(0, 0, 10**18), (0, 30, 30), (20, 0, 20), (20, 30, 20)]
)
def test_time_to_live(own: int, of_cache: int, valid: int) -> None:
    now = 1
    cache = LocalCache(1_000_000, of_cache, lambda: now)
    with site(spec=replace(SPEC, cache_ttl_ns=own), cache=cache) as made:
        made.ask()
        now += valid - 1
        made.ask()
        assert counts(made.cached)[2:] == (1, 1)
        now += 1
        made.ask()
        assert counts(made.cached)[2:] == ((1, 2) if own or of_cache else (2, 1))


def test_what_is_too_large_is_answered_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), site(cache=LocalCache(100)) as made:
        for value in (1.0, 2.0, 1.0):
            assert made.values(value=value) == [[value] * 16]
        assert counts(made.cached) == (3, 3, 0, 3)
    (record,) = caplog.records
    assert "Failed to insert key [" in record.message


def test_a_response_that_can_not_be_kept_is_still_an_answer() -> None:
    with site(lambda batch: [InferenceResponse([], None, {"x": [1]})]) as made:  # type: ignore[dict-item]
        for _ in range(2):
            assert list(made.ask().parameters or ()) == ["x"]
        assert counts(made.cached) == (2, 2, 0, 2)


class Broken(ResponseCache):
    """Holds what no cache should."""

    def lookup(self, key: bytes) -> bytes:
        return b"nonsense"

    def insert(self, key: bytes, entry: bytes, ttl_ns: int) -> bool:
        raise RuntimeError("no")


def test_an_entry_that_can_not_be_read_is_none() -> None:
    with site(cache=Broken()) as made:
        assert made.values(value=3.0) == [[3.0] * 16]
        assert counts(made.cached) == (1, 1, 0, 1)


def test_only_a_single_final_response_is_kept() -> None:
    """As an ensemble with decoupled steps might answer."""

    def several(batch: Batch) -> Any:
        for request in batch.requests:
            request.respond(InferenceResponse([Tensor("OUT", "FP32", (0,), b"")]), False)
            request.respond(None if request.id == "none" else InferenceResponse([]), True)
        return [None] * len(batch.requests)

    with site(several) as made:
        for request_id in ("", "none", ""):
            request = make_request(answers := Answers(), id=request_id)
            runner = made.cached.submit(request, True)
            assert runner is not None
            runner.run_inline()
            assert len(answers.calls) == 2
        assert counts(made.cached)[2:] == (0, 3)


def test_a_cancelled_request_leaves_nothing() -> None:
    with site() as made:
        request = make_request(answers := Answers())
        runner = made.cached.submit(request, True)
        assert runner is not None
        assert made.cached.pending == 1
        assert made.cached.cancel(request)
        runner.release()
        assert isinstance(answers.response(request).error, CancelledError)
        assert not made.cached.continues(request)
        assert counts(made.cached) == (0, 0, 0, 1)
        made.ask()
        assert counts(made.cached) == (1, 1, 0, 2)


def test_a_request_refused_by_a_closing_version_goes_to_its_successor() -> None:
    """Its responder is its own again: one answer, kept once, under the successor's key."""
    cache = LocalCache(1_000_000)
    old, new = (Site(echo, cache=cache, identity=identity) for identity in (b"1", b"2"))
    registry = Registry()
    registry.publish("m", Entry({1: new.cached}))
    assert old.cached.close()
    with pytest.raises(ClosedError):
        old.cached.submit(make_request())
    request = make_request(answers := Answers())
    claim = Admission(registry).admit(request, True, old.cached)
    assert claim is not None
    claim.run_inline()
    assert answers.finals == 1
    assert counts(old.cached) == (0, 0, 0, 0)
    assert counts(new.cached) == (1, 1, 0, 1)
    assert cache.snapshot().entries == 1
    new.ask()
    assert counts(new.cached) == (2, 1, 1, 1)
    assert new.cached.close()


def test_what_is_queued_can_be_failed() -> None:
    with site() as made:
        request = make_request(answers := Answers())
        runner = made.cached.submit(request, True)
        assert runner is not None
        assert made.cached.fail_queued(InternalError("exiting")) == 1
        runner.release()
        assert answers.finals == 1


def test_many_threads_get_their_own_answers() -> None:
    counting = Counting()
    with site(counting, cache=LocalCache(20 * 600)) as made:

        def client(seed: int) -> None:
            for step in range(300):
                value = float((step * 31 + seed) % 40)
                assert made.values(value=value) == [[value] * 16]

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(client, range(4)))
        success, executions, hits, misses = counts(made.cached)
        assert success == 1200 == hits + misses
        assert executions == misses == len(counting.requests)
