"""`conch.AsyncClient`: as `conch.Client`, on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any

import numpy.typing as npt

from conch.api.client import LOOK_S, raised_as_ours
from conch.api.results import Result
from conch.api.transport import Signature, Url
from conch.core.errors import DeadlineExceededError, UnavailableError, UnsupportedError
from conch.core.request import Parameter


class AsyncClient:
    """A model of a server, for coroutines of one event loop.

    It connects with the first call, and waits until the model is ready then.

    Args:
        url: As for `conch.Client`.
        model: The model's name.
        version: Its version; the newest without.
        wait_s: Seconds to wait for it to be ready.
        timeout_s: Seconds that a request, or the next response of a stream, may take; None for any time.

    Raises:
        InvalidArgumentError: The url is none.
        ImportError: tritonclient is not installed.
    """

    def __init__(
        self,
        url: str,
        model: str,
        version: str | int = "",
        *,
        wait_s: float = 60.0,
        timeout_s: float | None = None,
    ) -> None:
        self._url = Url.parse(url)
        self._module: Any = self._url.module(aio=True)
        self._tensors: Any = self._url.module()
        self._model = model
        self._version = str(version)
        self._wait_s = wait_s
        self._timeout_s = timeout_s
        self._client: Any = None
        self._signature: Signature | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> AsyncClient:
        await self.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; the next call opens another one."""
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
        signature = await self._known()
        given = self._inputs(signature.arrays(inputs, named, sample))
        try:
            with raised_as_ours():
                async with asyncio.timeout(self._timeout_s):
                    response = await self._client.infer(
                        self._model, given, self._version, parameters=dict(parameters) if parameters else None
                    )
        except TimeoutError:
            raise DeadlineExceededError(f"no answer within {self._timeout_s} s") from None
        return signature.result(response, sample)

    async def _stream(
        self, inputs: Any, named: Any, parameters: Mapping[str, Parameter] | None, sample: bool
    ) -> AsyncIterator[Result]:
        if not self._url.grpc:
            raise UnsupportedError("responses are streamed over gRPC only: use a grpc:// url")
        signature = await self._known()
        request = {
            "model_name": self._model,
            "inputs": self._inputs(signature.arrays(inputs, named, sample)),
            "model_version": self._version,
            "parameters": dict(parameters) if parameters else None,
        }

        async def requests() -> AsyncIterator[Any]:
            yield request  # and no more: the server ends the stream when this one has been answered

        stream = self._client.stream_infer(requests())
        try:
            while True:
                try:
                    with raised_as_ours():
                        async with asyncio.timeout(self._timeout_s):
                            response, error = await anext(stream)
                        if error is not None:
                            raise error
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise DeadlineExceededError(f"no response within {self._timeout_s} s") from None
                yield signature.result(response, sample)
        finally:
            stream.cancel()

    def _inputs(self, arrays: Mapping[str, tuple[str, Any]]) -> list[Any]:
        given = []
        for name, (datatype, array) in arrays.items():
            tensor = self._tensors.InferInput(name, list(array.shape), datatype)
            with raised_as_ours():
                tensor.set_data_from_numpy(array)
            given.append(tensor)
        return given

    async def _known(self) -> Signature:
        async with self._lock:
            if self._signature is None:
                if self._client is None:
                    self._client = self._module.InferenceServerClient(self._url.address, ssl=self._url.tls)
                await self._wait_ready()
                with raised_as_ours():
                    if self._url.grpc:
                        answer = await self._client.get_model_config(self._model, self._version, as_json=True)
                        config = answer["config"]
                    else:
                        config = await self._client.get_model_config(self._model, self._version)
                self._signature = Signature(config)
            return self._signature

    async def _wait_ready(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._wait_s
        while True:
            why = "it is not ready"
            try:
                with raised_as_ours():
                    if await self._client.is_model_ready(self._model, self._version):
                        return
            except UnavailableError as error:
                why = error.message
            left = end - loop.time()
            if left <= 0:
                raise UnavailableError(f"model '{self._model}' was not ready within {self._wait_s} s: {why}")
            await asyncio.sleep(min(LOOK_S, left))
