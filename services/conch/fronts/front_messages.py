"""Messages between the core and a front: packets of the workers' protocol with kinds of their own.

Requests that a front has decoded come as EXECUTE, and their responses go as RESPONSES, in the codec's
encoding: those of one model and one round of the loop are one message. All else of a call has a message of
its own:

    ========  ======  ============================================  =====================================
    kind      sender  subject                                       contents
    ========  ======  ============================================  =====================================
    START     core                                                  JSON: `FrontSettings`
    HELLO     front                                                 as a worker's: it serves
    CALLERS   front   number of the first                           JSON: new callers
    EXECUTE   front                                                 requests; the number of each is
                                                                    ``caller << 32 | call``, its batch
                                                                    size that of the client's message
    ADMIT     front   call                                          as OPEN, of a unary call whose method
                                                                    has a check; its message comes later,
                                                                    and is dropped if the check refuses it
    OPEN      front   call                                          caller, deadline, method; of a unary
                                                                    call the message
    CANCEL    front   call                                          the client is gone, or too late
    MODEL     core    number of a model's version                   JSON: name, version
    RESPONSES core    number of the model's version                 of calls that came by EXECUTE
    ANSWER    core    call                                          status, trailing metadata, message
    BEGIN     core    stream                                        compression of its messages
    MESSAGE   both    stream                                        a message, or the client's half-close
    READ      core    stream                                        the next message may come
    READ      front   stream                                        number of bytes that were read
    STATE     front   number of connections that have ended         JSON: what clients have caused
    LOG       front                                                 JSON: a record of the log
    LEVEL     core                                                  as to a worker: lowest level of records
    DRAIN     core                                                  all connections are to end
    ========  ======  ============================================  =====================================

Connections travel on a socket of their own, see `connection_passing`, with what `encode_connection` says.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from conch.core.tensor import Buffer
from conch.frontends.grpc.rpc_calls import Metadata
from conch.frontends.grpc.tls_options import TlsOptions
from conch.frontends.grpc.transport.port_state import PortOptions
from conch.ipc.channel import WireError
from conch.ipc.tensors import Payload, ReceivedMessage

CALL_BITS = 32
"""Bits of a call's number; those above are its caller's number."""

MOST_CALLERS = 4096
"""Callers that a front names by number; then it begins anew with 0."""

NO_DEADLINE = -1

_OPEN = struct.Struct("<IqBI")
_SIZE = struct.Struct("<I")
_NO_MESSAGE = (1 << 32) - 1
_LONG_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Settings of a front, sent with START.

    Attributes:
        port: Limits of its connections.
        tls: TLS of each listening socket, by its number; None for plain text.
        unary, streams: The methods that have handlers.
        checked: Unary methods with a check before their message is received.
        log_level: Lowest level of records to send at first.
    """

    port: PortOptions
    tls: tuple[TlsOptions | None, ...]
    unary: tuple[str, ...]
    streams: tuple[str, ...]
    checked: tuple[str, ...]
    log_level: int


class CallerFacts(NamedTuple):
    """The client of a call, with its metadata; equal for calls with the same metadata on one connection."""

    client: str
    certificate_names: tuple[str, ...]
    metadata: Metadata


def encode_callers(callers: Sequence[CallerFacts]) -> bytes:
    """Encodes callers."""
    return json.dumps(
        [(each.client, each.certificate_names, _metadata_to_json(each.metadata)) for each in callers]
    ).encode()


def decode_callers(fields: Buffer) -> list[CallerFacts]:
    """Reads callers.

    Raises:
        WireError: They are malformed.
    """
    try:
        return [
            CallerFacts(client, tuple(names), _metadata_from_json(metadata))
            for client, names, metadata in json.loads(bytes(fields))
        ]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"callers can't be read: {error}") from None


def _metadata_to_json(metadata: Metadata) -> list[tuple[str, str, bool]]:
    """Bytes as Latin-1."""
    return [
        (key, value, False) if isinstance(value, str) else (key, value.decode("latin-1"), True)
        for key, value in metadata
    ]


def _metadata_from_json(value: Any) -> Metadata:
    return tuple([(key, text.encode("latin-1") if binary else text) for key, text, binary in value])


class Opened(NamedTuple):
    """The beginning of a call; `message` is None for a stream."""

    caller: int
    deadline_ns: int | None
    method: str
    message: Buffer | None


def encode_open(caller: int, deadline_ns: int | None, method: str, message: Buffer | None) -> bytes:
    """Encodes the fields of OPEN; a unary call's message comes behind them."""
    deadline_ns = NO_DEADLINE if deadline_ns is None else min(deadline_ns, (1 << 63) - 1)
    size = 0 if message is None else len(message)
    return _OPEN.pack(caller, deadline_ns, message is None, size) + method.encode()


def decode_open(received: ReceivedMessage) -> Opened:
    """Reads OPEN.

    Raises:
        WireError: It is malformed.
    """
    try:
        caller, deadline_ns, stream, size = _OPEN.unpack_from(received.fields)
        method = str(received.fields[_OPEN.size :], "utf-8")
    except (struct.error, UnicodeDecodeError) as error:
        raise WireError(f"a call can't be read: {error}") from None
    message = None if stream else _data(received, size)
    return Opened(caller, None if deadline_ns == NO_DEADLINE else deadline_ns, method, message)


class Answer(NamedTuple):
    """The end of a call: `message` is that of a unary call with status 0, else None."""

    status: int
    details: str
    trailing: Metadata
    compression: str | None
    message: Buffer | None


def encode_answer(answer: Answer) -> bytes:
    """Encodes the fields of ANSWER; the message comes behind them."""
    size = _SIZE.pack(_NO_MESSAGE if answer.message is None else len(answer.message))
    if not answer.status and not answer.details and not answer.trailing and answer.compression is None:
        return size
    status, details, trailing, compression, _ = answer
    return size + json.dumps([status, details, _metadata_to_json(trailing), compression]).encode()


def decode_answer(received: ReceivedMessage) -> Answer:
    """Reads ANSWER.

    Raises:
        WireError: It is malformed.
    """
    size = _size(received)
    message = None if size == _NO_MESSAGE else _data(received, size)
    rest = bytes(received.fields[_SIZE.size :])
    if not rest:
        return Answer(0, "", (), None, message)
    try:
        status, details, trailing, compression = json.loads(rest)
        return Answer(status, details, _metadata_from_json(trailing), compression, message)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"an answer can't be read: {error}") from None


def encode_message(message: Buffer | None) -> bytes:
    """Encodes the fields of MESSAGE; the message, if any, comes behind them. None is the half-close."""
    return _SIZE.pack(_NO_MESSAGE if message is None else len(message))


def decode_message(received: ReceivedMessage) -> Buffer | None:
    """Reads MESSAGE.

    Raises:
        WireError: It is malformed.
    """
    size = _size(received)
    return None if size == _NO_MESSAGE else _data(received, size)


def encode_count(count: int) -> bytes:
    """Encodes the fields of a front's READ."""
    return _SIZE.pack(count)


def decode_count(received: ReceivedMessage) -> int:
    """Reads a front's READ.

    Raises:
        WireError: It is malformed.
    """
    return _size(received)


def carrying(message: Buffer | None) -> Payload | None:
    """The payload of a message that is no tensor."""
    if message is None:
        return None
    payload = Payload()
    payload.data = [message]
    return payload


def _size(received: ReceivedMessage) -> int:
    try:
        size: int = _SIZE.unpack_from(received.fields)[0]
    except struct.error as error:
        raise WireError(f"a message ends too early: {error}") from None
    return size


def _data(received: ReceivedMessage, size: int) -> Buffer:
    data = received.data
    if size > len(data):
        raise WireError(f"a client's message of {size} bytes has come with {len(data)}")
    if size == len(data):
        return data
    return bytes(data[:size]) if size < _LONG_BYTES else memoryview(data)[:size]


def encode_connection(listener: int, peer: str) -> bytes:
    """Encodes what comes with a connection's descriptor: number of the listening socket, client's address."""
    return json.dumps([listener, peer]).encode()


def decode_connection(packet: bytes) -> tuple[int, str]:
    """Reads what came with a connection."""
    listener, peer = json.loads(packet)
    return listener, peer
