"""Measuring what a version takes, and giving it back."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from conch_control.lifecycle import memory_usage
from conch_control.lifecycle.memory_usage import (
    MemoryMeter,
    ReleasePace,
    log_released,
    log_taken,
    release_memory,
    resident_bytes,
)


def test_growth() -> None:
    looks = iter([100, 150, 200, 170])
    meter = MemoryMeter(lambda: next(looks))
    assert meter.end(meter.begin()) == 50
    assert meter.end(meter.begin()) == 0, "not less than nothing"


def test_two_at_once_can_not_be_told_apart() -> None:
    meter = MemoryMeter(lambda: 1)
    first, second = meter.begin(), meter.begin()
    assert meter.end(first) is None
    third = meter.begin()
    assert meter.end(second) is None
    assert meter.end(third) is None
    assert meter.end(meter.begin()) == 0


def test_a_platform_that_does_not_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (resident_bytes() or 0) > 1 << 20
    monkeypatch.setattr(memory_usage, "STATM", tmp_path / "none")
    assert resident_bytes() is None
    meter = MemoryMeter()
    assert meter.end(meter.begin()) is None


def test_only_memory_that_shows_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    before = resident_bytes()
    assert before is not None
    for grown in (None, 0, 50_000, 3 << 20):
        log_taken("'m' version 1", grown)
    for more in (-(1 << 40), 1 << 40):
        log_released("'m' version 1", before + more)
    first, second = caplog.messages
    assert first == "'m' version 1 has taken 3.0 MiB"
    assert second.startswith("'m' version 1 gave back 104")


def test_garbage_goes() -> None:
    class Circle:
        me: Circle

    gc.disable()
    try:
        circle = Circle()
        circle.me = circle
        gone = weakref.ref(circle)
        del circle
        release_memory()
        assert gone() is None
    finally:
        gc.enable()


def test_large_blocks_return_to_the_system() -> None:
    # Too small to be mapped one by one, so that they stay with the allocator when they are freed.
    blocks = [bytearray(b"x" * 60_000) for _ in range(2_000)]
    before = resident_bytes()
    assert before is not None
    del blocks
    release_memory()
    after = resident_bytes()
    assert after is not None
    assert before - after > 60 << 20


def test_small_models_in_quick_succession_share_a_release() -> None:
    now = 0
    pace = ReleasePace(lambda: now)
    assert pace.due(100), "the first"
    assert not pace.due(100)
    assert pace.due(None), "of unknown size"
    assert [pace.due(400_000) for _ in range(6)] == [False, False, True] * 2, "a mebibyte at most is left"
    now += 1_000_000_000
    assert pace.due(0), "after a second"
    assert not pace.due(0)
