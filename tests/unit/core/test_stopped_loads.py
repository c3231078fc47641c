"""Loads that are told not to go on."""

from __future__ import annotations

import threading

from conch.core.stopping import load_stopped, stopping_with


def test_a_load_is_told_by_the_innermost_who_runs_it() -> None:
    assert not load_stopped()()
    with stopping_with(lambda: True):
        assert load_stopped()()
        with stopping_with(lambda: False):
            assert not load_stopped()()
        assert load_stopped()()
    assert not load_stopped()()


def test_it_is_that_of_the_thread() -> None:
    found: list[bool] = []
    with stopping_with(lambda: True):
        thread = threading.Thread(target=lambda: found.append(load_stopped()()))
        thread.start()
        thread.join()
    assert found == [False]
