"""Identifies the model instance that calls the server, from any thread or module.

In Triton a model has its own process. Here models, possibly of several servers, share an interpreter. The
caller is, in this order:

1. the owner of the innermost model module on the stack, also of a thread that the model started;
2. the instance whose coroutine is running, also in a library's own task;
3. the only loaded instance; if there are several, all of one server: that server, without an instance.

A request keeps the result of the first lookup, so it can be executed from any thread.

Owns: per instance, its open calls; `_lock` guards them and `_closed`.
"""

from __future__ import annotations

import inspect
import os
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
"""Forks between the program's first process and this one."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class OpenCall(Protocol):
    """A call that has not completed."""

    def abandon(self) -> None:
        """Cancels the call and wakes its waiter."""


class CallContext:
    """One model instance as a caller of the server.

    Attributes:
        known_server: The server, also after the instance has been closed; None if it cannot be called.
        model: The model's identifier and version.
        running: The batch that `thread` executes; set around `execute` unless that is a coroutine.
        thread: Identifier of the executing thread.
        waiting: The call that this thread waits for.
        in_cycle: True if the last look found the awaited call in a cycle of calls.
        opening: True if the instance is being created; the load of its model waits for that.
        finalizing: True once the model's `finalize` was called.
        loads: The model whose load it awaits meanwhile.
        warned_of_blocking: True if the log has the warning about blocking the event loop.
    """

    __slots__ = (
        "_abandoned",
        "_closed",
        "_forks",
        "_lock",
        "_namespace",
        "_open",
        "finalizing",
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
        self.finalizing = False
        self.loads = ""
        self.warned_of_blocking = False
        self._namespace = "" if spec is None else spec.namespace
        self._forks = _forks
        self._lock = threading.Lock()
        self._open: set[OpenCall] = set()
        self._closed = False
        self._abandoned: tuple[list[InferenceRequest] | None, int] | None = None

    @property
    def server(self) -> ServerCalls:
        """The server. Raises TritonModelException: it cannot be called from here, or not any more."""
        if self.known_server is None:
            raise TritonModelException(NOWHERE)
        self.check_process()
        if self._closed:
            raise TritonModelException(f"model instance '{self.name}' has been unloaded")
        return self.known_server

    def check_process(self) -> None:
        """Raises TritonModelException in a fork of the process, where no thread would complete calls."""
        if self._forks != _forks:
            raise TritonModelException(FORKED.format(name=self.name))

    def check_executing(self) -> None:
        """Raises TritonModelException in `initialize` and `finalize`, where no model may be called."""
        if self.opening or self.finalizing:
            raise TritonModelException(NOWHERE)

    def names(self, model_name: str) -> Iterator[str]:
        """Candidate identifiers of a model for this caller, in lookup order."""
        if self._namespace:
            yield identifier(self._namespace, model_name)
        yield model_name

    def parent_requests(self) -> list[InferenceRequest] | None:
        """The requests that the calling thread executes; None if unknown."""
        batch = self.running
        if batch is not None and self.thread == threading.get_ident():
            return batch.requests
        running = current_execution.get()
        return running.requests if running is not None and running.owner is self else None

    def abandoned_since(self, requests: list[InferenceRequest] | None, now_ns: int) -> int:
        """Time of the first call for these requests after all of them were abandoned."""
        if self._abandoned is None or self._abandoned[0] is not requests:
            self._abandoned = requests, now_ns
        return self._abandoned[1]

    @contextmanager
    def coroutine(self, batch: Batch) -> Iterator[None]:
        """Attributes calls of a coroutine, started in the block, and of its tasks to a batch."""
        token = current_execution.set(Execution(self, batch.requests))
        try:
            yield
        finally:
            current_execution.reset(token)

    def start_waiting(self, call: Wait) -> bool:
        """Records the call that the executing thread waits for; False on other threads."""
        if self.running is None or self.thread != threading.get_ident():
            return False
        self.waiting = call
        return True

    def cancel(self, request: InferenceRequest) -> None:
        """Cancels one of its requests, also after `close`."""
        if self.known_server is not None:
            self.known_server.cancel(request)

    @property
    def known_as(self) -> tuple[str, str]:
        """Identifiers of its model, with and without namespace."""
        known_as = self.model[0]
        return known_as, known_as.removeprefix(f"{self._namespace}::")

    def add_open_call(self, call: OpenCall) -> bool:
        """Registers a call, which `close` abandons if it is still open; False if closed: it is abandoned."""
        with self._lock:
            self._open.add(call)
            closed = self._closed
        if closed:
            call.abandon()
        return not closed

    def remove_open_call(self, call: OpenCall) -> None:
        """Unregisters a completed call."""
        with self._lock:
            self._open.discard(call)

    def close(self) -> None:
        """Abandons all open calls and all later ones."""
        with self._lock:
            self._closed = True
            calls = list(self._open)
        for call in calls:
            call.abandon()


class Opening(Waiter, Protocol):
    """An instance that may be in creation (`opening`)."""

    opening: bool
    loads: str


@contextmanager
def loading(waiter: Opening, name: str, error: Callable[[str], Exception]) -> Iterator[None]:
    """Guards a load by an instance: raises `error(reason)` if it would wait for that instance's creation."""
    if not waiter.opening:
        yield
        return
    waiter.loads = name  # set before the check: of two concurrent loads at least one sees the other
    try:
        reason = _why_not_load(waiter, name)
        if reason:
            raise error(reason)
        yield
    finally:
        waiter.loads = ""


def _why_not_load(waiter: Waiter, name: str) -> str:
    """Reason to reject the load; empty if allowed. The instance's `loads` is already set."""
    server = waiter.known_server
    known: list[Waiter] = [one for one in owners() if isinstance(one, CallContext)]
    others = [one for one in (*known, *(() if server is None else server.waiters.copy())) if one.loads]
    found, left = {name}, [name]
    while left:
        wanted = left.pop()
        if wanted in waiter.known_as:
            return (
                f"Failed to load model: model '{name}' cannot be loaded while '{waiter.name}' is being "
                f"initialized: its load would wait for that"
            )
        for one in others:
            if wanted in one.known_as and one.loads not in found:
                found.add(one.loads)
                left.append(one.loads)
    return ""


def current_call_context() -> CallContext:
    """The context of the calling thread. Raises TritonModelException: there is none, or it is ambiguous."""
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
    """The context found from the stack or the running coroutine; None without one.

    Raises:
        TritonModelException: `known` is set, and the calling model was unloaded or cannot call the server.
    """
    frame: FrameType | None = inspect.currentframe()
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
    """The context of the running coroutine, or None."""
    running = current_execution.get()
    owner = None if running is None else running.owner
    return owner if isinstance(owner, CallContext) else None
