"""`LiveFeed`: one look a second at counters, states, log and machine, for all viewers together.

While there is no viewer nothing is computed. Each look makes one text that all viewers get, and one for each
model whose charts a page has open. A viewer that does not read what was sent is dropped: its queue has room
for a few looks, and the connection below it for a few kilobytes.

Owns: the viewers. Threads and locks: event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from conch.core.clock import wall_seconds
from conch.core.errors import OutOfRangeError, ResourceExhaustedError
from conch.frontends.http.chat_route import ChatRoute
from conch.observability.metrics.metrics_exposition import GilYielder
from conch_console.live_counts import LiveCounts
from conch_console.log_ring import LogRing
from conch_console.server_views import MachineState
from conch_control.events import Event, EventLog

MOST_VIEWERS: Final = 32
PERIOD_S: Final = 1.0
_MOST_WAITING: Final = 8
_MOST_EVENTS: Final = 200
_MOST_LINES: Final = 100


def event_text(name: str, content: Any) -> bytes:
    """A server-sent event with JSON."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(content))


def _ignore() -> None:
    """A viewer that nothing waits for."""


@dataclass(eq=False, slots=True)
class Viewer:
    """One open page.

    Attributes:
        model: The model whose charts it shows; empty for none.
        logs: True if it shows the log.
        chats: Have figures of models that take text; None without any.
        waiting: Texts that are to be sent; an empty one ends the stream.
        there: Set when there is something to send.
        on_dropped: Called if it did not read in time.
    """

    model: str = ""
    logs: bool = False
    chats: ChatRoute | None = None
    waiting: deque[bytes] = field(default_factory=deque)
    there: asyncio.Event = field(default_factory=asyncio.Event)
    on_dropped: Callable[[], object] = _ignore

    def put(self, text: bytes) -> None:
        """Adds a text; drops the viewer if it is too far behind."""
        if len(self.waiting) >= _MOST_WAITING:
            self.on_dropped()
            return
        self.waiting.append(text)
        self.there.set()

    def end(self) -> None:
        """Ends the stream."""
        self.put(b"")

    async def take(self) -> bytes:
        """The texts to send, once there are some; empty at the end."""
        while not self.waiting:
            self.there.clear()
            await self.there.wait()
        texts = list(self.waiting)
        self.waiting.clear()
        return b"" if b"" in texts else b"".join(texts)


class LiveFeed:
    """The feed of one console.

    Args:
        counts: The models' counters.
        events: The control plane's events.
        logs: The server's log.
        machine: The machine's state.
        state: Returns the state of the server as a whole, as pages show it.

    Attributes:
        looks: Number of looks at the counters so far.
    """

    def __init__(
        self,
        counts: LiveCounts,
        events: EventLog,
        logs: LogRing,
        machine: MachineState,
        state: Callable[[], dict[str, Any]],
    ) -> None:
        self._counts = counts
        self._events = events
        self._logs = logs
        self._machine = machine
        self._state = state
        self._yielder = GilYielder()
        self._viewers: set[Viewer] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._revision = self._line = 0
        self.looks = 0
        self._closed = False

    @property
    def viewers(self) -> int:
        """Number of viewers."""
        return len(self._viewers)

    @property
    def resting(self) -> bool:
        """True if no look is planned."""
        return self._timer is None

    def join(self, model: str = "", logs: bool = False, chats: ChatRoute | None = None) -> Viewer:
        """Adds a viewer; it first gets the names of all versions."""
        if len(self._viewers) >= MOST_VIEWERS:
            raise ResourceExhaustedError(f"{MOST_VIEWERS} pages watch already; close one of them")
        if self._timer is None:
            self._start()
        viewer = Viewer(model, logs, chats)
        hello = {
            "names": self._counts.names(),
            "epoch": self._events.epoch,
            "revision": self._revision,
            "line": self._line,
            "period": PERIOD_S,
            "state": self._state(),
        }
        viewer.put(event_text("hello", hello))
        self._viewers.add(viewer)
        if self._closed:
            viewer.end()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Removes a viewer; without any the feed rests."""
        self._viewers.discard(viewer)
        if not self._viewers and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Ends all streams."""
        self._closed = True
        for viewer in self._viewers:
            viewer.end()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._counts.start()
        self._counts.new_names()
        self._machine.read()
        self._revision = self._events.revision
        self._line = self._logs.count
        self._timer = loop.call_later(PERIOD_S, self._tick, loop, loop.time() + PERIOD_S)

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        # From the time that was due, so that looks keep their distance.
        following = max(due + PERIOD_S, loop.time())
        self._timer = loop.call_later(following - loop.time(), self._tick, loop, following)
        self.look()

    def look(self) -> None:
        """Looks once, and gives what has changed to the viewers."""
        self.looks += 1
        self._yielder.begin()
        detailed = frozenset(viewer.model for viewer in self._viewers if viewer.model)
        lines, details = self._counts.changes(detailed, self._yielder.yield_if_due)
        content: dict[str, Any] = {
            "t": round(wall_seconds(), 1),
            "m": lines,
            **self._machine.read(),
            "state": self._state(),
        }
        names = self._counts.new_names()
        if names:
            content["names"] = names
        content |= self._new_events()
        text = event_text("tick", content)
        chats = {viewer.model: viewer.chats for viewer in self._viewers if viewer.chats is not None}
        shown = {}
        for name, rows in details.items():
            figures = chats[name].figures(name) if name in chats else None
            shown[name] = event_text("detail", {"model": name, "versions": rows, "text": figures})
        records = (
            self._logs.newest(_MOST_LINES, self._line) if any(each.logs for each in self._viewers) else []
        )
        self._line = self._logs.count
        logged = event_text("logs", records) if records else b""
        for viewer in self._viewers:
            viewer.put(text + shown.get(viewer.model, b"") + (logged if viewer.logs else b""))

    def _new_events(self) -> dict[str, Any]:
        """The events since the last look, or that there were more than a browser should follow."""
        try:
            events = self._events.after(self._revision)
        except OutOfRangeError:
            events = []
            self._revision = self._events.revision
            return {"reread": True}
        if not events:
            return {}
        self._revision = events[-1].revision
        if len(events) > _MOST_EVENTS:
            return {"reread": True}
        return {"events": [event_object(event) for event in events]}


def event_object(event: Event) -> dict[str, Any]:
    """An event as the pages take it."""
    return {
        "revision": event.revision,
        "model": event.model,
        "version": event.version,
        "phase": event.phase.value,
        "reason": event.reason[:2000],
        "rollout": event.rollout and {"state": event.rollout.state, "reason": event.rollout.reason[:2000]},
        "t": round(event.seconds, 3),
    }
