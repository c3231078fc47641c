"""`pb_utils.InferenceRequest`: requests that models receive or make."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import index
from typing import Any, SupportsIndex

from conch.backends.gather import Padder
from conch.backends.python.api.pb_errors import TritonModelException
from conch.backends.python.api.pb_response import InferenceResponse, as_json, check_parameters
from conch.backends.python.api.pb_tensor import Tensor
from conch.backends.python.api.pb_trace import INHERITED, InferenceTrace
from conch.backends.python.api.pb_types import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    PreferredMemory,
    text_of,
    texts_of,
    whole_of,
)
from conch.backends.python.api.response_sender import ResponseSender, SenderContext
from conch.backends.python.calls.async_calls import start_async_call, start_async_stream
from conch.backends.python.calls.bls_call import WaitingCall
from conch.backends.python.calls.call_context import CallContext, current_call_context, find_call_context
from conch.backends.python.calls.response_iterator import ResponseIterator
from conch.core.clock import monotonic_ns
from conch.core.device import DeviceTensor, FetchedTensor
from conch.core.request import InferenceRequest as CoreRequest
from conch.core.request import Parameter, Responder
from conch.core.scheduling.scheduler import Batch
from conch.core.tensor import Tensor as CoreTensor

_new = object.__new__
_IN_HOST_MEMORY = PreferredMemory(TRITONSERVER_MEMORY_CPU)


class InferenceRequest:
    """A request that a model received, or makes for another model.

    The order of the arguments is Triton's; inputs, requested_output_names and model_name are required.
    """

    __slots__ = (
        "_caller",
        "_correlation_id",
        "_flags",
        "_inputs",
        "_memory",
        "_model_name",
        "_model_version",
        "_outputs",
        "_parameters",
        "_priority",
        "_request_id",
        "_timeout",
        "_trace",
    )

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int | str = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace = INHERITED,
        parameters: Mapping[str, Parameter] | None = None,
        priority: int = 0,
    ) -> None:
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError(
                "an InferenceRequest must be given inputs, requested_output_names and model_name; the order "
                "of its arguments is request_id, correlation_id, inputs, requested_output_names, model_name"
            )
        if type(correlation_id) is not int or correlation_id:
            correlation_id = _correlation_of(correlation_id)
        if type(timeout) is not int and isinstance(timeout, SupportsIndex):  # this check is slow
            timeout = index(timeout)
        if not isinstance(timeout, int) or timeout < 0:
            raise TritonModelException(
                f"timeout must be a whole number of microseconds, and not below 0, not {timeout!r}"
            )
        if preferred_memory is not None and not isinstance(preferred_memory, PreferredMemory):
            raise TypeError(f"preferred_memory must be a PreferredMemory, not {type(preferred_memory)}")
        if not isinstance(trace, InferenceTrace):
            raise TypeError(
                f"trace of an InferenceRequest must be an InferenceTrace, not {type(trace)}; leave it out "
                f"for the trace of the request that is executed"
            )
        if parameters is not None:
            check_parameters(parameters)
        model_name = text_of(model_name, "model_name of an InferenceRequest")
        request_id = text_of(request_id, "request_id of an InferenceRequest")
        self._model_name = model_name
        self._outputs = texts_of(requested_output_names, "requested_output_names of an InferenceRequest")
        self._inputs = list(inputs)
        for tensor in self._inputs:
            if tensor is None:
                raise TritonModelException(
                    f"Input tensor for request with id '{request_id}' and model name '{model_name}' should "
                    f"not be empty."
                )
            if not isinstance(tensor, Tensor):
                raise TypeError(f"the inputs of an InferenceRequest must be tensors, found {type(tensor)}")
        self._request_id = request_id
        self._correlation_id = correlation_id
        if type(model_version) is not int and not isinstance(model_version, str):
            model_version = whole_of(model_version, "model_version of an InferenceRequest")
        self._model_version = model_version
        self._flags = whole_of(flags, "flags of an InferenceRequest")
        self._timeout = timeout
        self._memory = preferred_memory or _IN_HOST_MEMORY
        self._trace = trace
        self._priority = whole_of(priority, "priority of an InferenceRequest")
        self._parameters: Mapping[str, Parameter] = parameters or {}
        self._caller = find_call_context()

    def inputs(self) -> list[Tensor]:
        """The input tensors."""
        return self._inputs

    def request_id(self) -> str:
        """The client's request id, or an empty string."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """The sequence it belongs to; 0 or empty for none."""
        return self._correlation_id

    def flags(self) -> int:
        """The sequence flags."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Sets the sequence flags; on a received request only the model sees them."""
        self._flags = whole_of(flags, "flags of an InferenceRequest")

    def timeout(self) -> int:
        """The timeout in microseconds; 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """The request's parameters as a JSON object."""
        return as_json(self._parameters)

    def requested_output_names(self) -> set[str]:
        """The names of the requested outputs."""
        return set(self._outputs)

    def preferred_memory(self) -> PreferredMemory:
        """The memory to prefer for the response's tensors."""
        return self._memory

    def trace(self) -> InferenceTrace:
        """The trace that it was made with."""
        return self._trace

    def is_cancelled(self) -> bool:
        """True if the client no longer waits."""
        return False

    def get_response_sender(self) -> ResponseSender:
        """The response sender; only for received requests."""
        raise TritonModelException("Only a request that was received has a response sender.")

    def set_release_flags(self, flags: int) -> None:
        """Sets what happens when `execute` returns; only for received requests."""
        raise TritonModelException("Only a request that was received can have release flags.")

    def exec(self, decoupled: bool = False) -> Any:
        """Runs the request on its model and waits.

        Args:
            decoupled: True to accept any number of responses.

        Returns:
            The response, possibly an error; with `decoupled` an iterator of all responses.

        Raises:
            TritonModelException: The calling model cannot call others from here.
        """
        caller = self._calling()
        if decoupled:
            return ResponseIterator(caller, self)
        return WaitingCall(caller, self, False).run()

    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """Starts the request; the coroutine that awaits it gets what `exec` returns.

        Raises:
            TritonModelException: The calling model cannot call others from here.
            RuntimeError: The caller is not a coroutine.
        """
        caller = self._calling()
        if decoupled:
            return start_async_stream(caller, self)
        return start_async_call(caller, self)

    def _calling(self) -> CallContext:
        """The instance that calls. Raises TritonModelException: it can't, from here or now."""
        caller = self._caller or current_call_context()
        caller.check_executing()
        return caller

    def _to_core(self, responder: Responder, created_ns: int) -> CoreRequest:
        """Converts a BLS request; `Call` sets its deadline."""
        version = self._model_version
        core = CoreRequest(
            self._model_name,
            "" if version == -1 else str(version),
            {tensor.name(): tensor._for_request() for tensor in self.inputs()},
            responder,
            created_ns,
            self.request_id(),
            tuple(self._outputs) or None,
            dict(self._parameters) or None,
        )
        core.timeout_us = self.timeout()
        core.correlation_id = self.correlation_id()
        if flags := self.flags():
            core.sequence_start = bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
            core.sequence_end = bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
        core.priority = self._priority
        return core


def _correlation_of(value: object) -> int | str:
    """Checks a correlation id.

    Raises:
        TypeError: It is None.
        TritonModelException: It is invalid; the first text is Triton's.
    """
    if isinstance(value, str):
        return str(value)
    if value is None:
        raise TypeError("correlation_id of an InferenceRequest must be an integer or a string, not None")
    if not isinstance(value, int):
        raise TritonModelException("Correlation ID must be integer or string")
    if not 0 <= value < 1 << 64:
        raise TritonModelException(
            f"Correlation ID must be an integer of 64 bits that is not below 0, not {value}"
        )
    return int(value)


class ReceivedRequest(InferenceRequest):
    """A request from the scheduler; its parts are created on demand."""

    __slots__ = ("_batch", "_context", "_core", "_sender", "_tensors")

    def __init__(self, core: CoreRequest, batch: Batch, context: SenderContext) -> None:
        self._core = core
        self._batch = batch
        self._context = context
        self._sender: ResponseSender | None = None
        self._tensors: dict[str, Tensor] | None = None

    def trace(self) -> InferenceTrace:
        """The trace it belongs to."""
        return InferenceTrace(self._core)

    def exec(self, decoupled: bool = False) -> Any:
        """Sends the same request to its model again."""
        return self._as_new_request().exec(decoupled)

    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """Sends the same request to its model again, for a coroutine."""
        return self._as_new_request().async_exec(decoupled)

    def _as_new_request(self) -> InferenceRequest:
        core = self._core
        return InferenceRequest(
            core.id,
            core.correlation_id,
            self.inputs(),
            core.requested or (),
            core.model_name,
            core.model_version or -1,
            self.flags(),
            core.timeout_us,
            trace=self.trace(),
            parameters=dict(core.parameters or {}),
            priority=core.priority,
        )

    def _by_name(self) -> dict[str, Tensor]:
        """The input tensors, created once."""
        tensors = self._tensors
        if tensors is None:
            batch = self._batch
            tensors = {}
            for name, core in self._core.inputs.items():
                # Skips Tensor's constructor, which expects arrays.
                tensor = tensors[name] = _new(Tensor)
                tensor._core = self._for_model(core) if core.on_device else core
                tensor._batch = batch  # counts its copy
            self._tensors = tensors
        return tensors

    def _for_model(self, core: CoreTensor) -> CoreTensor:
        """A GPU tensor as the model receives it."""
        assert isinstance(core, DeviceTensor)
        return core if self._context.takes_gpu_tensors else FetchedTensor(core, self._batch)

    def _pad(self, padder: Padder) -> None:
        """Replaces inputs by padded ones and adds inputs with the real lengths."""
        core = (self._core,)
        arrays = {name: padder.join(core, name) for name in self._core.inputs if padder.pads(core, name)}
        arrays.update(padder.made(core))
        tensors = self._by_name()
        for name, array in arrays.items():
            tensors[name] = Tensor(name, array)
            self._batch.bytes_copied += array.nbytes

    def inputs(self) -> list[Tensor]:
        """The input tensors, in the client's order."""
        return list(self._by_name().values())

    def request_id(self) -> str:
        """The client's request id, or an empty string."""
        return self._core.id

    def correlation_id(self) -> int | str:
        """The sequence it belongs to; 0 or empty for none."""
        return self._core.correlation_id

    def flags(self) -> int:
        """The sequence flags: the client's, unless the model has set others."""
        flags: int | None = getattr(self, "_flags", None)  # set lazily, to save time
        if flags is not None:
            return flags
        return (TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if self._core.sequence_start else 0) | (
            TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if self._core.sequence_end else 0
        )

    def timeout(self) -> int:
        """The request's timeout in microseconds; 0 for none."""
        return self._core.timeout_us

    def parameters(self) -> str:
        """The request's parameters as a JSON object."""
        return as_json(self._core.parameters or {})

    def requested_output_names(self) -> set[str]:
        """The names of the requested outputs: all if the client named none."""
        requested = self._core.requested
        return set(self._context.output_names if requested is None else requested)

    def preferred_memory(self) -> PreferredMemory:
        """The memory to prefer for the response's tensors."""
        return _IN_HOST_MEMORY

    def is_cancelled(self) -> bool:
        """True if the client has left or the deadline has passed."""
        return self._core.is_abandoned(monotonic_ns())

    def call_if_cancelled(self, callback: Callable[[], None]) -> None:
        """Has a function called if the request is cancelled, at most once, from any thread.

        For models whose `execute` is a coroutine.
        """
        core = self._core
        core.on_cancel = lambda _: callback()
        if core.cancelled:
            core.notify_cancelled()

    def get_response_sender(self) -> ResponseSender:
        """The response sender; the same one every time."""
        sender = self._sender
        if sender is None:
            sender = self._sender = ResponseSender(self._core, self._context)
        return sender

    def set_release_flags(self, flags: int) -> None:
        """Sets whether the request is released or runs again when `execute` returns."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"Unknown request release flags {flags}.")
        if self._batch.compute_output_start_ns or not self._context.reschedules:
            raise TritonModelException(
                "The release flags of a request cannot be set when it has been released: after 'execute' has "
                "returned, or in a coroutine of a model that is decoupled or has several batches in flight."
            )
        if not self._core.filler:
            self._core.rescheduled = flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
            self._context.rescheduled = True


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The request's input with this name, or None."""
    if type(inference_request) is ReceivedRequest:
        tensors = inference_request._tensors or inference_request._by_name()
        return tensors.get(name)
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The response's output with this name; None for an error response or without one."""
    if inference_response.has_error():
        return None
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)
