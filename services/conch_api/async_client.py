"""`conch.AsyncClient`: `conch.Client` for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy.typing as npt

from conch.core.current_span import outgoing_headers
from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.request import Parameter
from conch_api.client_common import LOOK_S, STREAM_HEADERS, ClientBase, Signature, translated_errors
from conch_api.frame_requests import run_in_order_async
from conch_api.function_io import Result
from conch_frames.frame_error import FrameError


class AsyncClient(ClientBase):
    """A model of a server, for coroutines of one event loop.

    The first call connects and waits until the model is ready.

    Args:
        url: As for `conch.Client`.
        model: The model's name.
        version: Its version; the newest if empty.
        wait_s: Seconds to wait until it is ready.
        timeout_s: Time limit in seconds of a request, or of the next response of a stream; None for no limit.

    Raises:
        InvalidArgumentError: The url is invalid.
        ImportError: tritonclient is not installed.
    """

    _aio = True

    def __init__(
        self,
        url: str,
        model: str,
        version: str | int = "",
        *,
        wait_s: float = 60.0,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(url, model, version, wait_s=wait_s, timeout_s=timeout_s)
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> AsyncClient:
        await self.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; the next call opens another."""
        client, self._client, self._signature = self._client, None, None
        if client is not None:
            await client.close()

    async def wait(self) -> None:
        """As `conch.Client.wait`."""
        await self._known()

    async def infer_sample(
        self,
        *inputs: npt.ArrayLike,
        parameters: Mapping[str, Parameter] | None = None,
        **named: npt.ArrayLike,
    ) -> Result:
        """As `conch.Client.infer_sample`."""
        return await self._infer(inputs, named, parameters, sample=True)

    async def infer_batch(
        self,
        *inputs: npt.ArrayLike,
        parameters: Mapping[str, Parameter] | None = None,
        **named: npt.ArrayLike,
    ) -> Result:
        """As `conch.Client.infer_batch`."""
        return await self._infer(inputs, named, parameters, sample=False)

    async def infer_frame(
        self,
        frame: Any,
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> Any:
        """As `conch.Client.infer_frame`."""
        known = self._signature
        try:
            return await self._run_frame(await self._known(), frame, outputs, parameters)
        except FrameError:
            if known is None:
                raise
            self._signature = None
            found = await self._known()
            if found.config == known.config:
                raise
        return await self._run_frame(found, frame, outputs, parameters)

    async def _run_frame(
        self,
        signature: Signature,
        frame: Any,
        outputs: Sequence[str] | None,
        parameters: Mapping[str, Parameter] | None,
    ) -> Any:
        run = self._frame_run(signature, frame)
        calls = (
            self._ask(signature, self._frame_request(inputs, outputs, parameters), sample=False)
            for inputs in run.requests()
        )
        return await run_in_order_async(run, calls)

    def stream_sample(
        self,
        *inputs: npt.ArrayLike,
        parameters: Mapping[str, Parameter] | None = None,
        **named: npt.ArrayLike,
    ) -> AsyncIterator[Result]:
        """As `conch.Client.stream_sample`."""
        return self._stream(inputs, named, parameters, sample=True)

    def stream_batch(
        self,
        *inputs: npt.ArrayLike,
        parameters: Mapping[str, Parameter] | None = None,
        **named: npt.ArrayLike,
    ) -> AsyncIterator[Result]:
        """As `conch.Client.stream_batch`."""
        return self._stream(inputs, named, parameters, sample=False)

    async def _infer(
        self, inputs: Any, named: Any, parameters: Mapping[str, Parameter] | None, sample: bool
    ) -> Result:
        signature, request = await self._asked(inputs, named, parameters, sample)
        return await self._ask(signature, request, sample)

    async def _ask(self, signature: Signature, request: dict[str, Any], sample: bool) -> Result:
        with translated_errors(self._timeout_s):
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.infer(**request, headers=outgoing_headers())
        return signature.result(response, sample)

    async def _stream(
        self, inputs: Any, named: Any, parameters: Mapping[str, Parameter] | None, sample: bool
    ) -> AsyncIterator[Result]:
        self._check_streams()
        signature, request = await self._asked(inputs, named, parameters, sample)

        async def requests() -> AsyncIterator[Any]:
            yield request  # the server ends the stream after the only request

        stream = self._client.stream_infer(requests(), headers=STREAM_HEADERS | outgoing_headers())
        try:
            while True:
                try:
                    with translated_errors(self._timeout_s):
                        async with asyncio.timeout(self._timeout_s):
                            response, error = await anext(stream)
                        if error is not None:
                            raise error
                except StopAsyncIteration:
                    return
                yield signature.result(response, sample)
        finally:
            stream.cancel()

    async def _asked(
        self, inputs: Any, named: Any, parameters: Mapping[str, Parameter] | None, sample: bool
    ) -> tuple[Signature, dict[str, Any]]:
        """As in `conch.Client`."""
        known = self._signature
        signature = await self._known()
        try:
            return signature, self._request(signature, inputs, named, parameters, sample)
        except InvalidArgumentError:
            if known is None:
                raise
        self._signature = None
        signature = await self._known()
        return signature, self._request(signature, inputs, named, parameters, sample)

    async def _known(self) -> Signature:
        async with self._lock:
            if self._signature is not None:
                return self._signature
            if self._client is None:
                self._client = self._module.InferenceServerClient(self._url.address, ssl=self._url.tls)
            await self._wait_ready()
            with translated_errors():
                return self._know(await self._client.get_model_config(**self._asking))

    async def _wait_ready(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._wait_s
        while True:
            why = "it is not ready"
            try:
                with translated_errors():
                    if await self._client.is_model_ready(self._model, self._version):
                        return
            except UnavailableError as error:
                why = error.message
            left = end - loop.time()
            if left <= 0:
                raise self._not_ready(why)
            await asyncio.sleep(min(LOOK_S, left))
