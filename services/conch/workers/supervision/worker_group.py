"""Instances of one model version: readiness by quorum, and wake-up of waiting instances.

Owns: the members and the lock that guards their policies.
Threads and locks: `changed` and the callbacks run on any thread; callbacks outside the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from conch.core.backend import ConfigNotes
from conch.core.servable import Readiness
from conch.workers.supervision.restart_policy import RestartPolicy, has_quorum, none_serves_soon

OnAvailable = Callable[[], None]


class NotReady:
    """Readiness of an instance whose group has no quorum."""

    def start(self) -> None:
        """Needs no check."""

    def result(self) -> bool:
        """Always false."""
        return False


NOT_READY = NotReady()


@dataclass(slots=True, eq=False)
class Member:
    """State of an instance shared with its group.

    Attributes:
        policy: Its restart policy; changed under the group's lock.
        passive: It takes no requests and does not count.
        check: The worker's own readiness, or None.
        on_available: Callbacks for when it accepts batches.
        tell: Called with the instance's readiness after possible changes.
    """

    policy: RestartPolicy
    passive: bool
    tell: Callable[[Readiness | None], None]
    check: Readiness | None = None
    on_available: list[OnAvailable] = field(default_factory=list)


class WorkerGroup:
    """The instances of a model version; its lock guards their policies.

    Attributes:
        notes: Deviations of the model from its config.
    """

    def __init__(self) -> None:
        self.notes = ConfigNotes()
        self.lock = threading.Lock()
        self._members: list[Member] = []
        self._refuses_requests = False

    @property
    def refuses_requests(self) -> bool:
        """True if no worker serves or will soon, so that requests are refused; needs the lock."""
        return self._refuses_requests

    def join(self, member: Member) -> None:
        """Adds an instance."""
        with self.lock:
            self._members.append(member)
        self.changed()

    def leave(self, member: Member) -> None:
        """Removes an instance."""
        with self.lock:
            if member in self._members:
                self._members.remove(member)
        self.changed()

    def changed(self) -> None:
        """Updates all members after a change of state; call without the lock."""
        with self.lock:
            active = [member.policy for member in self._members if not member.passive]
            self._refuses_requests = bool(active) and none_serves_soon(active)
            ready = has_quorum(active)
            for member in self._members:
                member.tell(member.check if ready else NOT_READY)
            told = self._members if self._refuses_requests else ()
            again = [call for member in told for call in member.on_available]
            for member in told:
                member.on_available = []
        for call in again:
            call()
