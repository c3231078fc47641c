"""Loads that are stopped."""

from __future__ import annotations

import threading

from conch.core.model_control import cancellable_load, load_cancelled


def test_a_load_is_told_by_the_innermost_who_runs_it() -> None:
    assert not load_cancelled()()
    with cancellable_load(lambda: True):
        assert load_cancelled()()
        with cancellable_load(lambda: False):
            assert not load_cancelled()()
        assert load_cancelled()()
    assert not load_cancelled()()


def test_it_is_that_of_the_thread() -> None:
    found: list[bool] = []
    with cancellable_load(lambda: True):
        thread = threading.Thread(target=lambda: found.append(load_cancelled()()))
        thread.start()
        thread.join()
    assert found == [False]
