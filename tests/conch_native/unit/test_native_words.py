"""Words between a worker and the C host."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conch.core.errors import ERRORS_BY_CODE, InternalError, UnknownError
from conch.workers.host.native_words import (
    DATATYPES,
    NOTHING,
    Activity,
    Event,
    LogText,
    Note,
    Output,
    Released,
    Response,
    SmallOutput,
    SmallResponse,
    SmallResponses,
    code_of,
    error_of,
    pack_layout,
    pack_parameters,
    pack_text,
    pack_words,
    read_description,
    read_events,
    read_small_responses,
)

WORDS = st.integers(0, NOTHING - 1)
PARAMETERS = st.dictionaries(
    st.text(max_size=20),
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=20),
    max_size=4,
)
OUTPUTS = st.lists(
    st.builds(
        Output,
        st.integers(0, 100) | st.text(max_size=20),
        st.sampled_from(DATATYPES[1:]),
        st.lists(st.integers(0, 2**62), max_size=4).map(tuple),
        WORDS,
        WORDS,
    ),
    max_size=3,
)
SMALL = st.lists(
    st.builds(
        SmallOutput,
        st.integers(0, 3),
        st.sampled_from(["FP32", "BYTES"]),
        st.lists(st.integers(0, 3), max_size=2).map(tuple),
        st.binary(max_size=20),
    ),
    max_size=2,
)
ERRORS = st.sampled_from(
    [
        "UNKNOWN",
        "INTERNAL",
        "NOT_FOUND",
        "INVALID_ARG",
        "UNAVAILABLE",
        "UNSUPPORTED",
        "ALREADY_EXISTS",
        "CANCELLED",
    ]
)
EVENTS = st.one_of(
    st.builds(
        Response, WORDS, st.booleans(), WORDS, st.none(), PARAMETERS.map(lambda found: found or None), OUTPUTS
    ),
    st.builds(SmallResponse, WORDS, st.booleans(), SMALL),
    st.builds(Released, WORDS, st.booleans()),
    st.builds(LogText, st.integers(0, 3), WORDS, st.text(max_size=20), st.text(max_size=50)),
    st.builds(Note, st.text(max_size=50)),
    st.builds(Activity, WORDS, WORDS, st.text(max_size=20)),
)


def _output(output: Output) -> bytes:
    place, datatype, shape, address, nbytes = output
    named = isinstance(place, str)
    words = pack_words(
        (NOTHING if isinstance(place, str) else place, DATATYPES.index(datatype), len(shape), *shape)
    )
    words += pack_words((address, nbytes, 0, 0))
    return words + pack_text(place) if named and isinstance(place, str) else words


def _described(output: SmallOutput) -> bytes:
    kind, rank = DATATYPES.index(output.datatype), len(output.shape)
    return pack_words((output.place, kind, rank, *output.shape, len(output.data)))


def _written(event: Event) -> bytes:
    """An event as the host writes it."""
    match event:
        case Response(number, final, result, _, parameters, outputs):
            body = pack_words((1, number, final, NOTHING, result)) + pack_parameters(parameters or {})
            body += pack_words((len(outputs),)) + b"".join(map(_output, outputs))
        case SmallResponse(number, final, small):
            described = pack_words((len(small),)) + b"".join(map(_described, small))
            body = pack_words((12, number, final, len(described) // 8)) + described
            body += b"".join(each.data + bytes(-len(each.data) % 8) for each in small)
        case Released(number, again):
            body = pack_words((3 if again else 2, number))
        case LogText(level, line, file, text):
            body = pack_words((5, 0, level, line)) + pack_text(file) + pack_text(text)
        case Note(text):
            body = pack_words((6, 0)) + pack_text(text)
        case Activity(number, time_ns, name):
            body = pack_words((7, number, time_ns)) + pack_text(name)
        case _:
            raise AssertionError(event)
    return pack_words((len(body) // 8 + 1,)) + body


@given(st.lists(EVENTS, max_size=5))
def test_events_are_read_as_they_were_written(events: list[Event]) -> None:
    data = b"".join(map(_written, events))
    buffer = bytearray(data) + bytes(64)  # the host's buffer is larger
    assert list(read_events(memoryview(buffer), len(data) // 8)) == events


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, int, list[Event]]:
    """The events of a batch, mostly of one that small responses end, with its first number and its size."""
    first, count = draw(st.integers(0, 1 << 40)), draw(st.integers(1, 4))
    alike = draw(SMALL)
    events: list[Event] = []
    for number in range(first, first + count):
        outputs = [
            each._replace(data=draw(st.binary(min_size=n, max_size=n)))
            for each in alike
            for n in [len(each.data)]
        ]
        events += [SmallResponse(number, True, outputs), Released(number, False)]
    events = draw(st.permutations(events))
    match draw(st.integers(0, 4)):
        case 0:
            events.insert(draw(st.integers(0, len(events))), draw(EVENTS))
        case 1:
            events[draw(st.integers(0, len(events) - 1))] = draw(EVENTS)
        case 2:
            events[draw(st.integers(0, len(events) - 1))] = draw(st.sampled_from(events))
        case 3:
            del events[draw(st.integers(0, len(events) - 1))]
    return first, count, events


def _small_responses(first: int, count: int, events: list[Event]) -> SmallResponses | None:
    """Result that `read_small_responses` should have, from events as `read_events` reads them."""
    numbers = list(range(first, first + count))
    small = sorted((each for each in events if isinstance(each, SmallResponse)), key=lambda each: each.number)
    released = [each.number for each in events if isinstance(each, Released) and not each.runs_again]
    if [each.number for each in small] != numbers or sorted(set(released)) != numbers:
        return None
    if len(events) != count + len(released):
        return None
    described = [pack_words((len(each.outputs),)) + b"".join(map(_described, each.outputs)) for each in small]
    if described.count(described[0]) != count or not all(each.final for each in small):
        return None
    data = [output.data + bytes(-len(output.data) % 8) for each in small for output in each.outputs]
    return SmallResponses(described[0], b"".join(data))


@given(batches())
@example((1, 1, [SmallResponse(1, True, []), SmallResponse(1, True, []), Released(1, False)]))
def test_small_responses_are_those_of_the_events(batch: tuple[int, int, list[Event]]) -> None:
    first, count, events = batch
    data = b"".join(map(_written, events))
    buffer = memoryview(data + bytes(40))
    read = list(read_events(buffer, len(data) // 8))
    found = read_small_responses(buffer, len(data) // 8, first, count)
    assert found == _small_responses(first, count, read)
    if found is not None:
        (one, *_) = [each for each in read if isinstance(each, SmallResponse)]
        assert read_description(found.described) == [(*each[:3], len(each.data)) for each in one.outputs]


def test_events_of_other_kinds_are_skipped() -> None:
    unknown = pack_words((4, 99, 7, 7))
    data = unknown + _written(Note("a note"))
    assert list(read_events(memoryview(data), len(data) // 8)) == [Note("a note")]


def test_the_end_of_a_request_needs_no_response() -> None:
    data = pack_words((6, 1, 5, 2, NOTHING, 0))
    assert list(read_events(memoryview(data), 6)) == [Response(5, True, 0, None, None, ())]


@given(ERRORS, st.text(max_size=50))
def test_errors_keep_their_codes(code: str, text: str) -> None:
    error = ERRORS_BY_CODE[code](text)
    body = pack_words((1, 5, 1, code_of(error), 0)) + pack_text(text)
    data = pack_words((len(body) // 8 + 1,)) + body
    (event,) = read_events(memoryview(data), len(data) // 8)
    assert isinstance(event, Response)
    assert type(event.error) is type(error)


@pytest.mark.parametrize(("code", "kind"), [(99, UnknownError), (-2, UnknownError), (1, InternalError)])
def test_codes_that_triton_does_not_have(code: int, kind: type[Exception]) -> None:
    assert type(error_of(code, "text")) is kind


def test_layouts_name_tensors_and_wanted_outputs() -> None:
    packed = pack_layout((("input é", "FP32", (2, 3)), ("B", "BYTES", ())), ("OUT",))
    assert len(packed) % 8 == 0
    assert struct.unpack_from("=5Q", packed) == (2, 11, 2, 2, 3)
    assert packed[40:] == (
        pack_text("input é") + pack_words((13, 0)) + pack_text("B") + pack_words((1,)) + pack_text("OUT")
    )
