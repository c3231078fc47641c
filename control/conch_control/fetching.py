"""Fetches the files for a load, and says of its versions how far that is."""

from __future__ import annotations

from conch_control.book import UNFINISHED, Book, Change
from conch_control.operations import Operation, Operations
from conch_control.options import ControlOptions
from conch_control.repository.source import ModelSource
from conch_control.staging import Lease, guess_versions, stage
from conch_control.states import Phase


class Fetcher:
    """Stages models.

    Args:
        options: Settings of the control plane.
        book: Where it is said how far it is.
        operations: Tells when a load is not to go on.
    """

    def __init__(self, options: ControlOptions, book: Book, operations: Operations) -> None:
        self._options = options
        self._book = book
        self._lock = operations.lock

    def fetch(self, operation: Operation, source: ModelSource) -> Lease:
        """Fetches the files for a load, unless it is stopped.

        Raises:
            PollError: They can't be had.
            CancelledError: The load has been stopped.
        """
        name = operation.name
        versions = guess_versions(source, operation.state or (), self._options, operation.override)
        staging = True

        def progress(done: int, total: int) -> None:
            with self._lock:
                if not staging or operation.stopped is not None:
                    return
                said = self._book.versions(name)
                going = UNFINISHED | {Phase.READY}
                fresh = [each for each in versions if each not in said or said[each].phase not in going]
                self._book.change(name, dict.fromkeys(fresh, Change(Phase.STAGING)))
                self._book.fetched(name, versions, done, total)

        try:
            return stage(source, progress, lambda: operation.stopped is not None)
        finally:
            with self._lock:
                staging = False
                self._book.fetched(name, versions, 0, 0)
