"""The access log: one line for each answered request.

Threads: `conch-access-log` writes the lines.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from conch.core.request import Fact
from conch.observability.logging.line_writer import RECORD_BYTES, RecordLog
from conch.observability.logging.log_handler import quoted
from conch.observability.logging.log_settings import AccessLogOptions
from conch.observability.logging.log_sinks import FileSink, Sink, sink_of

log = logging.getLogger(__name__)

OK = "OK"


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
        trace_id: Trace of the request, or empty.
        principal: Name in the access policy, or empty.
        facts: Further attributes of the answer, such as ``gen_ai.usage.input_tokens``; None for none.
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
    trace_id: str = ""
    principal: str = ""
    facts: Mapping[str, Fact] | None = None


class AccessLog(RecordLog[AccessRecord]):
    """Writes a line for each request.

    Args:
        options: File and format.
        steps: Returns True if ensemble steps and BLS requests are logged; called for each of them.
        stream: Output if the options name no file; standard output if None.

    Raises:
        OSError: The file can't be opened.
    """

    def __init__(
        self,
        options: AccessLogOptions,
        steps: Callable[[], bool],
        stream: TextIO | None = None,
    ) -> None:
        sink: Sink = sink_of(stream or sys.stdout) if options.file is None else FileSink(options.file)
        self.steps = steps
        self._json = options.json
        super().__init__("access log", sink, log)

    def line(self, record: AccessRecord) -> str:
        """A record as a line of the chosen format."""
        return json_line(record) if self._json else text_line(record)

    def add(self, record: AccessRecord) -> None:
        """Queues a record for writing."""
        texts = (record.error, record.id, record.model, record.version)  # of any length
        self._writer.put(record, RECORD_BYTES + sum(map(len, texts)))


def json_line(record: AccessRecord) -> str:
    """A record as one line of JSON, without an empty `error`, `trace_id` or `principal`."""
    fields = {name: getattr(record, name) for name in AccessRecord.__slots__}
    del fields["facts"]
    fields.update(record.facts or {})
    fields["ts"] = _time(record.ts)
    for name in ("error", "trace_id", "principal"):
        if not fields[name]:
            del fields[name]
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
    if record.principal:
        line += f" principal={_word(record.principal)}"
    for name, value in (record.facts or {}).items():
        words = [value] if isinstance(value, str) else value if isinstance(value, Sequence) else [str(value)]
        line += f" {name}={','.join(map(_word, words))}"
    trace = f" trace={record.trace_id}" if record.trace_id else ""
    return line + trace + (f" error={quoted(record.error)}" if record.error else "")


def _word(text: str) -> str:
    """A client's text as one word, quoted if needed, so that clients can't forge fields."""
    plain = text and all(char.isalnum() or char in "-_.:+[]%" for char in text)
    return text if plain else quoted(text)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")
