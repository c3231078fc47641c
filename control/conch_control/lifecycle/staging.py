"""Brings a model's files to where they can be loaded from, and lets go of them when nothing needs them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from conch.core.errors import CancelledError, ConchError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.json_format import parse_override
from conch_control.config.normalize import normalize
from conch_control.config.parse import decode_config
from conch_control.lifecycle.load_queue import Operation, Operations
from conch_control.lifecycle.memory_usage import frozen
from conch_control.lifecycle.model_definition import PollError
from conch_control.lifecycle.version_phase import Phase
from conch_control.lifecycle.version_states import UNFINISHED, Book, Change
from conch_control.options import ControlOptions
from conch_control.repository.dependency_graph import config_content
from conch_control.repository.layout import Fingerprint, of_configs, select_versions, versions_in
from conch_control.repository.source import ModelSource, Progress, Staged

log = logging.getLogger(__name__)


class Lease:
    """Staged files that several need; released once, when the last of them has let go.

    Args:
        staged: The files; whoever makes the lease needs them, until it calls `drop`.

    Attributes:
        early: Whether what is loaded from them may be among what the process puts away after its start.
    """

    def __init__(self, staged: Staged) -> None:
        self._staged = staged
        self._lock = threading.Lock()
        self._needed = 1
        self.early = not frozen()
        self._first: Callable[[], None] = _nothing

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._staged.directory

    @property
    def fingerprint(self) -> Fingerprint:
        """Which state of the source they are."""
        return self._staged.fingerprint

    def before_release(self, do: Callable[[], None]) -> None:
        """Says what to do when nobody needs them any more, before they are released."""
        self._first = do

    def keep(self) -> Lease:
        """Says that one more needs them."""
        with self._lock:
            self._needed += 1
        return self

    def drop(self) -> None:
        """Says that one of those does not any more."""
        with self._lock:
            self._needed -= 1
            last = not self._needed
        if last:
            try:
                self._first()
                self._staged.release()
            except Exception:
                log.exception("the files in '%s' could not be released", self.directory)


def _nothing() -> None:
    """Done before a release that nobody needs to know of."""


def look(source: ModelSource) -> Fingerprint:
    """The state of a model's files now.

    Raises:
        PollError: The storage can't say.
    """
    try:
        return source.fingerprint()
    except (ConchError, OSError) as error:
        raise _poll_error(source.name, error) from error


def stage(source: ModelSource, progress: Progress, cancelled: Callable[[], bool]) -> Lease:
    """Fetches a model's files where that is needed.

    Raises:
        PollError: They can't be had.
        CancelledError: It was told to give up.
    """
    try:
        return Lease(source.stage(progress, cancelled))
    except CancelledError:
        raise
    except (ConchError, OSError) as error:
        raise _poll_error(source.name, error) from error


def guess_versions(
    source: ModelSource, state: Fingerprint, options: ControlOptions, override: str | None
) -> tuple[int, ...]:
    """Versions that a load is likely to be about, before the files are there; none if nobody can tell."""
    try:
        if override is not None:
            config = parse_override(override)
        else:
            config = ModelConfig()
            if of_configs(state):
                content = config_content(source, options.model_config_name)
                config = decode_config(content, source.location)
        normalize(config)
        available = versions_in(state)
        specific = config.version_policy.specific.versions
        if specific:  # what is missing is told when the files are there
            return tuple(sorted({*specific}.intersection(available)))
        return tuple(select_versions(config, available))
    except (ConchError, OSError):
        return ()  # whoever loads it finds out why


def _poll_error(name: str, error: ConchError | OSError) -> PollError:
    reason = error.message if isinstance(error, ConchError) else str(error) or type(error).__name__
    log.error("Poll failed for model directory '%s': %s", name, reason)
    return PollError(name, reason)


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
