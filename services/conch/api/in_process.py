"""Runs requests of the program itself: no socket, no message, the same scheduler, statistics and cache."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TypedDict
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from conch.api.array_conversion import input_array
from conch.api.function_io import Result
from conch.api.response_queue import AsyncResponseQueue, ResponseQueue, raise_error
from conch.core.admission import Admission
from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.request import InferenceRequest, InferenceResponse, Parameter
from conch.core.servable import Servable
from conch.core.server_state import ServerState
from conch.core.tensor import Array, Tensor, brain_floats, float_array

_S = 1_000_000_000
_DECOUPLED = "model '{name}' is decoupled and did not give exactly one response: use stream() for it"

Inputs = Mapping[str, npt.ArrayLike]
"""Arrays by name, or what can be made arrays of the model's types."""


class RequestOptions(TypedDict, total=False):
    """What a request may have besides its inputs.

    Attributes:
        version: The model's version; the newest one that is ready without.
        outputs: Names of the outputs wanted; all without.
        parameters: Parameters for the model.
        request_id: A name for logs.
        priority: Its priority level.
        sequence_id: The sequence that it belongs to.
        sequence_start: Whether it begins that.
        sequence_end: Whether it ends it.
    """

    version: str | int
    outputs: Sequence[str] | None
    parameters: Mapping[str, Parameter] | None
    request_id: str
    priority: int
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool


class InProcessRequests:
    """The way in for requests of the program.

    Args:
        core: Runs the requests.
    """

    def __init__(self, core: ServerState) -> None:
        self._core = core
        self._admission = core.admission("direct")
        self._lock = threading.Lock()
        self._open: WeakSet[ResponseQueue] = WeakSet()
        self._readings: WeakSet[_Reading] = WeakSet()

    def infer(self, model: str, inputs: Inputs, timeout: float | None, options: RequestOptions) -> Result:
        """Runs a request and waits for its only response."""
        handover = ResponseQueue()
        request, name = self._begin(model, inputs, handover, timeout, options)
        try:
            return _only(name, handover.take(timeout), lambda: handover.take(timeout))
        except BaseException:
            _end(self._admission, request, handover)
            raise

    async def infer_async(
        self, model: str, inputs: Inputs, timeout: float | None, options: RequestOptions
    ) -> Result:
        """The same, on an event loop."""
        handover = AsyncResponseQueue()
        request, name = self._begin(model, inputs, handover, timeout, options)
        try:
            first = await handover.get(timeout)
            second = None if first is None or first.error is not None else await handover.get(timeout)
            return _only(name, first, lambda: second)
        except BaseException:
            _end(self._admission, request, handover)
            raise

    def stream(self, model: str, inputs: Inputs, timeout: float | None, options: RequestOptions) -> Responses:
        """Runs a request, from when the first response is asked for, and gives its responses as they come."""

        def begin() -> _Reading:
            return self._read(model, inputs, ResponseQueue(), options)

        return Responses(begin, timeout)

    async def stream_async(
        self, model: str, inputs: Inputs, timeout: float | None, options: RequestOptions
    ) -> AsyncIterator[Result]:
        """The same, on an event loop."""
        handover = AsyncResponseQueue()
        reading = self._read(model, inputs, handover, options)
        try:
            while (response := await handover.get(timeout)) is not None:
                yield _result(response)
        finally:
            reading.end()

    def _read(self, model: str, inputs: Inputs, handover: ResponseQueue, options: RequestOptions) -> _Reading:
        # A deadline would be that of all responses together.
        request, _ = self._begin(model, inputs, handover, None, options)
        reading = _Reading(self._admission, request, handover)
        with self._lock:
            self._readings.add(reading)
        return reading

    def end_own_streams(self) -> None:
        """Ends the streams that the calling thread reads; it is about to wait for them to end."""
        with self._lock:
            readings = list(self._readings)
        for reading in readings:
            if reading.thread == threading.get_ident():
                reading.stop()

    def close(self) -> None:
        """Lets go of models that wait for somebody to read, and of who waits for an answer."""
        with self._lock:
            handovers = list(self._open)
        for handover in handovers:
            handover.stop()

    def _begin(
        self,
        model: str,
        inputs: Inputs,
        handover: ResponseQueue,
        timeout: float | None,
        options: RequestOptions,
    ) -> tuple[InferenceRequest, str]:
        """Submits a request whose responses go to a handover."""
        self._core.check_running()
        unknown = options.keys() - RequestOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"a request has no option '{min(unknown)}'")
        now = monotonic_ns()
        request = InferenceRequest(
            model,
            str(options.get("version", "")),
            {},
            handover.put,
            now,
            request_id=options.get("request_id", ""),
            requested=tuple(options.get("outputs") or ()) or None,
            parameters=_parameters(options.get("parameters")),
        )
        request.priority = options.get("priority", 0)
        request.correlation_id = options.get("sequence_id", 0)
        request.sequence_start = options.get("sequence_start", False)
        request.sequence_end = options.get("sequence_end", False)
        request.responses_wait = True  # the arrays become the caller's
        if timeout is not None:
            request.deadline_ns = now + round(timeout * _S)
        admission = self._admission
        admission.check_refused(request)
        found = admission.resolve(request)
        spec = found.spec
        datatypes = {tensor.name: tensor.datatype for tensor in spec.inputs}
        for name, value in inputs.items():
            request.inputs[name] = _tensor(name, value, datatypes.get(name))
        self._check_outputs(request, found)
        with self._lock:
            self._open.add(handover)
        nbytes = sum(tensor.nbytes for tensor in request.inputs.values()) if admission.logs else 0
        admission.admit(request, False, found, "", nbytes)
        return request, spec.name

    @staticmethod
    def _check_outputs(request: InferenceRequest, model: Servable) -> None:
        known = [tensor.name for tensor in model.spec.outputs]
        for name in request.requested or ():
            if name not in known:
                raise InvalidArgumentError(
                    f"unexpected inference output '{name}' for model '{request.model_name}'; it has "
                    f"{', '.join(known)}"
                )


class _Reading:
    """A request whose responses a thread reads one by one."""

    def __init__(self, admission: Admission, request: InferenceRequest, handover: ResponseQueue) -> None:
        self._admission = admission
        self._request = request
        self.handover = handover
        self.thread = threading.get_ident()

    def end(self) -> None:
        """Says that nobody reads any more."""
        _end(self._admission, self._request, self.handover)

    def stop(self) -> None:
        """Ends it for the server's sake."""
        self.handover.stop()
        self.end()


class Responses(Iterator[Result]):
    """The responses to a request, which is submitted when the first of them is asked for.

    Args:
        begin: Submits it.
        timeout: Seconds that each may take; None for any time.
    """

    def __init__(self, begin: Callable[[], _Reading], timeout: float | None) -> None:
        self._begin: Callable[[], _Reading] | None = begin
        self._timeout = timeout
        self._reading: _Reading | None = None

    def __next__(self) -> Result:
        begin, self._begin = self._begin, None
        if begin is not None:
            self._reading = begin()
        reading = self._reading
        if reading is None:
            raise StopIteration
        try:
            response = reading.handover.take(self._timeout)
            if response is not None:
                return _result(response)
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Ends it; a request that is not finished is cancelled."""
        reading, self._reading, self._begin = self._reading, None, None
        if reading is not None:
            reading.end()

    def __del__(self) -> None:
        reading: _Reading | None = getattr(self, "_reading", None)
        if reading is None:
            return
        # On a thread of its own: the garbage collector may run this in the middle of anything.
        try:
            threading.Thread(target=reading.end, name="conch-dropped-stream").start()
        except RuntimeError:
            pass  # the interpreter is shutting down


def _end(admission: Admission, request: InferenceRequest, handover: ResponseQueue) -> None:
    """Says that nobody waits for a request any more."""
    over = handover.over
    handover.close()  # first, or an answer that says that it was cancelled might have to wait to be read
    if not over:
        admission.cancel(request)


def _only(
    name: str, first: InferenceResponse | None, second: Callable[[], InferenceResponse | None]
) -> Result:
    """The only response, if there is exactly one."""
    if first is not None:
        result = _result(first)
        if second() is None:
            return result
    raise InvalidArgumentError(_DECOUPLED.format(name=name))


def _result(response: InferenceResponse) -> Result:
    raise_error(response)
    outputs: dict[str, Array] = {}
    for tensor in response.outputs:
        tensor.fetch()
        array = float_array(tensor.data, tensor.shape) if tensor.datatype == "BF16" else tensor.numpy()
        # What can't be written to is somebody else's as well: a message's, a cache's, or the caller's inputs.
        outputs[tensor.name] = array if array.flags.writeable else array.copy()
    return Result(outputs, response.parameters)


def _tensor(name: str, value: npt.ArrayLike, datatype: str | None) -> Tensor:
    """A tensor of what a caller gives as an input; no copy of an array that is one already.

    Raises:
        InvalidArgumentError: It can't be one.
    """
    array = input_array(name, value, "FP32" if datatype == "BF16" else datatype)
    if datatype == "BF16" and array.dtype == np.float32:
        return Tensor(name, datatype, array.shape, brain_floats(array))
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    array = array.view()
    array.flags.writeable = False
    try:
        return Tensor.from_array(name, array)
    except ConchError as error:
        raise InvalidArgumentError(f"input '{name}': {error.message}") from None


def _parameters(given: Mapping[str, Parameter] | None) -> dict[str, Parameter] | None:
    for key, value in (given or {}).items():
        if not isinstance(value, bool | int | float | str):
            raise InvalidArgumentError(
                f"parameter '{key}' must be a boolean, a number or a text, not {type(value).__name__}"
            )
    return dict(given) if given else None
