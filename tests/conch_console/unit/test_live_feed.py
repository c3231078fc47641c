"""The live feed: nothing without a viewer, one look for all, and no more events than a page follows."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from conch.core.registry import Registry
from conch_console.live_counts import LiveCounts
from conch_console.live_feed import LiveFeed
from conch_console.log_ring import LogRing
from conch_console.server_views import MachineState
from conch_control.events import EventLog
from conch_control.version_phase import Phase


def run(test: Callable[[LiveFeed, EventLog, LogRing], Awaitable[None]]) -> None:
    """Runs a test with a feed on an event loop."""

    async def within() -> None:
        events, logs = EventLog(lambda: 5.0), LogRing()
        feed = LiveFeed(LiveCounts(Registry()), events, logs, MachineState(), lambda: {"stage": "SERVING"})
        await test(feed, events, logs)

    asyncio.run(within())


def content(text: bytes, name: str) -> Any:
    """The content of the only event of a name; None without one."""
    found = [block for block in text.decode().split("\n\n") if block.startswith(f"event: {name}\n")]
    return json.loads(found[0].partition("data: ")[2]) if found else None


def test_all_viewers_share_one_look_and_without_one_there_is_none() -> None:
    async def test(feed: LiveFeed, events: EventLog, logs: LogRing) -> None:
        first, second = feed.join(), feed.join(logs=True)
        for viewer in (first, second):
            assert content(await viewer.take(), "hello")["epoch"] == events.epoch
        logs.handle(logging.LogRecord("conch", logging.INFO, "", 0, "line", None, None))
        feed.look()
        plain, with_logs = await first.take(), await second.take()
        assert with_logs.startswith(plain) and content(plain, "logs") is None
        assert [record["message"] for record in content(with_logs, "logs")] == ["line"]
        feed.leave(first)
        states = [feed.resting]
        feed.leave(second)
        states.append(feed.resting)
        assert states == [False, True] and feed.viewers == 0 and feed.looks == 1

    run(test)


def test_events_are_told_once_and_too_many_are_to_be_read_anew() -> None:
    async def test(feed: LiveFeed, events: EventLog, logs: LogRing) -> None:
        events.append("before", 1, Phase.READY)
        viewer = feed.join()
        assert content(await viewer.take(), "hello")["revision"] == 1
        events.append("m", 1, Phase.FAILED, "why")
        feed.look()
        (event,) = content(await viewer.take(), "tick")["events"]
        assert (event["model"], event["phase"], event["reason"]) == ("m", "FAILED", "why")
        for number in range(20_000):  # more than the log of events keeps
            events.append("m", number, Phase.LOADING)
        feed.look()
        tick = content(await viewer.take(), "tick")
        assert tick["reread"] and "events" not in tick
        feed.look()
        assert "reread" not in content(await viewer.take(), "tick")
        feed.leave(viewer)

    run(test)


def test_a_viewer_that_takes_nothing_is_dropped_and_the_others_go_on() -> None:
    async def test(feed: LiveFeed, events: EventLog, logs: LogRing) -> None:
        stuck, other = feed.join(), feed.join()
        dropped: list[int] = []
        stuck.on_dropped = lambda: dropped.append(feed.looks)
        for _ in range(10):
            feed.look()
            assert content(await other.take(), "tick")
        assert dropped[0] == 8
        feed.close()
        assert await other.take() == b""
        feed.leave(stuck)
        feed.leave(other)

    run(test)
