"""Requests that are recognised by the bytes around their ids and contents are read as if they were not."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.core import Answers
from tests.support.profiles import scaled

from conch.core.errors import ConchError
from conch.core.request import InferenceRequest
from conch.frontends.grpc import request_decoder, request_layouts
from conch.frontends.grpc.request_decoder import RequestDecoder
from conch.frontends.grpc.wire_format import length_header
from conch.protocol import inference_pb2 as pb

Request = pb.ModelInferRequest
Input = Request.InferInputTensor
Output = Request.InferRequestedOutputTensor
Decoder = Callable[[bytes, Any, int], InferenceRequest]

ENOUGH = 3
"""Number of times a message has to be seen to be recognised."""


def parse_all(message: bytes, responder: Any, received_ns: int) -> InferenceRequest:
    """Reads a request without remembering anything."""
    return request_decoder.parse_request(message, responder, received_ns)


def outcome(decoder: Decoder, message: bytes) -> object:
    """All that is read of a message, or what it is refused with."""
    try:
        request = decoder(message, Answers(), 7)
    except ConchError as error:
        return type(error), error.message.partition("malformed")[0]
    return (
        (request.model_name, request.model_version, request.id),
        (request.requested, request.classes, request.parameters, request.empty_final),
        (request.priority, request.timeout_us, request.correlation_id),
        (request.sequence_start, request.sequence_end, request.received_ns),
        [(name, one.name, one.datatype, one.shape, bytes(one.data)) for name, one in request.inputs.items()],
    )


@contextmanager
def nothing_taken_apart() -> Iterator[None]:
    """Makes messages that are not recognised an error of the test."""

    def refuse(message: bytes) -> None:
        raise AssertionError("the message was not recognised")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_layouts, "split_infer_request", refuse)
        patch.setattr(request_decoder, "parse_request", refuse)
        yield


def message_of(
    raw: list[bytes],
    request_id: str = "",
    name: str = "m",
    shapes: tuple[tuple[int, ...], ...] = ((4,), (2, 2)),
    outputs: tuple[str, ...] = (),
    **parameters: int | bool,
) -> bytes:
    message = Request(
        model_name=name,
        id=request_id,
        inputs=[
            Input(name=f"i{number}", datatype="UINT8", shape=shape)
            for number, shape in enumerate(shapes[: len(raw)])
        ],
        outputs=[Output(name=output) for output in outputs],
        raw_input_contents=raw,
    )
    for key, value in parameters.items():
        if isinstance(value, bool):
            message.parameters[key].bool_param = value
        else:
            message.parameters[key].int64_param = value
    data: bytes = message.SerializeToString()
    return data


@pytest.mark.parametrize("request_id", ["", "0", "an id"])
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("size", [0, 1, 4, 127, 128, 40_000])
@pytest.mark.parametrize("outputs", [(), ("o", "p")])
def test_other_ids_and_contents_of_the_same_length_are_recognised(
    request_id: str, count: int, size: int, outputs: tuple[str, ...]
) -> None:
    decoder = RequestDecoder()
    for _ in range(ENOUGH):
        decoder(message_of([bytes(size)] * count, request_id, outputs=outputs, priority=3), Answers(), 0)
    for number in range(3):
        other = request_id[:-1] + str(number) if request_id else ""
        raw = [bytes([number + place]) * size for place in range(count)]
        message = message_of(raw, other, outputs=outputs, priority=3)
        with nothing_taken_apart():
            found = outcome(decoder, message)
        assert found == outcome(parse_all, message)


@pytest.mark.parametrize(
    "message",
    [
        message_of([b"1234"], "id"),
        message_of([b"12", b"", b"4"][:2], outputs=("o",), timeout=1000),
        message_of([b"\x0a\x01m\x1a\x01i"], "\x0a\x01m"),
        message_of([], "7"),
    ],
)
def test_a_change_of_any_byte_is_noticed(message: bytes) -> None:
    decoder = RequestDecoder()
    for position in range(len(message)):
        for value in range(256):
            changed = message[:position] + bytes([value]) + message[position + 1 :]
            # Often enough for the message itself to stay known, whatever the others put in its place.
            for _ in range(ENOUGH if value % 64 == 0 else 0):
                decoder(message, Answers(), 0)
            assert outcome(decoder, changed) == outcome(parse_all, changed), (position, value)


def field(number: int, content: bytes) -> bytes:
    return length_header(number, len(content)) + content


names = st.sampled_from(["m", "n", "a long name " * 11, ""])
texts = st.sampled_from(["", "1", "2", "12"])
contents = st.one_of(st.sampled_from([b"", b"a", b"b", b"\x1a\x01i", b"\x3a\x01x"]), st.binary(max_size=140))
inputs = st.builds(
    lambda name, datatype, shape: Input(name=name, datatype=datatype, shape=shape).SerializeToString(),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["INT8", "FP32"]),
    st.sampled_from([[2], [3], [1, 2], [2, 1]]),
)
# Fields as clients may send them, in any order and number, some of them broken or unknown.
fields = st.one_of(
    st.builds(field, st.just(1), names.map(str.encode)),
    st.builds(field, st.sampled_from([2, 3]), texts.map(str.encode)),
    st.builds(field, st.just(5), inputs),
    st.builds(
        field, st.just(6), st.sampled_from(["o", "p"]).map(lambda o: Output(name=o).SerializeToString())
    ),
    st.builds(field, st.just(7), contents),
    st.builds(field, st.sampled_from([3, 4, 5, 6, 9]), st.binary(max_size=4)),
    st.builds(
        lambda key, value: Request(
            parameters={key: pb.InferParameter(int64_param=value)}
        ).SerializeToString(),
        st.sampled_from(["priority", "timeout", "sequence_id", "x"]),
        st.sampled_from([-1, 1, 2]),
    ),
    st.sampled_from([b"\x48\x01", b"\x3a\x81\x00a", b"\x1a\x80\x00"]),
)
plain = st.builds(
    message_of,
    st.lists(contents, max_size=2),
    texts,
    st.sampled_from(["m", "n"]),
    st.sampled_from([((2,), (3,)), ((3,), (2,)), ((1, 2), (4,)), ((2, 1), (4,))]),
    st.sampled_from([(), ("o",), ("p",)]),
    priority=st.sampled_from([1, 2]),
)
sequences = st.lists(st.one_of(plain, st.lists(fields, max_size=6).map(b"".join)), min_size=1, max_size=6)


@settings(max_examples=scaled(300))
@given(sequences, st.data())
def test_whatever_came_before_a_message_is_read_alike(messages: list[bytes], data: st.DataObject) -> None:
    decoder = RequestDecoder()
    for _ in range(ENOUGH + 1):
        for message in data.draw(st.permutations(messages)):
            assert outcome(decoder, message) == outcome(parse_all, message)
            end = data.draw(st.integers(0, len(message)))
            if data.draw(st.booleans()) and end < len(message):
                broken = message[:end] + bytes([data.draw(st.integers(0, 255))]) + message[end + 1 :]
            else:
                broken = message[:end]
            assert outcome(decoder, broken) == outcome(parse_all, broken)


def test_messages_that_have_only_their_length_in_common_are_all_recognised() -> None:
    decoder = RequestDecoder()
    messages = [
        message_of([b"123456"], shapes=(shape,), outputs=(output,))
        for shape in ((2, 3), (3, 2))
        for output in "op"
    ]
    assert len({len(message) for message in messages}) == 1
    assert len(messages) <= request_layouts.MAX_LAYOUTS_PER_KEY
    for _ in range(ENOUGH):
        for message in messages:
            decoder(message, Answers(), 0)
    with nothing_taken_apart():
        found = [outcome(decoder, message) for message in messages]
    assert found == [outcome(parse_all, message) for message in messages]


def test_requests_of_other_lengths_have_the_same_signature() -> None:
    decoder = RequestDecoder()
    signatures = {
        decoder(message_of([bytes(size)], request_id), Answers(), 0).signature
        for size in (1, 200)
        for request_id in ("", "1", "12")
        for _ in range(ENOUGH + 1)
    }
    assert len(signatures) == 1
    assert None not in signatures


def remembered(decoder: RequestDecoder) -> list[bytes]:
    """All bytes of messages that a decoder keeps beside its templates."""
    known = decoder.layouts.known
    keys = [name for _, name in known]
    return keys + [data for alike in known.values() for fixed, _ in alike for _, data in fixed]


@pytest.mark.parametrize("request_id", ["", "i" * 100_000])
def test_nothing_large_is_kept(request_id: str) -> None:
    decoder = RequestDecoder()
    message = message_of([b"x" * 100_000, b""], request_id)
    held = sys.getrefcount(message)
    for _ in range(ENOUGH):
        decoder(message, Answers(), 0)
    assert sys.getrefcount(message) == held
    assert 0 < sum(map(len, remembered(decoder))) < 100


def test_nothing_is_remembered_of_messages_that_do_not_begin_with_a_name() -> None:
    decoder = RequestDecoder()
    for message in (field(7, b"contents"), field(3, b"id"), b"", b"\x0a", message_of([b"1"])[3:]):
        for _ in range(ENOUGH):
            assert outcome(decoder, message) == outcome(parse_all, message)
    assert remembered(decoder) == []


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_layouts, "MAX_KEYS", 8)
    monkeypatch.setattr(request_layouts, "MAX_TEMPLATES", 8)
    decoder = RequestDecoder()
    for number in range(50):
        for size in (0, 1):
            for _ in range(ENOUGH):
                message = message_of([bytes(size)], name=f"m{number % 20}", outputs=(f"o{number}",))
                assert outcome(decoder, message) == outcome(parse_all, message)
    assert len(decoder.layouts.known) <= 8
    assert len(decoder.layouts.templates) <= 8
    alike = [message_of([b"1"], outputs=(f"o{number:02}",)) for number in range(20)]
    for message in alike * ENOUGH:
        decoder(message, Answers(), 0)
    assert max(map(len, decoder.layouts.known.values())) == request_layouts.MAX_LAYOUTS_PER_KEY


def test_many_long_headers_are_not_kept_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_layouts, "MAX_BYTES", 10_000)
    decoder = RequestDecoder()
    for number in range(50):
        message = message_of([b"1"], name=f"m{number}", outputs=("o" * 900,))
        for _ in range(ENOUGH):
            decoder(message, Answers(), 0)
        assert 900 < sum(map(len, remembered(decoder))) < 12_000


def test_what_is_remembered_takes_no_more_memory_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of many short pieces take far more memory than these have bytes."""
    monkeypatch.setattr(request_layouts, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(request_layouts, "MAX_TEMPLATES", 1)
    decoder = request_layouts.Layouts()
    region = Output(name="o")
    region.parameters["shared_memory_region"].string_param = "r"
    region.parameters["shared_memory_byte_size"].int64_param = 1
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(20):
            name = f"m{number}"
            message = Request(model_name=name, outputs=[region], raw_input_contents=[b""] * 1900)
            for _ in range(ENOUGH):
                assert decoder.find(message.SerializeToString()) is not None
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 2 * request_layouts.MAX_BYTES


def test_alike_messages_that_take_turns_keep_others_in_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them takes the place of another one, which then takes no memory."""
    monkeypatch.setattr(request_layouts, "MAX_BYTES", 10_000)
    decoder = RequestDecoder()
    other = message_of([b"1"], name="n")
    turns = [
        message_of([b"1"], outputs=(f"o{number}",))
        for number in range(request_layouts.MAX_LAYOUTS_PER_KEY + 2)
    ]
    for message in [other] * ENOUGH + turns * 200:
        decoder(message, Answers(), 0)
    with nothing_taken_apart():
        found = outcome(decoder, other)
    assert found == outcome(parse_all, other)


@pytest.mark.parametrize("raw", [1, 5000])
def test_headers_that_are_too_long_are_not_kept(raw: int) -> None:
    """Also where unread bytes make them long: contents of no input, which are skipped."""
    message = Request(model_name="m", inputs=[Input(name="x")], raw_input_contents=[b""] * raw)
    if raw == 1:
        message.outputs.extend(Output(name=f"output{number}") for number in range(1000))
    else:
        region = message.outputs.add(name="o").parameters
        region["shared_memory_region"].string_param = "r"
        region["shared_memory_byte_size"].int64_param = 1
    decoder = RequestDecoder()
    for _ in range(ENOUGH):
        assert outcome(decoder, message.SerializeToString()) == outcome(
            parse_all, message.SerializeToString()
        )
    assert sum(map(len, remembered(decoder))) < 10


def test_threads_that_share_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_layouts, "MAX_KEYS", 3)  # so that much is forgotten and learned again
    messages = [
        message_of([bytes([number]) * size], f"{number:03}", name=name, outputs=outputs)
        for number in range(6)
        for size in (1, 2)
        for name in ("m", "n")
        for outputs in (("o",), ("p",))
    ]
    expected = {message: outcome(parse_all, message) for message in messages}
    decoder = RequestDecoder()
    wrong: list[bytes] = []

    def run(offset: int) -> None:
        for round_ in range(30):
            for place in range(len(messages)):
                message = messages[(place * (offset + 1) + round_) % len(messages)]
                if outcome(decoder, message) != expected[message]:
                    wrong.append(message)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(offset,)) for offset in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert len(decoder.layouts.known) <= 3
