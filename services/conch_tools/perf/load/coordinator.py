"""Runs one load in several processes, and adds up what they count.

A process that dies, or does not end after the load, is reported; what it has counted by then and the counts
of the others stay.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic_ns

from conch_tools.perf.load.load_process import LoadPlan, ProcessEnd, run_process
from conch_tools.perf.measure.results import Generator
from conch_tools.perf.measure.slices import Slice

_HEAD_START_NS = 50_000_000
_READY_S = 60.0
_GRACE_S = 15.0


class LoadError(Exception):
    """The processes that make the load did not start."""


@dataclass(frozen=True)
class LoadOutcome:
    """Result of a load.

    Attributes:
        slices: The counts by second.
        begin_ns: Start of the load, monotonic.
        length_s: Length of the load.
        generator: CPU time and lost processes of the load generator.
        interrupted: True if it ended early, by KeyboardInterrupt; its last part of a second is left out then,
            unless it is the only one.
        lost: A sentence for each process whose counts are not whole.
        stream_limit: Streams that the server allows on a connection, if calls had to wait for one; else 0.
        texts: The server's text of an error, by status.
    """

    slices: Sequence[Slice]
    begin_ns: int
    length_s: float
    generator: Generator
    interrupted: bool
    lost: tuple[str, ...] = ()
    stream_limit: int = 0
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class _Child:
    """A process.

    Attributes:
        name: For the user.
        end: Our end of its pipe.
        whole: Seconds of which it has sent all counts.
    """

    name: str
    process: BaseProcess
    end: Connection
    whole: int = 0


def run_load(
    plan: LoadPlan,
    processes: int,
    progress: Callable[[Slice], object],
    enough: Callable[[Sequence[Slice]], bool] | None = None,
    grace_s: float = _GRACE_S,
) -> LoadOutcome:
    """Runs a load.

    Args:
        plan: The load of all processes.
        processes: Number of processes.
        progress: Gets each second's counts once all processes have sent them.
        enough: Takes the counts of all whole seconds so far; returns True to end the load early.
        grace_s: Time that processes have to end after the load, and again to close their connections.

    Raises:
        LoadError: A process did not start.
    """
    children: list[_Child] = []
    try:
        for share in range(processes):
            children.append(_start(plan, share, processes))
        for child in children:
            _await_ready(child)
        begin_ns = monotonic_ns() + _HEAD_START_NS
        for child in children:
            child.end.send(begin_ns)
        outcome = _Collector(plan, children, begin_ns, progress, enough, grace_s).outcome()
    except BaseException:  # of any kind: the processes end before it goes on
        _end(children, 0)
        raise
    try:
        _end(children, grace_s)
    except KeyboardInterrupt:
        _end(children, 0)
        return replace(outcome, interrupted=True)
    return outcome


def _start(plan: LoadPlan, share: int, shares: int) -> _Child:
    # A process that is forked has no state of this one; its threads are none of gRPC's.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_process, args=(plan, share, shares, theirs), daemon=True)
    resource_tracker.ensure_running()  # its start would unblock the signal
    # The process inherits that: Ctrl-C goes to all of a terminal, and this process tells the others.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        theirs.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _Child(f"load process {share + 1} of {shares}", process, ours)


def _await_ready(child: _Child) -> None:
    try:
        if child.end.poll(_READY_S) and child.end.recv() == "ready":
            return
    except (EOFError, OSError):
        raise LoadError(f"{child.name} did not start: {_how_ended(child.process)}") from None
    raise LoadError(f"{child.name} did not start within {_READY_S:.0f} s")


def _end(children: list[_Child], grace_s: float) -> None:
    """Waits for the end of processes, and kills them after a time."""
    for child in children:
        child.end.close()
    while children:
        process = children[-1].process
        process.join(grace_s)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
        children.pop()


def _how_ended(process: BaseProcess) -> str:
    process.join(_GRACE_S)
    code = process.exitcode
    if code is None:
        return "it still runs"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class _Collector:
    """Adds up what the processes send."""

    def __init__(
        self,
        plan: LoadPlan,
        children: Sequence[_Child],
        begin_ns: int,
        progress: Callable[[Slice], object],
        enough: Callable[[Sequence[Slice]], bool] | None,
        grace_s: float,
    ) -> None:
        self._plan = plan
        self._children = children
        self._begin_ns = begin_ns
        self._progress = progress
        self._enough = enough
        self._running = {child.end: child for child in children}
        self._grace_ns = int(grace_s * 1e9)
        self._over_ns = begin_ns + plan.seconds * 1_000_000_000 + self._grace_ns
        self._seconds: dict[int, Slice] = {}
        self._whole = 0
        self._stopped = 0
        self._interrupted = False
        self._cpu_s = 0.0
        self._stream_limit = 0
        self._texts: dict[str, str] = {}
        self._lost: list[str] = []

    def outcome(self) -> LoadOutcome:
        """Waits for the end of the load."""
        while self._running:
            try:
                ends = wait(list(self._running), max(self._over_ns - monotonic_ns(), 0) / 1e9)
                if not ends:
                    self._give_up()
                for end in ends:
                    assert isinstance(end, Connection), "it is one of ours"
                    self._receive(self._running[end])
                self._report_whole_seconds()
            except KeyboardInterrupt:
                if self._interrupted:  # the second one
                    self._give_up()
                self._interrupted = True
                self._stop()
        plan, wall_s = self._plan, (monotonic_ns() - self._begin_ns) / 1e9
        length = self._stopped
        if not length:
            length = min(int(wall_s), plan.seconds) if self._interrupted else plan.seconds
        generator = Generator(len(self._children), round(self._cpu_s, 6), round(wall_s, 6), len(self._lost))
        length_s: float = length
        if (plan.calls and wall_s < length) or (self._interrupted and not length):
            length, length_s = max(self._seconds, default=-1) + 1, wall_s
        slices = _in_order(self._seconds, length)
        return LoadOutcome(
            slices,
            self._begin_ns,
            length_s,
            generator,
            self._interrupted,
            tuple(self._lost),
            self._stream_limit,
            self._texts,
        )

    def _receive(self, child: _Child) -> None:
        try:
            found = child.end.recv()
        except (EOFError, OSError):
            del self._running[child.end]
            self._lost.append(f"{child.name} died after {child.whole} s ({_how_ended(child.process)})")
            return
        if isinstance(found, ProcessEnd):
            del self._running[child.end]
            self._cpu_s += found.cpu_s
            self._stream_limit = max(self._stream_limit, found.stream_limit)
            self._texts = {**found.texts, **self._texts}
            return
        assert isinstance(found, Slice), "all else is counts"
        known = self._seconds.get(found.second)
        if known is None:
            self._seconds[found.second] = found
        else:
            known.add(found)
        child.whole = found.second + 1

    def _report_whole_seconds(self) -> None:
        """Passes on the seconds that are whole now."""
        whole = min((child.whole for child in self._running.values()), default=self._plan.seconds)
        if whole <= self._whole:
            return
        for second in range(self._whole, min(whole, self._plan.seconds)):
            self._progress(self._seconds.get(second) or Slice(second))
        self._whole = whole
        if self._enough is not None and self._enough(_in_order(self._seconds, whole)):
            self._enough = None
            self._stopped = whole
            self._stop()

    def _stop(self) -> None:
        self._over_ns = min(self._over_ns, monotonic_ns() + self._grace_ns)
        for end in self._running:
            with suppress(OSError):  # it has just ended
                end.send("stop")

    def _give_up(self) -> None:
        """Goes on without the processes that still run; they are killed."""
        for child in self._running.values():
            self._lost.append(f"{child.name} did not end after the load and was killed")
            child.process.kill()
        self._running.clear()


def _in_order(seconds: Mapping[int, Slice], count: int) -> list[Slice]:
    return [seconds.get(number) or Slice(number) for number in range(count)]
