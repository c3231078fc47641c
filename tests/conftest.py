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

# `pytest` alone, unlike `python -m pytest`, does not put the root on the path.
if (_root := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _root)

from tests.support import profiles, run_report, sets, waiting
from tests.support.grpc_transports import grpc_transport
from tests.support.leaks import no_leaks
from tests.support.servers import FRONT_ENDS
from tests.support.sites import site

__all__ = ["grpc_transport", "site"]

# A shell has programs that it starts in the background ignore SIGINT, and so would what tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

profiles.load()
waiting.make_httpx_patient()
_guard = sets.ProcessGuard()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of `make test` and its like."""
    parser.addoption(
        "--times", action="store_true", help="report the slowest tests and the seconds of each folder"
    )
    parser.addoption("--record", type=Path, metavar="FILE", help="append the outcome, for sum_test_runs.py")


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


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Reports times, and records what came out, where that is asked for."""
    if hasattr(config, "workerinput"):
        return  # of xdist: the process that started it reports for all
    if config.getoption("times"):
        run_report.report_times(terminalreporter)
    if path := config.getoption("record"):
        run_report.record(terminalreporter, exitstatus, path)
