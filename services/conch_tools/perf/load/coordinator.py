"""Runs one load in several processes, and adds up what they count."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from time import monotonic_ns

from conch_tools.perf.load.load_process import Plan, run_process
from conch_tools.perf.measure.results import Generator
from conch_tools.perf.measure.slices import Slice

_HEAD_START_NS = 50_000_000
_READY_S = 60.0
_GRACE_S = 30.0
"""Time that processes have to end after the load's."""


class LoadError(Exception):
    """The processes that make the load could not do so."""


@dataclass(frozen=True)
class LoadOutcome:
    """What a load gave.

    Attributes:
        slices: The counts by second.
        begin_ns: When it began, monotonic.
        length_s: How long it was.
        generator: What it cost.
        interrupted: Whether it ended early, by KeyboardInterrupt; only whole seconds are counted then.
    """

    slices: Sequence[Slice]
    begin_ns: int
    length_s: float
    generator: Generator
    interrupted: bool


def run_load(
    plan: Plan,
    processes: int,
    progress: Callable[[Slice], object],
    enough: Callable[[Sequence[Slice]], bool] | None = None,
) -> LoadOutcome:
    """Runs a load.

    Args:
        plan: What is to be done.
        processes: How many do it.
        progress: Gets each second's counts once all processes have sent them.
        enough: Whether the load ends before its time; gets the counts of all whole seconds so far.

    Raises:
        LoadError: A process has died.
    """
    # A process that is forked has no state of this one; its threads are none of gRPC's.
    context = multiprocessing.get_context("spawn")
    ends: list[Connection] = []
    children = []
    try:
        for share in range(processes):
            ours, theirs = context.Pipe()
            child = context.Process(target=run_process, args=(plan, share, processes, theirs), daemon=True)
            child.start()
            theirs.close()
            ends.append(ours)
            children.append(child)
        for end in ends:
            if not end.poll(_READY_S) or _receive(end) != "ready":
                raise LoadError("a load process did not start")
        begin_ns = monotonic_ns() + _HEAD_START_NS
        for end in ends:
            end.send(begin_ns)
        return _collect(plan, ends, begin_ns, progress, enough)
    finally:
        for end in ends:
            end.close()
        for child in children:
            child.join(_GRACE_S)
            if child.is_alive():
                child.kill()
                child.join()
            child.close()


def _collect(
    plan: Plan,
    ends: list[Connection],
    begin_ns: int,
    progress: Callable[[Slice], object],
    enough: Callable[[Sequence[Slice]], bool] | None,
) -> LoadOutcome:
    seconds: dict[int, Slice] = {}
    # A process sends nothing for a second without events; its next counts say that the second is over.
    complete = dict.fromkeys(ends, 0)
    whole = 0
    shares: dict[int, int] = {}
    open_ends = list(ends)
    cpu_s, interrupted, stopped = 0.0, False, 0
    over_ns = begin_ns + int((plan.seconds + _GRACE_S) * 1e9)
    while open_ends:
        try:
            left_s = (over_ns - monotonic_ns()) / 1e9
            ready = wait(open_ends, max(left_s, 0))
            if not ready:
                raise LoadError(f"a load process did not end {_GRACE_S:.0f} s after its load")
            for end in ready:
                assert isinstance(end, Connection), "it is one of ours"
                found = _receive(end)
                if isinstance(found, float):
                    cpu_s += found
                    open_ends.remove(end)
                    continue
                assert isinstance(found, Slice), "all else is counts"
                known = seconds.get(found.second)
                if known is None:
                    seconds[found.second] = found
                else:
                    known.add(found)
                shares[found.second] = shares.get(found.second, 0) + 1
                if shares[found.second] == len(ends):
                    progress(seconds[found.second])
                complete[end] = found.second + 1
                if enough is None or min(complete.values()) <= whole:
                    continue
                whole = min(complete.values())
                if enough(_in_order(seconds, whole)):
                    enough = None
                    stopped = whole
                    _stop(open_ends)
        except KeyboardInterrupt:
            interrupted = True
            _stop(open_ends)
    wall_s = (monotonic_ns() - begin_ns) / 1e9
    generator = Generator(len(ends), round(cpu_s, 6), round(wall_s, 6))
    if not stopped:
        stopped = min(int(wall_s), plan.seconds) if interrupted else plan.seconds
    if plan.calls and wall_s < stopped:
        slices = _in_order(seconds, max(seconds, default=-1) + 1)
        return LoadOutcome(slices, begin_ns, wall_s, generator, interrupted)
    return LoadOutcome(_in_order(seconds, stopped), begin_ns, stopped, generator, interrupted)


def _stop(ends: Sequence[Connection]) -> None:
    for end in ends:
        with suppress(BrokenPipeError):  # it has just ended
            end.send("stop")


def _in_order(seconds: Mapping[int, Slice], count: int) -> list[Slice]:
    return [seconds.get(number) or Slice(number) for number in range(count)]


def _receive(end: Connection) -> object:
    try:
        return end.recv()
    except EOFError:
        raise LoadError("a load process has died") from None
