"""One process that makes load: runs its part of a plan, and sends each second's counts to its parent."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic_ns, process_time

from conch_tools.connection import Endpoint
from conch_tools.perf.load import schedules
from conch_tools.perf.load.calls import Client
from conch_tools.perf.load.driver import Driver, SequenceDriver
from conch_tools.perf.load.http1_client import Http1Client
from conch_tools.perf.load.http2_client import Http2Client
from conch_tools.perf.load.ready_requests import ReadyRequest
from conch_tools.perf.load.recorder import Recorder
from conch_tools.perf.load.sequences import SequencePlan, Sequences
from conch_tools.perf.measure.results import Load

_SEQUENCES_END_NS = 5_000_000_000
"""Longest time for the last requests of live sequences, after the load."""


@dataclass(frozen=True)
class LoadPlan:
    """Load of all processes together.

    Attributes:
        endpoint: The server.
        path: Path of the method, or of the HTTP request.
        streams: True if requests are messages of streams.
        decoupled: True if a request has any number of responses.
        requests: Sent in turn.
        load: Concurrency or rate.
        connections: Connections of all processes.
        seconds: Length, with the warm-up.
        most_outstanding: Limit of unanswered requests of an open loop, of all processes.
        gaps_us: Gaps of a trace in microseconds; empty for none.
        seed: Seed of random times.
        calls: Calls of all processes, which end with the last one; 0 for as many as there is time for.
        sequences: If there are any, their requests are sent, and not ``requests``.
        live_sequences: Concurrent sequences of all processes, for a rate.
        validates: True if requests have expected outputs.
        keeps: True if the counts have records of requests, with their responses.
    """

    endpoint: Endpoint
    path: str
    streams: bool
    decoupled: bool
    requests: Sequence[ReadyRequest]
    load: Load
    connections: int
    seconds: int
    most_outstanding: int = 10_000
    gaps_us: Sequence[float] = ()
    seed: int = 0
    calls: int = 0
    sequences: SequencePlan | None = None
    live_sequences: int = 0
    validates: bool = False
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """Last message of a process.

    Attributes:
        cpu_s: Its CPU time for the load.
        stream_limit, texts: As of `Driver`.
    """

    cpu_s: float
    stream_limit: int
    texts: Mapping[str, str]


def run_process(plan: LoadPlan, share: int, shares: int, parent: Connection) -> None:
    """Runs one process's part.

    Says that it is ready, gets the time at which to begin, sends each second's counts, and last a
    `ProcessEnd`.
    """
    try:
        parent.send("ready")
        begin_ns: int = parent.recv()
        recorder = Recorder(begin_ns, parent.send)
        driver, slots = _driver(plan, share, shares, recorder, _Stop(parent, recorder.passed))
        gc.freeze()
        gc.disable()
        parent.poll(max(begin_ns - monotonic_ns(), 0) / 1e9)  # waits for the time, or to be stopped
        before_s = process_time()
        end_ns = begin_ns + plan.seconds * 1_000_000_000
        if plan.load.mode == "concurrency":
            driver.run_closed(slots, end_ns)
        else:
            times = _times(plan, share, shares)
            most = max(1, plan.most_outstanding // shares)
            driver.run_open((begin_ns + int(at_ns) for at_ns in times), end_ns, most)
        parent.send(ProcessEnd(process_time() - before_s, driver.stream_limit, driver.texts))
        if isinstance(driver, SequenceDriver):
            driver.end_sequences(monotonic_ns() + _SEQUENCES_END_NS)
        driver.close()
    except (BrokenPipeError, EOFError):
        os._exit(1)  # the parent has ended


def _driver(
    plan: LoadPlan, share: int, shares: int, recorder: Recorder, stops: Callable[[], bool]
) -> tuple[Driver, int]:
    """The driver of one process, and how many slots of all there are it has."""
    connections = max(1, plan.connections // shares)
    calls = len(range(share, plan.calls, shares)) if plan.calls else sys.maxsize
    whole = int(plan.load.value) if plan.load.mode == "concurrency" else plan.live_sequences
    slots = len(range(share, whole, shares))

    def connect(ended: Driver) -> Client:
        return _connect(plan, ended)

    if plan.sequences is None:
        in_turn = _in_turn(plan.requests, share)
        return Driver(connect, connections, in_turn, recorder, stops, calls, plan.keeps), slots
    http = plan.endpoint.protocol == "http"
    sequences = Sequences(plan.sequences, http, slots, share, shares, plan.seed)
    return SequenceDriver(connect, connections, sequences, slots, recorder, stops, calls, plan.keeps), slots


class _Stop:
    """Returns True once the parent ends the load early; reports the time, too, every 50 ms at most."""

    def __init__(self, parent: Connection, passed: Callable[[int], None]) -> None:
        self._parent = parent
        self._passed = passed
        self._next_ns = 0

    def __call__(self) -> bool:
        now = monotonic_ns()
        if now < self._next_ns:
            return False
        self._next_ns = now + 50_000_000
        self._passed(now)
        return self._parent.poll()


def _times(plan: LoadPlan, share: int, shares: int) -> Iterator[float]:
    load = plan.load
    if plan.gaps_us:
        return schedules.traced(plan.gaps_us, share, shares)
    if load.distribution == "poisson":
        return schedules.poisson(load.value / shares, plan.seed * shares + share)
    return schedules.constant(load.value, share, shares)


def _in_turn(requests: Sequence[ReadyRequest], share: int) -> Callable[[int], ReadyRequest]:
    at = share

    def next_request(slot: int) -> ReadyRequest:
        nonlocal at
        at += 1
        return requests[at % len(requests)]

    return next_request


def _connect(plan: LoadPlan, ended: Driver) -> Client:
    if plan.endpoint.protocol == "http":
        return Http1Client(plan.endpoint, plan.path, ended, plan.validates)
    return Http2Client(plan.endpoint, plan.path, plan.streams, plan.decoupled, ended, plan.validates)
