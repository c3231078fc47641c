"""The agent of another process, reached through its control port, with a copy of its event log.

Threads: `conch-remote-events` receives events between `start` and `close`, and reconnects after failures.
Locks: `_lock` guards the current watch; the mirror has its own condition.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from conch.core.errors import ConchError, OutOfRangeError
from conch.core.model_control import LoadParameter
from conch.core.rollouts import RolloutReport, RolloutTransition
from conch_control.agent_api import Index, ModelDescription, ModelStatus
from conch_control.events import KEPT, Event, EventLog, never
from conch_control.managed_rollouts import ManagedBy, ManagedReport
from conch_control.remote_api.client import After, ModelControlClient, Update, WatchCall
from conch_control.version_phase import Phase

log = logging.getLogger(__name__)


class EventMirror(EventLog):
    """An event log with the epoch and revisions of another process.

    States: `epoch` is empty until the first message; then the mirror is current, or stale after missed
    events or a restart of the server. While stale, the reader gets OutOfRangeError until `index_read`.
    There must be one reader, as one `index_read` clears the state for all.
    """

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__(lambda: 0.0, kept)
        self.epoch = ""
        # No index was read since events were missed. Revisions alone can't tell: a restarted server
        # may have reached the same number.
        self._stale = False

    @property
    def position(self) -> tuple[str, int]:
        """Epoch and newest revision."""
        with self._changed:
            return self.epoch, self._revision

    def append(
        self,
        model: str,
        version: int,
        phase: Phase,
        reason: str = "",
        rollout: RolloutTransition | None = None,
    ) -> NoReturn:
        """Not supported: events come only from the other process."""
        raise TypeError("a mirror takes its events from the log that it mirrors")

    def begin(self, epoch: str, revision: int) -> None:
        """Records where a stream starts; the mirror becomes stale if events are missing before."""
        with self._changed:
            known = self.epoch
            if epoch == known and revision <= self._revision:
                return
            self._reset(epoch, revision)
            self._stale = bool(known)

    def index_read(self, epoch: str, revision: int) -> None:
        """Records that the reader has read an index and continues from it."""
        with self._changed:
            if epoch != self.epoch:
                self._reset(epoch, revision)
            self._stale = False

    def extend(self, epoch: str, events: Sequence[Event]) -> bool:
        """Adds events, skipping known ones; returns False if they leave a gap or are of another epoch."""
        with self._changed:
            if epoch != self.epoch:
                return False
            for event in events:
                if event.revision <= self._revision:
                    continue
                if event.revision > self._revision + 1:
                    return False
                self._revision = event.revision
                self.entries.append(event)
            self._changed.notify_all()
            return True

    def after(
        self, revision: int, timeout_s: float | None = 0.0, given_up: Callable[[], bool] = never
    ) -> list[Event]:
        """The events after a revision; waits for the first one.

        A revision beyond the newest event is valid: an index may arrive before the events.
        """
        with self._changed:
            epoch = self.epoch
            self._check(revision)
            self._changed.wait_for(
                lambda: (
                    self._revision > revision
                    or self._stale
                    or (epoch and self.epoch != epoch)
                    or self._closed
                    or given_up()
                ),
                timeout_s,
            )
            if epoch and self.epoch != epoch:
                # Another reader has read the index, this one has not.
                raise self._lost_events()
            self._check(revision)
            return self._newer_than(revision)

    def _check(self, revision: int) -> None:
        if self._stale:
            raise self._lost_events()
        if revision <= self._revision:
            super()._check(revision)

    def _lost_events(self) -> OutOfRangeError:
        return OutOfRangeError(
            "events of the server have been missed, or it has been started again: read the index and go on "
            "from its revision"
        )

    def _reset(self, epoch: str, revision: int) -> None:
        self.epoch, self._revision = epoch, revision
        self.entries.clear()
        self._changed.notify_all()


FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0


class RemoteAgent:
    """An `AgentApi` over the ModelControl service; closes its client.

    Methods raise `UnreachableError` while the server is unreachable.

    Attributes:
        connected: Events are being received.
        draining: The server drains or stops, as last received.
        on_change: Called on the thread of the events after a change of these two.
    """

    def __init__(self, client: ModelControlClient, wait: Callable[[float], bool] | None = None) -> None:
        self._client = client
        self.connected = self.draining = False
        self.on_change: Callable[[], None] = lambda: None
        self.events = EventMirror()
        self._stopped = threading.Event()
        self._wait = wait or self._stopped.wait
        self._lock = threading.Lock()
        self._watch_call: WatchCall | None = None
        self._thread = threading.Thread(target=self._receive_events, name="conch-remote-events")

    @property
    def target(self) -> str:
        """Address of the server."""
        return self._client.target

    def start(self) -> None:
        """Starts receiving events."""
        self._thread.start()

    def close(self) -> None:
        """Stops receiving and ends all calls."""
        with self._lock:
            self._stopped.set()
            if self._watch_call is not None:
                self._watch_call.cancel()
        self.events.close()
        self._client.close()
        if self._thread.ident is not None:
            self._thread.join()

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Loads or reloads a model and returns when it is ready."""
        self._client.load(name, parameters)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Unpublishes a model; requests in flight finish in the background."""
        self._client.unload(name, unload_dependents)

    def set_label(self, name: str, label: str, version: int | None) -> None:
        """Has a label of a model name a ready version; None removes it."""
        self._client.set_label(name, label, version)

    def rollout(self, name: str) -> RolloutReport:
        """A model's labels and rollout."""
        return self._client.rollout(name)

    def rollouts(self) -> list[RolloutReport]:
        """Labels and rollouts of all models that have some."""
        return self._client.rollouts()

    def start_rollout(self, name: str, declaration: Mapping[str, Any], again: bool) -> RolloutReport:
        """Declares and starts a rollout."""
        return self._client.start_rollout(name, declaration, again)

    def manage_rollout(
        self, name: str, declaration: Mapping[str, Any], managed_by: ManagedBy
    ) -> ManagedReport:
        """Tells the server the state of a rollout that we manage."""
        return self._client.manage_rollout(name, declaration, managed_by)

    def update_rollout(self, name: str, action: str, weight: float | None = None) -> RolloutReport:
        """Changes a rollout."""
        return self._client.update_rollout(name, action, weight)

    def models(self) -> Index:
        """All models with their states; `events` continues from its revision."""
        index = self._client.models()
        self.events.index_read(index.epoch, index.revision)
        return index

    def progress(self, names: Collection[str]) -> list[ModelStatus]:
        """Staging progress of some models; the server accesses its storage."""
        return [model for model in self._client.models().models if model.name in names]

    def describe(self, name: str) -> ModelDescription:
        """Status, effective config and instances of one model."""
        return self._client.describe(name)

    def drain(self) -> None:
        """Makes the server not ready; it still answers requests."""
        self._client.drain()

    def _receive_events(self) -> None:
        wait_s = FIRST_WAIT_S
        lost: str | None = None  # last logged error
        anew = False
        while not self._stopped.is_set():
            epoch, revision = self.events.position
            after = After(epoch, revision) if epoch and not anew else None
            missed, anew, resume = anew, False, False
            try:
                for update in self._watch(after):
                    self._show(True, update.draining)
                    if lost is not None:
                        log.info("the events of %s come again", self.target)
                        lost = None
                    wait_s = FIRST_WAIT_S
                    if after is None and not missed and self._has_gap(update):
                        resume = True
                        break
                    if not self._store(update, begin=after is None):
                        break
                    after = After(update.epoch, update.revision)
            except OutOfRangeError:
                anew = after is not None
            except ConchError as error:
                if lost != error.message and not self._stopped.is_set():
                    log.warning("the events of %s do not come: %s; trying again", self.target, error.message)
                    lost = error.message
            except Exception:
                # Boundary: the top of the thread. The planner must not stay without events.
                log.exception("the events of %s could not be read; trying again", self.target)
            if not (anew or resume):
                self._show(False, self.draining)
                if self._wait(wait_s):
                    return
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _watch(self, after: After | None) -> WatchCall:
        with self._lock:
            self._watch_call = self._client.watch(after)
            if self._stopped.is_set():
                self._watch_call.cancel()
            return self._watch_call

    def _show(self, connected: bool, draining: bool) -> None:
        if (connected, draining) != (self.connected, self.draining):
            self.connected, self.draining = connected, draining
            self.on_change()

    def _has_gap(self, update: Update) -> bool:
        """True if an index was read before the watch started, and the events between can be requested."""
        epoch, revision = self.events.position
        return update.epoch == epoch and revision < update.revision

    def _store(self, update: Update, begin: bool) -> bool:
        if begin:
            self.events.begin(update.epoch, update.revision)
        return self.events.extend(update.epoch, update.events)
