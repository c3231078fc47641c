"""Request logging: the interface of access log and traces, and the lines of ``--log-verbose``.

A front end attaches a `Watch` to each request through `RequestLog`; it writes a line with the final response.
A request without a watch costs one attribute check per batch. Models check `REQUESTS.on` once per request and
batch before they log verbose lines, in the words of Triton's log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from conch.core.errors import ConchError
from conch.core.request import InferenceRequest, InferenceResponse, RequestModel, Responder, RunTimes
from conch.core.responder_layers import ResponderLayer
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor

log = logging.getLogger(__name__)


class Granted(Protocol):
    """A caller's principal in the access policy, with its rights."""

    @property
    def name(self) -> str:
        """Name of the principal that it acts as."""

    def pay_load(self) -> None:
        """Pays for the load of a model that is not in memory.

        Raises:
            ResourceExhaustedError: The principal has no loads left for now.
        """


class Caller(Protocol):
    """The call that a request came with."""

    @property
    def read_ns(self) -> int:
        """Monotonic time at which all of it was there; 0 if that is when it was received."""

    @property
    def path(self) -> str:
        """Path of an HTTP request; empty for gRPC."""

    @property
    def access(self) -> Granted | None:
        """The caller's principal and rights; None without an access policy, and before its check."""

    @property
    def client(self) -> str:
        """Address of the client."""

    def header(self, name: str) -> str:
        """A header or an entry of metadata, by its name in lower case; empty without it."""

    def add_response_metadata(self, name: str, value: str) -> None:
        """Adds a header, or an entry of trailing metadata, to the response, if it can have one."""


class RequestLog(Protocol):
    """Access log and traces of a server.

    Attributes:
        on: True if requests are to be begun.
        adds_metadata: True if it may call `Caller.add_response_metadata`.
    """

    on: bool
    adds_metadata: bool

    def begin(
        self,
        request: InferenceRequest,
        model: RequestModel,
        protocol: str,
        caller: Caller | None,
        bytes_in: int,
    ) -> None:
        """Attaches a watch; called after the regions are attached, before the responder is wrapped otherwise.

        Args:
            request: The request, before it is submitted.
            model: The version that will serve it.
            protocol: ``http``, ``grpc``, ``grpc-stream`` or ``direct``.
            caller: The call; None for a caller in this process.
            bytes_in: Size of the request message.
        """

    def refuse(
        self,
        request: InferenceRequest | None,
        error: ConchError,
        protocol: str,
        caller: Caller | None,
        bytes_in: int,
        received_ns: int,
    ) -> None:
        """Logs a request that was refused, whether it was begun or not.

        Args:
            request: The request; None if it could not be read.
            error: The error that its client got.
            protocol: As in `begin`.
            caller: As in `begin`.
            bytes_in: Size of the request message.
            received_ns: Monotonic time at which it arrived.
        """


def note_open(request: InferenceRequest) -> None:
    """Notes that the model goes on with a request after its batch has ended."""
    watch = request.watch
    if watch is not None and watch.times is not None:
        watch.times = watch.times.unfinished()


def note_run(batch: Batch) -> RunTimes:
    """Gives the watches of a batch's requests its times, which may be completed later."""
    times = RunTimes(batch.size, batch.compute_start_ns, len(batch.requests) - batch.fillers)
    complete_run(batch, times, False)
    for request in batch.requests:
        watch = request.watch
        if watch is not None:
            watch.run(times)
    return times


def complete_run(batch: Batch, times: RunTimes, goes_on: bool) -> None:
    """Copies the times of a batch that are known by now; of one whose requests go on, those of its inputs."""
    times.input_end_ns = batch.compute_input_end_ns
    if not goes_on:
        times.output_start_ns = batch.compute_output_start_ns
        times.end_ns = batch.compute_end_ns


class RequestLines:
    """Verbose lines of requests, if `on`."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False

    def begin(self, request: InferenceRequest, model: RequestModel) -> None:
        """Logs a request before it is queued, and then its responses."""
        names = "all" if request.requested is None else ", ".join(request.requested)
        log.debug(
            "%sprepared: model: %s, requested version: %s, actual version: %s, correlation id: %s, "
            "batch size: %d, priority: %d, timeout (us): %d, inputs: %s, requested outputs: %s",
            request.log_prefix,
            request.model_name,
            request.model_version or -1,
            model.version_text,
            request.correlation_id,
            request.batch_size,
            request.priority,
            request.timeout_us,
            _described(request.inputs.values()),
            names,
        )
        request.wrap_responder(_Responses, ResponderLayer.LINES)

    def execute(self, batch: Batch, spec: ModelSpec) -> None:
        """Logs a batch before it runs."""
        log.debug(
            "model %s, version %d, executing %d requests, batch size: %d",
            spec.name,
            spec.version,
            len(batch.requests),
            batch.size,
        )


class _Responses:
    """A responder that logs responses and passes them on."""

    __slots__ = ("_responder",)

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        if response is not None:
            what = response.error.message if response.error is not None else _described(response.outputs)
            kind = "outputs" if response.error is None else "error"
            log.debug("%sadd response, model: %s, %s: %s", request.log_prefix, request.model_name, kind, what)
        if final:
            log.debug("%sreleased, model: %s", request.log_prefix, request.model_name)
        self._responder(request, response, final)


def _described(tensors: Iterable[Tensor]) -> str:
    return "; ".join(f"{each.name}, type: {each.datatype}, shape: {list(each.shape)}" for each in tensors)


REQUESTS = RequestLines()
"""The instance of this process."""
