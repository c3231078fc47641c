"""Streams of tokens by OpenAI's routes: models whose words can be told apart, and clients that count them.

A prompt is a name, a number of words and the size of each: ``s1 40 0``. The words of the answer have the
name, the version of the model and their number. In front of word `HELD` a model waits while there is a file
``hold`` in the directory that its config names; there it also has its process id and a file for each answer
that runs.
"""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import h11
from tests.support.llm_models import parameter
from tests.support.servers import write_model
from tests.support.text_models import CHAT, COMPLETIONS

HELD = 3
"""Words that come before a model waits."""

_MODEL = """
import asyncio
import json
import os
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


def output(text):
    content = np.array([text.encode()], object)
    return [pb_utils.Tensor("text_output", content)]


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.at = Path(config["parameters"]["at"]["string_value"])
        self.version = args["model_version"]
        (self.at / f"pid-{args['model_name']}").write_text(str(os.getpid()))

    async def words(self, prompt, is_cancelled=lambda: False):
        name, count, width = prompt.split()
        running = self.at / f"running-{name}"
        running.touch()
        try:
            for number in range(int(count)):
                while number == HELD and (self.at / "hold").exists():
                    await asyncio.sleep(0.005)
                    if is_cancelled():
                        return
                await asyncio.sleep(0.001)
                yield f"{name}.{self.version}.{number}" + "x" * int(width) + " "
        finally:
            running.unlink()
""".replace("HELD", str(HELD))
_DELTAS = """
    async def chat(self, request):
        async for word in self.words(request.messages[-1]["content"]):
            yield word

    async def complete(self, request):
        async for word in self.words(request.prompt):
            yield word
"""
_TEXTS = """
    async def execute(self, requests):
        (request,) = requests
        prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
        async for word in self.words(prompt, request.is_cancelled):
            yield pb_utils.InferenceResponse(output(word))
"""
_NATIVE = """
    async def execute(self, requests):
        (request,) = requests
        body = json.loads(pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0])
        head = {"http_status": 200, "content_type": "text/event-stream"}
        async for word in self.words(body["prompt"], request.is_cancelled):
            event = {"choices": [{"index": 0, "text": word, "finish_reason": None}]}
            yield pb_utils.InferenceResponse(output(f"data: {json.dumps(event)}\\n\\n"), parameters=head)
            head = {}
        event = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
        yield pb_utils.InferenceResponse(output(f"data: {json.dumps(event)}\\n\\ndata: [DONE]\\n\\n"))
"""
_TENSORS = """
    input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
    model_transaction_policy { decoupled: true }
"""
_FILES = {
    "deltas": (_MODEL + _DELTAS, ""),
    "texts": (_MODEL + _TEXTS, _TENSORS),
    "native": (_MODEL + _NATIVE, _TENSORS + parameter("CONCH_LLM", "native")),
}
WAYS = (("deltas", CHAT), ("deltas", COMPLETIONS), ("texts", COMPLETIONS), ("native", COMPLETIONS))
"""Models, and the routes by which they are asked: every way of an answer to a client."""


def write_models(repository: Path, at: Path, version: int = 1) -> None:
    """Writes a version of all models; `at` is the directory with their files."""
    for name, (code, extra) in _FILES.items():
        config = (
            f'backend: "python"\n{extra}\n{parameter("at", str(at))}{parameter("CONCH_MAX_INFLIGHT", "64")}'
        )
        write_model(repository, name, config, {"model.py": code}, versions=[version])


class TokenStream:
    """A request on a connection of its own, and what has come of it.

    Attributes:
        name: Begins its words.
        version: The version of the model that is to answer.
        status: HTTP status, once it is there.
        ended: True if the response is complete.
    """

    def __init__(self, name: str, model: str, route: str, *, count: int = 40, width: int = 0) -> None:
        self.name = name
        self.model = model
        self.version = 1
        self.status = 0
        self.ended = False
        self.socket = socket.socket()
        self._route = route
        self._count = count
        self._width = width
        self._http = h11.Connection(h11.CLIENT)
        self._body = bytearray()

    async def send(self, address: str, receive_buffer: int | None = None) -> None:
        """Connects, and sends the request."""
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.setblocking(False)
        loop = asyncio.get_running_loop()
        host, _, port = address.rpartition(":")
        await loop.sock_connect(self.socket, (host, int(port)))
        prompt = f"{self.name} {self._count} {self._width}"
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        if self._route != CHAT:
            asked = {"prompt": prompt, "max_tokens": self._count}
        body = json.dumps({"model": self.model, "stream": True, **asked}).encode()
        headers = [("host", address), ("content-length", str(len(body)))]
        head = self._http.send(h11.Request(method="POST", target=self._route, headers=headers))
        data = self._http.send(h11.Data(body))
        self._http.send(h11.EndOfMessage())
        assert head is not None and data is not None
        await loop.sock_sendall(self.socket, head + data)

    async def read(self, most: int = 1 << 16) -> None:
        """Reads what has come, at least a byte. Fails if the connection ends before the response."""
        data = await asyncio.get_running_loop().sock_recv(self.socket, most)
        self._http.receive_data(data)
        while not self.ended and (event := self._http.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Response):
                self.status = event.status_code
            elif isinstance(event, h11.Data):
                self._body += event.data
            else:
                assert isinstance(event, h11.EndOfMessage)
                self.ended = True

    async def read_words(self, count: int) -> None:
        """Reads until there are so many words."""
        while len(self.text().split()) < count:
            await self.read()

    async def read_all(self) -> None:
        """Reads to the end."""
        while not self.ended:
            await self.read()

    def json(self) -> Any:
        """The body of a response that is no stream."""
        return json.loads(self._body)

    def text(self) -> str:
        """The words that have come."""
        choices = [each for event in self._events() for each in event.get("choices", ())]
        return "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)

    def check_whole(self) -> None:
        """Fails unless each word has come once and in order, and then the end."""
        assert (self.status, self.text()) == (200, "".join(self._words()))
        reasons = [choice["finish_reason"] for event in self._events() for choice in event["choices"]]
        assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
        assert self._body.endswith(b"data: [DONE]\n\n") and self._body.count(b"[DONE]") == 1

    def check_failed(self, message: str) -> None:
        """Fails unless the first words have come once and in order, and then an error in OpenAI's shape."""
        assert self.status == 200
        count = len(self.text().split())
        assert self.text() == "".join(self._words()[:count])
        *before, last = self._events()
        assert all("error" not in event for event in before)
        error = last["error"]
        assert message in error.pop("message")
        assert error == {"type": "server_error", "param": None, "code": "model_unavailable"}
        assert self._body.endswith(b"data: [DONE]\n\n") and self._body.count(b"[DONE]") == 1

    def close(self) -> None:
        """Leaves."""
        with suppress(OSError):
            self.socket.close()

    def _words(self) -> list[str]:
        padding = "x" * self._width + " "
        return [f"{self.name}.{self.version}.{number}{padding}" for number in range(self._count)]

    def _events(self) -> list[dict[str, Any]]:
        """The complete events, without comments and the end."""
        *events, _ = self._body.split(b"\n\n")
        datas = [event.removeprefix(b"data: ") for event in events if event.startswith(b"data: ")]
        return [json.loads(data) for data in datas if data != b"[DONE]"]
