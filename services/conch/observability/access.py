"""The access log: one line for each request that was answered, written where nobody waits for it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from conch.core.clock import Clock, monotonic_ns, wall_seconds
from conch.core.errors import ConchError
from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.servable import Servable
from conch.core.watch import RunTimes, watch_of
from conch.observability.options import AccessLogOptions
from conch.observability.quoting import quoted
from conch.observability.sinks import FileSink, Sink, sink_of
from conch.observability.writer import LineWriter

log = logging.getLogger(__name__)

OK = "OK"
_BYTES = 512  # what a record takes up, roughly
_GATHER_S = 0.05
_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class AccessRecord:
    """What is told of a request; the fields of a line, in its order.

    Attributes:
        ts: When it was answered, in seconds since 1970.
        protocol: ``http``, ``grpc``, ``grpc-stream``, ``ensemble-step`` for what an ensemble has asked of one
            of its models, or ``model-call`` for what a model has asked of another one.
        client: Address of the client.
        id: The client's request id, or empty.
        model: Name of the model, or empty if the request could not be read.
        version: The version that served it; if none has, the one that was asked for, or empty.
        code: ``OK``, or Triton's name of the error's code.
        error: The error's text, or empty.
        rows: Rows of the request.
        batch_size: Rows of the batch that it ran in; 0 if it did not run, as what was refused or cached.
        responses: How many responses its client was sent, errors included.
        bytes_in: Size of the request as it came.
        bytes_out: Size of the responses, where the front end says so; of what it has yet to make, that of its
            tensors.
        queue_us: Microseconds in the queue.
        compute_input_us: Microseconds to prepare its batch.
        compute_infer_us: Microseconds in the model.
        compute_output_us: Microseconds to make the responses of the model's results.
        total_us: Microseconds from receipt until the last response was handed over to be sent.
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
    """Watches over requests and writes a line for each; see `RequestLog`.

    Args:
        options: Where to, and how.
        steps: Whether what ensembles ask of their models is told too, asked for each request of an ensemble.
        stream: Where to, unless the options name a file; standard output if None.
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
            _tell_dropped,
            _tell_failed,
            gather_s=_GATHER_S,
        )

    def begin(
        self, request: InferenceRequest, model: Servable, protocol: str, client: str, bytes_in: int
    ) -> None:
        """Watches over a request; see `RequestLog`."""
        model.statistics.watched = True
        entry = _Entry(self, protocol, client, bytes_in, model.version_text)
        request.watch = entry
        # Behind regions: outputs may fail on their way there, and go there directly if nobody is in between.
        uses = getattr(request, "uses", None)
        (request if uses is None else uses).intercept(entry.before)

    def refuse(
        self,
        request: InferenceRequest | None,
        error: ConchError,
        protocol: str,
        client: str,
        bytes_in: int,
        received_ns: int,
    ) -> None:
        """Tells of a request that was not let in; see `RequestLog`."""
        entry = None if request is None else watch_of(request)
        if entry is None:
            entry = _Entry(self, protocol, client, bytes_in, "" if request is None else request.model_version)
        if request is None:
            request = InferenceRequest("", "", {}, _nobody, received_ns)
        entry.refused(request, error)

    def add(self, record: AccessRecord) -> None:
        """Has a record written."""
        texts = (
            record.error,
            record.id,
            record.model,
            record.version,
        )  # clients make them as long as they like
        self._writer.put(record, _BYTES + sum(map(len, texts)))

    def reopen(self) -> None:
        """Has the file opened anew; may be called from a signal handler."""
        self._writer.reopen()

    def close(self) -> bool:
        """Writes what there is and ends; False if the file did not take it in time."""
        return self._writer.close(_PATIENCE_S)


class _Entry:
    """Watches over one request; see `Watch`."""

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
        """Itself, in front of a responder."""
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
                    code = "CANCELLED"  # the model went on to its end, and nobody got what it said
                self._end(request, code, "" if error is None else error.message)

    def step(self, request: InferenceRequest, model: Servable, kind: str = "ensemble-step") -> None:
        """Watches over a request that is made for this one, if such are to be told; see `Watch`."""
        if self._log.steps():
            self._log.begin(request, model, kind, self._client, 0)

    def refused(self, request: InferenceRequest, error: ConchError) -> None:
        """Tells that it was answered with an error by whoever submitted it; see `Watch`."""
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
    """A record as one line of JSON; an empty `error` is left out."""
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
    """A client's text as one word: quoted unless it is one, so that no client writes words of its own."""
    plain = text and all(char.isalnum() or char in "-_.:+[]%" for char in text)
    return text if plain else quoted(text)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def _tell_dropped(count: int) -> None:
    log.warning("lines of the access log were dropped, as they could not be written: %d", count)


def _tell_failed(error: OSError) -> None:
    log.warning("the access log could not be opened anew, the old file is written to: %s", error)


def _nobody(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """The responder of a request that could not be read."""
