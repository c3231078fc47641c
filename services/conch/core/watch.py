"""What may be told of a request to whoever logs it: when it ran, in what batch, and its outcome.

Nobody is told anything unless a request has a watch, so that this costs those that have none one look at an
attribute for each batch.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from conch.core.errors import ConchError
    from conch.core.request import InferenceRequest
    from conch.core.scheduling.base import Batch
    from conch.core.servable import Servable


class RunTimes:
    """When a batch ran; it does not keep the batch.

    Attributes:
        size: Rows of the batch.
        start_ns: Monotonic time at which an instance took it.
        input_end_ns: When its inputs were ready; 0 as long as that is not known.
        output_start_ns: When the model had its results; 0 as long as that is not known.
        end_ns: When all responses had been made; 0 as long as that is not known.
    """

    __slots__ = ("end_ns", "input_end_ns", "output_start_ns", "size", "start_ns")

    def __init__(self, batch: Batch) -> None:
        self.size = batch.size
        self.start_ns = batch.compute_start_ns
        self.complete(batch)

    def complete(self, batch: Batch) -> None:
        """Takes over the times that have become known."""
        self.input_end_ns = batch.compute_input_end_ns
        self.output_start_ns = batch.compute_output_start_ns
        self.end_ns = batch.compute_end_ns

    def unfinished(self) -> RunTimes:
        """The same, for a request that goes on."""
        times = copy(self)
        times.output_start_ns = times.end_ns = 0
        return times


class Watch(Protocol):
    """Watches over one request.

    Attributes:
        times: Of the batch it ran in last; None as long as it has not run.
        bytes_out: How many bytes its responses had, if the front end says so.
    """

    times: RunTimes | None
    bytes_out: int

    def step(self, request: InferenceRequest, model: Servable, kind: str = "ensemble-step") -> None:
        """Takes notice of a request that is made for the watched one, before it is submitted.

        Args:
            request: The request.
            model: The model that is to serve it.
            kind: ``ensemble-step``, or ``model-call`` where a model makes it.
        """

    def refused(self, request: InferenceRequest, error: ConchError) -> None:
        """Takes notice that the watched request was not taken, and is not answered through its responder."""


class RequestLog(Protocol):
    """What front ends tell of requests; they do so only where a server has one."""

    def begin(
        self, request: InferenceRequest, model: Servable, protocol: str, client: str, bytes_in: int
    ) -> None:
        """Watches over a request, which is told in one line with its last response.

        To be called before anything else comes between the request and its responder.

        Args:
            request: The request, about to be submitted.
            model: The model that is to serve it.
            protocol: ``http``, ``grpc`` or ``grpc-stream``.
            client: Address of the client.
            bytes_in: Size of the request as it came.
        """

    def refuse(
        self,
        request: InferenceRequest | None,
        error: ConchError,
        protocol: str,
        client: str,
        bytes_in: int,
        received_ns: int,
    ) -> None:
        """Tells of a request that was answered with an error before, or when, it was submitted.

        Args:
            request: The request, begun or not; None where it could not be read.
            error: What it was answered.
            protocol: As in `begin`.
            client: Address of the client.
            bytes_in: Size of the request as it came.
            received_ns: Monotonic time at which it came.
        """


def watch_of(request: InferenceRequest) -> Watch | None:
    """The watch over a request, if there is one."""
    return getattr(request, "watch", None)


def note_open(request: InferenceRequest) -> None:
    """Has a request's watch know that the model goes on with it by itself, though its batch is done."""
    watch = watch_of(request)
    if watch is not None and watch.times is not None:
        watch.times = watch.times.unfinished()


def note_run(batch: Batch) -> RunTimes:
    """Has the watches of a batch's requests know its times, which may still become complete."""
    times = RunTimes(batch)
    for request in batch.requests:
        watch = watch_of(request)
        if watch is not None:
            watch.times = times
    return times
