"""How the load of a model learns that it is not to go on: asked for by what takes long in it.

The thread that runs a load says how to find out, for all that the load does on it. Loads ask between their
steps (`check_wanted`). Backends need not know: what takes minutes, such as installing packages, asks as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from conch.core.errors import UnavailableError

Stopped = Callable[[], bool]
"""Whether what is being made is wanted no longer."""


def never() -> bool:
    """A `Stopped` of something that is wanted in any case."""
    return False


_stopped: ContextVar[Stopped] = ContextVar("stopped", default=never)


def load_stopped() -> Stopped:
    """Tells whether the load that this thread runs is not to go on; false for ever where it runs none."""
    return _stopped.get()


def check_wanted() -> None:
    """Ends the load that this thread runs, between two of its steps, if it is not to go on.

    Raises:
        UnavailableError: It is not.
    """
    if load_stopped()():
        raise UnavailableError("the load was stopped")


@contextmanager
def stopping_with(stopped: Stopped) -> Iterator[None]:
    """Runs a load on this thread that is not to go on once this is so."""
    token = _stopped.set(stopped)
    try:
        yield
    finally:
        _stopped.reset(token)
