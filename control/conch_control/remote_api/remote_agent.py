"""The agent of a server in another process, reached through its control port."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping

from conch.core.errors import ConchError, OutOfRangeError
from conch.core.model_control import LoadParameter
from conch_control.port import Index, ModelDescription, ModelStatus
from conch_control.remote_api.client import After, ModelControlClient, Update, WatchCall
from conch_control.remote_api.event_mirror import EventMirror

log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0


class RemoteAgent:
    """An `AgentPort` over the ModelControl service.

    Between `start` and `close` it follows the server's events, also when the server has been away. Methods
    raise `UnreachableError` while it can't be reached.

    Args:
        client: The connection, which it closes in the end.
        wait: Waits some seconds before the next try, and says whether to give up; for tests.

    Attributes:
        events: What has happened to the models, with the server's epoch and revisions.
    """

    def __init__(self, client: ModelControlClient, wait: Callable[[float], bool] | None = None) -> None:
        self._client = client
        self.events = EventMirror()
        self._stopped = threading.Event()
        self._wait = wait or self._stopped.wait
        self._lock = threading.Lock()
        self._watch_call: WatchCall | None = None
        self._thread = threading.Thread(target=self._follow, name="conch-remote-events")

    @property
    def target(self) -> str:
        """Where the server is."""
        return self._client.target

    def start(self) -> None:
        """Begins to follow the server's events."""
        self._thread.start()

    def close(self) -> None:
        """Stops following, ends all calls and all waiting for events."""
        with self._lock:
            self._stopped.set()
            if self._watch_call is not None:
                self._watch_call.cancel()
        self.events.close()
        self._client.close()
        if self._thread.ident is not None:
            self._thread.join()

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Loads or reloads a model; see `AgentPort.load`."""
        self._client.load(name, parameters)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Takes a model out of service; see `AgentPort.unload`."""
        self._client.unload(name, unload_dependents)

    def models(self) -> Index:
        """All models with their states; `events` goes on from its revision."""
        index = self._client.models()
        self.events.index_read(index.epoch, index.revision)
        return index

    def progress(self, names: Collection[str]) -> list[ModelStatus]:
        """Some models with how far their files are fetched; the server has a look at its storage for it."""
        return [model for model in self._client.models().models if model.name in names]

    def describe(self, name: str) -> ModelDescription:
        """All there is to say about one model; see `AgentPort.describe`."""
        return self._client.describe(name)

    def drain(self) -> None:
        """Makes the server not ready; see `AgentPort.drain`."""
        self._client.drain()

    def _follow(self) -> None:
        wait_s = FIRST_WAIT_S
        lost: str | None = None  # why the events do not come, once it has been logged
        anew = False
        while not self._stopped.is_set():
            epoch, revision = self.events.position
            after = After(epoch, revision) if epoch and not anew else None
            missed, anew, resume = anew, False, False
            try:
                for update in self._watch(after):
                    if lost is not None:
                        log.info("the events of %s come again", self.target)
                        lost = None
                    wait_s = FIRST_WAIT_S
                    if after is None and not missed and self._begins_late(update):
                        resume = True
                        break
                    if not self._take(update, begin=after is None):
                        break
                    after = After(update.epoch, update.revision)
            except OutOfRangeError:
                anew = after is not None
            except ConchError as error:
                if lost != error.message and not self._stopped.is_set():
                    log.warning("the events of %s do not come: %s; trying again", self.target, error.message)
                    lost = error.message
            except Exception:
                # Whatever it was, the planner must not be left without events for ever.
                log.exception("the events of %s could not be read; trying again", self.target)
            if not (anew or resume):
                if self._wait(wait_s):
                    return
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _watch(self, after: After | None) -> WatchCall:
        with self._lock:
            self._watch_call = self._client.watch(after)
            if self._stopped.is_set():
                self._watch_call.cancel()
            return self._watch_call

    def _begins_late(self, update: Update) -> bool:
        """Whether an index was read before the watch began, and events that it lacks can still be had."""
        epoch, revision = self.events.position
        return update.epoch == epoch and revision < update.revision

    def _take(self, update: Update, begin: bool) -> bool:
        if begin:
            self.events.begin(update.epoch, update.revision)
        return self.events.extend(update.epoch, update.events)
