"""Header compression: the examples of RFC 7541, agreement with the `hpack` package, and limits."""

from __future__ import annotations

import tracemalloc

import hpack
import pytest
from hpack.hpack import decode_integer, encode_integer
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.profiles import scaled

from conch.frontends.grpc.http2.hpack import (
    STATIC_TABLE,
    HeaderDecoder,
    HeaderEncoder,
    HeaderListBombError,
    HpackError,
)

Pairs = tuple[tuple[bytes, bytes], ...]

GRPC_REQUEST: Pairs = (
    (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
    (b":authority", b"127.0.0.1:8001"),
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
    (b"grpc-accept-encoding", b"identity, deflate, gzip"),
    (b"user-agent", b"grpc-python/1.85.1 grpc-c/53.0.0 (linux; chttp2)"),
)
GRPC_RESPONSE: Pairs = ((b":status", b"200"), (b"content-type", b"application/grpc"))

# Section C of RFC 7541: the size of the table, then blocks with their fields as "name: value".
EXAMPLES = {
    "C.2.1": (
        4096,
        ["400a637573746f6d2d6b65790d637573746f6d2d686561646572"],
        [["custom-key: custom-header"]],
    ),
    "C.2.2": (4096, ["040c2f73616d706c652f70617468"], [[":path: /sample/path"]]),
    "C.2.3": (4096, ["100870617373776f726406736563726574"], [["password: secret"]]),
    "C.2.4": (4096, ["82"], [[":method: GET"]]),
}
REQUESTS = [
    [":method: GET", ":scheme: http", ":path: /", ":authority: www.example.com"],
    [":method: GET", ":scheme: http", ":path: /", ":authority: www.example.com", "cache-control: no-cache"],
    [
        ":method: GET",
        ":scheme: https",
        ":path: /index.html",
        ":authority: www.example.com",
        "custom-key: custom-value",
    ],
]
EXAMPLES["C.3"] = (
    4096,
    [
        "828684410f7777772e6578616d706c652e636f6d",
        "828684be58086e6f2d6361636865",
        "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
    ],
    REQUESTS,
)
EXAMPLES["C.4"] = (
    4096,
    [
        "828684418cf1e3c2e5f23a6ba0ab90f4ff",
        "828684be5886a8eb10649cbf",
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
    ],
    REQUESTS,
)
RESPONSES = [
    [
        ":status: 302",
        "cache-control: private",
        "date: Mon, 21 Oct 2013 20:13:21 GMT",
        "location: https://www.example.com",
    ],
    [
        ":status: 307",
        "cache-control: private",
        "date: Mon, 21 Oct 2013 20:13:21 GMT",
        "location: https://www.example.com",
    ],
    [
        ":status: 200",
        "cache-control: private",
        "date: Mon, 21 Oct 2013 20:13:22 GMT",
        "location: https://www.example.com",
        "content-encoding: gzip",
        "set-cookie: foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1",
    ],
]
EXAMPLES["C.5"] = (
    256,
    [
        "4803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a323120474d54"
        "6e1768747470733a2f2f7777772e6578616d706c652e636f6d",
        "4803333037c1c0bf",
        "88c1611d4d6f6e2c203231204f637420323031332032303a31333a323220474d54c05a04677a69707738666f6f"
        "3d4153444a4b48514b425a584f5157454f50495541585157454f49553b206d61782d6167653d333630303b2076"
        "657273696f6e3d31",
    ],
    RESPONSES,
)
EXAMPLES["C.6"] = (
    256,
    [
        "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f"
        "0b97c8e9ae82ae43d3",
        "4883640effc1c0bf",
        "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335df"
        "dfcd5b3960d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
    ],
    RESPONSES,
)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_the_rfc(example: str) -> None:
    table_bytes, blocks, lists = EXAMPLES[example]
    decoder = HeaderDecoder(max_table_bytes=table_bytes)
    for block, expected in zip(blocks, lists, strict=True):
        pairs = decoder.decode(bytes.fromhex(block)).pairs
        assert [f"{name.decode()}: {value.decode()}" for name, value in pairs] == expected


def test_static_table() -> None:
    decoder = HeaderDecoder(max_list_bytes=1 << 20)
    oracle = hpack.Decoder()
    block = bytes(0x80 + index for index in range(1, len(STATIC_TABLE) + 1))
    assert decoder.decode(block).pairs == STATIC_TABLE == tuple(map(tuple, oracle.decode(block, raw=True)))


huffman_encoder = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)

names = st.one_of(
    st.sampled_from(
        [b":status", b":path", b"content-type", b"grpc-status", b"grpc-timeout", b"cookie", b"x-a"]
    ),
    st.binary(max_size=4),
)
values = st.one_of(
    st.sampled_from([b"200", b"application/grpc", b"0", b"/", b"x" * 300]),
    st.binary(max_size=6),
)
header_lists = st.lists(
    st.one_of(st.sampled_from([*GRPC_REQUEST, *GRPC_RESPONSE]), st.tuples(names, values)), max_size=10
).map(tuple)
table_sizes = st.one_of(st.sampled_from([0, 33, 80, 200, 4096]), st.integers(0, 4096))


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[Pairs, list[int]]]:
    """Lists, most of them several times as a client sends them, each with the table sizes set before it."""
    pool = draw(st.lists(header_lists, min_size=1, max_size=4))
    none: st.SearchStrategy[list[int]] = st.just([])
    sizes = st.one_of(none, none, st.lists(table_sizes, max_size=2))
    return draw(
        st.lists(st.tuples(st.one_of(st.sampled_from(pool), header_lists), sizes), min_size=1, max_size=25)
    )


@settings(max_examples=scaled(300))
@given(sequences(), st.data())
def test_decodes_what_hpack_encodes(steps: list[tuple[Pairs, list[int]]], data: st.DataObject) -> None:
    encoder = hpack.Encoder()
    decoder = HeaderDecoder()
    for pairs, sizes in steps:
        for size in sizes:
            if size != encoder.header_table_size:  # hpack drops what was set before an equal size
                encoder.header_table_size = size
        secret = data.draw(st.integers(0, 10))
        fields = [(name, value, number == secret) for number, (name, value) in enumerate(pairs)]
        block = encoder.encode(fields, huffman=data.draw(st.booleans()))
        headers = decoder.decode(block)
        assert headers.pairs == pairs
        assert not headers.too_large


@settings(max_examples=scaled(300))
@given(sequences())
def test_hpack_decodes_what_is_encoded(steps: list[tuple[Pairs, list[int]]]) -> None:
    encoder = HeaderEncoder()
    oracle = hpack.Decoder()
    decoder = HeaderDecoder()
    for pairs, sizes in steps:
        for size in sizes:
            encoder.set_table_limit(size)
            oracle.max_allowed_table_size = size
        block = encoder.encode(pairs)
        assert tuple(map(tuple, oracle.decode(block, raw=True))) == pairs
        assert decoder.decode(block).pairs == pairs


def integer(kind: tuple[int, int], value: int) -> bytes:
    """An integer behind the bits of its kind, which leave so many for its prefix."""
    bits, prefix = kind
    encoded = encode_integer(value, prefix)
    encoded[0] |= bits
    return bytes(encoded)


def string(text: bytes, huffman: bool = False) -> bytes:
    if huffman:
        text = huffman_encoder.encode(text)
    return integer((0x80 if huffman else 0, 7), len(text)) + text


indexes = st.one_of(st.integers(0, 70), st.integers(0, 1000))
literal_kinds = st.sampled_from([(0x00, 4), (0x10, 4), (0x40, 6)])
strings = st.builds(string, st.one_of(names, values), st.booleans())
representations = st.one_of(
    indexes.map(lambda index: integer((0x80, 7), index)),
    st.builds(lambda kind, index, value: integer(kind, index) + value, literal_kinds, indexes, strings),
    st.builds(lambda kind, name, value: integer(kind, 0) + name + value, literal_kinds, strings, strings),
)
# Table size updates come first, at most two of them.
blocks_of_any_fields = st.builds(
    lambda sizes, fields: b"".join([*(integer((0x20, 5), size) for size in sizes), *fields]),
    st.lists(st.one_of(table_sizes, st.integers(4000, 5000)), max_size=2),
    st.lists(representations, max_size=8),
)


@st.composite
def damaged_blocks(draw: st.DrawFn) -> bytes:
    block = bytearray(draw(blocks_of_any_fields))
    assume(block)
    position = draw(st.integers(0, len(block) - 1))
    if draw(st.booleans()):
        block[position] = draw(st.integers(0, 255))
    else:
        del block[position:]
    return bytes(block)


def leading_size_updates(block: bytes) -> int:
    count = position = 0
    while position < len(block) and 0x20 <= block[position] < 0x40:
        _, length = decode_integer(block[position:], 5)
        position += length
        count += 1
    return count


@settings(max_examples=scaled(300))
@given(st.lists(st.one_of(blocks_of_any_fields, damaged_blocks()), max_size=12))
def test_agrees_with_hpack_on_any_block(blocks: list[bytes]) -> None:
    """Until the first error, which both report; each block comes twice, the second time perhaps kept."""
    decoder = HeaderDecoder(max_list_bytes=1 << 20)
    oracle = hpack.Decoder(max_header_list_size=1 << 20)
    for block in [block for block in blocks for _ in range(2)]:
        try:
            expected = tuple(map(tuple, oracle.decode(block, raw=True)))
        except hpack.HPACKError:
            with pytest.raises(HpackError):
                decoder.decode(block)
            return
        assume(leading_size_updates(block) <= 2)  # hpack takes any number
        assert decoder.decode(block).pairs == expected


@settings(max_examples=scaled(300))
@given(st.lists(st.binary(max_size=60), max_size=6))
def test_any_bytes_decode_or_are_an_error(blocks: list[bytes]) -> None:
    decoder = HeaderDecoder()
    try:
        for block in blocks:
            decoder.decode(block)
    except HpackError:
        pass


@pytest.mark.parametrize(
    ("block", "error"),
    {
        "index 0": ("80", "index 0 stands for no field"),
        "index behind the table": ("be", "an index is not in the table"),
        "long index behind the table": ("ff00", "an index is not in the table"),
        "name's index behind the table": ("7e0130", "an index is not in the table"),
        "no value": ("04", "ends within a field"),
        "no name": ("00", "ends within a field"),
        "a name without its value": ("000161", "ends within a field"),
        "a short name": ("00056161", "ends within a string"),
        "a short value": ("040261", "ends within a string"),
        "a short integer": ("ff80", "ends within a field"),
        "an integer of six octets": ("ff808080808000", "an integer is too long"),
        "an overflow": ("047fffffffffffff7f", "an integer is too long"),
        "a size update behind a field": ("8220", "a size update follows a field"),
        "three size updates": ("20202082", "more than two size updates"),
        "a size over the limit": ("3fe21f", "over the limit of the table"),
        "EOS": ("0484ffffffff", "contains EOS"),
        "a Huffman code that ends early": ("0481ff", "ends within a symbol"),
    }.values(),
)
def test_malformed_blocks(block: str, error: str) -> None:
    decoder = HeaderDecoder()
    with pytest.raises(HpackError, match=error):
        decoder.decode(bytes.fromhex(block))


def test_size_updates_up_to_the_limit() -> None:
    """1337 in five bits is the example of section C.1.2."""
    update = bytes.fromhex("3f9a0a")
    assert HeaderDecoder(max_table_bytes=1337).decode(update + b"\x82").pairs == ((b":method", b"GET"),)
    with pytest.raises(HpackError, match="over the limit"):
        HeaderDecoder(max_table_bytes=1336).decode(update + b"\x82")
    assert HeaderDecoder().decode(bytes.fromhex("203fe11f")).pairs == ()


def test_a_field_joins_a_table_that_it_fills() -> None:
    insert = b"\x40\x01a\x01b"  # 34 bytes of the table
    assert HeaderDecoder(max_table_bytes=34).decode(insert + b"\xbe").pairs == ((b"a", b"b"),) * 2
    with pytest.raises(HpackError, match="not in the table"):
        HeaderDecoder(max_table_bytes=33).decode(insert + b"\xbe")
    with pytest.raises(HpackError, match="not in the table"):
        HeaderDecoder(max_table_bytes=67).decode(insert * 2 + b"\xbf")


def test_integers_may_be_padded_with_zeros() -> None:
    assert HeaderDecoder().decode(bytes.fromhex("047f8180808000") + b"x" * 128).pairs == (
        (b":path", b"x" * 128),
    )


def test_a_known_block_gives_the_same_list_until_the_table_changes() -> None:
    encoder = hpack.Encoder()
    decoder = HeaderDecoder()
    first = decoder.decode(encoder.encode(GRPC_REQUEST))
    block = encoder.encode(GRPC_REQUEST)
    known = decoder.decode(block)
    known.note = "read"
    assert known is not first
    assert known.pairs == first.pairs == GRPC_REQUEST
    assert decoder.decode(bytes(bytearray(block))) is known
    decoder.decode(b"\x00\x01a\x01b")  # a literal that stays out of the table
    assert decoder.decode(block) is known
    decoder.decode(b"\x40\x01a\x01b")
    shifted = decoder.decode(block)
    assert shifted is not known
    assert shifted.note is None
    assert (b"a", b"b") in shifted.pairs


def test_a_block_that_changes_the_table_is_decoded_each_time() -> None:
    decoder = HeaderDecoder()
    block = b"\x40\x01a\x01b"
    assert decoder.decode(block) is not decoder.decode(block)
    assert decoder.decode(b"\xbe\xbf").pairs == ((b"a", b"b"),) * 2
    # A size update evicts, also where the block has no field.
    known = decoder.decode(b"\xbe")
    assert decoder.decode(b"\xbe") is known
    assert decoder.decode(b"\x20").pairs == ()
    with pytest.raises(HpackError):
        decoder.decode(b"\xbe")


@pytest.mark.parametrize("value", [b"", b"x" * 100, b"x" * 8000])
def test_kept_blocks_are_bounded(value: bytes) -> None:
    decoder = HeaderDecoder()
    tracemalloc.start()
    try:
        for number in range(3000):
            decoder.decode(b"\x00" + string(b"%d" % number) + string(value))
        assert tracemalloc.get_traced_memory()[0] < 400_000
    finally:
        tracemalloc.stop()


def test_a_list_at_its_limit() -> None:
    decoder = HeaderDecoder(max_list_bytes=3 * 34)
    field = b"\x00\x01a\x01b"
    assert not decoder.decode(field * 3).too_large
    headers = decoder.decode(field * 4)
    assert headers.too_large
    assert headers.pairs == ((b"a", b"b"),) * 3


def test_the_table_stays_right_behind_a_list_that_is_too_large() -> None:
    encoder = hpack.Encoder()
    decoder = HeaderDecoder(max_list_bytes=600)
    large = tuple((b"name%d" % number, b"x" * 40) for number in range(20))
    block = encoder.encode(large)
    headers = decoder.decode(block)
    assert headers.too_large
    assert headers.pairs == large[: len(headers.pairs)]
    for pair in large:
        assert decoder.decode(encoder.encode([pair])).pairs == (pair,)


@pytest.mark.parametrize("insert", [b"\x40\x01a" + string(b"x" * 4000), b"\x40\x01a\x00"])
def test_a_bomb_costs_no_more_than_its_limit(insert: bytes) -> None:
    """64 KiB that stand for 264 or 2 MB end the connection, and take little memory."""
    block = b"\xbe" * 65536
    peaks = []
    for _ in range(5):  # what other threads of the process take meanwhile counts too
        decoder = HeaderDecoder()
        decoder.decode(insert)
        tracemalloc.start()
        try:
            with pytest.raises(HeaderListBombError, match="far more headers than are allowed"):
                decoder.decode(block)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert min(peaks) < 20_000


def test_a_list_is_a_bomb_above_four_times_the_limit() -> None:
    decoder = HeaderDecoder(max_list_bytes=100)
    field = b"\x00\x01a" + string(b"x" * 67)
    assert decoder.decode(field * 4).too_large
    with pytest.raises(HeaderListBombError):
        decoder.decode(field * 4 + b"\x82")


def test_the_usual_response_is_two_bytes() -> None:
    encoder = HeaderEncoder()
    first = encoder.encode(GRPC_RESPONSE)
    assert len(first) > 2
    block = encoder.encode(GRPC_RESPONSE)
    assert len(block) == 2
    assert encoder.encode(tuple(GRPC_RESPONSE)) is block


def test_a_known_list_is_encoded_anew_when_the_table_changes() -> None:
    encoder = HeaderEncoder()
    oracle = hpack.Decoder()

    def send(pairs: Pairs) -> None:
        assert tuple(map(tuple, oracle.decode(encoder.encode(pairs), raw=True))) == pairs

    for _ in range(2):
        send(GRPC_RESPONSE)
    send(((b"grpc-status", b"5"),))
    for _ in range(2):
        send(GRPC_RESPONSE)
    encoder.set_table_limit(0)
    oracle.max_allowed_table_size = 0  # hpack then refuses a block without the size update
    send(GRPC_RESPONSE)


def test_kept_lists_of_the_encoder_are_bounded() -> None:
    encoder = HeaderEncoder()
    tracemalloc.start()
    try:
        for number in range(3000):
            encoder.encode(tuple(STATIC_TABLE[number >> bit & 1] for bit in range(24)))
        assert tracemalloc.get_traced_memory()[0] < 50_000
    finally:
        tracemalloc.stop()


def test_only_listed_and_short_fields_are_indexed() -> None:
    encoder = HeaderEncoder()
    for pair in ((b"grpc-message", b"no such model"), (b":path", b"/" * 600), (b"x-id", b"1")):
        assert encoder.encode((pair,)) == encoder.encode((pair,))
    path = ((b":path", b"/a.B/C"),)
    assert len(encoder.encode(path)) > len(encoder.encode(path)) == 1


@pytest.mark.parametrize("name", [b"authorization", b"cookie", b"set-cookie", b"x-api-key"])
def test_secrets_are_never_indexed(name: bytes) -> None:
    encoder = HeaderEncoder()
    decoder = hpack.Decoder()
    for _ in range(2):
        (field,) = decoder.decode(encoder.encode(((name, b"secret"),)), raw=True)
        assert isinstance(field, hpack.NeverIndexedHeaderTuple)


def test_the_smallest_table_limit_is_told_too() -> None:
    encoder = HeaderEncoder()
    encoder.encode(GRPC_RESPONSE)
    encoder.set_table_limit(4096)
    assert len(encoder.encode(GRPC_RESPONSE)) == 2
    encoder.set_table_limit(1 << 20)
    assert len(encoder.encode(GRPC_RESPONSE)) == 2
    encoder.set_table_limit(0)
    encoder.set_table_limit(100)
    assert encoder.encode(((b":method", b"GET"),)) == bytes.fromhex("203f4582")
    assert encoder.encode(((b":method", b"GET"),)) == b"\x82"
