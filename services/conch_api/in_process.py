"""Requests of the program itself (`Server.infer`, `stream`), without sockets or messages.

They use the same admission and scheduler as client requests.

Owns: open response queues and streams; `_lock` guards both sets.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from conch.core.admission import Admission
from conch.core.clock import monotonic_ns
from conch.core.cold_models import resident, resident_async
from conch.core.current_span import outgoing_headers
from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.request import InferenceRequest, InferenceResponse, Parameter
from conch.core.servable import Servable
from conch.core.server_state import ServerState
from conch.core.tensor import Array, Tensor, brain_floats, float_array
from conch_api.array_conversion import column_input, input_array, is_flat
from conch_api.frame_requests import FrameRun, run_in_order, run_in_order_async
from conch_api.function_io import Result
from conch_api.response_queue import AsyncResponseQueue, ResponseQueue, raise_error
from conch_frames.column_rules import ModelColumns, columns_of_spec

_S = 1_000_000_000
_DECOUPLED = "model '{name}' is decoupled and did not give exactly one response: use stream() for it"

Inputs = Mapping[str, npt.ArrayLike]
"""Arrays by name, or values that convert to arrays of the model's datatypes."""


class RequestOptions(TypedDict, total=False):
    """Options of a request besides its inputs.

    Attributes:
        version: The model's version, a number or a label; by default the default one.
        outputs: Names of the requested outputs; by default all.
        parameters: Request parameters.
        request_id: An id for logs.
        priority: Its priority level.
        sequence_id: Its sequence.
        sequence_start: True if it starts the sequence.
        sequence_end: True if it ends the sequence.
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
    """Runs requests of the program."""

    def __init__(self, core: ServerState) -> None:
        self._core = core
        self._admission = core.admission("direct")
        self._lock = threading.Lock()
        self._open: WeakSet[ResponseQueue] = WeakSet()
        self._streams: WeakSet[_OpenStream] = WeakSet()

    def infer(self, model: str, inputs: Inputs, timeout: float | None, options: RequestOptions) -> Result:
        """Runs a request and waits for its only response."""
        return self._begin(model, inputs, timeout, options).result()

    def infer_frame(self, model: str, frame: Any, timeout: float | None, options: RequestOptions) -> Any:
        """Runs the rows of a frame, in requests of at most the model's batch size; a frame of the outputs."""
        run = FrameRun(frame, resident(lambda: self._columns(model, options)))
        begun = (self._begin(model, _arrays(inputs), timeout, options) for inputs in run.requests())
        return run_in_order(run, begun)

    async def infer_frame_async(
        self, model: str, frame: Any, timeout: float | None, options: RequestOptions
    ) -> Any:
        """`infer_frame` for an event loop."""
        run = FrameRun(frame, await resident_async(lambda: self._columns(model, options)))
        calls = (self.infer_async(model, _arrays(inputs), timeout, options) for inputs in run.requests())
        return await run_in_order_async(run, calls)

    def _columns(self, model: str, options: RequestOptions) -> ModelColumns:
        return columns_of_spec(self._core.registry.resolve(model, str(options.get("version", ""))).spec)

    def _begin(self, model: str, inputs: Inputs, timeout: float | None, options: RequestOptions) -> _Answer:
        queue = ResponseQueue()
        ends_ns = _deadline(timeout)
        request, name = resident(
            lambda: self._submit(model, inputs, queue, ends_ns, options), lambda: ends_ns
        )
        return _Answer(self._admission, request, name, queue, timeout)

    async def infer_async(
        self, model: str, inputs: Inputs, timeout: float | None, options: RequestOptions
    ) -> Result:
        """`infer` for an event loop."""
        queue = AsyncResponseQueue()
        ends_ns = _deadline(timeout)
        request, name = await resident_async(
            lambda: self._submit(model, inputs, queue, ends_ns, options), ends_ns
        )
        try:
            first = await queue.get(timeout)
            second = None if first is None or first.error is not None else await queue.get(timeout)
            return _only_result(name, first, lambda: second)
        except BaseException:  # raised again
            _end(self._admission, request, queue)
            raise

    def stream(self, model: str, inputs: Inputs, timeout: float | None, options: RequestOptions) -> Responses:
        """Iterates over the responses; submits the request at the first `next`."""

        def begin() -> _OpenStream:
            return resident(lambda: self._read(model, inputs, ResponseQueue(), options))

        return Responses(begin, timeout)

    async def stream_async(
        self, model: str, inputs: Inputs, timeout: float | None, options: RequestOptions
    ) -> AsyncIterator[Result]:
        """`stream` for an event loop."""
        queue = AsyncResponseQueue()
        stream = await resident_async(lambda: self._read(model, inputs, queue, options))
        try:
            while (response := await queue.get(timeout)) is not None:
                yield _result(response)
        finally:
            stream.end()

    def _read(self, model: str, inputs: Inputs, queue: ResponseQueue, options: RequestOptions) -> _OpenStream:
        # A deadline would apply to all responses together.
        request, _ = self._submit(model, inputs, queue, None, options)
        stream = _OpenStream(self._admission, request, queue)
        with self._lock:
            self._streams.add(stream)
        return stream

    def end_own_streams(self) -> None:
        """Ends the streams that the calling thread reads, before it waits for all requests."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            if stream.thread == threading.get_ident():
                stream.stop()

    def close(self) -> None:
        """Stops all queues: unblocks models that wait for readers, and readers that wait for responses."""
        with self._lock:
            queues = list(self._open)
        for queue in queues:
            queue.stop()

    def _submit(
        self,
        model: str,
        inputs: Inputs,
        queue: ResponseQueue,
        deadline_ns: int | None,
        options: RequestOptions,
    ) -> tuple[InferenceRequest, str]:
        """Submits a request whose responses go to a queue."""
        self._core.check_running()
        unknown = options.keys() - RequestOptions.__optional_keys__
        if unknown:
            raise TypeError(f"a request has no option '{min(unknown)}'")
        now = monotonic_ns()
        request = InferenceRequest(
            model,
            str(options.get("version", "")),
            {},
            queue.put,
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
        request.reader = queue
        request.deadline_ns = deadline_ns
        admission = self._admission
        found = admission.resolve(request)
        spec = found.spec
        rules = {tensor.name: tensor for tensor in spec.inputs}
        columns: ModelColumns | None = None
        for name, value in inputs.items():
            rule = rules.get(name)
            datatype = None if rule is None else rule.datatype
            given = value
            if rule is not None and rule.dims == (1,) and spec.max_batch_size > 0 and is_flat(value):
                columns = columns or columns_of_spec(spec)
                given = column_input(name, value, rule.datatype, columns)
            request.inputs[name] = input_tensor(name, given, datatype)
        self._check_outputs(request, found)
        with self._lock:
            self._open.add(queue)
        nbytes = sum(tensor.nbytes for tensor in request.inputs.values())
        headers = outgoing_headers()
        admission.admit(request, False, found, _Program(headers) if headers else None, nbytes)
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


class _Program:
    """The `Caller` of a request of this process, within a trace of it."""

    read_ns = 0
    path = ""
    client = ""
    access = None

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers

    def header(self, name: str) -> str:
        """A header of the trace."""
        return self._headers.get(name, "")

    def add_response_metadata(self, name: str, value: str) -> None:
        """The answer has no headers."""


class _Answer:
    """A request with one response; a `Pending`."""

    def __init__(
        self,
        admission: Admission,
        request: InferenceRequest,
        name: str,
        queue: ResponseQueue,
        timeout: float | None,
    ) -> None:
        self._admission = admission
        self._request = request
        self._name = name
        self._queue = queue
        self._timeout = timeout

    def result(self) -> Result:
        """Waits for the response."""
        queue = self._queue
        try:
            return _only_result(self._name, queue.take(self._timeout), lambda: queue.take(self._timeout))
        except BaseException:  # raised again
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ends the request."""
        _end(self._admission, self._request, self._queue)


def _arrays(inputs: Mapping[str, Tensor]) -> dict[str, Array]:
    return {name: tensor.numpy() for name, tensor in inputs.items()}


class _OpenStream:
    """A request whose responses a thread reads one by one."""

    def __init__(self, admission: Admission, request: InferenceRequest, queue: ResponseQueue) -> None:
        self._admission = admission
        self._request = request
        self.queue = queue
        self.thread = threading.get_ident()

    def end(self) -> None:
        """Ends stream and cancels the request."""
        _end(self._admission, self._request, self.queue)

    def stop(self) -> None:
        """Ends stream because the server stops."""
        self.queue.stop()
        self.end()


class Responses(Iterator[Result]):
    """The responses to a request; the first `next` submits it.

    Args:
        begin: Submits the request.
        timeout: Time limit of each response in seconds; None for no limit.
    """

    def __init__(self, begin: Callable[[], _OpenStream], timeout: float | None) -> None:
        self._begin: Callable[[], _OpenStream] | None = begin
        self._timeout = timeout
        self._stream: _OpenStream | None = None

    def __next__(self) -> Result:
        begin, self._begin = self._begin, None
        if begin is not None:
            self._stream = begin()
        stream = self._stream
        if stream is None:
            raise StopIteration
        try:
            response = stream.queue.take(self._timeout)
            if response is not None:
                return _result(response)
        except BaseException:  # raised again
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Ends the iteration; cancels an unfinished request."""
        stream, self._stream, self._begin = self._stream, None, None
        if stream is not None:
            stream.end()

    def __del__(self) -> None:
        stream: _OpenStream | None = getattr(self, "_stream", None)
        if stream is None:
            return
        # On a separate thread: the garbage collector may run this inside any code.
        try:
            threading.Thread(target=stream.end, name="conch-dropped-stream").start()
        except RuntimeError:
            pass  # the interpreter is shutting down


def _deadline(timeout: float | None) -> int | None:
    """The monotonic time at which a request with a timeout ends."""
    return None if timeout is None else monotonic_ns() + round(timeout * _S)


def _end(admission: Admission, request: InferenceRequest, queue: ResponseQueue) -> None:
    """Closes the queue and cancels an unfinished request."""
    over = queue.over
    queue.close()  # first, or an answer that says that it was cancelled might have to wait to be read
    if not over:
        admission.cancel(request)


def _only_result(
    name: str, first: InferenceResponse | None, second: Callable[[], InferenceResponse | None]
) -> Result:
    """Returns the only response; raises if there is none or more than one."""
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
        # A read-only array belongs to a message, a cache or the caller too.
        outputs[tensor.name] = array if array.flags.writeable else array.copy()
    return Result(outputs, response.parameters)


def input_tensor(name: str, value: npt.ArrayLike, datatype: str | None, dims: Sequence[int] = ()) -> Tensor:
    """Creates a tensor from an input; an array that has its datatype is not copied.

    Args:
        name: The input's name.
        value: Its value.
        datatype: Its datatype; None if it is not known.
        dims: Its dims behind that of the batch; empty if there is none.

    Raises:
        InvalidArgumentError: The value cannot be converted.
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
