"""What those are told who count on a worker that is lost."""

from __future__ import annotations

import threading

from conch.core.errors import ConchError, UnavailableError
from conch.workers.connection.in_flight import SentBatch


class Loss:
    """How one worker was lost, from when it is given up until it is known how it ended, and after.

    Args:
        name: The instance's name.

    Attributes:
        reason: Why the worker has been given up; None while it has not been.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.reason: str | None = None
        self._lock = threading.Lock()
        self._late: list[SentBatch] | None = []  # begun while it is being found out how the worker ended
        self._explanation: ConchError | None = None

    def begin(self, reason: str) -> bool:
        """Gives the worker up; False if it has been before."""
        with self._lock:
            if self.reason is not None:
                return False
            self.reason = reason
            return True

    def refuse(self, sent: SentBatch) -> None:
        """Ends a batch that was begun on a lost worker, as soon as it is known how that one ended."""
        with self._lock:
            if self._late is not None:
                self._late.append(sent)
                return
        sent.done(self.error())

    def explained(self, explanation: ConchError | None) -> list[SentBatch]:
        """Takes what there is to be known.

        Args:
            explanation: The error for everything that the worker had; None if only the reason is known.

        Returns:
            The batches that were begun meanwhile, for the caller to end.
        """
        with self._lock:
            self._explanation = explanation
            late, self._late = self._late or [], None
        return late

    def error(self) -> ConchError:
        """What clients are told when the worker can't answer any more; a new one each time."""
        known = self._explanation
        if known is not None:
            error = type(known)(known.message)
            error.retry_after_ms = known.retry_after_ms
            return error
        return UnavailableError(
            f"Failed to process the request(s) for model instance '{self._name}', message: Stub process "
            f"'{self._name}' is not healthy. The worker of the model is gone ({self.reason}); another one "
            f"takes its place, so the request may be sent again."
        )
