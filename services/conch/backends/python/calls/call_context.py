"""On whose behalf a model calls the server, whatever thread or module the call comes from.

In Triton a model has a process, and so the server is simply the one that started it. Here many models, and
possibly several servers, share an interpreter. The caller is whoever

1. has the innermost module of a model on the stack: whatever a model calls, or starts a thread with;
2. else, has the coroutine that runs, which may be a library's in a task of its own;
3. else, is the only one there is; if there are several, and all of one server, then that server for nobody.

A request that a model makes remembers the first answer, so that it can be run from any thread.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from conch.backends.python.api.pb_errors import TritonModelException
from conch.backends.python.runtime.module_loading import (
    Execution,
    current_execution,
    is_model_module,
    owner_of,
    owners,
)
from conch.core.bls import ServerCalls, Wait, Waiter
from conch.core.request import InferenceRequest
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec, identifier

NOWHERE = "BLS is only supported during the 'execute' function."
FORKED = (
    "a process that model instance '{name}' has forked can't call the server: make the call in the model's "
    "own process and pass the result on"
)

_forks = 0
"""How many forks lie between the program's first process and this one."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class OpenCall(Protocol):
    """A call that has not ended."""

    def abandon(self) -> None:
        """Cancels it and has whoever waits for it know."""


class CallContext:
    """One instance of a model, as it calls the server.

    Args:
        server: The server; None where it can't be called.
        name: The instance's name.
        spec: The model; None for somebody who is no model.

    Attributes:
        known_server: The server, whether it can be called or not.
        name: The instance's name.
        model: The model's identifier and version.
        running: The batch that `thread` executes; to be set around `execute`, unless that is a coroutine.
        thread: The identifier of the thread that executes it.
        waiting: The call that this thread waits for.
        in_cycle: Whether the call that was last waited for was in a circle of calls when it was looked at.
        opening: Whether the instance is being made, so that whoever loads the model waits for it.
        loads: The model that it waits for meanwhile, to be loaded.
        warned_of_blocking: Whether the log says that it blocks its event loop while it waits for responses.
    """

    __slots__ = (
        "_closed",
        "_forks",
        "_lock",
        "_namespace",
        "_open",
        "_unwanted",
        "in_cycle",
        "known_server",
        "loads",
        "model",
        "name",
        "opening",
        "running",
        "thread",
        "waiting",
        "warned_of_blocking",
    )

    def __init__(self, server: ServerCalls | None, name: str, spec: ModelSpec | None = None) -> None:
        self.known_server = server
        self.name = name
        self.model = ("", 0) if spec is None else (spec.identifier, spec.version)
        self.running: Batch | None = None
        self.thread = 0
        self.waiting: Wait | None = None
        self.in_cycle = False
        self.opening = False
        self.loads = ""
        self.warned_of_blocking = False
        self._namespace = "" if spec is None else spec.namespace
        self._forks = _forks
        self._lock = threading.Lock()
        self._open: set[OpenCall] = set()
        self._closed = False
        self._unwanted: tuple[list[InferenceRequest] | None, int] | None = None

    @property
    def server(self) -> ServerCalls:
        """The server.

        Raises:
            TritonModelException: It can't be called from here, or not any more.
        """
        if self.known_server is None:
            raise TritonModelException(NOWHERE)
        self.check_process()
        if self._closed:
            raise TritonModelException(f"model instance '{self.name}' has been unloaded")
        return self.known_server

    def check_process(self) -> None:
        """Checks that this is the caller's process: no thread answers calls in a fork of it.

        Raises:
            TritonModelException: It is a fork.
        """
        if self._forks != _forks:
            raise TritonModelException(FORKED.format(name=self.name))

    def names(self, model_name: str) -> Iterator[str]:
        """What a model may be known as to this caller, in the order in which that is to be tried."""
        if self._namespace:
            yield identifier(self._namespace, model_name)
        yield model_name

    def callers(self) -> list[InferenceRequest] | None:
        """The requests for which the calling thread executes; None where that is not known."""
        batch = self.running
        if batch is not None and self.thread == threading.get_ident():
            return batch.requests
        running = current_execution.get()
        return running.requests if running is not None and running.owner is self else None

    def noticed(self, requests: list[InferenceRequest] | None, now_ns: int) -> int:
        """When it first made a call for requests that nobody waits for: now, or before."""
        if self._unwanted is None or self._unwanted[0] is not requests:
            self._unwanted = requests, now_ns
        return self._unwanted[1]

    @contextmanager
    def coroutine(self, batch: Batch) -> Iterator[None]:
        """Around the start of a coroutine: it and all tasks that it starts call for a batch."""
        token = current_execution.set(Execution(self, batch.requests))
        try:
            yield
        finally:
            current_execution.reset(token)

    def start_waiting(self, call: Wait) -> bool:
        """Notes that its executing thread waits for a call, if that is the calling thread; whether it is."""
        if self.running is None or self.thread != threading.get_ident():
            return False
        self.waiting = call
        return True

    def cancel(self, request: InferenceRequest) -> None:
        """Cancels a request of its, also when it can't make any more."""
        if self.known_server is not None:
            self.known_server.cancel(request)

    @property
    def known_as(self) -> tuple[str, str]:
        """What its model is known as, with its namespace and without."""
        known_as = self.model[0]
        return known_as, known_as.removeprefix(f"{self._namespace}::")

    def opened(self, call: OpenCall) -> bool:
        """Takes notice of a call, which is abandoned if it has not ended when the caller goes.

        Returns:
            Whether the caller is still there; if not, the call has been abandoned.
        """
        with self._lock:
            self._open.add(call)
            closed = self._closed
        if closed:
            call.abandon()
        return not closed

    def ended(self, call: OpenCall) -> None:
        """Takes notice of the end of a call."""
        with self._lock:
            self._open.discard(call)

    def close(self) -> None:
        """Abandons all calls, those that are open and those to come."""
        with self._lock:
            self._closed = True
            calls = list(self._open)
        for call in calls:
            call.abandon()


class Opening(Waiter, Protocol):
    """An instance that may be about to be made.

    Attributes:
        opening: Whether it is.
        loads: See `Waiter`.
    """

    opening: bool
    loads: str


@contextmanager
def loading(waiter: Opening, name: str, error: Callable[[str], Exception]) -> Iterator[None]:
    """Around the load of a model for an instance, which the load is not to wait for if that is being made.

    Args:
        waiter: The instance.
        name: The model.
        error: Makes what is raised where it would, of the reason.
    """
    if not waiter.opening:
        yield
        return
    waiter.loads = name  # before the others are looked at: of two that come at once one sees the other
    try:
        reason = _why_not_load(waiter, name)
        if reason:
            raise error(reason)
        yield
    finally:
        waiter.loads = ""


def _why_not_load(waiter: Waiter, name: str) -> str:
    """Why an instance that is being made must not have a model loaded; empty if it may.

    Args:
        waiter: The instance; its `loads` is the model already.
        name: The model.
    """
    server = waiter.known_server
    known: list[Waiter] = [one for one in owners() if isinstance(one, CallContext)]
    asking = [one for one in (*known, *(() if server is None else server.waiters.copy())) if one.loads]
    asked, left = {name}, [name]
    while left:
        wanted = left.pop()
        if wanted in waiter.known_as:
            return (
                f"Failed to load model: model '{name}' cannot be loaded while '{waiter.name}' is being "
                f"initialized: its load would wait for that"
            )
        for one in asking:
            if wanted in one.known_as and one.loads not in asked:
                asked.add(one.loads)
                left.append(one.loads)
    return ""


def current_call_context() -> CallContext:
    """On whose behalf the calling thread calls.

    Raises:
        TritonModelException: That is nobody, or cannot be known.
    """
    caller = find_call_context(known=True)
    if caller is not None:
        return caller
    known = [owner for owner in owners() if isinstance(owner, CallContext)]
    if len(known) == 1:
        return known[0]
    servers = {id(caller.known_server): caller.known_server for caller in known}
    if len(servers) == 1:
        known[0].check_process()
        return CallContext(known[0].known_server, "")
    if not servers:
        raise TritonModelException(NOWHERE)
    raise TritonModelException(
        "models of several servers run in this process, and it is not known which of them calls: make the "
        "InferenceRequest in a module of the model, or on the thread that executes it"
    )


def find_call_context(known: bool = False) -> CallContext | None:
    """The same where the stack or the running coroutine tells it; else None.

    Args:
        known: Whether a model that can't call the server, or has been unloaded, is an error.

    Raises:
        TritonModelException: It is one, and has been found.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if is_model_module(module):
            owner = owner_of(module)
            if isinstance(owner, CallContext):
                return owner
            if known:
                raise TritonModelException(NOWHERE)
            return None
        frame = frame.f_back
    return running_call_context()


def running_call_context() -> CallContext | None:
    """Whose coroutine runs, or None."""
    running = current_execution.get()
    owner = None if running is None else running.owner
    return owner if isinstance(owner, CallContext) else None
