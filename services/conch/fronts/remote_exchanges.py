"""HTTP exchanges whose connections are a front's, as the core's handlers see them.

Threads and locks: the event loop of the HTTP ports only, but for what `HttpExchange` allows on any thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from conch.core.clock import monotonic_ns
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.tensor import Buffer, Tensor
from conch.frontends.http.flow_control import AT_ONCE_BYTES, Body, body_size
from conch.frontends.http.http_exchange import STATUS_LINES, FrontReply, Headers, HttpExchange
from conch.fronts.decoded_requests import DecodedRequest
from conch.fronts.http_messages import (
    CREDIT_BYTES,
    Head,
    HttpRecord,
    Record,
    encode_json,
    headers_from_json,
    headers_to_json,
    whole_response,
)
from conch.fronts.packed_responses import PackedResponse
from conch.ipc.tensors import Payload


class ExchangeLink(Protocol):
    """The link to the front of an exchange, as the exchange needs it."""

    def send(self, record: HttpRecord) -> None:
        """Sends a record with the round."""

    def run(self, exchange: HttpExchange, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine of an exchange as a task."""

    def pack(self, outputs: Sequence[Tensor]) -> Payload:
        """Packs the outputs of one response, to be answered with or discarded; from any thread."""

    def discard(self, message: PackedResponse) -> None:
        """Frees what a response holds that is not sent."""

    def answer(self, number: int, message: PackedResponse) -> None:
        """Sends the response to a decoded request with the round."""

    def ended(self, number: int) -> None:
        """Forgets an exchange, to which nothing more is sent."""


class ReceivedHead:
    """The head of an exchange, read once for all that have it in common."""

    __slots__ = ("facts", "fields", "headers", "names")

    def __init__(self, facts: Head) -> None:
        self.facts = facts
        self.names = tuple(facts.certificate_names)
        self.headers = headers_from_json(facts.headers)
        self.fields = {name.lower(): value for name, value in self.headers}


class RemoteConnection:
    """The connection of one exchange; see `ExchangeConnection`.

    Flow control: the front says how much of the pieces of a response its client has read, or is about to.
    """

    def __init__(self, link: ExchangeLink, number: int, peer: str) -> None:
        self.link = link
        self.number = number
        self.peer = peer
        self.lost = False
        self._unread = 0
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def writable(self) -> bool:
        """True if the client has read enough for more to be written."""
        return self._writable.is_set()

    async def drain(self) -> None:
        """Waits until the client has read enough for more to be written."""
        await self._writable.wait()

    def write(self, piece: Buffer) -> None:
        """Sends a piece of a response."""
        self._unread += len(piece)
        if self._unread > CREDIT_BYTES:
            self._writable.clear()
        self.link.send(HttpRecord(Record.WRITE, self.number, body=piece))

    def note_read(self, count: int) -> None:
        """Notes that the client has read so many bytes."""
        self._unread -= count
        if self._unread <= CREDIT_BYTES:
            self._writable.set()

    def lose(self) -> None:
        """Notes that the client is gone."""
        self.lost = True
        self._writable.set()

    def hold_body(self, paused: bool) -> None:
        """Needs nothing: the front sends no more than it may until it is asked."""

    def run(self, exchange: HttpExchange, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine of an exchange as a task."""
        self.link.run(exchange, work)

    def finished(self, exchange: HttpExchange) -> None:
        """Ends an exchange whose response came in pieces."""
        if not self.lost:
            self.link.send(HttpRecord(Record.END, self.number))
        self.end(exchange)

    def end(self, exchange: HttpExchange) -> None:
        """Ends an exchange, to which nothing more is sent."""
        exchange.done = True
        if exchange.body_hold is not None:
            exchange.let_go()
        exchange.on_disconnect = exchange.then = exchange.whole = exchange.collected = None
        self.link.ended(self.number)


class RemoteExchange(HttpExchange):
    """One request and its response, which a front receives and sends.

    Args:
        link: The link to the front.
        number: Its number at the front.
        head: Its head.
    """

    __slots__ = ("_decoded", "_names", "_remote", "port")

    def __init__(self, link: ExchangeLink, number: int, head: ReceivedHead) -> None:
        facts = head.facts
        # Without a transport: see what is overridden.
        remote: Any = RemoteConnection(link, number, facts.client)
        HttpExchange.__init__(
            self,
            remote,
            facts.method,
            facts.target,
            facts.version,
            head.headers,
            head.fields,
            facts.length,
            facts.keep_alive,
        )
        self._remote: RemoteConnection = remote
        self._decoded: DecodedRequest | None = None
        self._names = head.names
        self.port = facts.port

    @property
    def link(self) -> ExchangeLink:
        """The link to the front."""
        return self._remote.link

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """Names in the client's certificate, such as ``cn:web``; none without one."""
        return self._names

    def receive(self, piece: bytes, chunks: int, complete: bool) -> None:
        """Takes a piece of the body, or all of it."""
        self.chunks = chunks
        if piece and complete and len(piece) == self.length and len(piece) <= self.most:
            self.whole = piece
            self.size = len(piece)
        elif piece:
            self.collect(piece)
        if complete:
            self._complete()

    def receive_decoded(self, request: DecodedRequest) -> None:
        """Takes the request that the front has made of the body."""
        self._decoded, self.decoded = request, True
        self.size = len(request)
        self._complete()

    def _complete(self) -> None:
        self.complete = True
        self.read_ns = monotonic_ns()
        then, self.then = self.then, None
        if then is not None:
            then()

    def take_decoded(self) -> DecodedRequest | None:
        """Returns what the front has decoded, and no longer keeps it; None for nothing."""
        decoded, self._decoded = self._decoded, None
        return decoded

    def leave_encoding(self, request: InferenceRequest, response: InferenceResponse) -> FrontReply | None:
        """Leaves a response to its front; any thread.

        None for one with more than its outputs, and where the size of the body is counted or what is added
        to it is only known here; so, too, for what can't be packed: the encoder finds the error.
        """
        if response.parameters or request.watch is not None or self.hooks is not None:
            return None
        if self.extra_headers or self.late_headers is not None:
            return None
        try:
            return _PackedReply(self, request, response)
        except Exception:  # boundary: outputs that models have made
            return None

    def send_packed(self, reply: _PackedReply) -> None:
        """Sends a response that the front encodes, or drops it."""
        remote = self._remote
        if remote.lost or self.began:
            remote.link.discard(reply)
        else:
            self.began = True
            remote.link.answer(remote.number, reply)
        remote.end(self)

    def note_read(self, count: int) -> None:
        """Notes that the client has read so many bytes of the response."""
        self._remote.note_read(count)

    def disconnected(self) -> None:
        """Tells the handler that the client disconnected."""
        self._decoded = None
        self._remote.lose()
        HttpExchange.disconnected(self)

    def _ask(self) -> None:
        self.body_paused = False
        self._remote.link.send(HttpRecord(Record.ASK, self._remote.number))

    def respond(self, status: int, headers: Headers, body: Body = b"", closes: bool = False) -> None:
        """Sends a whole response, once; see `HttpExchange.respond`."""
        remote = self._remote
        if remote.lost:
            remote.end(self)
            return
        if self.hooks is not None:
            status, headers = self.hooks.translate(self, status, headers, body)
        self.began = True
        if closes:
            self.keep_alive = False
        size = body_size(body)
        if size > AT_ONCE_BYTES and self.method != "HEAD":
            self.unsent = size
            self._begin(status, headers, b"", size, closes)
            remote.run(self, self._write_pieces(body))
            return
        added = self._with_added(headers)
        remote.link.send(whole_response(remote.number, _known(status), added, body, closes))
        remote.end(self)

    def begin_response(
        self, status: int, headers: Headers, filler: bytes = b"", size: int | None = None
    ) -> None:
        """Begins a response that comes in pieces; see `HttpExchange.begin_response`."""
        self.began = True
        self._begin(status, headers, filler, size, False)

    def _begin(self, status: int, headers: Headers, filler: bytes, size: int | None, closes: bool) -> None:
        if self.lost:
            return
        remote = self._remote
        text = encode_json(
            (_known(status), headers_to_json(self._with_added(headers)), filler.decode("latin-1"), size)
        )
        remote.link.send(HttpRecord(Record.BEGIN, remote.number, closes, 0, text))

    def _with_added(self, headers: Headers) -> Headers:
        late = [] if self.late_headers is None else self.late_headers()
        return [*headers, *late, *(self.extra_headers or ())]

    def abort(self) -> None:
        """Has the front break the connection off."""
        if not self.lost:
            self._remote.link.send(HttpRecord(Record.ABORT, self._remote.number))
            self.disconnected()
        self._remote.end(self)

    def _write(self, data: Buffer) -> None:
        if not self.lost and len(data):
            self._remote.write(data)


class _PackedReply(PackedResponse):
    """A response that the front encodes."""

    __slots__ = ("_exchange",)

    def __init__(
        self, exchange: RemoteExchange, request: InferenceRequest, response: InferenceResponse
    ) -> None:
        PackedResponse.__init__(self, request, response, exchange.link.pack)
        self._exchange = exchange

    def send(self) -> None:
        """See `FrontReply`."""
        self._exchange.send_packed(self)


def _known(status: int) -> int:
    """The status. Raises KeyError: there is none such; a front would end with it."""
    if status not in STATUS_LINES:
        raise KeyError(status)
    return int(status)
