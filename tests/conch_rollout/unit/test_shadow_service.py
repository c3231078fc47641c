"""Shadows from their opening to their end, and the processor time of comparisons."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.servers import WAIT_S, eventually

from conch.core.tensor import Tensor
from conch_rollout.shadows.pair_files import PairFiles
from conch_rollout.shadows.shadow import ShadowPolicy, kept_input
from conch_rollout.shadows.shadow_service import BURST_NS, COMPARE_SHARE, Allowance, Shadows


@pytest.fixture
def shadows() -> Iterator[Shadows]:
    made = Shadows()
    yield made
    assert made.stop(WAIT_S)


def running() -> set[str]:
    return {thread.name for thread in threading.enumerate()} & {"conch-shadow", "conch-compare"}


def test_a_rollout_has_one_shadow(shadows: Shadows) -> None:
    first = shadows.open("m", 2, b"1", ShadowPolicy())
    assert first is not None
    other = ShadowPolicy(inflight=3)
    assert shadows.open("m", 2, b"1", other) is first
    assert first.policy is other
    again = shadows.open("m", 2, b"2", other)
    assert again is not None
    assert (first.active, again.active) == (False, True)
    assert (shadows.find("m"), shadows.find("n"), shadows.all()) == (again, None, [again])


def test_the_threads_end_with_the_last_shadow(shadows: Shadows) -> None:
    assert not running()
    for name in "mn":
        shadows.open(name, 2, b"1", ShadowPolicy())
    assert running() == {"conch-shadow", "conch-compare"}
    for name in "mmx":
        shadows.close(name)
    assert len(running()) == 2
    shadows.close("n")
    eventually(lambda: not running(), "the threads end")
    assert len(shadows.all()) == 2, "reports stay"
    assert shadows.open("m", 2, b"1", ShadowPolicy()) is not None
    assert len(running()) == 2


def test_nothing_opens_after_the_stop(shadows: Shadows) -> None:
    assert shadows.stop(WAIT_S)
    assert shadows.open("m", 2, b"1", ShadowPolicy()) is None


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**10)), min_size=1, max_size=50))
def test_comparisons_take_their_share_at_most(work: list[tuple[int, int]]) -> None:
    """Each comparison costs some time, after the time to wait and a pause."""
    now, spent = 0, 0
    allowance = Allowance(now)
    for cost, pause in work:
        now += cost
        spent += cost
        wait = allowance.spend(cost, now)
        assert spent <= (now + wait) * COMPARE_SHARE + BURST_NS + 1
        assert wait <= cost / COMPARE_SHARE + 1
        now += wait + pause


def test_a_time_without_comparisons_saves_up_one_burst() -> None:
    hour_ns = 3600 * 10**9
    assert Allowance(0).spend(BURST_NS, hour_ns) == 0
    assert Allowance(0).spend(BURST_NS + 1, hour_ns) > 0


@pytest.mark.parametrize("kind", ["message", "array", "array read before", "strings"])
def test_inputs_are_the_same_bytes_unless_others_may_write_to_them(kind: str) -> None:
    array = np.zeros(4, np.float32)
    made = {
        "message": Tensor("IN", "FP32", (4,), np.zeros(16, np.uint8).data.toreadonly()),
        "array": Tensor.from_array("IN", array),
        "array read before": Tensor.from_array("IN", array),
        "strings": Tensor.from_array("IN", np.array([b"a"], object)),
    }[kind]
    data = None if kind == "array" else made.data
    kept = kept_input(made)
    array[:] = 1
    if kind in ("message", "strings"):
        assert kept.data is data
    else:
        assert not kept.numpy().any()


def test_files_of_pairs_stay_in_their_directory(tmp_path: Path) -> None:
    """Whatever the model is called, and whatever its tensors hold."""
    files = PairFiles(tmp_path / "captured", "/models::../m-2")
    strings, short = Tensor("S", "BYTES", (1,), b"\1\0\0\0a"), Tensor("X", "FP32", (2,), b"\0\0\0\0")
    name = files.write({"stable/0/S": strings, "candidate/0/X": short})
    assert [path.name for path in (tmp_path / "captured").iterdir()] == [name]
    with np.load(tmp_path / "captured" / name) as arrays:
        assert {key: arrays[key].tobytes() for key in arrays} == {
            "stable/0/S": strings.data,
            "candidate/0/X": short.data,
        }
    files.remove(name)
    assert not list((tmp_path / "captured").iterdir())


def test_a_directory_that_can_not_be_written_to_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert PairFiles(tmp_path / "file", "m").write({}) == ""
    assert "can't be written" in caplog.text
