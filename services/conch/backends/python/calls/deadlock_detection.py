"""Detects calls that can never complete: models that wait for each other or for themselves.

Theory of operation. A call waits for the instance that runs it or, while queued, for all instances of its
model. An instance whose executing thread waits for a call waits for that call. A call is deadlocked when
everything reachable from it only waits, and two looks in a row find the same set of calls.

Assumptions: anything not known to wait counts as busy: instances of other backends, coroutines, threads
started by models, calls with a queue timeout. Workers report their waits to the server, which checks them;
see `conch.workers.connection.waiting_calls`.

Guarantee: of the calls in a cycle the newest one fails; the others can then proceed.
"""

from __future__ import annotations

from collections.abc import Iterator

from conch.backends.python.calls.call_context import CallContext
from conch.backends.python.runtime.module_loading import owners
from conch.core.bls import Wait, Waiter
from conch.core.request import InferenceRequest, RequestState

DEADLOCK = (
    "model '{model}' can't run this call: all of its instances wait for calls that wait for this one; "
    "give it more instances"
)


def is_deadlocked(call: Wait, before: frozenset[Wait]) -> tuple[frozenset[Wait], bool]:
    """Checks whether a pending call has to fail because it can never run.

    Returns all calls it transitively waits for, itself included, empty if anything can make progress, and
    whether it has to fail. `before` is the set that the previous look at this call returned.
    """
    found = frozenset(_Look(call).calls())
    if not found or found != before or call.core.state is not RequestState.QUEUED:
        return found, False
    newest = max((each for each in found if _is_queued(each)), key=lambda each: each.since_ns, default=None)
    return found, newest is call


class _Look:
    """A snapshot of the waiting calls."""

    def __init__(self, call: Wait) -> None:
        self._call = call
        server = call.caller.known_server
        here = (one for one in owners() if isinstance(one, CallContext) and one.known_server is server)
        self._callers: list[Waiter] = [*here, *(() if server is None else server.waiters.copy())]
        self._holders: dict[InferenceRequest, Waiter] = {}
        for caller in self._callers:
            waiting = caller.waiting
            for parent in () if waiting is None else waiting.parents or ():
                self._holders[parent] = caller

    def calls(self) -> set[Wait]:
        """All calls that the call transitively waits for; empty if anything can make progress."""
        found: set[Wait] = set()
        left = [self._call]
        while left:
            call = left.pop()
            if call in found:
                continue
            found.add(call)
            holders = list(self._waited_for(call))
            if not holders:
                return set()
            for holder in holders:
                waiting = holder.waiting
                if waiting is None:
                    return set()
                left.append(waiting)
        return found

    def _waited_for(self, call: Wait) -> Iterator[Waiter]:
        """The instances that a call waits for; none if unknown."""
        core = call.core
        if core.completed:
            # Its thread is running another model's batch or is about to continue.
            for caller in self._callers:
                waiting = caller.waiting
                if waiting is None or caller.thread != call.caller.thread:
                    continue
                if waiting.since_ns > call.since_ns:
                    yield caller
        elif core.state is RequestState.RUNNING:
            if core in self._holders:
                yield self._holders[core]
        elif _is_queued(call):
            spec = None if core.model is None else core.model.spec
            for caller in self._callers:
                if spec is not None and caller.model == (spec.identifier, spec.version):
                    yield caller


def _is_queued(call: Wait) -> bool:
    return call.core.state is RequestState.QUEUED and not call.core.timeout_us
