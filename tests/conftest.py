"""Fixtures and settings of all tests."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import uvloop

# `pytest` alone, unlike `python -m pytest`, does not put the root on the path.
if (_root := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _root)

from tests.support import budgets, profiles, sets, waiting
from tests.support.leaks import no_leaks
from tests.support.servers import FRONT_ENDS

# A shell has programs that it starts in the background ignore SIGINT, and so would what tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# From its first loop on libuv keeps a pipe for signals, which is no leak of the test that has that loop.
uvloop.new_event_loop().close()

profiles.load()
waiting.make_httpx_patient()
_guard = sets.ProcessGuard()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of `make test` and its like."""
    parser.addoption(
        "--budgets",
        choices=("quick", "all", "grpcio"),
        help="report the slowest tests and each folder's time; `quick` fails where one is half over budget",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that start processes, and puts those last that share a server."""
    sets.mark(items)
    sets.order(items)


def pytest_collection_finish() -> None:
    """Keeps modules and collected tests out of garbage collection: the check for leaks collects often."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Refuses tests of the quick set that start a process, unless all servers have front processes."""
    with _guard.refused() if sets.is_quick(item) and FRONT_ENDS == "0" else nullcontext():
        return (yield)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves a thread, process, file descriptor or shared-memory name behind."""
    with no_leaks():
        yield


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Reports times where they are asked for."""
    if part := config.getoption("budgets"):
        over = budgets.report(terminalreporter, part)
        # The others take half an hour, on machines of all speeds, and are not to fail by that alone.
        if over and part == "quick" and terminalreporter._session.exitstatus == pytest.ExitCode.OK:
            terminalreporter.write_line(f"over budget by more than half: {', '.join(over)}", red=True)
            terminalreporter._session.exitstatus = pytest.ExitCode.TESTS_FAILED
