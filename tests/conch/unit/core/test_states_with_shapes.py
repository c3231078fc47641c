"""States of any shape: what has different ones does not share a batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.support.core import make_request, make_spec

from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.scheduling.sequence.batcher import SequenceBatcher
from conch.core.scheduling.sequence.implicit_state import SequenceStates
from conch.core.spec import ModelSpec, SequenceBatching, StateSpec
from conch.core.tensor import Tensor

GROWING = StateSpec("BEFORE", "AFTER", "FP32", (-1,), (1,))

OWN = 1 << 63
"""Ids of sequences that the batcher makes are above this."""


def spec_of(strategy: str, iterative: bool = False) -> ModelSpec:
    settings = SequenceBatching(
        "DIRECT" if strategy == "direct" else "OLDEST",
        states=(GROWING,),
        max_candidates=4,
        iterative=iterative,
    )
    return dataclasses.replace(make_spec(4), sequence=settings)


def ask(scheduler: SequenceBatcher, sequence: int, now_ns: int, start: bool = False) -> InferenceRequest:
    request = make_request(rows=1, correlation_id=sequence, sequence_start=start)
    scheduler.submit(request, now_ns)
    return request


def run(scheduler: SequenceBatcher, spec: ModelSpec, widths: dict[int, int], now_ns: int) -> list[int]:
    """Runs the next batch, after which states have these widths; returns the sequences it was for."""
    batch = scheduler.next_batch(now_ns)
    assert type(batch) is Batch
    shapes = {request.inputs["BEFORE"].shape for request in batch.requests}
    assert len(shapes) == 1, "fillers have the shape of the others"
    made = [request for request in batch.requests if not request.filler]
    for request in made:
        assert isinstance(request.correlation_id, int)
        after = np.zeros((1, widths.get(request.correlation_id, 1)), np.float32)
        SequenceStates(spec).collect(request, InferenceResponse([Tensor.from_array("AFTER", after)]))
    scheduler.complete(batch, now_ns)
    return [int(request.correlation_id) for request in made]


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_only_states_of_one_shape_share_a_batch(strategy: str) -> None:
    spec = spec_of(strategy)
    scheduler = SequenceBatcher(spec, 1)
    for sequence in (1, 2, 3):
        ask(scheduler, sequence, sequence, start=True)
    assert run(scheduler, spec, {1: 2, 2: 5, 3: 2}, 10) == [1, 2, 3]
    for sequence in (1, 2, 3):
        ask(scheduler, sequence, 10 + sequence)
    runs = [run(scheduler, spec, {1: 5, 2: 5, 3: 5}, 20)]
    while scheduler.pending:
        runs.append(run(scheduler, spec, {1: 5, 2: 5, 3: 5}, 20))
    # The oldest strategy does not pass requests by.
    assert runs == ([[1, 3], [2]] if strategy == "direct" else [[1], [2], [3]])
    for sequence in (1, 2, 3):
        ask(scheduler, sequence, 20 + sequence)
    assert run(scheduler, spec, {}, 30) == [1, 2, 3], "they are all of one shape again"


def test_a_request_that_runs_again_is_kept_apart_by_its_new_state() -> None:
    spec = spec_of("oldest", iterative=True)
    scheduler = SequenceBatcher(spec, 1)
    first, second = (ask(scheduler, 0, now) for now in (1, 2))
    for request in (first, second):
        request.rescheduled = True
    assert len(run(scheduler, spec, {OWN + 1: 3, OWN + 2: 3}, 10)) == 2
    first.rescheduled = second.rescheduled = True
    assert len(run(scheduler, spec, {OWN + 1: 3, OWN + 2: 4}, 20)) == 2
    assert [len(run(scheduler, spec, {}, 30)) for _ in range(2)] == [1, 1]
    assert not scheduler.pending


def test_a_request_that_runs_again_joins_new_ones_of_its_shape() -> None:
    spec = spec_of("oldest", iterative=True)
    scheduler = SequenceBatcher(spec, 1)
    first = ask(scheduler, 0, 1)
    for now in (10, 20):
        first.rescheduled = True
        assert run(scheduler, spec, {}, now) == [OWN + 1]
    ask(scheduler, 0, 25)
    assert run(scheduler, spec, {}, 30) == [OWN + 1, OWN + 2]
