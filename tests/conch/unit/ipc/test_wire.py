"""The wire format: what is encoded comes back, and no bytes do anything but that or raise `WireError`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.workers import arrived, inline, placed

from conch.core.errors import ERRORS_BY_CODE, InternalError
from conch.core.request import InferenceRequest
from conch.ipc import channel, codec
from conch.ipc.channel import (
    MOST_TEXT,
    MOST_TEXTS,
    NEW,
    Kind,
    Message,
    ReceivedTexts,
    SentTexts,
    Text,
    WireError,
    encode,
    encode_texts,
)
from conch.ipc.codec import (
    MOST_REQUESTS,
    NO_DEADLINE,
    batch_of,
    decode_requests,
    decode_responses,
    encode_failure,
    encode_requests,
    encode_responses,
    number_of,
)
from conch.ipc.response_credit import decode_credit, encode_credit
from conch.ipc.tensors import Place, ReceivedMessage, describe_layout, read_layout

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
    texts=st.lists(st.binary(max_size=30), max_size=4),
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
    texts: list[bytes],
) -> None:
    packet = encode(kind, subject, fields, data, block, size, new, released, encode_texts(texts))
    message = Message(memoryview(packet))
    assert (message.kind, message.subject, bytes(message.fields)) == (kind, subject, fields)
    assert (message.block, message.block_size, message.new_block) == (block, size, new)
    assert message.released == tuple(released)
    assert [text.content for text in ReceivedTexts().take_texts(message)] == texts
    offset = 0
    for part in data:
        assert offset % 8 == 0
        assert bytes(message.data[offset : offset + len(part)]) == part
        offset += len(part) + -len(part) % 8


def test_small_tensors_lie_where_numpy_wants_them() -> None:
    for length in range(9):
        for released in ([], [1], [1, 2]):
            packet = encode(Kind.DONE, 0, bytes(length), [b"12345678"], released=released)
            assert (len(packet) - 8) % 8 == 0
            assert bytes(Message(memoryview(packet)).data) == b"12345678"


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
    encoded, texts = encode_requests(requests, 33, instance, 44, numbers, 0, model)
    message = arrived(encode(Kind.EXECUTE, fields=encoded, texts=encode_texts(texts)))
    read = decode_requests(message)
    assert (message.position, message.texts_read) == (len(encoded), len(texts))
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


def test_options_are_read_once_unless_they_are_long() -> None:
    for length, kept in ((100, True), (100_000, False)):
        fields, texts = encode_requests([_request(parameters={"text": "x" * length})])
        sent = SentTexts()
        packets = [encode(Kind.EXECUTE, fields=fields, texts=sent.encode(tuple(texts))) for _ in range(3)]
        assert (len(packets[2]) < 100) is kept
        message = arrived(*packets)
        first, second = (next(iter(decode_requests(message).options)) for _ in range(2))
        assert first is second and first.parameters == {"text": "x" * length}


def test_there_are_not_more_requests_than_fields_for_them() -> None:
    encoded, texts = encode_requests([_request()])
    fields = bytearray(encoded)
    for count in (0, 2, MOST_REQUESTS, MOST_REQUESTS + 1, 2**32 - 1):
        fields[:4] = count.to_bytes(4, "little")
        with pytest.raises(WireError):
            decode_requests(arrived(encode(Kind.EXECUTE, fields=bytes(fields), texts=encode_texts(texts))))


def test_there_are_not_more_requests_than_options_for_them() -> None:
    fields, _ = encode_requests([_request(priority=1), _request(priority=2)])
    with pytest.raises(WireError, match="2 requests have 1 options"):
        decode_requests(arrived(encode(Kind.EXECUTE, fields=fields, texts=encode_texts([b"{}"]))))


# --- texts -------------------------------------------------------------------------------------------------


@given(messages=st.lists(st.lists(st.binary(max_size=3), max_size=6), max_size=30), most=st.integers(8, 20))
def test_texts_come_back_however_often_they_are_sent(messages: list[list[bytes]], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "MOST_TEXTS", most)  # so that the table is full now and then
        sent, received = SentTexts(), ReceivedTexts()
        for texts in messages:
            encoded = sent.encode(tuple(texts)) if texts else b""
            packet = encode(Kind.DONE, texts=encoded)
            assert [text.content for text in received.take_texts(Message(memoryview(packet)))] == texts
            assert len(received.known) <= most and len(sent.encoded) <= most


def test_a_text_is_sent_twice_and_has_a_number_then() -> None:
    sent = SentTexts()

    def numbers(*texts: bytes) -> tuple[tuple[int, ...], bool]:
        message = Message(memoryview(encode(Kind.DONE, texts=sent.encode(texts))))
        return message.numbers, message.reset

    text, long = b"a layout", b"x" * (MOST_TEXT + 1)
    assert [numbers(text)[0] for _ in range(4)] == [(NEW,), (NEW | 1,), (1,), (1,)]
    assert numbers(b"", b"another", long) == ((0, NEW, NEW), False)
    assert numbers(b"another", long) == ((NEW | 2, NEW), False)
    sent.forget()
    assert [numbers(text) for _ in range(2)] == [((NEW,), True), ((NEW | 1,), False)]


@pytest.mark.parametrize(
    ("numbers", "text", "why"),
    [
        ([1], b"a", "there is no text 1"),
        ([NEW - 1], b"a", "there is no text"),
        ([NEW, 5], b"a", "there is no text 5"),
        ([NEW | 2], b"a", "a text of 1 bytes can't have number 2"),
        ([NEW | 1, NEW | 1], b"a", "a text of 1 bytes can't have number 1"),
        ([NEW | 1], b"a" * (MOST_TEXT + 1), "a text of 4097 bytes can't have number 1"),
        (list(range(NEW | 1, (NEW | MOST_TEXTS) + 2)), b"a", f"can't have number {MOST_TEXTS}"),
    ],
)
def test_a_text_without_a_valid_number_is_refused(numbers: list[int], text: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        arrived(encode(Kind.DONE, texts=encode_texts([text] * len(numbers), numbers)))


def test_texts_must_lie_in_their_message() -> None:
    packet = encode(Kind.DONE, texts=encode_texts([b"abcd", b"efgh"]))
    for size in range(len(packet)):
        short = bytearray(packet[:size])
        if size >= 8:  # the header says how long the rest is
            short[4:8] = max(size - 28, 0).to_bytes(4, "little")
        with pytest.raises(WireError):
            Message(memoryview(short))


@given(error=ERRORS, retry=st.none() | st.integers(0, 10**6))
def test_errors_come_back(error: Any, retry: int | None) -> None:
    error.retry_after_ms = retry
    read = codec.decode_error(codec.encode_error(error))
    assert (type(read), read.message, read.retry_after_ms) == (type(error), error.message, retry)


def test_a_layout_is_read_once() -> None:
    text = Text(describe_layout((("IN", "FP32", (3,)),)).text)
    layout = read_layout(text)
    assert layout.nbytes == 16 and read_layout(text) is layout


def test_a_tensor_has_the_size_that_its_shape_says() -> None:
    key = (("IN", "FP32", (4,)), ("T", "BYTES", (1,)))
    for payload in (inline(key, [15, 1]), placed(key, [Place(1, 0, 15), Place(1, 0, 1)])):
        message = arrived(encode(Kind.DONE, fields=payload.fields, texts=encode_texts(payload.texts)))
        with pytest.raises(WireError, match="tensor 'IN' has 15 bytes, not 16"):
            message.lists(1)


def test_there_is_a_layout_for_each_list() -> None:
    payload = inline((("IN", "FP32", (4,)),))
    for texts in ([], payload.texts * 2):
        message = arrived(encode(Kind.DONE, fields=payload.fields, texts=encode_texts(texts)))
        with pytest.raises(WireError, match=f"a message has {len(texts)} layouts for 1 lists of tensors"):
            message.lists(1)


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
        read_layout(Text(text.encode()))


def _text_of(packet: memoryview) -> Text:
    return Text(bytes(packet))


def _with_fields(packet: memoryview) -> ReceivedMessage:
    """A message with these fields, and texts that fit what is encoded below."""
    return arrived(encode(Kind.EXECUTE, fields=bytes(packet), texts=encode_texts([b"{}", b"{}"])))


DECODERS: list[Callable[[memoryview], object]] = [
    Message,
    lambda packet: arrived(bytes(packet) or b"0"),  # an empty one ends the channel
    lambda packet: decode_requests(_with_fields(packet)),
    lambda packet: decode_responses(_with_fields(packet), 2),
    lambda packet: decode_responses(_with_fields(packet)),
    lambda packet: _with_fields(packet).lists(2),
    lambda packet: read_layout(_text_of(packet)),
    codec.decode_error,
    codec.decode_json,
    channel.decode_numbers,
    decode_credit,
    lambda packet: codec.check_hello(packet, "worker"),
]


@pytest.mark.parametrize("decoder", DECODERS)
@given(packet=st.binary(max_size=200))
def test_garbage_raises_wire_errors_and_nothing_else(decoder: Any, packet: bytes) -> None:
    try:
        decoder(memoryview(packet))
    except WireError:
        pass


VALID = [
    encode(Kind.DONE, 1, b"fields", [b"12345678"], 3, 65536, True, [1, 2]),
    encode(Kind.DONE, 1, b"fields", texts=encode_texts([b"a", b"text"], [NEW | 1, NEW])),
    encode_requests([_request(id="a", parameters={"a": 1}), _request(id="b", priority=2)], numbers=[1, 2])[0],
    encode_requests([_request(requested=("OUT",))] * 2)[0],
    encode_responses(2, [1, 3], True),
    encode_responses(2, [1, 0], numbers=[5, 7]) + inline((("IN", "FP32", (4,)),)).fields,
    encode_credit([(5, 24), (7, 30)]),
    encode_responses(2) + inline((("IN", "FP32", (4,)),)).fields,
    encode_failure(InternalError("no"))[0],
    describe_layout((("IN", "FP32", (4,)), ("B", "BYTES", (1,)))).text,
    codec.encode_error(InternalError("no")),
    codec.encode_hello(5),
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
    hello = bytearray(codec.encode_hello(1))
    codec.check_hello(bytes(hello), "worker")
    hello[4] += 1
    with pytest.raises(WireError, match=f"version {codec.VERSION + 1} .* this side version {codec.VERSION}"):
        codec.check_hello(bytes(hello), "worker")
