"""The requests that wait for models, bounded for each model. Pure; the caller serialises the calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from conch.core.errors import ConchError, ResourceExhaustedError

_NO_PRIORITY = 1 << 62


@dataclass(slots=True, eq=False)
class Waiter:
    """One waiting request.

    Attributes:
        then: Called once with None if the model is in memory, else with the error.
        size: Bytes that it holds.
        ends_ns: Monotonic time at which it times out.
        priority: Its priority level; 0 for none.
        own_deadline: True if it times out by its own deadline.
    """

    then: Callable[[ConchError | None], None]
    size: int
    ends_ns: int
    priority: int = 0
    own_deadline: bool = False


@dataclass(slots=True)
class _Waiters:
    number: int
    waiters: dict[object, Waiter] = field(default_factory=dict)
    bytes: int = 0
    priority: int = _NO_PRIORITY


class ColdQueue:
    """The models that are to be loaded, with the requests that wait for them.

    Args:
        most_requests: Most requests for one model; 0 for no limit.
        most_bytes: Most bytes that the requests for one model hold; 0 for no limit.
    """

    def __init__(self, most_requests: int, most_bytes: int) -> None:
        self._most_requests = most_requests
        self._most_bytes = most_bytes
        self._number = 0
        self._wanted: dict[str, _Waiters] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._wanted

    def __len__(self) -> int:
        return sum(len(each.waiters) for each in self._wanted.values())

    @property
    def in_order(self) -> list[str]:
        """The models, those with requests of high priority first, then by their first request."""
        return sorted(self._wanted, key=lambda name: (self._wanted[name].priority, self._wanted[name].number))

    def waiting(self, name: str) -> int:
        """Number of requests that wait for a model."""
        return len(self._wanted[name].waiters) if name in self._wanted else 0

    def add_wanted(self, name: str) -> bool:
        """Adds a model, if it is not there; True if it was not."""
        if name in self._wanted:
            return False
        self._number += 1
        self._wanted[name] = _Waiters(self._number)
        return True

    def add(self, name: str, key: object, waiter: Waiter) -> None:
        """Adds a request for a model that is there; `key` is for `leave`.

        Raises:
            ResourceExhaustedError: Too many wait, or they hold too many bytes.
        """
        wanted = self._wanted[name]
        if self._most_requests and len(wanted.waiters) >= self._most_requests:
            raise ResourceExhaustedError(
                f"{len(wanted.waiters)} requests wait for model '{name}' to be loaded, the most that "
                f"--cold-queue-size allows"
            )
        if self._most_bytes and wanted.bytes + waiter.size > self._most_bytes:
            raise ResourceExhaustedError(
                f"requests of {wanted.bytes} bytes wait for model '{name}' to be loaded, and "
                f"--cold-queue-bytes allows {self._most_bytes}"
            )
        wanted.waiters[key] = waiter
        wanted.bytes += waiter.size
        if waiter.priority > 0:
            wanted.priority = min(wanted.priority, waiter.priority)

    def leave(self, name: str, key: object) -> bool:
        """Removes a request; True if it was there. The model stays."""
        wanted = self._wanted.get(name)
        waiter = None if wanted is None else wanted.waiters.pop(key, None)
        if wanted is None or waiter is None:
            return False
        wanted.bytes -= waiter.size
        return True

    def take_waiters(self, name: str) -> list[Waiter]:
        """Removes a model; returns its requests in their order."""
        wanted = self._wanted.pop(name, None)
        return [] if wanted is None else list(wanted.waiters.values())

    def expire(self, now: int) -> list[tuple[str, Waiter]]:
        """Removes the requests that time out; returns them with their models."""
        found = [
            (name, key, waiter)
            for name, wanted in self._wanted.items()
            for key, waiter in wanted.waiters.items()
            if now >= waiter.ends_ns
        ]
        for name, key, _ in found:
            self.leave(name, key)
        return [(name, waiter) for name, _, waiter in found]

    def next_end_ns(self) -> int | None:
        """Monotonic time at which the next request times out; None if none waits."""
        ends = [waiter.ends_ns for wanted in self._wanted.values() for waiter in wanted.waiters.values()]
        return min(ends, default=None)
