"""The two sets of tests: what runs at every change, and what takes processes or time.

A test is `process` if it starts a process, `slow` if it takes more than a few seconds; `make test` runs
neither. Whole folders and cases with a worker are marked here, others where they stand. A test of the quick
set that starts a process fails, also where a fixture starts it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from conch.core.compiled import build

PROCESS_FOLDERS = ("/chaos/", "/e2e/")
PROCESS_FIXTURES = frozenset({"driver", "libraries"})
"""Fixtures that start a process for every test that uses them, such as a compiler."""

_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"})


class StartsProcess(Exception):
    """A test that is not marked `process` has started one."""


class ProcessGuard:
    """Refuses to start processes inside `refused`; Python offers no way to take an audit hook away again."""

    def __init__(self) -> None:
        self._refused = False
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._refused and event in _EVENTS:
            raise StartsProcess(f"mark this test `process`: it starts {arguments[:2]}")

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Has attempts to start a process raise `StartsProcess`, from any thread."""
        self._refused = True
        try:
            yield
        finally:
            self._refused = False


def mark(items: list[pytest.Item]) -> None:
    """Marks the tests of whole folders, cases with models in workers and those beside a real Triton."""
    for item in items:
        cases = getattr(item, "callspec", None)
        values = () if cases is None else cases.params.values()
        worker = any(value == "worker" for value in values if isinstance(value, str))
        fixtures = PROCESS_FIXTURES & set(getattr(item, "fixturenames", ()))
        outside = any(item.get_closest_marker(name) is not None for name in ("peer", "browser"))
        if worker or fixtures or outside or any(each in item.nodeid for each in PROCESS_FOLDERS):
            item.add_marker(pytest.mark.process)
        pure = item.get_closest_marker("pure")
        if pure is not None and build() == "compiled":
            item.add_marker(pytest.mark.skip(reason=pure.args[0]))


def order(items: list[pytest.Item]) -> None:
    """Puts the contract tests last: unit tests are to have a process without a server of the session."""
    items.sort(key=lambda item: "/contract/" in item.nodeid)


def is_quick(item: pytest.Item) -> bool:
    """True if the test belongs to the set that runs at every change."""
    return not any(item.get_closest_marker(name) for name in ("process", "slow", "peer", "gpu", "browser"))
