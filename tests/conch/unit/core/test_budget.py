"""Batches with a budget of elements: never above it, never smaller than they must be, in order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.core import make_request, make_spec

from conch.core.batch_key import PaddedKey
from conch.core.model_version import scheduler_for
from conch.core.padding import PaddedInput, Padding
from conch.core.request import InferenceRequest
from conch.core.scheduling.dynamic import DynamicBatcher
from conch.core.scheduling.priority import BudgetBatcher, BudgetPriorityBatcher, PriorityBatcher
from conch.core.scheduling.scheduler import IDLE, Batch, WaitUntil
from conch.core.spec import DynamicBatching, ModelSpec, QueuePolicy, TensorSpec
from conch.core.tensor import Tensor
from conch.core.validation import RequestValidator


def spec_with(budget: int, *policies: QueuePolicy, delay_ns: int = 0, most: int = 8) -> ModelSpec:
    spec = make_spec(
        most,
        inputs=(TensorSpec("A", "INT8", (-1, 2)),),
        batching=DynamicBatching(policies=policies, max_queue_delay_ns=delay_ns),
    )
    return replace(spec, padding=Padding((PaddedInput("A", 0),), (), budget))


def request_of(spec: ModelSpec, rows: int, length: int, priority: int = 0) -> InferenceRequest:
    request = make_request(priority=priority)
    shape = (rows, length, 2)
    request.inputs = {"A": Tensor("A", "INT8", shape, bytes(rows * length * 2))}
    RequestValidator(spec)(request)
    return request


def test_the_config_chooses() -> None:
    assert type(scheduler_for(spec_with(0))) is DynamicBatcher
    assert type(scheduler_for(spec_with(0, QueuePolicy(max_size=1)))) is PriorityBatcher
    assert type(scheduler_for(spec_with(1))) is BudgetBatcher
    assert type(scheduler_for(spec_with(1, QueuePolicy(max_size=1)))) is BudgetPriorityBatcher


@pytest.mark.parametrize(("length", "most"), [(1, 32), (3, 8), (4, 8), (5, 4), (33, 1), (10**6, 1)])
def test_the_key_says_how_many_rows(length: int, most: int) -> None:
    key = request_of(spec_with(64), 1, length).batch_key
    assert isinstance(key, PaddedKey) and key.most_rows == most


@dataclass(frozen=True)
class Waiting:
    rows: int
    length: int
    level: int = 1
    cancelled: bool = False


@given(
    st.lists(
        st.builds(Waiting, st.integers(1, 4), st.integers(1, 9), st.integers(1, 2), st.booleans()),
        max_size=15,
    ),
    st.sampled_from([1, 16, 64, 1000]),
    st.booleans(),
    st.booleans(),
)
def test_batches(waiting: list[Waiting], budget: int, priorities: bool, asks_between: bool) -> None:
    policies = (QueuePolicy(), QueuePolicy()) if priorities else ()
    spec = spec_with(budget, *policies)
    scheduler = scheduler_for(spec)
    queued = []
    for each in waiting:
        request = request_of(spec, each.rows, each.length, priority=each.level)
        scheduler.submit(request, 0)
        if asks_between:
            scheduler.due_ns(0)
        queued.append((each, request))
    for each, request in queued:
        if each.cancelled:
            assert scheduler.cancel(request)
    left = [request for each, request in queued if not each.cancelled]
    if priorities:
        left.sort(key=lambda request: request.priority)

    def cost(request: InferenceRequest) -> int:
        length = request.inputs["A"].shape[1]
        return request.batch_size * 2 * (1 << (length - 1).bit_length())

    while left:
        batch = scheduler.next_batch(0)
        assert isinstance(batch, Batch)
        count = len(batch.requests)
        assert batch.requests == left[:count]
        del left[:count]
        spent = sum(map(cost, batch.requests))
        assert count == 1 or (spent <= budget and batch.size <= 8)
        if left and left[0].batch_key == batch.requests[0].batch_key:
            grown = spent + cost(left[0])
            assert grown > budget or batch.size + left[0].batch_size > 8, "it would have fitted"
    assert scheduler.next_batch(0) is IDLE


def test_a_batch_at_its_budget_does_not_wait_for_a_size_it_cannot_reach() -> None:
    spec = spec_with(16, delay_ns=100)
    scheduler = scheduler_for(spec)
    scheduler.submit(request_of(spec, 1, 4), 0)
    assert isinstance(scheduler.next_batch(0), WaitUntil)
    scheduler.submit(request_of(spec, 1, 3), 0)
    scheduler.submit(request_of(spec, 1, 1), 0)
    batch = scheduler.next_batch(0)
    assert isinstance(batch, Batch) and batch.size == 2
    assert isinstance(scheduler.next_batch(0), WaitUntil), "shorter rows have a larger limit again"
    for _ in range(7):
        scheduler.submit(request_of(spec, 1, 1), 0)
    batch = scheduler.next_batch(0)
    assert isinstance(batch, Batch) and batch.size == 8
