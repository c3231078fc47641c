"""`conch top` as a library: views of a server, one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from conch_tools.connection import Endpoint, parse_url
from conch_tools.server_api import AskError
from conch_tools.top.samples import Sample, read_sample
from conch_tools.top.views import ModelView, ServerView, is_same_server, model_views, server_view


@dataclass(frozen=True, slots=True)
class TopView:
    """A server at one time, and what happened since the view before.

    Attributes:
        time: Time of the view.
        url: The server's metrics port.
        seconds: Seconds since the view before; None without one, or if the server started in between.
        server: The server; None if it can't be reached.
        models: The versions that it serves, by name.
        error: Reason for which it can't be reached; None if it can.
    """

    time: datetime
    url: str
    seconds: float | None = None
    server: ServerView | None = None
    models: Sequence[ModelView] = ()
    error: AskError | None = None


def top(
    endpoint: Endpoint | str, interval_s: float = 1.0, over: threading.Event | None = None
) -> Iterator[TopView]:
    """Views of a server at regular times; the first has no rates.

    A server that can't be reached gives views with an `error`, until it is back.

    Args:
        endpoint: The server's metrics port, or its URL, as ``http://localhost:8002``.
        interval_s: Seconds from view to view.
        over: Ends the iteration when it is set.

    Raises:
        UrlError: The URL is wrong.
    """
    endpoint = parse_url(endpoint) if isinstance(endpoint, str) else endpoint
    over = over or threading.Event()
    return _views(endpoint, interval_s, over)


def _views(endpoint: Endpoint, interval_s: float, over: threading.Event) -> Iterator[TopView]:
    before: Sample | None = None
    due = time.monotonic()
    while not over.wait(max(0.0, due - time.monotonic())):
        due = max(due, time.monotonic() - interval_s) + interval_s
        try:
            now = read_sample(endpoint)
        except AskError as error:
            before = None
            yield TopView(datetime.now(UTC), endpoint.url, error=error)
            continue
        if before is not None and not is_same_server(before, now):
            before = None
        seconds = None if before is None else now.at_s - before.at_s
        yield TopView(
            datetime.now(UTC), endpoint.url, seconds, server_view(before, now), model_views(before, now)
        )
        before = now
