"""Header compression for HTTP/2 (RFC 7541): the decoder and the encoder of one connection.

A block of headers is a row of fields: an index into the table, or a literal name (or the index of one) with
a literal value. The table is the static one, followed by the dynamic one with its newest field first; a
literal may say that it joins. Both sides of a connection hold the same table, so every block must be decoded,
in order, also of requests that are refused; after an error the connection is lost.

gRPC's clients send the same few fields with each request, most of them as indexes. Two cases are made fast:

- The block's bytes were seen before, and no field has joined or left since: the same `HeaderList` again. A
  client without deadlines always is in this case.
- Only one field is new, such as `grpc-timeout`: the table is one list in the order of its indexes, whose
  entries know their size, so that an indexed field costs one subscript.

What a peer can make the decoder do is linear in the bytes that it sends: an index adds no more than a
reference to the list, and a list over its limit takes no further fields. The kept lists are bounded by their
sizes.
"""

from __future__ import annotations

from collections import deque

from conch.frontends.grpc.http2 import huffman

Pair = tuple[bytes, bytes]

DEFAULT_TABLE_BYTES = 4096
"""The size of a dynamic table until SETTINGS_HEADER_TABLE_SIZE changes it."""

# Section 4.1: an estimate of what an entry takes besides its strings. RFC 9113, 6.5.2 sizes lists by it too.
_ENTRY_OVERHEAD = 32
_MAX_SIZE_UPDATES = 2
# 5 octets behind the prefix hold 35 bits; a number that needs more is an error, and so are more zeros.
_MAX_INTEGER_OCTETS = 5
# Of what a connection keeps decoded or encoded, estimated as lists are.
_KEPT_DECODED_BYTES = 64 * 1024
_KEPT_ENCODED_BLOCKS = 64
# A list this many times over its limit ends the connection instead of the stream.
_BOMB_FACTOR = 4

STATIC_TABLE: tuple[Pair, ...] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
)
"""Appendix A; the first field has index 1."""

INDEXED = frozenset(
    (
        b":status",
        b"content-type",
        b"grpc-status",
        b"grpc-accept-encoding",
        b"grpc-encoding",
        # Of requests.
        b":method",
        b":scheme",
        b":path",
        b":authority",
        b"te",
        b"user-agent",
    )
)
"""Names whose fields the encoder puts into the dynamic table: their values come again."""

NEVER_INDEXED = frozenset(
    (b"authorization", b"proxy-authorization", b"cookie", b"set-cookie", b"x-api-key", b"api-key")
)
"""Names of secrets, which proxies too must keep out of their tables (section 7.1.3)."""

# A longer field would push the others out.
_MAX_INDEXED_BYTES = 512


class HpackError(Exception):
    """A block that is malformed or over a limit; the connection ends with COMPRESSION_ERROR."""


class HeaderListBombError(HpackError):
    """A block that stands for far more than the largest list of headers."""


class HeaderList:
    """The fields of a block, in order.

    Attributes:
        pairs: Names and values; the first of them if the list is too large.
        too_large: True if the list is over the decoder's limit.
        note: Free for the reader of the list, None at first. A connection's usual lists come again as the
            same object, so that what was made of one can be kept here.
    """

    __slots__ = ("note", "pairs", "too_large")

    def __init__(self, pairs: tuple[Pair, ...], too_large: bool = False) -> None:
        self.pairs = pairs
        self.too_large = too_large
        self.note: object = None


_Entry = tuple[Pair, int]


def _entry(name: bytes, value: bytes) -> _Entry:
    return (name, value), len(name) + len(value) + _ENTRY_OVERHEAD


# Index 0 stands for no field; decoders refuse it before they look.
_STATIC_ENTRIES: tuple[_Entry, ...] = (_entry(b"", b""), *(_entry(*pair) for pair in STATIC_TABLE))
_FIRST_DYNAMIC = len(_STATIC_ENTRIES)


class HeaderDecoder:
    """Decodes the blocks that a peer sends, in order.

    `max_table_bytes` is the size that this side has announced by SETTINGS_HEADER_TABLE_SIZE.
    """

    __slots__ = (
        "_bomb_bytes",
        "_decoded",
        "_decoded_bytes",
        "_max_list_bytes",
        "_max_table_bytes",
        "_table",
        "_table_bytes",
        "_table_limit",
    )

    def __init__(self, max_table_bytes: int = DEFAULT_TABLE_BYTES, max_list_bytes: int = 16384) -> None:
        self._max_table_bytes = max_table_bytes
        self._max_list_bytes = max_list_bytes
        self._bomb_bytes = _BOMB_FACTOR * max_list_bytes
        self._table = list(_STATIC_ENTRIES)
        self._table_bytes = 0  # of the dynamic part
        self._table_limit = max_table_bytes
        self._decoded: dict[bytes, HeaderList] = {}
        self._decoded_bytes = 0

    def decode(self, block: bytes) -> HeaderList:
        """Decodes a whole block; equal blocks give the same list while the dynamic table stays as it is.

        Raises:
            HpackError: The block is malformed; the decoder is of no further use.
            HeaderListBombError: The list is over four times its limit; the same holds.
        """
        kept = self._decoded.get(block)
        if kept is not None:
            return kept
        try:
            return self._decode(block)
        except IndexError:
            raise HpackError("a block ends within a field, or an index is not in the table") from None

    def _decode(self, block: bytes) -> HeaderList:
        table = self._table
        limit = self._max_list_bytes
        pairs: list[Pair] = []
        size = 0
        end = len(block)
        position = self._update_sizes(block) if end and 0x20 <= block[0] < 0x40 else 0
        constant = not position
        while position < end:
            byte = block[position]
            position += 1
            if 0x80 < byte < 0xFF:
                pair, more = table[byte - 0x80]
            elif byte < 0x80:
                entry, position = self._literal(block, position, byte)
                if byte >= 0x40:
                    self._insert(entry)
                    constant = False
                pair, more = entry
            elif byte == 0xFF:
                index, position = _read_integer(block, position, 0x7F)
                pair, more = table[index]
            else:
                raise HpackError("index 0 stands for no field")
            size += more
            if size > limit:
                if size > self._bomb_bytes:
                    raise HeaderListBombError("a block stands for far more headers than are allowed")
                continue
            pairs.append(pair)
        headers = HeaderList(tuple(pairs), size > limit)
        if constant:
            self._keep(block, headers, size)
        elif self._decoded:
            self._decoded.clear()
            self._decoded_bytes = 0
        return headers

    def _keep(self, block: bytes, headers: HeaderList, size: int) -> None:
        self._decoded_bytes += size + len(block) + _ENTRY_OVERHEAD
        if self._decoded_bytes > _KEPT_DECODED_BYTES:
            # A client whose blocks all differ; those that come again are soon back.
            self._decoded.clear()
            self._decoded_bytes = 0
            return
        self._decoded[block] = headers

    def _literal(self, block: bytes, position: int, byte: int) -> tuple[_Entry, int]:
        """A literal field behind its first byte, and the position behind it."""
        if byte >= 0x40:
            mask = 0x3F
        elif byte < 0x20:
            mask = 0x0F
        else:
            raise HpackError("a size update follows a field")
        index = byte & mask
        if index:
            if index == mask:
                index, position = _read_integer(block, position, mask)
            name = self._table[index][0][0]
        else:
            name, position = _read_string(block, position)
        value, position = _read_string(block, position)
        return ((name, value), len(name) + len(value) + _ENTRY_OVERHEAD), position

    def _insert(self, entry: _Entry) -> None:
        table = self._table
        # First, as it may evict: a field larger than the table leaves it empty (section 4.4).
        table.insert(_FIRST_DYNAMIC, entry)
        self._table_bytes += entry[1]
        if self._table_bytes > self._table_limit:
            self._evict()

    def _evict(self) -> None:
        table, size = self._table, self._table_bytes
        while size > self._table_limit:
            size -= table.pop()[1]
        self._table_bytes = size

    def _update_sizes(self, block: bytes) -> int:
        """Obeys the size updates at the block's start, and returns the position behind them."""
        position = updates = 0
        while position < len(block) and 0x20 <= block[position] < 0x40:
            updates += 1
            if updates > _MAX_SIZE_UPDATES:
                raise HpackError("a block has more than two size updates")
            size = block[position] & 0x1F
            position += 1
            if size == 0x1F:
                size, position = _read_integer(block, position, size)
            if size > self._max_table_bytes:
                raise HpackError("a size update is over the limit of the table")
            self._table_limit = size
            self._evict()
        return position


def _read_integer(block: bytes, position: int, prefix: int) -> tuple[int, int]:
    """An integer whose prefix is all ones (section 5.1), and the position behind it."""
    value = prefix
    for shift in range(0, 7 * _MAX_INTEGER_OCTETS, 7):
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise HpackError("an integer is too long")


def _read_string(block: bytes, position: int) -> tuple[bytes, int]:
    """A string (section 5.2), and the position behind it."""
    head = block[position]
    position += 1
    length = head & 0x7F
    if length == 0x7F:
        length, position = _read_integer(block, position, length)
    end = position + length
    if end > len(block):
        raise HpackError("a block ends within a string")
    text = block[position:end]
    if head >= 0x80:
        try:
            text = huffman.decode(text)
        except ValueError as error:
            raise HpackError(str(error)) from None
    return text, end


_STATIC_INDEX = {pair: index for index, pair in reversed(list(enumerate(STATIC_TABLE, 1)))}
_STATIC_NAME_INDEX = {pair[0]: index for index, pair in reversed(list(enumerate(STATIC_TABLE, 1)))}


class HeaderEncoder:
    """Encodes the blocks that a peer is sent, in this order; it does not use Huffman's code."""

    __slots__ = ("_blocks", "_fields", "_inserted", "_least", "_limit", "_numbers", "_table_bytes")

    def __init__(self) -> None:
        self._limit = DEFAULT_TABLE_BYTES
        self._least: int | None = None  # the smallest limit since the last block, which has to be told
        # The dynamic table, oldest first. Fields are numbered as they join: the newest has index 62, so a
        # field's index is 62 plus how many have joined since.
        self._fields: deque[_Entry] = deque()
        self._numbers: dict[Pair, int] = {}
        self._inserted = 0
        self._table_bytes = 0
        self._blocks: dict[tuple[Pair, ...], bytes] = {}

    def encode(self, pairs: tuple[Pair, ...]) -> bytes:
        """Encodes a list of fields; the block must be sent, and before the next one."""
        block = self._blocks.get(pairs)
        return self._encode(pairs) if block is None else block

    def _encode(self, pairs: tuple[Pair, ...]) -> bytes:
        out = bytearray()
        if self._least is not None:
            # The smallest limit evicted, so that the peer has to pass through it too (section 4.2).
            if self._least < self._limit:
                _write_integer(out, 0x20, 0x1F, self._least)
            _write_integer(out, 0x20, 0x1F, self._limit)
            self._least = None
        constant = not out
        for pair in pairs:
            index = _STATIC_INDEX.get(pair)
            if index is None and pair in self._numbers:
                index = _FIRST_DYNAMIC + self._inserted - self._numbers[pair]
            if index is not None:
                _write_integer(out, 0x80, 0x7F, index)
                continue
            constant = False
            name, value = pair
            size = len(name) + len(value) + _ENTRY_OVERHEAD
            if name in INDEXED and size <= min(_MAX_INDEXED_BYTES, self._limit):
                _write_integer(out, 0x40, 0x3F, _STATIC_NAME_INDEX.get(name, 0))
                self._insert((pair, size))
            else:
                kind = 0x10 if name in NEVER_INDEXED else 0x00
                _write_integer(out, kind, 0x0F, _STATIC_NAME_INDEX.get(name, 0))
            if name not in _STATIC_NAME_INDEX:
                _write_integer(out, 0x00, 0x7F, len(name))
                out += name
            _write_integer(out, 0x00, 0x7F, len(value))
            out += value
        block = bytes(out)
        if constant:
            if len(self._blocks) >= _KEPT_ENCODED_BLOCKS:
                self._blocks.clear()
            self._blocks[pairs] = block
        return block

    def set_table_limit(self, size: int) -> None:
        """Obeys the peer's SETTINGS_HEADER_TABLE_SIZE; the next block tells a change of the table's size."""
        limit = min(size, DEFAULT_TABLE_BYTES)
        if limit == self._limit and self._least is None:
            return
        self._limit = limit
        self._least = limit if self._least is None else min(limit, self._least)
        self._blocks.clear()
        self._evict()

    def _insert(self, entry: _Entry) -> None:
        self._inserted += 1
        self._fields.append(entry)
        self._numbers[entry[0]] = self._inserted
        self._table_bytes += entry[1]
        self._blocks.clear()
        self._evict()

    def _evict(self) -> None:
        while self._table_bytes > self._limit:
            pair, size = self._fields.popleft()
            self._table_bytes -= size
            # A pair is in the table once: it is inserted only where it is missing.
            del self._numbers[pair]


def _write_integer(out: bytearray, kind: int, prefix: int, value: int) -> None:
    """An integer with the bits of `kind` before its prefix (section 5.1)."""
    if value < prefix:
        out.append(kind | value)
        return
    out.append(kind | prefix)
    value -= prefix
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
