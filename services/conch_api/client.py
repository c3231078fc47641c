"""`conch.Client`: one model of a server, called like a function; a thin layer over tritonclient."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy.typing as npt

from conch.core.current_span import outgoing_headers
from conch.core.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from conch.core.request import Parameter
from conch_api.client_common import LOOK_S, STREAM_HEADERS, ClientBase, Signature, is_final, translated_errors
from conch_api.frame_requests import MOST_OPEN, run_in_order
from conch_api.function_io import Result
from conch_frames.frame_error import FrameError


class Client(ClientBase):
    """A model of a server, for one thread at a time.

    The first call connects and waits until the model is ready.

    Args:
        url: ``host:port`` or ``grpc://host:port`` for gRPC, ``http://host:port`` for REST; ``grpcs://`` and
            ``https://`` with TLS.
        model: The model's name.
        version: Its version; the newest if empty.
        wait_s: Seconds to wait until it is ready.
        timeout_s: Time limit in seconds of a request, or of the next response of a stream; None for no limit.

    Raises:
        InvalidArgumentError: The url is invalid.
        ImportError: tritonclient is not installed.
    """

    def __enter__(self) -> Client:
        self.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; the next call opens another."""
        client, self._client, self._signature = self._client, None, None
        if client is not None:
            client.close()

    def wait(self) -> None:
        """Waits until the model is ready; later calls return at once.

        Raises:
            UnavailableError: It was not ready in time.
        """
        self._known()

    def infer_sample(
        self,
        *inputs: npt.ArrayLike,
        parameters: Mapping[str, Parameter] | None = None,
        **named: npt.ArrayLike,
    ) -> Result:
        """Runs a request for one sample: inputs and outputs have no batch dimension.

        Args:
            inputs: Inputs in the model's order.
            parameters: Request parameters.
            named: Inputs by name, instead.

        Raises:
            ConchError: An error of the server.
        """
        return self._infer(inputs, named, parameters, sample=True)

    def infer_batch(
        self,
        *inputs: npt.ArrayLike,
        parameters: Mapping[str, Parameter] | None = None,
        **named: npt.ArrayLike,
    ) -> Result:
        """As `infer_sample`, with arrays as they are."""
        return self._infer(inputs, named, parameters, sample=False)

    def infer_frame(
        self,
        frame: Any,
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> Any:
        """Runs the rows of a frame, in batches that are open side by side, and joins the outputs.

        Args:
            frame: A DataFrame of pandas or polars, a table of pyarrow, or a mapping of columns by name. The
                model's columns are found by name, others are left out; docs/frames.md has the conversions.
            outputs: Names of the requested outputs; by default all.
            parameters: Request parameters.

        Returns:
            The outputs as a frame of the same library, with the index of pandas; one of several values for
            each row has columns ``name_0``, ``name_1`` and so on.

        Raises:
            ConchError: An error of the server, or of a value that the model can't take: the text names
                column and row.
        """
        known = self._signature
        try:
            return self._run_frame(self._known(), frame, outputs, parameters)
        except FrameError:
            if known is None:
                raise
            self._signature = None  # the model may have been replaced
            found = self._known()
            if found.config == known.config:
                raise
        return self._run_frame(found, frame, outputs, parameters)

    def _run_frame(
        self,
        signature: Signature,
        frame: Any,
        outputs: Sequence[str] | None,
        parameters: Mapping[str, Parameter] | None,
    ) -> Any:
        run = self._frame_run(signature, frame)
        begin = _GrpcCall if self._url.grpc else _HttpCall
        limits = {} if self._timeout_s is None or not self._url.grpc else {"client_timeout": self._timeout_s}
        sent = (
            begin(self._client, signature, {**self._frame_request(inputs, outputs, parameters), **limits})
            for inputs in run.requests()
        )
        return run_in_order(run, sent)

    def stream_sample(
        self,
        *inputs: npt.ArrayLike,
        parameters: Mapping[str, Parameter] | None = None,
        **named: npt.ArrayLike,
    ) -> Iterator[Result]:
        """As `infer_sample`, for a model with any number of responses; over gRPC only.

        Leaving the loop early cancels the request.
        """
        return self._stream(inputs, named, parameters, sample=True)

    def stream_batch(
        self,
        *inputs: npt.ArrayLike,
        parameters: Mapping[str, Parameter] | None = None,
        **named: npt.ArrayLike,
    ) -> Iterator[Result]:
        """As `stream_sample`, with arrays as they are."""
        return self._stream(inputs, named, parameters, sample=False)

    def _infer(
        self, inputs: Any, named: Any, parameters: Mapping[str, Parameter] | None, sample: bool
    ) -> Result:
        signature, request = self._asked(inputs, named, parameters, sample)
        limits = {} if self._timeout_s is None or not self._url.grpc else {"client_timeout": self._timeout_s}
        with translated_errors(self._timeout_s):
            response = self._client.infer(**request, headers=outgoing_headers(), **limits)
        return signature.result(response, sample)

    def _stream(
        self, inputs: Any, named: Any, parameters: Mapping[str, Parameter] | None, sample: bool
    ) -> Iterator[Result]:
        self._check_streams()
        signature, request = self._asked(inputs, named, parameters, sample)
        return self._responses(signature, request, sample)

    def _responses(self, signature: Signature, request: dict[str, Any], sample: bool) -> Iterator[Result]:
        # A tritonclient client has one stream; callers may read several.
        client = self._open()
        come: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        ended = False
        try:
            with translated_errors():
                client.start_stream(
                    lambda result, error: come.put((result, error)),
                    headers=STREAM_HEADERS | outgoing_headers(),
                )
                client.async_stream_infer(**request, enable_empty_final_response=True)
            while not ended:
                try:
                    result, error = come.get(timeout=self._timeout_s)
                except queue.Empty:
                    raise DeadlineExceededError(f"no answer within {self._timeout_s} s") from None
                with translated_errors():
                    if error is not None:
                        raise error
                ended = is_final(result)
                found = signature.result(result, sample)
                if found or not ended:
                    yield found
        finally:
            # A cancelled tritonclient stream leaks a thread that waits for requests: wake it.
            waits = None if ended else getattr(getattr(client, "_stream", None), "_request_queue", None)
            client.stop_stream(cancel_requests=not ended)
            if waits is not None:
                waits.put(None)
            client.close()

    def _asked(
        self, inputs: Any, named: Any, parameters: Mapping[str, Parameter] | None, sample: bool
    ) -> tuple[Signature, dict[str, Any]]:
        """A request and the signature it was made from."""
        known = self._signature
        signature = self._known()
        try:
            return signature, self._request(signature, inputs, named, parameters, sample)
        except InvalidArgumentError:
            if known is None:
                raise
        self._signature = None  # the model may have been replaced
        signature = self._known()
        return signature, self._request(signature, inputs, named, parameters, sample)

    def _known(self) -> Signature:
        """The model's signature; waits until the model is ready."""
        if self._signature is not None:
            return self._signature
        if self._client is None:
            self._client = self._open()
        self._wait_ready()
        with translated_errors():
            return self._know(self._client.get_model_config(**self._asking))

    def _wait_ready(self) -> None:
        end = time.monotonic() + self._wait_s
        never = threading.Event()
        while True:
            why = "it is not ready"
            try:
                with translated_errors():
                    if self._client.is_model_ready(self._model, self._version):
                        return
            except UnavailableError as error:
                why = error.message
            left = end - time.monotonic()
            if left <= 0:
                raise self._not_ready(why)
            never.wait(min(LOOK_S, left))

    def _open(self) -> Any:
        limits: dict[str, Any] = {} if self._url.grpc else {"concurrency": MOST_OPEN}
        if not self._url.grpc and self._timeout_s is not None:
            limits["network_timeout"] = self._timeout_s
        return self._module.InferenceServerClient(self._url.address, ssl=self._url.tls, **limits)


class _GrpcCall:
    """A request that was sent over gRPC; a `Pending`."""

    def __init__(self, client: Any, signature: Signature, request: dict[str, Any]) -> None:
        self._signature = signature
        self._answer: Future[Any] = Future()
        with translated_errors():
            self._call = client.async_infer(callback=self._done, headers=outgoing_headers(), **request)

    def _done(self, result: Any, error: BaseException | None) -> None:
        if error is None:
            self._answer.set_result(result)
        else:
            self._answer.set_exception(error)

    def result(self) -> Result:
        """The outputs, when they are there."""
        with translated_errors():
            return self._signature.result(self._answer.result(), sample=False)

    def cancel(self) -> None:
        """Gives the request up."""
        self._call.cancel()


class _HttpCall:
    """A request that was sent over HTTP; a `Pending`. It goes on whenever the thread waits."""

    def __init__(self, client: Any, signature: Signature, request: dict[str, Any]) -> None:
        self._signature = signature
        with translated_errors():
            self._call = client.async_infer(headers=outgoing_headers(), **request)

    def result(self) -> Result:
        """The outputs, when they are there."""
        with translated_errors():
            return self._signature.result(self._call.get_result(), sample=False)

    def cancel(self) -> None:
        """Waits for the answer, which has no other end."""
        with suppress(Exception):  # of tritonclient: the error of an earlier request is raised
            self._call.get_result()
