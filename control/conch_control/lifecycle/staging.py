"""Stages model files in a local directory and releases them after the last use.

Lease life cycle: `Fetcher.fetch` returns a lease with one user; the load, the loaded definition and each
served version hold one use each:

| event                     | users                                          |
|---------------------------|------------------------------------------------|
| `Fetcher.fetch`           | 1, the running load                            |
| swap                      | +1 for the model, +1 for each new version      |
| load ends                 | -1                                             |
| model replaced, unloaded  | -1                                             |
| version drained           | -1                                             |
| last `drop`               | `before_release` callback, then files released |

Locks: each lease has its own; the callback and the release run outside it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from conch.core.errors import CancelledError, ConchError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.json_format import parse_override
from conch_control.config.parse import decode_config, normalize
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.load_queue import LoadQueue, QueuedLoad
from conch_control.lifecycle.memory_usage import gc_frozen
from conch_control.lifecycle.model_definition import PollError
from conch_control.lifecycle.version_states import UNFINISHED, Change, VersionStates
from conch_control.repository.dependency_graph import config_content
from conch_control.repository.layout import (
    Fingerprint,
    of_configs,
    select_versions,
    versions_in,
    without_rollout,
)
from conch_control.repository.source import ModelSource, Staged
from conch_control.version_phase import Phase

log = logging.getLogger(__name__)


class Lease:
    """Reference-counted staged files; `early` if staged before the garbage collector was frozen."""

    def __init__(self, staged: Staged) -> None:
        self._staged = staged
        self._lock = threading.Lock()
        self._needed = 1
        self.early = not gc_frozen()
        self._before_release: Callable[[], None] | None = None

    @property
    def directory(self) -> Path:
        """The local directory."""
        return self._staged.directory

    @property
    def fingerprint(self) -> Fingerprint:
        """State of the source that the files hold, as far as it is loaded."""
        return without_rollout(self._staged.fingerprint)

    def before_release(self, do: Callable[[], None]) -> None:
        """Sets a callback that runs before the files are released."""
        self._before_release = do

    def keep(self) -> Lease:
        """Adds a user."""
        with self._lock:
            self._needed += 1
        return self

    def drop(self) -> None:
        """Removes a user; the last one releases the files."""
        with self._lock:
            self._needed -= 1
            last = not self._needed
        if last:
            try:
                if self._before_release is not None:
                    self._before_release()
                self._staged.release()
            except Exception:  # boundary: repository agents and repositories of other packages
                log.exception("the files in '%s' could not be released", self.directory)


def guess_versions(
    source: ModelSource, state: Fingerprint, options: ControlOptions, override: str | None
) -> tuple[int, ...]:
    """Versions a load will probably select, before the files are local; empty if unknown."""
    try:
        if override is not None:
            config = parse_override(override)
        else:
            config = ModelConfig()
            if of_configs(state):
                content = config_content(source, options.model_config_name)
                config = decode_config(content, source.location, options.max_config_bytes)
        normalize(config)
        available = versions_in(state)
        specific = config.version_policy.specific.versions
        if specific:  # missing ones are reported once the files are local
            return tuple(sorted({*specific}.intersection(available)))
        return tuple(select_versions(config, available))
    except (ConchError, OSError):
        return ()  # the load itself reports the error


def poll_error(name: str, error: ConchError | OSError) -> PollError:
    """Logs that the storage does not answer, and returns the error of the load."""
    reason = error.message if isinstance(error, ConchError) else str(error) or type(error).__name__
    log.error("Poll failed for model directory '%s': %s", name, reason)
    return PollError(name, reason)


class Fetcher:
    """Stages files for loads and reports the progress of their versions."""

    def __init__(self, options: ControlOptions, states: VersionStates, queue: LoadQueue) -> None:
        self._options = options
        self._states = states
        self._lock = queue.lock

    def fetch(self, queued: QueuedLoad, source: ModelSource) -> Lease:
        """Stages the files of a load.

        Raises:
            PollError: They can't be fetched.
            CancelledError: The load was stopped.
        """
        name = queued.name
        versions = guess_versions(source, queued.state or (), self._options, queued.override)
        staging = True

        def progress(done: int, total: int) -> None:
            with self._lock:
                if not staging or queued.stopped is not None:
                    return
                said = self._states.versions(name)
                going = UNFINISHED | {Phase.READY}
                fresh = [each for each in versions if each not in said or said[each].phase not in going]
                self._states.change(name, dict.fromkeys(fresh, Change(Phase.STAGING)))
                self._states.report_progress(name, versions, done, total)

        try:
            return Lease(source.stage(progress, lambda: queued.stopped is not None))
        except CancelledError:
            raise
        except (ConchError, OSError) as error:
            raise poll_error(name, error) from error
        finally:
            with self._lock:
                staging = False
                self._states.report_progress(name, versions, 0, 0)
