"""Calls that would wait for ever: models that wait for each other, or for themselves.

A call waits for the instance that runs it, or, as long as it is queued, for any instance of its model. An
instance whose own thread waits for a call waits for that call. Where everything that a call waits for does
nothing but wait, and all of it was found waiting for the same at two looks, nothing of it can ever go on.
Whatever is not known to wait counts as busy: instances of other backends, coroutines, threads that models
have started, and calls that leave their queue by themselves after a time. What a model in a worker process
waits for the worker tells the server, which looks for it; see `conch.workers.waiting`.

Of the calls that wait for each other the one that came last fails; the others may go on then.
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
    """Whether a call that has not been answered has to fail, as it could never be served.

    Args:
        call: The call, for which a thread waits.
        before: What this has returned for the call the last time.

    Returns:
        All calls that it waits for, itself included, if nothing but calls stands between it and its answer,
        else nothing; and whether it has to fail.
    """
    found = frozenset(_Look(call).calls())
    if not found or found != before or call.core.state is not RequestState.QUEUED:
        return found, False
    newest = max((each for each in found if _is_queued(each)), key=lambda each: each.since_ns, default=None)
    return found, newest is call


class _Look:
    """What is to be seen from a call at one time."""

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
        """All calls that the call waits for, itself included; none where anything else may happen."""
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
        """The instances that a call waits for; none where that can't be known."""
        core = call.core
        if core.completed:
            # Its thread runs another model's batch meanwhile, or is about to go on.
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
