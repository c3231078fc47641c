"""The wire format: what is encoded comes back, and no bytes do anything but that or raise `WireError`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import ERRORS_BY_CODE, InternalError
from conch.core.request import InferenceRequest
from conch.workers.protocol import tensor_layouts, wire
from conch.workers.protocol.request_columns import (
    MOST_REQUESTS,
    NO_DEADLINE,
    batch_of,
    decode_requests,
    encode_requests,
    number_of,
)
from conch.workers.protocol.response_columns import decode_credit, encode_failure, encode_responses
from conch.workers.protocol.tensor_layouts import Layouts, Place
from conch.workers.protocol.wire import Kind, Reader, WireError

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(), max_size=20)  # surrogates too: clients' names may come from files
PARAMETERS = st.none() | st.dictionaries(
    TEXT, st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT, min_size=1, max_size=3
)
ERRORS = st.builds(lambda kind, text: kind(text), st.sampled_from(list(ERRORS_BY_CODE.values())), TEXT)


@given(
    kind=st.sampled_from(Kind),
    subject=U64,
    fields=st.binary(max_size=50),
    data=st.lists(st.binary(max_size=30), max_size=4),
    block=U32,
    size=U64,
    new=st.booleans(),
    released=st.lists(U32, max_size=255),
)
def test_messages_come_back(
    kind: Kind,
    subject: int,
    fields: bytes,
    data: list[bytes],
    block: int,
    size: int,
    new: bool,
    released: list[int],
) -> None:
    packet = wire.encode(kind, subject, fields, data, block, size, new, released)
    message = wire.decode(memoryview(packet))
    assert (message.kind, message.subject, bytes(message.fields)) == (kind, subject, fields)
    assert (message.block, message.block_size, message.new_block) == (block, size, new)
    assert message.released == tuple(released)
    offset = 0
    for part in data:
        assert offset % 8 == 0
        assert bytes(message.data[offset : offset + len(part)]) == part
        offset += len(part) + -len(part) % 8


def test_small_tensors_lie_where_numpy_wants_them() -> None:
    for length in range(9):
        for released in ([], [1], [1, 2]):
            packet = wire.encode(Kind.DONE, 0, bytes(length), [b"12345678"], released=released)
            assert (len(packet) - 8) % 8 == 0
            assert bytes(wire.decode(memoryview(packet)).data) == b"12345678"


REQUESTS = st.fixed_dictionaries(
    {
        "received_ns": U64,
        "queued_ns": U64,
        "deadline_ns": st.none() | st.integers(0, 2**64),
        "batch_size": U32,
        "id": TEXT,
        "parameters": PARAMETERS,
        "correlation_id": st.integers() | TEXT,
        "requested": st.none() | st.lists(TEXT, max_size=3).map(tuple),
        "priority": st.integers(0, 2**64),
        "timeout_us": st.integers(0, 2**64),
        "sequence_start": st.booleans(),
        "sequence_end": st.booleans(),
        "cancelled": st.booleans(),
    }
)
OPTIONS = ("parameters", "correlation_id", "requested", "priority", "timeout_us")


def _request(**fields: Any) -> InferenceRequest:
    request = InferenceRequest("m", "", {}, lambda *answer: None, 0)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


@given(
    fields=st.lists(REQUESTS, min_size=1, max_size=4),
    alike=st.booleans(),
    instance=st.integers(-1, 9),
    again=st.none() | st.lists(U64, min_size=4, max_size=4),
    model=st.just(()) | st.tuples(TEXT, TEXT),
)
def test_requests_come_back_with_the_types_that_values_have(
    fields: list[dict[str, Any]], alike: bool, instance: int, again: list[int] | None, model: tuple[str, ...]
) -> None:
    if alike:  # then they have one description
        fields = [{**each, **{name: fields[0][name] for name in OPTIONS}} for each in fields]
    numbers = None if again is None else again[: len(fields)]
    requests = [_request(**each) for each in fields]
    reader = Reader(memoryview(encode_requests(requests, 33, instance, 44, numbers, 0, model)))
    read = decode_requests(reader)
    reader.end()
    assert (read.size, read.instance, read.start_ns) == (33, instance, 44)
    assert read.numbers is None if numbers is None else list(read.numbers or ()) == numbers
    for sent, row, name, options in zip(fields, read.rows, read.ids, read.options, strict=False):
        deadline = sent["deadline_ns"]
        # A deadline in 292 years is none.
        limit = NO_DEADLINE if deadline is None or deadline >= 2**63 else deadline
        assert row[:4] == (sent["received_ns"], sent["queued_ns"], limit, sent["batch_size"])
        flags = sent["sequence_start"] + 2 * sent["sequence_end"] + 8 * sent["cancelled"]
        assert (row[4], name, options.model) == (flags, sent["id"], model)
        for option in OPTIONS:
            value, expected = getattr(options, option), sent[option]
            assert value == (expected or 0 if option == "correlation_id" else expected)
        if sent["parameters"]:
            assert {key: type(value) for key, value in (options.parameters or {}).items()} == {
                key: type(value) for key, value in sent["parameters"].items()
            }
    assert len(read.rows) == len(fields)


@given(batch=st.integers(1, 2**40), index=st.integers(0, MOST_REQUESTS - 1))
def test_a_number_names_a_batch_and_a_place_in_it(batch: int, index: int) -> None:
    assert batch_of(number_of(batch, index)) == (batch, index)


def test_long_options_are_not_kept() -> None:
    for length, kept in ((100, True), (100_000, False)):
        fields = memoryview(encode_requests([_request(parameters={"text": "x" * length})]))
        first, second = (next(iter(decode_requests(Reader(fields)).options)) for _ in range(2))
        assert first == second
        assert (first.parameters is second.parameters) is kept


def test_there_are_not_more_requests_than_fields_for_them() -> None:
    fields = bytearray(encode_requests([_request()]))
    for count in (0, 2, MOST_REQUESTS, MOST_REQUESTS + 1, 2**32 - 1):
        fields[:4] = count.to_bytes(4, "little")
        with pytest.raises(WireError):
            decode_requests(Reader(memoryview(fields)))


@given(error=ERRORS, retry=st.none() | st.integers(0, 10**6))
def test_errors_come_back(error: Any, retry: int | None) -> None:
    error.retry_after_ms = retry
    read = wire.decode_error(wire.encode_error(error))
    assert (type(read), read.message, read.retry_after_ms) == (type(error), error.message, retry)


def test_layouts_are_forgotten_when_there_are_too_many() -> None:
    layouts = Layouts()
    key = (("IN", "FP32", (0,)),)
    sent = layouts.encode(key)

    def read(text: bytes) -> tensor_layouts.Layout:
        return layouts.read(Reader(memoryview(text)))

    received = read(sent.text)
    assert layouts.encode(key) is sent and read(sent.text) is received
    for size in range(2000):
        text = layouts.encode((("IN", "FP32", (size,)),)).text
        layout = read(text)
        assert layout.nbytes == 4 * size + 4 * size % 8
        layouts.recognise(text, 1, layout)
    assert layouts.encode(key) is not sent and read(sent.text) is not received
    assert len(layouts.whole) < 1000


def test_a_tensor_has_the_size_that_its_shape_says() -> None:
    layout = Layouts().read(Reader(memoryview(Layouts().encode((("IN", "FP32", (4,)),)).text)))
    with pytest.raises(WireError, match="tensor 'IN' has 15 bytes, not 16"):
        tensor_layouts.read_sizes(Reader(memoryview(tensor_layouts.encode_sizes([15]))), layout)
    with pytest.raises(WireError, match="tensor 'IN' has 15 bytes, not 16"):
        tensor_layouts.read_place(Reader(memoryview(Place(1, 0, 15).encode())), layout.tensors[0])


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1}',
        "[1]",
        '[["IN","FP32"]]',
        '[["IN","FP33",[1]]]',
        '[["IN","FP32",[-1]]]',
        '[["IN","FP32",[true]]]',
        '[["IN","FP32",[1.0]]]',
        '[[1,"FP32",[1]]]',
        "[" * 100_000,
        "",
    ],
)
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(WireError):
        Layouts().read(Reader(memoryview(len(text).to_bytes(4, "little") + text.encode())))


DECODERS: list[Callable[[memoryview], object]] = [
    wire.decode,
    lambda packet: decode_requests(Reader(packet)),
    lambda packet: Layouts().read(Reader(packet)),
    lambda packet: tensor_layouts.read_head(Reader(packet), 2),
    wire.decode_error,
    wire.decode_json,
    wire.decode_numbers,
    decode_credit,
    lambda packet: wire.check_hello(packet, "worker"),
]


@pytest.mark.parametrize("decoder", DECODERS)
@given(packet=st.binary(max_size=200))
def test_garbage_raises_wire_errors_and_nothing_else(decoder: Any, packet: bytes) -> None:
    try:
        decoder(memoryview(packet))
    except WireError:
        pass


VALID = [
    wire.encode(Kind.DONE, 1, b"fields", [b"12345678"], 3, 65536, True, [1, 2]),
    encode_requests([_request(id="a", parameters={"a": 1}), _request(id="b", priority=2)], numbers=[1, 2]),
    encode_requests([_request(requested=("OUT",))] * 2),
    encode_responses(2, b"", [1, 3], [b"{}", wire.encode_error(InternalError("no"))]),
    encode_failure(InternalError("no")),
    Layouts().encode((("IN", "FP32", (4,)), ("B", "BYTES", (1,)))).text,
    wire.encode_hello(5),
]


@pytest.mark.parametrize("packet", VALID)
@pytest.mark.parametrize("decoder", DECODERS)
@given(data=st.data())
def test_damaged_messages_raise_wire_errors_and_nothing_else(decoder: Any, packet: bytes, data: Any) -> None:
    damaged = bytearray(packet)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoder(memoryview(bytes(damaged[: data.draw(st.integers(0, len(damaged)))])))
    except WireError:
        pass


def test_another_version_is_named() -> None:
    hello = bytearray(wire.encode_hello(1))
    wire.check_hello(bytes(hello), "worker")
    hello[4] += 1
    with pytest.raises(WireError, match=f"version {wire.VERSION + 1} .* this side version {wire.VERSION}"):
        wire.check_hello(bytes(hello), "worker")
