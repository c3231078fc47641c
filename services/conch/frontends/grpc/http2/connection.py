"""An HTTP/2 connection (RFC 9113): bytes in, events out; no sockets, no clock, no locks.

Theory of operation
-------------------
The owner reads bytes and gives them to `receive`, which returns events; it calls `send_headers`, `send_data`
and the like, and sends what `take_output` returns, until that is empty. One thread does all of it.

Frames are read one after the other. DATA frames are passed on piece by piece as they arrive, as slices of
what was received, so that a frame may be larger than any buffer; the rest of a long one can be received into
the owner's own buffer (`direct`, `received_directly`). All other frames are short, or are refused for their
length, and wait in `_rest` until they are whole. Frames of unknown types are skipped as they arrive.
Some frames are read at a time, as few bytes may be many: the others wait, `unparsed`.

A stream is in `_streams` while a side of it is open. Of closed streams only this is kept: the last stream id
(below it there is no idle stream), a few ranges of ids that the peer skipped, and the last streams that were
reset here, whose frames may still be under way and are ignored. What the peer did to a stream that is in none
of them, the tables tell; "S" is a stream error, "C" a connection error, PROTOCOL_ERROR or STREAM_CLOSED.

    received         HEADERS      HEADERS, END  DATA         DATA, END    RST_STREAM  WINDOW_UPDATE
    idle             open         half-cl. (r)  C PROTOCOL   C PROTOCOL   C PROTOCOL  C PROTOCOL
    open             S PROTOCOL   half-cl. (r)  same         half-cl. (r) closed      same
    half-closed (l)  S PROTOCOL   closed        same         closed       closed      same
    half-closed (r)  S CLOSED     S CLOSED      S CLOSED     S CLOSED     closed      same
    closed           C CLOSED     C CLOSED      S CLOSED     S CLOSED     ignored     ignored
    reset here       ignored      ignored       ignored      ignored      ignored     ignored
    skipped          C PROTOCOL   C PROTOCOL    S CLOSED     S CLOSED     ignored     ignored

    sent             HEADERS      DATA          DATA, END    trailers     RST_STREAM
    open             same         same          half-cl. (l) half-cl. (l) reset here
    half-closed (l)  ignored      ignored       ignored      ignored      reset here
    half-closed (r)  same         same          closed       closed       reset here
    all others       ignored      ignored       ignored      ignored      ignored

(r) is remote: the peer has sent END_STREAM; (l) is local. That is the server's side. For a client streams are
idle until it opens them, HEADERS of the server on an idle stream are C PROTOCOL, and the first HEADERS on an
open one are the response's head; informational ones (1xx) are dropped. Sending on a closed stream does
nothing, as it may have closed since the owner last looked. PRIORITY is checked and ignored in all states.

Flow control. Each DATA byte, padding too, counts against the windows of its stream and of the connection.
`consumed` gives bytes back; WINDOW_UPDATE frames follow once a quarter of a window has been. A stream that
closes gives back what it had not consumed, and DATA that no stream takes is given back at once.
Data to be sent goes straight to the output if both windows, the peer's frame size and
`Http2Limits.output_bytes` allow it whole; else it waits in the stream's queue. Streams that could send take
turns, a few frames each (`_pump`), at the end of `receive` and in `take_output`. Streams whose own window is
shut wait outside of that line until it opens. Header blocks are encoded when they go to the output, in the
order of the dynamic table.

Limits (`limits.Http2Limits`) hold what the peer can cost; each that closes the connection has its `Reason`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from conch.frontends.grpc.http2.events import (
    ConnectionClosed,
    DataReceived,
    Event,
    GoAwayReceived,
    HeadersReceived,
    PingAcknowledged,
    PingReceived,
    StreamRefused,
    StreamReset,
    TrailersReceived,
    WindowOpened,
)
from conch.frontends.grpc.http2.field_rules import (
    MalformedError,
    Pairs,
    check_request,
    check_response,
    check_trailers,
)
from conch.frontends.grpc.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEAD_BYTES,
    HEADERS,
    LEAST_FRAME_SIZE,
    MOST_FRAME_SIZE,
    MOST_STREAM_ID,
    MOST_WINDOW,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PRIORITY_FLAG,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    WINDOW_UPDATE,
    ErrorCode,
    Setting,
    pack_frame,
    pack_goaway,
    pack_head,
    pack_reset,
    pack_settings,
    pack_window_update,
    unpack_head,
    unpack_setting,
    unpack_word,
)
from conch.frontends.grpc.http2.hpack import (
    HeaderDecoder,
    HeaderEncoder,
    HeaderList,
    HeaderListBombError,
    HpackError,
)
from conch.frontends.grpc.http2.limits import (
    PERIOD_NS,
    ConnectionViolation,
    Http2Limits,
    LocalSettings,
    Reason,
    Recent,
    too_much,
)
from conch.frontends.grpc.http2.streams import Buffer, SendQueue, Stream

# Frames that `receive` reads at once.
FRAMES_AT_ONCE = 16
# What is remembered of closed streams, and header lists known to be well-formed.
_RESETS_REMEMBERED = 1024
_GAPS_REMEMBERED = 32
_LISTS_REMEMBERED = 64
# Output up to here is one buffer; above, only buffers smaller than the second number are joined.
_JOINED_BYTES = 65_536
# What a stream may send before it is the next one's turn.
_TURN_BYTES = 65_536
_SMALL_BYTES = 4096

# In place of a content-length.
_NO_LENGTH, _MALFORMED, _INFORMATIONAL = -1, -2, -3
# A flag of ours, above those of frames.
_DEPENDS_ON_ITSELF = 0x100


class NoStreamError(Exception):
    """The connection has closed, the peer goes away or allows no more streams, or ids ran out."""


class Http2Connection:
    """One side of a connection."""

    def __init__(
        self, client: bool = False, settings: LocalSettings | None = None, limits: Http2Limits | None = None
    ) -> None:
        self._client = client
        self._settings = settings = settings or LocalSettings()
        self._limits = limits or Http2Limits()
        self._decoder = HeaderDecoder(max(settings.header_table_bytes, 4096), settings.max_header_list_bytes)
        self._encoder = HeaderEncoder()
        self._streams: dict[int, Stream] = {}
        self._events: list[Event] = []
        # The last stream that the peer opened, or for a client the last of its own.
        self._last_stream_id = -1
        self._reset_here: set[int] = set()
        self._reset_order: deque[int] = deque()
        self._gaps: deque[range] = deque(maxlen=_GAPS_REMEMBERED)
        # What `_head_length` and `check_trailers` made of header lists, which the decoder may return again.
        self._heads: dict[HeaderList, int] = {}
        self._trailers: set[HeaderList] = set()

        # Receiving: bytes of an incomplete frame and how many it needs; then, of a DATA frame that arrives in
        # pieces, how much is missing. Without a stream, it is skipped.
        self._rest = bytearray()
        self._needed = 0
        self.unparsed: tuple[bytes, int] | None = None
        self._preface_left = b"" if client else PREFACE
        self._data_stream: Stream | None = None
        self._data_left = 0
        self._data_ends = False
        self._padding_left = 0
        # What the next frame must be, if it is not free: SETTINGS at first, CONTINUATION in a header block.
        self._expected = SETTINGS
        # A header block that CONTINUATION frames are to complete.
        self._block_stream_id = 0
        self._block = bytearray()
        self._block_flags = 0
        self._block_frames = 0
        self._window = max(settings.initial_window, DEFAULT_WINDOW)
        self._connection_left = settings.connection_window
        self._connection_freed = 0
        self._empty_data = 0

        # Sending.
        self._out: list[Buffer] = []
        self._out_bytes = 0
        # Of header blocks and resets, which no window bounds.
        self.output_head_bytes = 0
        self.queued_bytes = 0
        self._waits = self._moved = 0
        self._most_output = self._limits.output_bytes
        self._unsent_acks = 0
        self._send_left = DEFAULT_WINDOW
        self._ready: OrderedDict[int, Stream] = OrderedDict()
        self._peer_window = DEFAULT_WINDOW
        self._peer_frame_size = LEAST_FRAME_SIZE
        self._peer_streams = MOST_STREAM_ID

        self._recent = Recent()
        self._period_ends_ns = 0
        self._highest_taken = MOST_STREAM_ID
        self._peer_goes_away = False
        self.established = False
        self.closed = False
        self._begin()

    def _begin(self) -> None:
        settings = self._settings
        values = [
            (Setting.HEADER_TABLE_SIZE, settings.header_table_bytes),
            (Setting.INITIAL_WINDOW_SIZE, settings.initial_window),
            (Setting.MAX_FRAME_SIZE, settings.max_frame_size),
            (Setting.MAX_HEADER_LIST_SIZE, settings.max_header_list_bytes),
        ]
        if self._client:
            self._out.append(PREFACE)
            values.append((Setting.ENABLE_PUSH, 0))
        else:
            values.append((Setting.MAX_CONCURRENT_STREAMS, settings.max_concurrent_streams))
        self._out.append(pack_settings(values))
        if more := settings.connection_window - DEFAULT_WINDOW:
            self._out.append(pack_window_update(0, more))

    @property
    def open_streams(self) -> int:
        """Number of streams of which a side is open."""
        return len(self._streams)

    @property
    def peer_streams(self) -> int:
        """Streams that the peer allows at the same time; the highest stream id without a limit."""
        return self._peer_streams

    @property
    def last_stream_id(self) -> int:
        """The last stream that was opened."""
        return max(self._last_stream_id, 0)

    # Receiving

    def receive(self, data: bytes, now_ns: int) -> list[Event]:
        """Takes what has arrived, up to `FRAMES_AT_ONCE`; `DataReceived` events refer to it.

        While frames are `unparsed`, it takes more of them and is to be called without data.

        Raises:
            ValueError: There is data, though frames are unparsed.
        """
        if now_ns >= self._period_ends_ns:
            self._next_period(now_ns)
        events, self._events = self._events, []
        if self.closed:
            return events
        try:
            if self.unparsed is not None:
                if data:
                    raise ValueError("data before what came earlier is parsed")
                waiting, self.unparsed = self.unparsed, None
                self._parse(*waiting, events)
            elif self._data_left or self._padding_left:
                position = self._continue_data(data, 0, events)
                if position < len(data):
                    self._parse(data, position, events)
            elif self._rest:
                if len(self._rest) + len(data) < self._needed:
                    self._rest += data
                else:
                    data = bytes(self._rest) + data
                    self._rest.clear()
                    self._parse(data, 0, events)
            elif self._preface_left:
                self._receive_preface(data, events)
            else:
                self._parse(data, 0, events)
            if self._ready:
                self._pump(events)
        except ConnectionViolation as violation:
            self._close(violation, events)
        return events

    def _next_period(self, now_ns: int) -> None:
        skipped = now_ns >= self._period_ends_ns + PERIOD_NS
        self._period_ends_ns = now_ns + PERIOD_NS
        self._recent.next_period(self._last_stream_id + 2, skipped)

    def _close(self, violation: ConnectionViolation, events: list[Event]) -> None:
        self.fail(violation.code, violation.text)
        events.append(ConnectionClosed(violation.code, violation.reason, violation.text))

    def fail(self, code: ErrorCode, text: str) -> None:
        """Sends GOAWAY and ends all streams; nothing is received or sent any more."""
        self.go_away(code, text=text.encode())
        self.closed = True
        self._streams.clear()
        self.queued_bytes = 0
        self._ready.clear()
        self._rest.clear()
        self.unparsed = None
        self._data_stream, self._data_left, self._padding_left = None, 0, 0

    def _receive_preface(self, data: bytes, events: list[Event]) -> None:
        wanted = self._preface_left
        here = data[: len(wanted)]
        if not wanted.startswith(here):
            raise ConnectionViolation(ErrorCode.PROTOCOL_ERROR, Reason.PREFACE, "no HTTP/2 preface")
        self._preface_left = wanted[len(here) :]
        self._parse(data, len(here), events)

    def _parse(self, data: bytes, position: int, events: list[Event]) -> None:
        """Reads frames from a position on; keeps the rest."""
        end, most = len(data), self._settings.max_frame_size
        needed = HEAD_BYTES
        frames = FRAMES_AT_ONCE
        while end - position >= HEAD_BYTES:
            if not frames:
                self.unparsed = data, position
                return
            frames -= 1
            word, flags, stream_id = unpack_head(data, position)
            kind, length = word & 0xFF, word >> 8
            stream_id &= MOST_STREAM_ID
            start = position + HEAD_BYTES
            after = start + length
            if length > most:
                raise ConnectionViolation(
                    ErrorCode.FRAME_SIZE_ERROR, Reason.FRAME_SIZE, "frame above SETTINGS_MAX_FRAME_SIZE"
                )
            if self._expected:
                self._check_expected(kind, flags, stream_id)
            if kind == DATA:
                if flags & PADDED and start == end < after:
                    # Its first byte has the length of the padding.
                    needed += 1
                    break
                self._receive_data(flags, stream_id, data, start, after, events)
                if after > end:
                    return
            elif after > end:
                if kind > CONTINUATION:
                    self._count_idle()
                    self._data_stream, self._data_left, self._padding_left = None, after - end, 0
                    return
                self._check_length(kind, length)
                needed += length
                break
            elif kind == HEADERS and flags & ~END_STREAM == END_HEADERS:
                self._receive_block(stream_id, flags, data[start:after], events)
            elif kind <= CONTINUATION:
                self._check_length(kind, length)
                self._receive_whole(kind, flags, stream_id, data[start:after], events)
            else:
                self._count_idle()
            position = after
        if position < end:
            self._rest += memoryview(data)[position:]
            self._needed = needed

    def _count_idle(self) -> None:
        """Counts a frame that brings nothing."""
        self._recent.idle += 1
        self._recent.check_idle(self._limits)

    def _check_length(self, kind: int, length: int) -> None:
        """Raises where a frame that is read whole is too long."""
        if kind in (HEADERS, CONTINUATION):
            if length > self._limits.header_block_bytes:
                raise too_much(Reason.HEADER_BLOCK, "header block too long")
        elif length > self._limits.control_frame_bytes:
            raise too_much(Reason.CONTROL_FRAME, "control frame too long")

    def _check_expected(self, kind: int, flags: int, stream_id: int) -> None:
        if self._expected == SETTINGS:
            if kind != SETTINGS or flags & ACK:
                raise ConnectionViolation(
                    ErrorCode.PROTOCOL_ERROR, Reason.PREFACE, "the first frame is not SETTINGS"
                )
        elif kind != CONTINUATION or stream_id != self._block_stream_id:
            raise _protocol_error("CONTINUATION expected")

    # Receiving DATA

    def _receive_data(
        self, flags: int, stream_id: int, data: bytes, start: int, after: int, events: list[Event]
    ) -> None:
        """Takes a DATA frame, whose payload is from `start` to `after` and may be incomplete."""
        length, stop = after - start, after
        ends = flags & END_STREAM == 1
        padding = 0
        if flags & PADDED:
            padding = _padding(data, start, length)
            start += 1
            stop -= padding
        stream = self._streams.get(stream_id)
        if stream is None or not stream.receiving or not stream.headed:
            self._refuse_data(stream_id, stream, events)
            stream = None
        if start == stop and not ends:
            self._count_empty()
        elif self._empty_data:
            self._empty_data = 0
        self._connection_left -= length
        if self._connection_left < 0:
            raise _window_error("connection's window exceeded")
        if stream is None:
            self._free(length)
        else:
            stream.unread += length
            if stream.unread + stream.freed > self._window:
                self._reset_for_error(stream_id, ErrorCode.FLOW_CONTROL_ERROR, events)
                stream = None
            elif flags & PADDED:
                self._consume(stream, padding + 1, False)
        if after > len(data):
            self._data_stream, self._data_ends = stream, ends
            self._data_left, self._padding_left = stop - start, padding
            self._continue_data(data, start, events)
        elif stream is not None:
            if stream.content_left is not None:
                stream.content_left -= stop - start
            if ends:
                self._finish_data(stream, data, start, stop, events)
            elif stop > start:
                events.append(DataReceived(stream_id, data, start, stop, False))

    def _count_empty(self) -> None:
        self._empty_data += 1
        if self._empty_data > self._limits.empty_data_in_a_row:
            raise too_much(Reason.EMPTY_DATA, "too many empty DATA frames")

    def _refuse_data(self, stream_id: int, stream: Stream | None, events: list[Event]) -> None:
        """Answers DATA that no stream takes."""
        if stream is None:
            if self._is_idle(stream_id):
                raise _protocol_error("DATA on an idle stream")
            if self._is_ignored(stream_id):
                return
        # A client's stream takes none before the response's head.
        early = stream is not None and stream.receiving
        self._reset_for_error(
            stream_id, ErrorCode.PROTOCOL_ERROR if early else ErrorCode.STREAM_CLOSED, events
        )

    def _continue_data(self, data: bytes, start: int, events: list[Event]) -> int:
        """Takes more of a DATA frame that arrives in pieces, and returns where it ends."""
        stop = min(len(data), start + self._data_left)
        after = min(len(data), stop + self._padding_left)
        self._data_left -= stop - start
        self._padding_left -= after - stop
        stream = self._data_stream
        if stream is not None:
            if stream.content_left is not None:
                stream.content_left -= stop - start
            if self._data_left or self._padding_left or not self._data_ends:
                if stop > start:
                    events.append(DataReceived(stream.id, data, start, stop, False))
            else:
                self._finish_data(stream, data, start, stop, events)
        return after

    def _finish_data(self, stream: Stream, data: bytes, start: int, stop: int, events: list[Event]) -> None:
        self._data_stream = None
        if self._end_receiving(stream, events):
            events.append(DataReceived(stream.id, data, start, stop, True))

    def _end_receiving(self, stream: Stream, events: list[Event]) -> bool:
        """Ends the peer's side of a stream; False if its content-length was wrong."""
        if stream.content_left:
            self._reset_for_error(stream.id, ErrorCode.PROTOCOL_ERROR, events)
            return False
        stream.receiving = False
        if not stream.sending:
            self._drop(stream)
        return True

    def direct(self) -> tuple[int, int] | None:
        """Stream and missing bytes of the DATA frame that is arriving, which the owner may receive itself."""
        stream = self._data_stream
        if stream is None or not self._data_left:
            return None
        return stream.id, self._data_left

    def received_directly(self, count: int) -> list[Event]:
        """Tells that the owner has received so many of the bytes that `direct` named."""
        events, self._events = self._events, []
        stream = self._data_stream
        self._data_left -= count
        if stream is not None:
            if stream.content_left is not None:
                stream.content_left -= count
            if self._data_ends and not self._data_left and not self._padding_left:
                try:
                    self._finish_data(stream, b"", 0, 0, events)
                except ConnectionViolation as violation:
                    self._close(violation, events)
        return events

    def may_receive(self, stream_id: int) -> bool:
        """True if the flow-control windows allow the peer to send more on a stream."""
        stream = self._streams.get(stream_id)
        return (
            stream is not None
            and stream.receiving
            and self._connection_left > 0
            and stream.unread + stream.freed < self._window
        )

    def consumed(self, stream_id: int, count: int, grant: bool = True) -> None:
        """Gives back received bytes that need no memory any more; closed streams have done so.

        Without `grant` only the connection's window has them, until the next call with it.
        """
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._consume(stream, count, grant)

    def _consume(self, stream: Stream, count: int, grant: bool) -> None:
        stream.unread -= count
        self._free(count)
        if stream.receiving:
            stream.freed += count
            if grant and stream.freed * 4 >= self._settings.initial_window:
                self._out.append(pack_window_update(stream.id, stream.freed))
                stream.freed = 0

    def _free(self, count: int) -> None:
        """Gives bytes back to the connection's window."""
        self._connection_freed += count
        if self._connection_freed * 4 >= self._settings.connection_window:
            self._out.append(pack_window_update(0, self._connection_freed))
            self._connection_left += self._connection_freed
            self._connection_freed = 0

    # Receiving HEADERS

    def _receive_fragment(
        self, kind: int, flags: int, stream_id: int, payload: bytes, events: list[Event]
    ) -> None:
        """Takes HEADERS that are padded, have a priority or are incomplete, and CONTINUATION."""
        if kind == HEADERS:
            self._begin_block(flags, stream_id, payload, events)
            return
        if self._expected != CONTINUATION:
            raise _protocol_error("unexpected CONTINUATION")
        self._block += payload
        self._block_frames += 1
        if self._block_frames > self._limits.continuations:
            raise too_much(Reason.CONTINUATIONS, "too many CONTINUATION frames")
        if len(self._block) > self._limits.header_block_bytes:
            raise too_much(Reason.HEADER_BLOCK, "header block too long")
        if flags & END_HEADERS:
            block = bytes(self._block)
            self._block.clear()
            self._expected = 0
            self._receive_block(stream_id, self._block_flags, block, events)

    def _begin_block(self, flags: int, stream_id: int, payload: bytes, events: list[Event]) -> None:
        start, stop = 0, len(payload)
        if flags & PADDED:
            if not payload:
                raise _frame_size_error("HEADERS")
            start, stop = 1, stop - payload[0]
        if flags & PRIORITY_FLAG:
            if len(payload) < start + 5:
                raise _frame_size_error("HEADERS")
            if unpack_word(payload, start)[0] & MOST_STREAM_ID == stream_id:
                flags |= _DEPENDS_ON_ITSELF
            start += 5
        if stop < start:
            raise _protocol_error("padding as long as its frame")
        if flags & END_HEADERS:
            self._receive_block(stream_id, flags, payload[start:stop], events)
            return
        if not stream_id:
            raise _protocol_error("HEADERS on stream 0")
        self._expected = CONTINUATION
        self._block_stream_id, self._block_flags, self._block_frames = stream_id, flags, 0
        self._block += payload[start:stop]

    def _receive_block(self, stream_id: int, flags: int, block: bytes, events: list[Event]) -> None:
        """Takes a whole header block: a request, the head of a response, or trailers."""
        if len(block) > self._limits.header_block_bytes:
            raise too_much(Reason.HEADER_BLOCK, "header block too long")
        try:
            # Also if the stream is closed: the dynamic table is the connection's.
            headers = self._decoder.decode(block)
        except HeaderListBombError as error:
            raise too_much(Reason.HEADER_LIST, "header list too long") from error
        except HpackError as malformed:
            raise ConnectionViolation(
                ErrorCode.COMPRESSION_ERROR, Reason.COMPRESSION, "invalid header block"
            ) from malformed
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._receive_more_headers(stream, flags, headers, events)
        elif stream_id <= self._last_stream_id or self._client or not stream_id & 1:
            self._refuse_headers(stream_id)
        else:
            self._receive_request(stream_id, flags, headers, events)

    def _receive_request(self, stream_id: int, flags: int, headers: HeaderList, events: list[Event]) -> None:
        if stream_id > self._last_stream_id + 2:
            self._gaps.append(range(self._last_stream_id + 2, stream_id, 2))
        self._last_stream_id = stream_id
        self._recent.opened += 1
        if stream_id > self._highest_taken:
            return
        if self._recent.resets > self._limits.resets and self._recent.resets_most():
            self._send_reset(stream_id, ErrorCode.REFUSED_STREAM)
            events.append(StreamRefused())
            return
        if len(self._streams) >= self._settings.max_concurrent_streams:
            self._reset_for_error(stream_id, ErrorCode.REFUSED_STREAM, events)
            return
        length = self._heads.get(headers)
        if length is None:
            length = self._head_length(headers)
        ends = flags & END_STREAM == 1
        if length == _MALFORMED or (ends and length > 0) or flags & _DEPENDS_ON_ITSELF:
            self._reset_for_error(stream_id, ErrorCode.PROTOCOL_ERROR, events)
            return
        self._streams[stream_id] = Stream(stream_id, True, not ends, length if length >= 0 else None)
        events.append(HeadersReceived(stream_id, headers, ends))

    def _head_length(self, headers: HeaderList) -> int:
        """Content-length of a request or response, or `_NO_LENGTH`, `_MALFORMED` or `_INFORMATIONAL`."""
        if headers.too_large:
            return _NO_LENGTH
        try:
            if self._client:
                status, length = check_response(headers.pairs)
                if status < 200:
                    length = _INFORMATIONAL
            else:
                length = check_request(headers.pairs)
        except MalformedError:
            length = _MALFORMED
        if len(self._heads) >= _LISTS_REMEMBERED:
            self._heads.clear()
        self._heads[headers] = length
        return length

    def _trailers_are_valid(self, headers: HeaderList) -> bool:
        if headers not in self._trailers:
            try:
                check_trailers(headers.pairs)
            except MalformedError:
                return False
            if len(self._trailers) >= _LISTS_REMEMBERED:
                self._trailers.clear()
            self._trailers.add(headers)
        return True

    def _receive_more_headers(
        self, stream: Stream, flags: int, headers: HeaderList, events: list[Event]
    ) -> None:
        """Takes trailers, or a response's head."""
        code = ErrorCode.PROTOCOL_ERROR
        if not stream.receiving:
            code = ErrorCode.STREAM_CLOSED
        elif flags & _DEPENDS_ON_ITSELF:
            pass
        elif not stream.headed:
            length = self._heads.get(headers)
            if length is None:
                length = self._head_length(headers)
            ends = flags & END_STREAM == 1
            if length >= _NO_LENGTH:
                stream.headed = True
                stream.content_left = length if length >= 0 else None
                if not ends or self._end_receiving(stream, events):
                    events.append(HeadersReceived(stream.id, headers, ends))
                return
            if length == _INFORMATIONAL and not ends:
                return
        elif headers.too_large:
            code = ErrorCode.ENHANCE_YOUR_CALM
        elif flags & END_STREAM and self._trailers_are_valid(headers):
            if self._end_receiving(stream, events):
                events.append(TrailersReceived(stream.id, headers))
            return
        self._reset_for_error(stream.id, code, events)

    def _refuse_headers(self, stream_id: int) -> None:
        """Answers HEADERS on a stream that is closed, or that the peer may not open."""
        if self._is_idle(stream_id):
            raise _protocol_error("HEADERS on a stream that the peer cannot open")
        if self._is_ignored(stream_id):
            return
        if any(stream_id in gap for gap in self._gaps):
            raise _protocol_error("stream ids must increase")
        raise ConnectionViolation(ErrorCode.STREAM_CLOSED, Reason.STREAM_CLOSED, "HEADERS on a closed stream")

    # Receiving all other frames

    def _receive_whole(
        self, kind: int, flags: int, stream_id: int, payload: bytes, events: list[Event]
    ) -> None:
        if kind == WINDOW_UPDATE:
            self._receive_window_update(stream_id, payload, events)
        elif kind == PING:
            self._receive_ping(flags, stream_id, payload, events)
        elif kind == RST_STREAM:
            self._receive_reset(stream_id, payload, events)
        elif kind == SETTINGS:
            self._receive_settings(flags, stream_id, payload)
        elif kind == PRIORITY:
            self._receive_priority(stream_id, payload, events)
        elif kind == GOAWAY:
            self._receive_goaway(stream_id, payload, events)
        elif kind == PUSH_PROMISE:
            raise _protocol_error("PUSH_PROMISE")
        else:
            self._receive_fragment(kind, flags, stream_id, payload, events)

    def _receive_goaway(self, stream_id: int, payload: bytes, events: list[Event]) -> None:
        if stream_id:
            raise _protocol_error("GOAWAY on a stream")
        if len(payload) < 8:
            raise _frame_size_error("GOAWAY")
        self._peer_goes_away = True
        (last,), (code,) = unpack_word(payload), unpack_word(payload, 4)
        events.append(GoAwayReceived(last & MOST_STREAM_ID, code, payload[8:]))

    def _receive_window_update(self, stream_id: int, payload: bytes, events: list[Event]) -> None:
        if len(payload) != 4:
            raise _frame_size_error("WINDOW_UPDATE")
        self._recent.updates += 1
        self._recent.check_updates(self._limits)
        increment = unpack_word(payload)[0] & MOST_WINDOW
        if not stream_id:
            if not increment:
                raise _protocol_error("WINDOW_UPDATE of 0")
            self._send_left += increment
            if self._send_left > MOST_WINDOW:
                raise _window_error("connection's window above 2^31-1")
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            if self._is_idle(stream_id):
                raise _protocol_error("WINDOW_UPDATE on an idle stream")
            return
        stream.send_used -= increment
        if not increment:
            self._reset_for_error(stream_id, ErrorCode.PROTOCOL_ERROR, events)
        elif self._peer_window - stream.send_used > MOST_WINDOW:
            self._reset_for_error(stream_id, ErrorCode.FLOW_CONTROL_ERROR, events)
        elif stream.queue is not None and self._peer_window > stream.send_used:
            self._ready[stream_id] = stream

    def _receive_ping(self, flags: int, stream_id: int, payload: bytes, events: list[Event]) -> None:
        if stream_id:
            raise _protocol_error("PING on a stream")
        if len(payload) != 8:
            raise _frame_size_error("PING")
        if flags & ACK:
            self._count_idle()
            events.append(PingAcknowledged(payload))
            return
        self._recent.pings += 1
        self._recent.check_pings(self._limits)
        self._acknowledge(pack_frame(PING, ACK, 0, payload))
        events.append(PingReceived())

    def _acknowledge(self, frame: bytes) -> None:
        self._unsent_acks += 1
        if self._unsent_acks > self._limits.unsent_acks:
            raise too_much(Reason.UNSENT_ACKS, "too many PING and SETTINGS frames at once")
        self._out.append(frame)

    def _receive_reset(self, stream_id: int, payload: bytes, events: list[Event]) -> None:
        if len(payload) != 4:
            raise _frame_size_error("RST_STREAM")
        stream = self._streams.get(stream_id)
        if stream is None and self._is_idle(stream_id):
            raise _protocol_error("RST_STREAM on an idle stream")
        if stream is None:
            self._count_idle()
        else:
            # Not what was answered already, nor what began long ago, of which there is little.
            counts = stream.sending and not stream.answered and stream_id >= self._recent.first_stream_id
            self._drop(stream)
            events.append(StreamReset(stream_id, unpack_word(payload)[0]))
            if counts:
                self._count_reset()

    def _receive_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise _protocol_error("SETTINGS on a stream")
        if len(payload) % 6 or (payload and flags & ACK):
            raise _frame_size_error("SETTINGS")
        self._recent.settings += 1
        self._recent.check_settings(self._limits)
        if flags & ACK:
            # From now on the peer knows of a window that is smaller than the default.
            self._window = self._settings.initial_window
            return
        if not self.established:
            self.established = True
            self._expected = 0
        window = self._peer_window
        for position in range(0, len(payload), 6):
            setting, value = unpack_setting(payload, position)
            if setting == Setting.INITIAL_WINDOW_SIZE:
                if value > MOST_WINDOW:
                    raise _window_error("initial window above 2^31-1")
                window = value
            elif setting == Setting.MAX_FRAME_SIZE:
                if not LEAST_FRAME_SIZE <= value <= MOST_FRAME_SIZE:
                    raise _protocol_error("invalid SETTINGS_MAX_FRAME_SIZE")
                self._peer_frame_size = value
            elif setting == Setting.HEADER_TABLE_SIZE:
                self._encoder.set_table_limit(value)
            elif setting == Setting.MAX_CONCURRENT_STREAMS:
                self._peer_streams = value
            elif setting == Setting.ENABLE_PUSH and value > (0 if self._client else 1):
                raise _protocol_error("invalid SETTINGS_ENABLE_PUSH")
        if window != self._peer_window:
            self._set_peer_window(window)
        self._acknowledge(SETTINGS_ACK)

    def _set_peer_window(self, window: int) -> None:
        self._peer_window = window
        for stream in self._streams.values():
            if window - stream.send_used > MOST_WINDOW:
                raise _window_error("a stream's window above 2^31-1")
            if stream.queue is not None and window > stream.send_used:
                self._ready[stream.id] = stream

    def _receive_priority(self, stream_id: int, payload: bytes, events: list[Event]) -> None:
        self._count_idle()
        if not stream_id:
            raise _protocol_error("PRIORITY on stream 0")
        if len(payload) != 5:
            code = ErrorCode.FRAME_SIZE_ERROR
        elif unpack_word(payload)[0] & MOST_STREAM_ID == stream_id:
            code = ErrorCode.PROTOCOL_ERROR
        else:
            return
        if self._is_idle(stream_id):
            # RST_STREAM may not be sent on an idle stream.
            raise ConnectionViolation(code, Reason.PROTOCOL, "invalid PRIORITY")
        if not self._is_ignored(stream_id):
            self._reset_for_error(stream_id, code, events)

    # Streams

    def _is_idle(self, stream_id: int) -> bool:
        """True if a stream was not opened yet, or the id is no client's (even)."""
        return stream_id > self._last_stream_id or stream_id & 1 == 0

    def _is_ignored(self, stream_id: int) -> bool:
        """True if frames of a stream are ignored: this side reset it, or GOAWAY excludes it."""
        return stream_id in self._reset_here or stream_id > self._highest_taken

    def _drop(self, stream: Stream) -> None:
        """Forgets a stream that has closed."""
        stream_id = stream.id
        del self._streams[stream_id]
        stream.receiving = stream.sending = False
        self._drop_queue(stream)
        if stream is self._data_stream:
            self._data_stream = None
        if stream.unread:
            self._free(stream.unread)

    def _send_reset(self, stream_id: int, code: int) -> None:
        self._out.append(pack_reset(stream_id, code))
        self.output_head_bytes += HEAD_BYTES + 4
        if stream_id not in self._reset_here:
            self._reset_here.add(stream_id)
            self._reset_order.append(stream_id)
            if len(self._reset_order) > _RESETS_REMEMBERED:
                self._reset_here.discard(self._reset_order.popleft())

    def _reset_for_error(self, stream_id: int, code: ErrorCode, events: list[Event]) -> None:
        """Resets a stream for an error of the peer's."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._drop(stream)
            events.append(StreamReset(stream_id, code))
        self._send_reset(stream_id, code)
        self._count_reset()

    def _count_reset(self) -> None:
        if not self._client:
            self._recent.resets += 1

    def forgive_reset(self) -> None:
        """Takes a reset by the peer out of its budget: it had a reason."""
        if self._recent.resets:
            self._recent.resets -= 1

    @property
    def can_open(self) -> bool:
        """True if `open_stream` may be called."""
        return (
            not self.closed
            and not self._peer_goes_away
            and len(self._streams) < self._peer_streams
            and self._last_stream_id < MOST_STREAM_ID
        )

    def open_stream(self) -> int:
        """Opens a stream of a client's; its headers are to be sent before the next one is opened."""
        if not self._client or not self.can_open:
            raise NoStreamError("no stream can be opened")
        stream_id = self._last_stream_id = self._last_stream_id + 2
        self._streams[stream_id] = Stream(stream_id, False, True, None)
        self._recent.opened += 1
        return stream_id

    # Sending

    def send_headers(self, stream_id: int, pairs: Pairs, end_stream: bool = False) -> None:
        """Sends a request, or the head of a response."""
        stream = self._streams.get(stream_id)
        if stream is None or not stream.sending:
            return
        block = self._encoder.encode(pairs)
        self.output_head_bytes += HEAD_BYTES + len(block)
        if len(block) <= self._peer_frame_size:
            flags = END_HEADERS | END_STREAM if end_stream else END_HEADERS
            self._out.append(pack_head(len(block) << 8 | HEADERS, flags, stream_id) + block)
        else:
            self._send_long_block(stream_id, block, end_stream)
        if end_stream:
            self._end_sending(stream)

    def _send_long_block(self, stream_id: int, block: bytes, end_stream: bool) -> None:
        size = self._peer_frame_size
        kind, flags = HEADERS, END_STREAM if end_stream else 0
        for start in range(0, len(block), size):
            if start + size >= len(block):
                flags |= END_HEADERS
            self._out.append(pack_frame(kind, flags, stream_id, block[start : start + size]))
            kind, flags = CONTINUATION, 0

    def send_data(self, stream_id: int, buffers: Sequence[Buffer], end_stream: bool = False) -> None:
        """Sends bytes, which must not change until they are sent; those that must wait are `unsent`."""
        stream = self._streams.get(stream_id)
        if stream is None or not stream.sending:
            return
        count = 0
        for one in buffers:
            count += len(one)
        stream.answered = True
        queue = stream.queue
        if queue is None:
            if not count or (
                count <= self._send_left
                and count <= self._peer_window - stream.send_used
                and count <= self._peer_frame_size
                and self._out_bytes < self._most_output
            ):
                self._out.append(pack_head(count << 8, end_stream, stream_id))
                self._out += buffers
                self._out_bytes += HEAD_BYTES + count
                self._send_left -= count
                stream.send_used += count
                self._recent.data_sent += 1
                if end_stream:
                    self._end_sending(stream)
                return
            queue = stream.queue = SendQueue()
            stream.waits = stream.moved = 0
            self._ready[stream_id] = stream
        elif queue.end or queue.trailers is not None:
            return
        queue.put(buffers, count)
        self.queued_bytes += count
        queue.end = end_stream

    def send_trailers(self, stream_id: int, pairs: Pairs) -> None:
        """Sends trailers, behind all queued data, and ends this side of the stream."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.queue is None:
            self.send_headers(stream_id, pairs, True)
        elif not stream.queue.end:
            stream.queue.trailers = pairs

    def send_trailers_now(self, stream_id: int, pairs: Pairs) -> bool:
        """Ends this side of a stream by trailers in place of what is queued; False within a message."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.queue is not None:
            if not stream.queue.whole:
                return False
            self._drop_queue(stream)
        self.send_headers(stream_id, pairs, True)
        return True

    def _drop_queue(self, stream: Stream) -> None:
        if stream.queue is not None:
            self.queued_bytes -= stream.queue.count
            stream.queue = None
            self._ready.pop(stream.id, None)

    def _end_sending(self, stream: Stream) -> None:
        if stream.receiving and self._client:
            stream.sending = False
            return
        unwanted = stream.receiving
        self._drop(stream)
        if unwanted:
            self._send_reset(stream.id, ErrorCode.NO_ERROR)

    def _pump(self, events: list[Event]) -> None:
        """Moves queued data to the output, some frames of each stream in turn, as far as windows allow."""
        ready, out = self._ready, self._out
        frame_size = self._peer_frame_size
        most = max(_TURN_BYTES, frame_size)
        moved: dict[int, None] = {}
        while ready and self._send_left and self._out_bytes < self._most_output:
            stream_id, stream = next(iter(ready.items()))
            queue = stream.queue
            assert queue is not None
            count = min(queue.count, self._send_left, self._peer_window - stream.send_used, most)
            if count <= 0:
                # Its own window is shut.
                del ready[stream_id]
                continue
            drained = count == queue.count
            self.queued_bytes -= count
            self._send_left -= count
            stream.send_used += count
            moved[stream_id] = None
            stream.moved += count
            self._moved += count
            while count:
                size = min(count, frame_size)
                count -= size
                out.append(pack_head(size << 8, drained and queue.end and not count, stream_id))
                out += queue.cut(size)
                self._out_bytes += HEAD_BYTES + size
                self._recent.data_sent += 1
            if not drained:
                ready.move_to_end(stream_id)
                continue
            del ready[stream_id]
            stream.queue = None
            if queue.trailers is not None:
                self.send_headers(stream_id, queue.trailers, True)
            elif queue.end:
                self._end_sending(stream)
        events += map(WindowOpened, moved)

    def unsent(self, stream_id: int) -> int:
        """Bytes of data that were accepted and are not in the output yet."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None or stream.queue is None else stream.queue.count

    def stuck_streams(self, most: int, least: int) -> list[int]:
        """Streams whose data has waited for the peer's windows for more than `most` calls of this method.

        Between two calls, at least `least` bytes have to move where as many wait, else one.
        """
        self._waits = self._waits + 1 if too_slow(self._moved, self.queued_bytes, least) else 0
        self._moved = 0
        all_wait = not self._send_left and self._waits > most
        stuck = []
        for stream in self._streams.values():
            if stream.queue is not None:
                slow = too_slow(stream.moved, stream.queue.count, least)
                stream.waits = stream.waits + 1 if slow else 0
                stream.moved = 0
                if stream.waits > most and (all_wait or self._peer_window <= stream.send_used):
                    stuck.append(stream.id)
        return stuck

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """Resets a stream; what of it is queued is dropped."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._drop(stream)
            self._send_reset(stream_id, code)

    def ping(self, payload: bytes) -> None:
        """Sends a PING with eight bytes, which `PingAcknowledged` will have."""
        if len(payload) != 8:
            raise ValueError("the payload of a PING has eight bytes")
        if not self.closed:
            self._out.append(pack_frame(PING, 0, 0, payload))

    def go_away(self, code: ErrorCode, last_stream_id: int | None = None, text: bytes = b"") -> None:
        """Sends GOAWAY; streams that the peer opens above `last_stream_id` (None: the last) are ignored."""
        if self.closed:
            return
        last = 0 if self._client else self.last_stream_id
        if last_stream_id is not None:
            last = last_stream_id
        if not self._client:
            last = self._highest_taken = min(last, self._highest_taken)
        self._out.append(pack_goaway(last, code, text))

    def take_output(self) -> list[Buffer]:
        """Takes the output to send now, in order; call it again after each send until it is empty."""
        if self._ready:
            self._pump(self._events)
        out = self._out
        if not out:
            return []
        small = self._out_bytes < _JOINED_BYTES
        self._out = []
        self._out_bytes = self._unsent_acks = self.output_head_bytes = 0
        return [b"".join(out)] if small else _join_small(out)

    def take_events(self) -> list[Event]:
        """Events that `take_output` caused; `receive` returns them, too."""
        events, self._events = self._events, []
        return events


def too_slow(moved: int, waiting: int, least: int) -> bool:
    """True if fewer than `least` bytes moved while as many wait, or none at all."""
    return not moved or moved < least <= waiting


def _join_small(buffers: list[Buffer]) -> list[Buffer]:
    """Joins runs of small buffers, so that one call of `sendmsg` takes more."""
    joined: list[Buffer] = []
    run: list[Buffer] = []
    for one in buffers:
        if len(one) < _SMALL_BYTES:
            run.append(one)
        else:
            if run:
                joined.append(b"".join(run))
                run = []
            joined.append(one)
    if run:
        joined.append(b"".join(run))
    return joined


def _padding(data: bytes, start: int, length: int) -> int:
    """Length of the padding of a DATA frame."""
    if not length:
        raise _frame_size_error("DATA")
    if data[start] >= length:
        raise _protocol_error("padding as long as its frame")
    return data[start]


def _protocol_error(text: str) -> ConnectionViolation:
    return ConnectionViolation(ErrorCode.PROTOCOL_ERROR, Reason.PROTOCOL, text)


def _frame_size_error(kind: str) -> ConnectionViolation:
    return ConnectionViolation(ErrorCode.FRAME_SIZE_ERROR, Reason.FRAME_SIZE, f"invalid length of {kind}")


def _window_error(text: str) -> ConnectionViolation:
    return ConnectionViolation(ErrorCode.FLOW_CONTROL_ERROR, Reason.FLOW_CONTROL, text)
