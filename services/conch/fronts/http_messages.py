"""Messages about HTTP between core and fronts.

Infer requests that a front has decoded come as EXECUTE, and their responses go as RESPONSES, as those of gRPC
do (`front_messages`); the number of each is ``head << 32 | exchange``. All else are records, those of one
round in a message:

    ========  ======  ============================================  =====================================
    record    sender  number                                        contents
    ========  ======  ============================================  =====================================
    LISTEN    core    port                                          JSON: `PortSettings`
    CLOSE     core    port                                          `amount`: milliseconds of grace
    SERVING   front                                                 it serves
    CONNS     front   port                                          `amount`: connections that have ended
    HEAD      front   head                                          JSON: `Head`; 0: all before are forgotten
    OPEN      front   exchange                                      `amount`: its head; what has come of the
                                                                    body; `flag`: it is complete; the number
                                                                    of its chunks, if any
    BODY      front   exchange                                      a piece of the body; `amount`: chunks so
                                                                    far; `flag`: it is complete
    GONE      front   exchange                                      its client has disconnected
    ASK       core    exchange                                      the handler asks for the body
    RESPOND   core    exchange                                      JSON: status, headers; the body;
                                                                    `flag`: the connection closes
    BEGIN     core    exchange                                      JSON: status, headers, filler, size
    WRITE     core    exchange                                      a piece of the response
    END       core    exchange                                      the response is complete
    ABORT     core    exchange                                      the response can't be completed
    READ      both    exchange                                      `amount`: bytes of pieces that were read
    ========  ======  ============================================  =====================================

Connections travel on a socket of their own, each with its descriptor and the number of its port.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from conch.core.tensor import Buffer
from conch.frontends.http.flow_control import Body
from conch.frontends.http.http_exchange import Headers
from conch.frontends.http.http_options import HttpTls
from conch.ipc.channel import Kind, WireError
from conch.ipc.tensors import MessageStream, Payload, ReceivedMessage

CREDIT_BYTES = 64 << 10
"""A side that has written more pieces than this of an exchange waits until the other has read them."""
OPENED = (1 << 32) - 1
"""In place of a head's number: the exchange has come by OPEN."""
MOST_HEADS = 1024
"""Heads that a front names by number; then it begins anew with 0."""
MOST_HEADS_BYTES = 1 << 20
"""So it does once they have so many bytes."""
READ_STEP = CREDIT_BYTES // 4
"""A side reports pieces as read after so many bytes."""

_RECORD = struct.Struct("<BBIIII")
_MOST_JOINED = 32 << 10  # larger bodies travel alone, and are copied less


class Record(IntEnum):
    """Kinds of records."""

    LISTEN = 1
    CLOSE = 2
    SERVING = 3
    CONNS = 4
    OPEN = 5
    BODY = 6
    GONE = 7
    ASK = 8
    RESPOND = 9
    BEGIN = 10
    WRITE = 11
    END = 12
    ABORT = 13
    READ = 14
    HEAD = 15


_RECORDS = {int(record): record for record in Record}


class HttpRecord(NamedTuple):
    """One record."""

    kind: Record
    number: int
    flag: bool = False
    amount: int = 0
    text: bytes = b""
    body: Buffer = b""


@dataclass(frozen=True, slots=True)
class PortSettings:
    """Settings of a port that a front needs.

    Attributes:
        tls: TLS, or None for plain text.
        idle_s: Seconds after which an unused connection is closed.
        most_connections: Its share of the limit of connections.
        infer_bytes: Largest JSON or decompressed body of infer requests; None if fronts decode none.
    """

    tls: HttpTls | None
    idle_s: float
    most_connections: int
    infer_bytes: int | None


class Head(NamedTuple):
    """The beginning of an exchange, which many may have in common; headers as `Headers`, in Latin-1.

    Attributes:
        port: Number of its port.
    """

    port: int
    client: str
    certificate_names: Sequence[str]
    method: str
    target: str
    version: str
    length: int | None
    keep_alive: bool
    headers: Sequence[Sequence[str]]


class RecordSender:
    """Sends records, those of a round of the event loop in one message.

    Args:
        stream: The messages.
        call_soon: Calls a function in the next round.
        on_failure: Called with the reason if a message can't be sent.
    """

    def __init__(
        self,
        stream: MessageStream,
        call_soon: Callable[[Callable[[], None]], object],
        on_failure: Callable[[str], None],
    ) -> None:
        self._stream = stream
        self._call_soon = call_soon
        self._on_failure = on_failure
        self._records: list[HttpRecord] = []
        self._bytes = 0

    def add(self, record: HttpRecord) -> None:
        """Adds a record; on the loop."""
        size = len(record.text) + len(record.body)
        if size > _MOST_JOINED or self._bytes + size > _MOST_JOINED:
            self.flush()
        if not self._records:
            self._call_soon(self.flush)
        self._records.append(record)
        self._bytes += size
        if size > _MOST_JOINED:
            self.flush()

    def flush(self) -> None:
        """Sends the records of the round."""
        records, self._records, self._bytes = self._records, [], 0
        if not records:
            return
        parts = [
            _RECORD.pack(kind, flag, number, count, len(text), len(body)) + text
            for kind, number, flag, count, text, body in records
        ]
        payload = Payload()
        payload.data = [records[0].body] if len(records) == 1 else [b"".join([each.body for each in records])]
        try:
            self._stream.send(Kind.HTTP, 0, b"".join(parts), payload)
        except Exception as error:  # boundary: a closed channel, memory, a body above 2 GB
            self._on_failure(str(error))


def decode_records(received: ReceivedMessage) -> Iterator[HttpRecord]:
    """Reads the records of a message.

    Raises:
        WireError: One is malformed.
    """
    if received.kind is not Kind.HTTP:
        raise WireError(f"a message {received.kind.name} was not expected")
    fields, data = bytes(received.fields), received.data
    position = begin = 0
    while position < len(fields):
        try:
            kind, flag, number, count, text_size, size = _RECORD.unpack_from(fields, position)
        except struct.error as error:
            raise WireError(f"a record ends too early: {error}") from None
        position += _RECORD.size
        text = fields[position : position + text_size]
        position += text_size
        end = begin + size
        if kind not in _RECORDS or position > len(fields) or end > len(data):
            raise WireError(f"a record of kind {kind} can't be read")
        body = b"" if not size else data if size == len(data) else data[begin:end]
        begin = end
        yield HttpRecord(_RECORDS[kind], number, flag != 0, count, text, body)


def encode_json(value: Sequence[Any]) -> bytes:
    """Encodes a record's text."""
    return json.dumps(value, separators=(",", ":")).encode()


def decode_json(text: bytes) -> list[Any]:
    """Reads a record's text.

    Raises:
        WireError: It is malformed.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a record can't be read: {error}") from None
    if not isinstance(value, list):
        raise WireError("a record's text is not a list")
    return value


def decode_head(text: bytes) -> Head:
    """Reads the head of an exchange.

    Raises:
        WireError: It is malformed.
    """
    try:
        return Head(*decode_json(text))
    except TypeError as error:
        raise WireError(f"the head of an exchange can't be read: {error}") from None


def whole_response(number: int, status: int, headers: Headers, body: Body, closes: bool) -> HttpRecord:
    """The record of a whole response."""
    text = encode_json((status, headers_to_json(headers)))
    whole = body if isinstance(body, bytes) else b"".join(body)
    return HttpRecord(Record.RESPOND, number, closes, 0, text, whole)


def headers_to_json(headers: Headers) -> list[tuple[str, str]]:
    """Headers for `encode_json`."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def headers_from_json(value: Sequence[Sequence[str]]) -> Headers:
    """Headers of `decode_json`."""
    return [(name.encode("latin-1"), text.encode("latin-1")) for name, text in value]


def encode_port(port: int) -> bytes:
    """Encodes what comes with a connection's descriptor."""
    return port.to_bytes(4, "little")


def decode_port(packet: bytes) -> int:
    """Reads what came with a connection."""
    return int.from_bytes(packet, "little")
