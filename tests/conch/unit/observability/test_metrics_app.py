"""The handler of the metrics port: who gets which text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.waiting import PATIENCE_S

from conch.observability.metrics.metrics_app import MetricsApp
from conch.observability.metrics.metrics_exposition import Format


class Rendered:
    """Makes texts that say their number; each waits until it may be ready."""

    def __init__(self) -> None:
        self.begun: list[Format] = []
        self.started = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.error: Exception | None = None

    def __call__(self, wanted: Format) -> Sequence[bytes]:
        self.begun.append(wanted)
        number = len(self.begun)
        self.started.release()
        assert self.go.acquire(timeout=PATIENCE_S)
        if self.error is not None:
            raise self.error
        return [b"text ", str(number).encode()]


@pytest.fixture
def rendered() -> Rendered:
    return Rendered()


@pytest.fixture
def app(rendered: Rendered) -> Iterator[MetricsApp]:
    app = MetricsApp(rendered, lambda: True, lambda: False)
    yield app
    app.close()


async def ask(
    app: MetricsApp, path: str = "/metrics", method: str = "GET", **headers: str
) -> tuple[int, bytes]:
    sent: list[tuple[int, bytes]] = []

    def respond(status: int, headers: list[tuple[bytes, bytes]], body: Sequence[bytes]) -> None:
        sent.append((status, b"".join(body)))

    names = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await app(SimpleNamespace(method=method, path=path, headers=names, respond=respond))
    (answer,) = sent
    return answer


async def until(started: threading.Semaphore) -> None:
    assert await asyncio.to_thread(started.acquire, timeout=PATIENCE_S)


def test_all_who_ask_before_a_text_is_begun_share_it(app: MetricsApp, rendered: Rendered) -> None:
    async def run() -> list[bytes]:
        first = asyncio.create_task(ask(app))
        await until(rendered.started)
        # It is being made: what has happened since is not in it.
        others = [asyncio.create_task(ask(app)) for _ in range(3)]
        other_format = asyncio.create_task(ask(app, accept="application/openmetrics-text"))
        await asyncio.sleep(0)
        rendered.go.release(3)
        return [body for _, body in await asyncio.gather(first, *others, other_format)]

    assert asyncio.run(run()) == [b"text 1", b"text 2", b"text 2", b"text 2", b"text 3"]
    assert rendered.begun == [Format(), Format(), Format(openmetrics=True)]


def test_every_scrape_after_another_gets_a_text_of_its_own(app: MetricsApp, rendered: Rendered) -> None:
    rendered.go.release(200)

    async def run() -> list[bytes]:
        return [(await ask(app))[1] for _ in range(200)]

    assert asyncio.run(run()) == [f"text {number}".encode() for number in range(1, 201)]


def test_one_who_leaves_does_not_take_it_from_the_others(app: MetricsApp, rendered: Rendered) -> None:
    async def run() -> tuple[int, bytes]:
        asked = [asyncio.create_task(ask(app)) for _ in range(2)]
        await until(rendered.started)
        asked[0].cancel()
        rendered.go.release(2)  # the second may have come after the first text was begun
        return await asked[1]

    assert asyncio.run(run()) in ((200, b"text 1"), (200, b"text 2"))


def test_an_error_is_an_answer_and_the_next_one_is_well(
    app: MetricsApp, rendered: Rendered, caplog: pytest.LogCaptureFixture
) -> None:
    rendered.go.release(2)

    async def run() -> list[tuple[int, bytes]]:
        rendered.error = RuntimeError("no")
        first = await ask(app)
        rendered.error = None
        return [first, await ask(app)]

    first, second = asyncio.run(run())
    assert first[0] == 500 and b"log" in first[1]
    assert second == (200, b"text 2")
    assert "can't be rendered" in caplog.text


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda app: ask(app, "/x"), (200, b"")),
        (lambda app: ask(app, "/v2/health/live"), (200, b'{"live":true}')),
        (lambda app: ask(app, "/v2/health/ready"), (400, b'{"ready":false}')),
        (lambda app: ask(app, method="POST"), (405, b'{"error":"Method Not Allowed"}')),
    ],
)
def test_nothing_is_rendered_for_nothing(
    app: MetricsApp, rendered: Rendered, call: Callable[[MetricsApp], Any], expected: tuple[int, bytes]
) -> None:
    assert asyncio.run(call(app)) == expected
    assert rendered.begun == []
