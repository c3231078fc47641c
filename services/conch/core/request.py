"""Requests and responses: what front ends hand in, what schedulers queue, what backends answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, Protocol

from conch.core.errors import ConchError
from conch.core.tensor import Tensor

if TYPE_CHECKING:
    from conch.core.device import DeviceMemory
    from conch.core.scheduling.sequence.table import LiveSequence
    from conch.core.servable import Servable
    from conch.core.watch import Watch

Parameter = bool | int | float | str
"""A value of a request or response parameter."""


class Kept(ABC):
    """What a backend keeps of a rescheduled request that may still be sent responses of its last run."""

    __slots__ = ()

    @abstractmethod
    def end(self, request: InferenceRequest, error: ConchError) -> None:
        """Ends the request, which does not run again after all, behind those responses."""


class RequestState(IntEnum):
    """Where a request is; only the thread that moves it from one state to the next may answer it."""

    NEW = 0
    QUEUED = 1
    RUNNING = 2
    DONE = 3


_NEW, _QUEUED, _DONE = RequestState.NEW, RequestState.QUEUED, RequestState.DONE


class InferenceResponse:
    """One answer to a request: tensors, or an error.

    Attributes:
        outputs: Output tensors in the order the model made them; empty with an error.
        error: What went wrong, or None.
        parameters: Response parameters for the client.
    """

    __slots__ = ("error", "outputs", "parameters")

    def __init__(
        self,
        outputs: list[Tensor],
        error: ConchError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self.outputs = outputs
        self.error = error
        self.parameters = parameters


Responder = Callable[["InferenceRequest", InferenceResponse | None, bool], None]
"""Takes (request, response, final); the response is None for a final flag with nothing to say.

It may block the threads of a decoupled model until a client that reads slowly has caught up.
"""


class MemoryUses(Protocol):
    """What a request uses of memory that it shares with its client; stands before its responder."""

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Takes a response on its way to the responder."""

    def buffer(self, name: str, byte_size: int) -> memoryview | None:
        """Memory to which an output can be written directly; None where there is none, or not enough."""

    def device(self, name: str) -> DeviceMemory | None:
        """Where an output goes in the memory of a device; None if it goes elsewhere."""

    def intercept(self, between: Callable[[Responder], Responder]) -> None:
        """Puts something between it and the responder."""

    def release(self) -> None:
        """Gives it up: the request is never submitted."""


class InferenceRequest:
    """One request for one model.

    The responder may be called from any thread. `respond` lets exactly one final call through;
    decoupled models respond any number of times before it.

    Attributes:
        model: The model that serves the request, once resolved.
        model_name: Name as the client gave it.
        model_version: Version as the client gave it; empty for the newest ready one.
        id: The client's request id, or empty.
        inputs: Input tensors by name, in the client's order.
        requested: Names of the outputs the client wants, or None for all of them.
        classes: For outputs wanted as classes, how many of them.
        parameters: Custom request parameters.
        priority: Priority level, 0 for the model's default.
        timeout_us: Queue timeout in microseconds, 0 for the model's default.
        correlation_id: Sequence the request belongs to; 0 or empty for none.
        sequence_start: Whether it opens its sequence.
        sequence_end: Whether it ends its sequence.
        deadline_ns: Monotonic time after which nobody waits for the answer, or None.
        empty_final: Whether a decoupled request wants a final response even where it says nothing.
        batch_size: Rows it adds to a batch; 1 for models without batching.
        batch_key: Requests share a batch only where their keys are equal.
        received_ns: Monotonic time at which the request reached the server.
        queued_ns: Monotonic time at which the scheduler took it.
        cancelled: Set when the client no longer waits.
        context: Whatever the front end needs to send the answer.
        sequence: What the scheduler knows of the sequence the request belongs to; None for none.
        rescheduled: Set by a model that wants to run the request again instead of ending it.
        answered: Whether the last response has been given, also while the request waits to run again.
        failed: Set where a model answers with an error by itself; unset before it is used.
        kept: What a backend keeps of a rescheduled request until it runs again, a `Kept` if that is to end
            it; unset before it is used.
        state: Where it is.
        responses_wait: Whether its responses may be kept for a while before they are sent: arrays in them
            that the model may change meanwhile have to be copied.
        signature: The same object for requests that differ in nothing but their id and their tensors'
            bytes, so that what was found out about one holds for the others; None where nobody knows.
        uses: What it uses of memory that it shares with its client; unset where it uses none.
        watch: Who logs the request; unset where nobody does.
        on_cancel: What an instance that begins its batches wants called, once, when the request is cancelled
            while it runs; set in `begin`, unset before. Called from any thread with no lock held, possibly
            when the request has just been answered.
        filler: Whether it only fills a row of a batch that no client's request has; nobody counts it, and
            nobody gets its responses.
    """

    filler: ClassVar[bool] = False

    __slots__ = (
        "_responder",
        "answered",
        "batch_key",
        "batch_size",
        "cancelled",
        "classes",
        "context",
        "correlation_id",
        "deadline_ns",
        "empty_final",
        "failed",
        "id",
        "inputs",
        "kept",
        "model",
        "model_name",
        "model_version",
        "on_cancel",
        "parameters",
        "priority",
        "queued_ns",
        "received_ns",
        "requested",
        "rescheduled",
        "responses_wait",
        "sequence",
        "sequence_end",
        "sequence_start",
        "signature",
        "state",
        "timeout_us",
        "uses",
        "watch",
    )

    failed: bool
    kept: object
    on_cancel: Callable[[], None]
    uses: MemoryUses
    watch: Watch

    def __init__(
        self,
        model_name: str,
        model_version: str,
        inputs: dict[str, Tensor],
        responder: Responder,
        received_ns: int,
        request_id: str = "",
        requested: tuple[str, ...] | None = None,
        parameters: dict[str, Parameter] | None = None,
    ) -> None:
        self.model: Servable | None = None
        self.model_name = model_name
        self.model_version = model_version
        self.id = request_id
        self.inputs = inputs
        self.requested = requested
        self.classes: dict[str, int] | None = None
        self.parameters = parameters
        self.priority = 0
        self.timeout_us = 0
        self.correlation_id: int | str = 0
        self.sequence_start = False
        self.sequence_end = False
        self.deadline_ns: int | None = None
        self.empty_final = False
        self.batch_size = 1
        self.batch_key: object = None
        self.received_ns = received_ns
        self.queued_ns = 0
        self.cancelled = False
        self.state = _NEW
        self.signature: object = None
        self.context: object = None
        self.sequence: LiveSequence | None = None
        self.rescheduled = False
        self.answered = False
        self.responses_wait = False
        self._responder = responder

    def respond(self, response: InferenceResponse | None, final: bool = True) -> None:
        """Hands one response to whoever made the request.

        A call after the final one does nothing: the request has been answered.

        Args:
            response: The response, or None to end a decoupled request without another one.
            final: Whether this is the last call for the request.
        """
        if self.answered:
            return
        if final:
            self.answered = True
            # One that waits to run again leaves its queue when the scheduler comes to it.
            if self.state is not _QUEUED:
                self.state = _DONE
        self._responder(self, response, final)

    @property
    def responder(self) -> Responder:
        """What responses are handed to now."""
        return self._responder

    def intercept(self, between: Callable[[Responder], Responder], waits: bool = False) -> None:
        """Puts something between the request and its responder.

        Args:
            between: Makes it of the responder that there is.
            waits: Whether it may keep responses for a while; see `responses_wait`.
        """
        self._responder = between(self._responder)
        self.responses_wait |= waits

    def discard(self) -> None:
        """Gives up what it holds, for a request that is never submitted, or not taken."""
        uses = getattr(self, "uses", None)
        if uses is not None:
            uses.release()

    def is_abandoned(self, now_ns: int) -> bool:
        """Whether nobody waits for the answer any more: it was cancelled, or its deadline has passed."""
        return self.cancelled or (self.deadline_ns is not None and now_ns >= self.deadline_ns)

    def tell_cancelled(self) -> None:
        """Calls `on_cancel`, if it is set and has not been called."""
        try:
            on_cancel = self.on_cancel
            del self.on_cancel  # of several threads only the one that takes it out calls it
        except AttributeError:
            return
        on_cancel()

    def fail(self, error: ConchError) -> None:
        """Answers the request with an error, finally."""
        self.respond(InferenceResponse([], error), True)

    @property
    def log_prefix(self) -> str:
        """What comes before messages about this request; nothing if its client has given it no id."""
        return id_prefix(self.id)


def id_prefix(request_id: str) -> str:
    """What comes before messages about a request with an id; Triton has it for those without, too."""
    return f"[request id: {request_id}] " if request_id else ""
