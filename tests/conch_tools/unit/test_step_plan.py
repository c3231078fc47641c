"""The order of steps, and the choice among their results."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from conch_tools.optimize.candidate_choice import Measured, front, recommended
from conch_tools.optimize.model_kinds import KINDS
from conch_tools.optimize.profiling import measure
from conch_tools.optimize.step_plan import StepPlan
from conch_tools.optimize.step_table import OPENERS, STEPS

NAMES = [step.name for step in STEPS]


def chains(
    source: str, targets: tuple[str, ...] = (), failing: tuple[str, ...] = ()
) -> list[tuple[str, ...]]:
    plan, found = StepPlan(STEPS, KINDS, source, targets), []
    while (planned := plan.next_step()) is not None:
        found.append(planned.chain)
        if planned.step.name not in failing:
            plan.passed(planned)
    return found


def test_the_table_names_kinds_that_there_are() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for step in STEPS:
        assert {step.result, *step.sources} <= set(KINDS), step.name
        assert KINDS[step.result].backend, step.name
    assert set(OPENERS) <= set(KINDS)


def test_every_source_has_steps_breadth_first() -> None:
    for source in OPENERS:
        found = chains(source)
        assert found, source
        assert [len(chain) for chain in found] == sorted(len(chain) for chain in found)
        assert len(set(found)) == len(found)


def test_targets_keep_the_steps_on_the_way() -> None:
    found = chains("onnx", ("openvino",))
    assert ("openvino", "openvino-bf16") in found
    assert ("ort-int8-static", "openvino-int8") in found
    assert not {("onnx",), ("ort-optimize",), ("ort-int8-dynamic",)} & set(found)


def test_what_has_failed_is_not_converted_further() -> None:
    assert ("openvino", "openvino-bf16") not in chains("onnx", failing=("openvino",))


@given(st.lists(st.tuples(*[st.integers(1, 50)] * 4), min_size=1))
def test_the_front_has_the_best_of_each(figures: list[tuple[int, int, int, int]]) -> None:
    candidates = [Measured(str(number), *each) for number, each in enumerate(figures)]
    found = front(candidates)
    assert min(each.p50_us for each in found) == min(each.p50_us for each in candidates)
    assert max(each.throughput for each in found) == max(each.throughput for each in candidates)
    for first, second in pairwise(found):
        assert first.p50_us <= second.p50_us
        assert first.throughput <= second.throughput
    best = recommended(candidates)
    assert best is not None
    assert best.p50_us <= 1.2 * min(each.p50_us for each in candidates)
    fastest = recommended(candidates, "throughput")
    assert fastest is not None
    assert fastest.throughput == max(each.throughput for each in candidates)


def test_batches_grow_while_the_throughput_does() -> None:
    now = 0

    def clock() -> int:
        return now

    def run(size: int) -> None:
        nonlocal now
        now += 1_000_000 * max(size, 8)  # batches of up to 8 take as long as one

    rows = measure(run, 64, 0.1, clock)
    assert [row.batch for row in rows] == [1, 2, 4, 8, 16, 32]
    assert [round(row.throughput) for row in rows] == [125, 250, 500, 1000, 1000, 1000]
    assert rows[0].p50_us == rows[0].p99_us == 8000
    assert [row.batch for row in measure(run, 4, 0.1, clock)] == [1, 2, 4]
