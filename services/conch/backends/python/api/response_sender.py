"""Response senders: a model sends responses of a request at any time, from any thread.

Locks: one per sender, held while a response is delivered, which keeps responses in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from sys import is_finalizing

from conch.backends.python.api.pb_errors import TritonModelException
from conch.backends.python.api.pb_response import Converter, InferenceResponse
from conch.backends.python.api.pb_types import TRITONSERVER_RESPONSE_COMPLETE_FINAL as FINAL
from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError
from conch.core.execution.shaping import Shaper
from conch.core.request import InferenceRequest as CoreRequest
from conch.core.request import InferenceResponse as CoreResponse
from conch.core.scheduling.sequence.implicit_state import SequenceStates
from conch.core.spec import ModelSpec


def begin_output(sender: ResponseSender) -> None:
    """Notes that the outputs of the next response are made from now on, for its statistics."""
    sender._request.output_start_ns = monotonic_ns()


class SenderContext:
    """State that the senders of one instance share.

    Attributes:
        states: Takes sequence states out of responses; None without states.
        reschedules: True if the model may reschedule a request in `execute`.
        takes_gpu_tensors: True if inputs on a GPU are passed as they are.
        rescheduled: True if a request of the running batch has been rescheduled.
    """

    __slots__ = (
        "converter",
        "decoupled",
        "name",
        "output_names",
        "rescheduled",
        "reschedules",
        "shaper",
        "states",
        "takes_gpu_tensors",
    )

    def __init__(
        self,
        converter: Converter,
        shaper: Shaper,
        decoupled: bool,
        name: str,
        output_names: tuple[str, ...],
        states: SequenceStates | None = None,
        reschedules: bool = True,
        takes_gpu_tensors: bool = False,
    ) -> None:
        self.takes_gpu_tensors = takes_gpu_tensors
        self.converter = converter
        self.shaper = shaper
        self.decoupled = decoupled
        self.name = name
        self.output_names = output_names
        self.states = states
        self.reschedules = reschedules
        self.rescheduled = False

    def finish(self, request: CoreRequest, response: CoreResponse) -> None:
        """Finishes a converted response for the client: removes states, applies shapes and classification."""
        if self.states is not None:
            self.states.collect(request, response)
        if response.error is None and (self.shaper.reshapes_outputs or request.classes is not None):
            self.shaper.shape_response(request, response)

    def leave_shaping(self, spec: ModelSpec) -> None:
        """Has responses sent as the model made them; see `PythonInstance.leave_shaping`."""
        self.shaper = Shaper(replace(spec, inputs=(), outputs=(), padding=None))
        self.states = None


class ResponseSender:
    """Sends the responses of one request."""

    __slots__ = ("__weakref__", "_closed", "_context", "_lock", "_request", "_sent")

    def __init__(self, request: CoreRequest, context: SenderContext) -> None:
        self._request = request
        self._context = context
        self._lock = threading.Lock()
        self._closed = False
        self._sent = 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Sends a response, the final flag, or both; blocks while the client has too much to read.

        Raises:
            TritonModelException: Not allowed, or not any more; the text is Triton's.
        """
        self._send(response, flags)
        if not flags and self._context.decoupled:
            self._request.wait_until_writable()

    def _send(self, response: InferenceResponse | None, flags: int = 0) -> None:
        """`send`, without waiting for the client."""
        if flags not in (0, FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TritonModelException(
                f"Expected an 'InferenceResponse' object, found type '{type(response)}'."
            )
        converted = None if response is None else self._converted(response)
        # Under the lock, so that two threads cannot swap their responses.
        with self._lock:
            self._check(response, flags)
            self._closed = flags == FINAL
            self._sent += 1
            if self._context.decoupled:
                self._request.respond(converted, flags == FINAL)
            elif converted is not None:
                # The only response; a later final flag is ignored.
                if converted.error is not None:
                    self._request.failed = True
                self._request.respond(converted, True)

    def is_cancelled(self) -> bool:
        """True if the client has left or the deadline has passed."""
        return self._request.is_abandoned(monotonic_ns())

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once if the request is cancelled, now or later, from any thread; not in Triton.

        It must return at once. A later one replaces it.
        """
        request = self._request
        request.on_cancel = lambda _: callback()
        if request.cancelled:
            request.notify_cancelled()

    def is_behind(self) -> bool:
        """True if `send` would block, as the client has much to read; not in Triton."""
        return bool(getattr(self._request, "backpressure", False))

    def _converted(self, response: InferenceResponse) -> CoreResponse:
        context = self._context
        converted = context.converter.convert(self._request, response)
        context.finish(self._request, converted)
        return converted

    def _check(self, response: InferenceResponse | None, flags: int) -> None:
        if not self._context.decoupled:
            if response is not None and self._sent > 0:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if response is None and flags == FINAL and self._sent == 0:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending "
                    "a response."
                )
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")

    @property
    def _open(self) -> bool:
        """True until the request has been completed."""
        return not (self._closed or (self._sent > 0 and not self._context.decoupled))

    def _end(self, error: ConchError) -> None:
        """Completes the request with an error unless it is complete."""
        with self._lock:
            if self._open:
                self._closed = True
                self._request.failed = True
                self._request.respond(CoreResponse([], error), True)

    def __del__(self) -> None:
        # The request could never complete and its client would wait forever.
        if getattr(self, "_closed", True) or not self._open:
            return
        request, context = self._request, self._context
        if request.completed or request.filler or is_finalizing():
            return  # complete already, or a filler, or too late to start threads
        answer = context.converter.failed(
            f"model '{context.name}' dropped the response sender of a request without sending the final flag"
        )
        # On a separate thread: the garbage collector may run this inside any code.
        try:
            threading.Thread(target=request.respond, args=(answer, True), name="conch-dropped-sender").start()
        except RuntimeError:
            pass  # the interpreter is shutting down
