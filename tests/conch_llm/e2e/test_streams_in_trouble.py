"""Troubles of streams from workers: all other clients get each of their tokens, once and in order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import httpx
import pytest
from tests.support.server_fixtures import LOAD_ALL
from tests.support.servers import WAIT_S, ServerProcess, eventually, serving_process
from tests.support.token_streams import HELD, WAYS, TokenStream, write_models

pytestmark = [pytest.mark.slow, pytest.mark.process]

STREAMS = 32
RESET = struct.pack("ii", 1, 0)
"""For SO_LINGER: closing sends RST."""


class Scene:
    """A server with streams that wait in the middle of their answers until `release`.

    Attributes:
        server: The server.
        whole: Streams that are to get all of their answers.
    """

    def __init__(self, server: ServerProcess, models: Path, at: Path, stack: ExitStack) -> None:
        self.server = server
        self.models = models
        self.at = at
        self.whole: list[TokenStream] = []
        self._stack = stack
        self.hold.touch()

    @property
    def hold(self) -> Path:
        return self.at / "hold"

    def stream(self, model: str, route: str, name: str, **size: int) -> TokenStream:
        """A stream, which is closed at the end."""
        return self._stack.enter_context(closing(TokenStream(name, model, route, **size)))

    async def open(self, count: int, prefix: str) -> list[TokenStream]:
        """Streams in all ways that have come to where they wait."""
        opened = [
            self.stream(*way, f"{prefix}{number}") for number, way in enumerate(islice(cycle(WAYS), count))
        ]
        await asyncio.gather(*(stream.send(self.server.http_address) for stream in opened))
        await asyncio.gather(*(stream.read_words(HELD) for stream in opened))
        self.whole += opened
        return opened

    def running(self) -> set[str]:
        """Names of the answers that the models are at."""
        return {path.name.removeprefix("running-") for path in self.at.glob("running-*")}

    async def release(self) -> None:
        """Lets the models go on; the streams get the rest of their answers."""
        self.hold.unlink()
        await asyncio.gather(*(stream.read_all() for stream in self.whole))


async def clients_leave(scene: Scene) -> None:
    """By FIN and by RST."""
    for number, stream in enumerate(scene.whole[::3]):
        if number % 2:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        stream.close()
    del scene.whole[::3]
    left = {stream.name for stream in scene.whole}
    await asyncio.to_thread(eventually, lambda: scene.running() == left, "the others are cancelled")
    await scene.release()


async def clients_close_their_half(scene: Scene) -> None:
    for stream in scene.whole[::2]:
        stream.socket.shutdown(socket.SHUT_WR)
    await scene.release()


async def a_client_reads_slowly(scene: Scene) -> None:
    """One for each way, a byte a second: fewer words than others get, but more than all buffers hold."""
    slow = [scene.stream(*way, f"slow{number}", count=20, width=1 << 20) for number, way in enumerate(WAYS)]
    ended = asyncio.Event()

    async def read_slowly(stream: TokenStream) -> None:
        await stream.send(scene.server.http_address, receive_buffer=4096)
        while not ended.is_set():
            await stream.read(1)
            await asyncio.wait({asyncio.ensure_future(ended.wait())}, timeout=1)
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        await stream.read_all()

    reading = [asyncio.ensure_future(read_slowly(stream)) for stream in slow]
    names = {stream.name for stream in slow}
    await asyncio.to_thread(eventually, lambda: names <= scene.running(), "they are answered")
    await scene.release()
    assert names <= scene.running(), "the models wait for them"
    ended.set()
    await asyncio.gather(*reading)
    scene.whole += slow


async def a_version_is_swapped(scene: Scene) -> None:
    write_models(scene.models, scene.at, version=2)
    url = f"http://{scene.server.http_address}/v2"
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        for model in {model for model, _ in WAYS}:
            loaded = await http.post(f"{url}/repository/models/{model}/load")
            assert loaded.status_code == 200, loaded.text
        for stream in await opened_at(scene, 2):
            stream.version = 2
        await scene.release()
        for model in {model for model, _ in WAYS}:
            while (await http.get(f"{url}/models/{model}")).json()["versions"] != ["2"]:
                await asyncio.sleep(0.01)


async def opened_at(scene: Scene, version: int) -> list[TokenStream]:
    return await scene.open(len(WAYS), f"version{version}-")


async def the_server_stops(scene: Scene) -> None:
    scene.server.signal(signal.SIGTERM)
    await asyncio.to_thread(
        eventually, lambda: "Waiting for in-flight requests" in scene.server.errors, "it stops"
    )
    for way in WAYS:
        late = scene.stream(*way, "late")
        await late.send(scene.server.http_address)
        await late.read_all()
        assert late.status == 503
        error = {
            "message": "Server exiting",
            "type": "server_error",
            "param": None,
            "code": "model_unavailable",
        }
        assert late.json() == {"error": error}
    await scene.release()
    assert await asyncio.to_thread(scene.server.wait) == 0


async def a_worker_is_killed(model: str, scene: Scene) -> None:
    os.kill(int((scene.at / f"pid-{model}").read_text()), signal.SIGKILL)
    failed = [stream for stream in scene.whole if stream.model == model]
    scene.whole = [stream for stream in scene.whole if stream.model != model]
    await asyncio.gather(*(stream.read_all() for stream in failed))
    for stream in failed:
        stream.check_failed("was killed by signal 9 (SIGKILL)")
        (scene.at / f"running-{stream.name}").unlink()
    await scene.open(len(WAYS), "after")
    await scene.release()


SCENARIOS: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "clients leave": clients_leave,
    "clients close their half": clients_close_their_half,
    "a client reads slowly": a_client_reads_slowly,
    "a version is swapped": a_version_is_swapped,
    "the server stops": the_server_stops,
    **{
        f"the worker of {model} is killed": partial(a_worker_is_killed, model)
        for model in ("deltas", "texts", "native")
    },
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_token_is_lost_or_doubled(tmp_path: Path, scenario: str) -> None:
    models = tmp_path / "models"
    write_models(models, tmp_path)

    async def play(scene: Scene) -> None:
        await scene.open(STREAMS, "stream")
        await SCENARIOS[scenario](scene)

    with serving_process(models, flags=LOAD_ALL) as server, ExitStack() as stack:
        scene = Scene(server, models, tmp_path, stack)
        asyncio.run(asyncio.wait_for(play(scene), 2 * WAIT_S))
        for stream in scene.whole:
            stream.check_whole()
        eventually(lambda: not scene.running(), "no answer runs any more")
