"""The access log: one line for each answered request.

Threads: `conch-access-log` writes the lines. Implements `RequestLog` of the core. Used by: `composition`,
`process_logs`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from conch.core.clock import Clock, monotonic_ns, wall_seconds
from conch.core.errors import ConchError
from conch.core.request import InferenceRequest, InferenceResponse, RequestModel, Responder, RunTimes
from conch.observability.logging.line_writer import LineWriter
from conch.observability.logging.log_handler import quoted
from conch.observability.logging.log_settings import AccessLogOptions
from conch.observability.logging.log_sinks import FileSink, Sink, sink_of

log = logging.getLogger(__name__)

OK = "OK"
_RECORD_BYTES = 512  # approximate size of a record
_GATHER_S = 0.05
_CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class AccessRecord:
    """The fields of a line, in order.

    Attributes:
        ts: Time of the last response, in seconds since 1970.
        protocol: ``http``, ``grpc``, ``grpc-stream``, ``ensemble-step`` for a step of an ensemble, or
            ``model-call`` for a BLS request.
        client: Address of the client.
        id: Request id, or empty.
        model: Name of the model; empty for an unreadable request.
        version: Version that served the request, else the requested one, or empty.
        code: ``OK``, or Triton's name of the error code.
        error: Error text, or empty.
        rows: Rows of the request.
        batch_size: Rows of its batch; 0 if it did not run, such as a refused or cached one.
        responses: Number of responses sent, errors included.
        bytes_in: Size of the request as received.
        bytes_out: Size of the responses if the front end reports it; size of the tensors of unencoded ones.
        queue_us: Microseconds in the queue.
        compute_input_us: Microseconds to prepare the batch.
        compute_infer_us: Microseconds in the model.
        compute_output_us: Microseconds to make the responses.
        total_us: Microseconds from receipt to the hand-over of the last response to the transport.
    """

    ts: float
    protocol: str
    client: str
    id: str
    model: str
    version: str
    code: str
    error: str
    rows: int
    batch_size: int
    responses: int
    bytes_in: int
    bytes_out: int
    queue_us: int
    compute_input_us: int
    compute_infer_us: int
    compute_output_us: int
    total_us: int


class AccessLog:
    """Writes a line for each request; see `RequestLog`.

    Args:
        options: File and format.
        steps: Whether to log ensemble steps and BLS requests; called for each of them.
        stream: Output if the options name no file; standard output if None.
        clock: Monotonic time in nanoseconds.

    Raises:
        OSError: The file can't be opened.
    """

    def __init__(
        self,
        options: AccessLogOptions,
        steps: Callable[[], bool],
        stream: TextIO | None = None,
        clock: Clock = monotonic_ns,
    ) -> None:
        sink: Sink = sink_of(stream or sys.stdout) if options.file is None else FileSink(options.file)
        self.steps = steps
        self.clock = clock
        self._writer = LineWriter(
            "conch-access-log",
            sink,
            json_line if options.json else text_line,
            _log_dropped,
            _log_reopen_failure,
            gather_s=_GATHER_S,
        )

    def begin(
        self, request: InferenceRequest, model: RequestModel, protocol: str, client: str, bytes_in: int
    ) -> None:
        """Starts the entry of a request; see `RequestLog`."""
        model.statistics.watched = True
        entry = _Entry(self, protocol, client, bytes_in, model.version_text)
        request.watch = entry
        # Between model and regions: copying outputs to a region may fail, and needs the direct way.
        bindings = request.region_bindings
        (request if bindings is None else bindings).wrap_responder(entry.before)

    def refuse(
        self,
        request: InferenceRequest | None,
        error: ConchError,
        protocol: str,
        client: str,
        bytes_in: int,
        received_ns: int,
    ) -> None:
        """Logs a refused request; see `RequestLog`."""
        entry = None if request is None else request.watch
        if entry is None:
            entry = _Entry(self, protocol, client, bytes_in, "" if request is None else request.model_version)
        if request is None:
            request = InferenceRequest("", "", {}, _no_responder, received_ns)
        entry.refused(request, error)

    def add(self, record: AccessRecord) -> None:
        """Queues a record for writing."""
        texts = (record.error, record.id, record.model, record.version)  # of any length
        self._writer.put(record, _RECORD_BYTES + sum(map(len, texts)))

    def reopen(self) -> None:
        """Reopens the file soon; signal-safe."""
        self._writer.reopen()

    def close(self) -> bool:
        """Writes queued records and ends; False on a timeout of the file."""
        return self._writer.close(_CLOSE_TIMEOUT_S)


class _Entry:
    """The entry of one request; see `Watch`."""

    __slots__ = ("_bytes_in", "_client", "_done", "_log", "_protocol", "_responder", "_responses", "_version",
                 "bytes_out", "times")  # fmt: skip

    _responder: Responder

    def __init__(self, access: AccessLog, protocol: str, client: str, bytes_in: int, version: str) -> None:
        self._log = access
        self._protocol = protocol
        self._client = client
        self._bytes_in = bytes_in
        self._version = version
        self._responses = 0
        self._done = False
        self.bytes_out = 0
        self.times: RunTimes | None = None

    def before(self, responder: Responder) -> Responder:
        """Puts itself in front of a responder."""
        self._responder = responder
        return self

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        if response is not None:
            self._responses += 1
        try:
            self._responder(request, response, final)
        finally:
            if final:
                error = None if response is None else response.error
                code = OK if error is None else error.code
                if request.cancelled and error is None:
                    code = "CANCELLED"  # the model finished, but the result was discarded
                self._end(request, code, "" if error is None else error.message)

    def step(self, request: InferenceRequest, model: RequestModel, kind: str = "ensemble-step") -> None:
        """Starts the entry of a subrequest if those are logged; see `Watch`."""
        if self._log.steps():
            self._log.begin(request, model, kind, self._client, 0)

    def refused(self, request: InferenceRequest, error: ConchError) -> None:
        """Logs an error that did not pass the responder; see `Watch`."""
        if not self._done:
            self._responses += 1
            self._end(request, error.code, error.message)

    def _end(self, request: InferenceRequest, code: str, error: str) -> None:
        self._done = True
        now = self._log.clock()
        times = self.times
        model = request.model
        queue = infer_input = infer = output = 0
        if times is not None:
            input_end = times.input_end_ns or times.start_ns
            end = times.end_ns or now
            output_start = times.output_start_ns or end
            queue = times.start_ns - request.queued_ns
            infer_input, infer, output = (
                input_end - times.start_ns,
                output_start - input_end,
                end - output_start,
            )
        elif request.queued_ns:
            queue = now - request.queued_ns
        self._log.add(
            AccessRecord(
                ts=wall_seconds(),
                protocol=self._protocol,
                client=self._client,
                id=request.id,
                model=request.model_name,
                version=self._version if model is None else model.version_text,
                code=code,
                error=error,
                rows=request.batch_size,
                batch_size=0 if times is None else times.size,
                responses=self._responses,
                bytes_in=self._bytes_in,
                bytes_out=self.bytes_out,
                queue_us=queue // 1000,
                compute_input_us=infer_input // 1000,
                compute_infer_us=infer // 1000,
                compute_output_us=output // 1000,
                total_us=(now - request.received_ns) // 1000,
            )
        )


def json_line(record: AccessRecord) -> str:
    """A record as one line of JSON, without an empty `error`."""
    fields = {name: getattr(record, name) for name in AccessRecord.__slots__}
    fields["ts"] = _time(record.ts)
    if not record.error:
        del fields["error"]
    return quoted(fields)


def text_line(record: AccessRecord) -> str:
    """A record as one line of text: time, protocol, client, model, code, and the rest by name."""
    version = f"/{_word(record.version)}" if record.version else ""
    line = (
        f"{_time(record.ts)} {record.protocol} {_word(record.client)} {_word(record.model)}{version} "
        f"{record.code} "
        f"id={_word(record.id)} rows={record.rows} batch={record.batch_size} responses={record.responses} "
        f"in={record.bytes_in} out={record.bytes_out} queue={record.queue_us} "
        f"input={record.compute_input_us} infer={record.compute_infer_us} "
        f"output={record.compute_output_us} total={record.total_us}"
    )
    return line + (f" error={quoted(record.error)}" if record.error else "")


def _word(text: str) -> str:
    """A client's text as one word, quoted if needed, so that clients can't forge fields."""
    plain = text and all(char.isalnum() or char in "-_.:+[]%" for char in text)
    return text if plain else quoted(text)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def _log_dropped(count: int) -> None:
    log.warning("lines of the access log were dropped, as they could not be written: %d", count)


def _log_reopen_failure(error: OSError) -> None:
    log.warning("the access log could not be opened anew, the old file is written to: %s", error)


def _no_responder(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """The responder of an unreadable request."""
