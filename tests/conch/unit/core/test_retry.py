"""Retry times for a client that met a full queue."""

from __future__ import annotations

import threading

import pytest
from tests.support.core import WAIT_S, Answers, echo, make_model, make_request, make_spec

from conch.core.errors import ConchError, ResourceExhaustedError, UnavailableError
from conch.core.execution.executor import retry_after_ms
from conch.core.model_statistics import QUEUE_FULL
from conch.core.request import InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import DynamicBatching, QueuePolicy

MS = 1_000_000


@pytest.mark.parametrize(
    ("mean_ns", "pending", "per_batch", "instances", "expected"),
    [
        (10 * MS, 100, 4, 1, 250),
        (10 * MS, 100, 4, 2, 125),
        (10 * MS, 100, 0, 1, 1000),  # nothing has been counted yet, so nothing is known of company
        (1, 100, 4, 1, 1),
        (1000 * MS, 10**6, 1, 1, 10_000),
        (0, 100, 4, 1, 1000),
        (10 * MS, 0, 4, 0, 1),
    ],
)
def test_hint(mean_ns: int, pending: int, per_batch: float, instances: int, expected: int) -> None:
    assert retry_after_ms(mean_ns, pending, per_batch, instances) == expected


@pytest.mark.parametrize("error", [ResourceExhaustedError, UnavailableError])
def test_refusals_are_counted_and_carry_a_hint(error: type[ConchError]) -> None:
    entered, go = threading.Event(), threading.Event()

    def hold(batch: Batch) -> list[InferenceResponse | None]:
        entered.set()
        assert go.wait(WAIT_S)
        return echo(batch)

    policies = (QueuePolicy(max_size=2),) if error.code == "UNAVAILABLE" else ()
    spec = make_spec(8, batching=DynamicBatching(policies=policies))
    object.__setattr__(spec, "max_queue_size", 0 if policies else 2)
    model = make_model(spec, hold, allows_inline=False)
    answers = Answers()
    model.submit(make_request(answers, 1))
    assert entered.wait(WAIT_S)
    for _ in range(2):
        model.submit(make_request(answers, 1))
    for _ in range(3):
        with pytest.raises(error) as raised:
            model.submit(make_request(answers, 1))
        assert raised.value.retry_after_ms == 1000
    go.set()
    assert answers.wait(3)
    snapshot = model.statistics.snapshot()
    assert (dict(snapshot.rejected), snapshot.success.count, snapshot.fail.count) == ({QUEUE_FULL: 3}, 3, 3)
    assert model.close(WAIT_S)


def test_a_request_that_does_not_fit_is_no_rejection() -> None:
    model = make_model(make_spec(8))
    with pytest.raises(Exception, match="batch-size"):
        model.submit(make_request(rows=9))
    assert not model.statistics.snapshot().rejected
    assert model.close(WAIT_S)
