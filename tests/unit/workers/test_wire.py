"""The wire format: what is encoded comes back, and no bytes do anything but that or raise `WireError`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import ERRORS_BY_CODE
from conch.core.request import InferenceRequest
from conch.workers.protocol import message_records, tensor_layouts, wire
from conch.workers.protocol.message_records import BatchRecord, DoneRecord, RequestRecord, ResponseRecord
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


@given(
    record=st.builds(
        RequestRecord,
        number=U64,
        received_ns=U64,
        queued_ns=U64,
        deadline_ns=st.none() | st.integers(0, 2**63 - 1),
        batch_size=U32,
        flags=U32,
        id=TEXT,
        parameters=PARAMETERS,
        correlation_id=st.integers(1) | TEXT.filter(bool),
        requested=st.none() | st.lists(TEXT, max_size=3).map(tuple),
        priority=st.integers(0, 2**64),
        timeout_us=st.integers(0, 2**64),
        model=st.just(()) | st.tuples(TEXT, TEXT),
    )
)
def test_requests_come_back_with_the_types_that_values_have(record: RequestRecord) -> None:
    reader = Reader(memoryview(record.encode()))
    read = RequestRecord.decode(reader)
    reader.end()
    assert read == record
    if record.parameters:
        assert read.parameters is not None
        assert {key: type(value) for key, value in read.parameters.items()} == {
            key: type(value) for key, value in record.parameters.items()
        }
    assert type(read.correlation_id) is type(record.correlation_id)


def _plain(request_id: str = "", requested: tuple[str, ...] | None = None) -> InferenceRequest:
    return InferenceRequest("m", "", {}, lambda *answer: None, 5, request_id, requested)


@given(
    rows=st.lists(
        st.tuples(U64, U64, U64, st.none() | st.integers(0, 2**64), U32, TEXT), min_size=1, max_size=5
    ),
    requested=st.none() | st.lists(TEXT, max_size=3).map(tuple),
)
def test_homogeneous_requests_come_back(
    rows: list[tuple[int, int, int, int | None, int, str]], requested: tuple[str, ...] | None
) -> None:
    requests = []
    for _, received, queued, deadline, size, name in rows:
        request = _plain(name, requested)
        request.received_ns, request.queued_ns = received, queued
        request.deadline_ns, request.batch_size = deadline, size
        requests.append(request)
    fields = message_records.encode_homogeneous(requests, [row[0] for row in rows])
    assert fields is not None
    reader = Reader(memoryview(fields))
    wanted, read, ids = message_records.decode_homogeneous(reader, len(rows))
    reader.end()
    assert wanted == requested
    # A deadline in 292 years is none.
    assert [(*row[:5], name) for row, name in zip(read, ids, strict=True)] == [
        (*row[:3], message_records.NO_DEADLINE if row[3] is None or row[3] >= 2**63 else row[3], *row[4:])
        for row in rows
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("requested", ("OUT",)),
        ("parameters", {"a": 1}),
        ("correlation_id", 1),
        ("correlation_id", "a"),
        ("priority", 1),
        ("timeout_us", 1),
        ("sequence_start", True),
        ("sequence_end", True),
        ("cancelled", True),
    ],
)
def test_a_request_that_says_more_than_others_is_not_homogeneous(name: str, value: Any) -> None:
    requests = [_plain("a"), _plain("b"), _plain("c")]
    assert message_records.encode_homogeneous(requests, [1, 2, 3]) is not None
    setattr(requests[1], name, value)
    assert message_records.encode_homogeneous(requests, [1, 2, 3]) is None


def test_what_only_front_ends_look_at_makes_no_difference() -> None:
    requests = [_plain("a"), _plain("b")]
    fields = message_records.encode_homogeneous(requests, [1, 2])
    requests[1].empty_final = True
    assert fields is not None and message_records.encode_homogeneous(requests, [1, 2]) == fields


def test_there_are_not_more_requests_than_fields_for_them() -> None:
    fields = message_records.encode_homogeneous([_plain()], [1])
    assert fields is not None
    with pytest.raises(WireError, match="too early"):
        message_records.decode_homogeneous(Reader(memoryview(fields)), 2**32 - 1)


@given(
    present=st.booleans(),
    error=st.none() | ERRORS,
    parameters=PARAMETERS,
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    retry=st.none() | st.integers(0, 10**6),
)
def test_responses_come_back(
    present: bool, error: Any, parameters: Any, flags: tuple[bool, bool, bool], retry: int | None
) -> None:
    if error is not None:
        error.retry_after_ms = retry
        parameters = None
    record = ResponseRecord(present, error, parameters, *flags)
    read = ResponseRecord.decode(Reader(memoryview(record.encode())))
    assert (read.present, read.parameters) == (present, parameters)
    assert (read.final, read.rescheduled, read.failed) == flags
    assert read.has_tensors == (present and error is None)
    if error is None:
        assert read.error is None
    else:
        assert read.error is not None and type(read.error) is type(error)
        assert (read.error.message, read.error.retry_after_ms) == (error.message, retry)


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
TENSORS = st.lists(st.tuples(TEXT, st.sampled_from(["FP32", "BOOL", "BF16", "BYTES"]), SHAPES), max_size=4)


@given(key=TENSORS.map(tuple), source=U32, offset=U64, twice=st.booleans())
def test_tensors_in_blocks_come_back(
    key: tensor_layouts.LayoutKey, source: int, offset: int, twice: bool
) -> None:
    sent, received = Layouts(), Layouts()
    for _ in range(1 + twice):  # the second time out of what is remembered
        places = [Place(source, offset, max(layout.nbytes, 0)) for layout in _layouts(key)]
        reader = Reader(memoryview(tensor_layouts.encode_tensors(sent, key, places)))
        inline, nbytes, tensors = tensor_layouts.decode_tensors(received, reader)
        reader.end()
        assert (list(inline), nbytes) == ([], 0)
        assert [(layout.name, layout.datatype, layout.shape) for layout, _ in tensors] == list(key)
        assert [place for _, place in tensors] == places


@given(
    key=TENSORS.map(tuple), strings=st.lists(st.integers(0, 20), min_size=4, max_size=4), twice=st.booleans()
)
def test_tensors_in_the_message_come_back(
    key: tensor_layouts.LayoutKey, strings: list[int], twice: bool
) -> None:
    sent, received = Layouts(), Layouts()
    sizes = [
        layout.nbytes if layout.nbytes >= 0 else strings[number]
        for number, layout in enumerate(_layouts(key))
    ]
    for _ in range(1 + twice):
        reader = Reader(memoryview(tensor_layouts.encode_inline(sent, key, [bytes(size) for size in sizes])))
        inline, nbytes, others = tensor_layouts.decode_tensors(received, reader)
        reader.end()
        assert list(others) == []
        assert [(layout.name, layout.datatype, layout.shape) for layout, _, _ in inline] == list(key)
        assert [end - start for _, start, end in inline] == sizes
        assert all(start % 8 == 0 for _, start, _ in inline)
        assert nbytes == sum(size + -size % 8 for size in sizes)


def _layouts(key: tensor_layouts.LayoutKey) -> tuple[tensor_layouts.TensorLayout, ...]:
    return Layouts().decode(wire.encode_json(key)).tensors


def test_layouts_are_forgotten_when_there_are_too_many() -> None:
    layouts = Layouts()
    key = (("IN", "FP32", (0,)),)
    text = wire.encode_json(key)
    sent, received = layouts.encode(key), layouts.decode(text)
    assert layouts.encode(key) is sent and layouts.decode(text) is received
    for size in range(2000):
        reader = Reader(memoryview(tensor_layouts.encode_inline(layouts, (("IN", "FP32", (size,)),), [b""])))
        _, nbytes, _ = tensor_layouts.decode_tensors(layouts, reader)
        assert nbytes == 4 * size + 4 * size % 8
    assert layouts.encode(key) is not sent and layouts.decode(text) is not received


@pytest.mark.parametrize("count", [0, 2, 2**32 - 1])
@pytest.mark.parametrize("inline", [0, 1, 2])
def test_a_list_has_as_many_tensors_as_its_layout(count: int, inline: int) -> None:
    text = wire.encode_json((("IN", "BYTES", (4,)),))
    fields = struct.pack("<IIB", len(text), count, inline) + text + bytes(64)
    with pytest.raises(WireError, match="a layout of 1"):
        tensor_layouts.decode_tensors(Layouts(), Reader(memoryview(fields)))


def test_a_tensor_has_the_size_that_its_shape_says() -> None:
    for fields in (
        tensor_layouts.encode_tensors(Layouts(), (("IN", "FP32", (4,)),), [Place(1, 0, 15)]),
        tensor_layouts.encode_inline(
            Layouts(), (("S", "BYTES", (1,)), ("IN", "FP32", (4,))), [b"", bytes(15)]
        ),
    ):
        with pytest.raises(WireError, match="tensor 'IN' has 15 bytes, not 16"):
            tensor_layouts.decode_tensors(Layouts(), Reader(memoryview(fields)))


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
        Layouts().decode(text.encode())


def test_done_and_batch_come_back() -> None:
    for record, kind in (
        (DoneRecord(1, 2, 3, 4, 5), DoneRecord),
        (DoneRecord(1, 2, 3, 4, 0, True), DoneRecord),
        (BatchRecord(2, 8, -1, 5), BatchRecord),
        (BatchRecord(2, 8, 3, 5, True), BatchRecord),
    ):
        reader = Reader(memoryview(record.encode()))
        assert kind.decode(reader) == record
        reader.end()


DECODERS: list[Callable[[memoryview], object]] = [
    wire.decode,
    lambda packet: RequestRecord.decode(Reader(packet)),
    lambda packet: ResponseRecord.decode(Reader(packet)),
    lambda packet: DoneRecord.decode(Reader(packet)),
    lambda packet: BatchRecord.decode(Reader(packet)),
    lambda packet: tensor_layouts.decode_tensors(Layouts(), Reader(packet)),
    lambda packet: message_records.decode_homogeneous(Reader(packet), 2),
    lambda packet: Layouts().decode_homogeneous(Reader(packet)),
    message_records.decode_error,
    wire.decode_json,
    wire.decode_numbers,
    message_records.decode_credit,
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
    RequestRecord(1, 2, 3, 4, 5, 6, "id", {"a": 1}, "corr", ("OUT",), 7, 8).encode(),
    message_records.encode_homogeneous([_plain("a", ("OUT",)), _plain("b", ("OUT",))], [1, 2]),
    ResponseRecord(True, ERRORS_BY_CODE["UNAVAILABLE"]("text")).encode(),
    ResponseRecord(True, None, {"a": True}).encode(),
    tensor_layouts.encode_tensors(
        Layouts(), (("IN", "FP32", (4,)), ("B", "BYTES", (1,))), [Place(7, 0, 16)] * 2
    ),
    tensor_layouts.encode_inline(Layouts(), (("IN", "FP32", (4,)), ("B", "BYTES", (1,))), [bytes(16)] * 2),
    tensor_layouts.encode_inline(Layouts(), (("IN", "FP32", (4,)),), [bytes(16)]),
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


def test_what_few_requests_have_is_not_kept_where_it_is_long() -> None:
    for length, kept in ((100, True), (100_000, False)):
        record = RequestRecord(1, parameters={"text": "x" * length})
        fields = memoryview(record.encode())
        first, second = RequestRecord.decode(Reader(fields)), RequestRecord.decode(Reader(fields))
        assert first == second == record
        assert (first.parameters is second.parameters) is kept


FLOATS = tensor_layouts.encode_inline(Layouts(), (("IN", "FP32", (4,)),), [bytes(16)])


@pytest.mark.parametrize(
    "fields",
    [
        b"",
        FLOATS[:-1],
        FLOATS + b"\0",
        tensor_layouts.encode_inline(Layouts(), (("IN", "BYTES", (1,)),), [bytes(16)]),
        tensor_layouts.encode_tensors(Layouts(), (("IN", "FP32", (4,)),), [Place(7, 0, 16)]),
        tensor_layouts.encode_tensors(Layouts(), (("IN", "FP32", (4,)),), []),
        FLOATS[:4] + b"\2\0\0\0" + FLOATS[8:],
    ],
)
def test_only_one_list_of_small_tensors_holds_for_many(fields: bytes) -> None:
    layouts = Layouts()
    for _ in range(2):
        with pytest.raises(WireError):
            layouts.decode_homogeneous(Reader(memoryview(fields)))
    assert layouts.decode_homogeneous(Reader(memoryview(FLOATS))).nbytes == 16


def test_lists_that_hold_for_many_are_forgotten_when_there_are_too_many() -> None:
    layouts = Layouts()
    fields = memoryview(FLOATS)
    known = layouts.decode_homogeneous(Reader(fields))
    assert layouts.decode_homogeneous(Reader(fields)) is known
    for size in range(5, 2000):
        text = layouts.encode((("IN", "FP32", (size,)),)).inline
        assert layouts.decode_homogeneous(Reader(memoryview(text))).nbytes == 4 * size + 4 * size % 8
    assert layouts.decode_homogeneous(Reader(fields)) is not known
