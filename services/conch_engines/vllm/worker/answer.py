"""`VllmAnswer`: sends the responses of one request, without blocking the engine's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class VllmAnswer:
    """The responses of one request.

    A response that has to wait for a slow client is sent by a thread of `threads`; meanwhile vLLM joins
    what it generates for the request.

    Attributes:
        ended: True if the last response was sent.
    """

    def __init__(self, sender: Any, threads: Executor) -> None:
        self._sender = sender
        self._threads = threads
        self._waiting: asyncio.Future[None] | None = None
        self.ended = False

    async def send(
        self,
        tensors: Mapping[str, Any],
        final: bool = False,
        parameters: dict[str, bool | int | str] | None = None,
    ) -> None:
        """Sends outputs by name."""
        made = [pb_utils.Tensor(name, array) for name, array in tensors.items()]
        await self._send(pb_utils.InferenceResponse(made, None, parameters), final)

    async def end(self) -> None:
        """Sends the final flag alone."""
        await self._send(None, True)

    async def fail(self, text: str, code: int) -> None:
        """Ends with an error, unless it has ended."""
        if self._waiting is not None and not self._waiting.done():
            await asyncio.wait([self._waiting])
        if not self.ended:
            error = pb_utils.TritonError(text, code)
            await self._send(pb_utils.InferenceResponse([], error), True)

    async def _send(self, response: Any, final: bool) -> None:
        self.ended = final
        flags = _FINAL if final else 0
        if self._sender.is_behind():
            loop = asyncio.get_running_loop()
            self._waiting = loop.run_in_executor(self._threads, self._sender.send, response, flags)
            await asyncio.shield(self._waiting)
        else:
            self._sender.send(response, flags)


def texts(values: list[Any]) -> Any:
    """An array of strings."""
    array = np.empty(len(values), dtype=np.object_)
    array[:] = values
    return array
