"""Messages of the core and a front: encoded ones are read again, and any other bytes are refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conch.core.tensor import Buffer
from conch.fronts import front_messages as messages
from conch.fronts.front_messages import Answer, CallerFacts
from conch.ipc.channel import Kind, PacketChannel, WireError
from conch.ipc.tensors import MessageStream, ReceivedMessage

_METADATA = st.lists(st.tuples(st.text(), st.text() | st.binary())).map(tuple)
_MESSAGES = st.binary(max_size=100) | st.just(bytes(20_001))


class Pair:
    """Both ends of a conversation."""

    def __init__(self) -> None:
        self.ours, self.theirs = (
            MessageStream(PacketChannel(each), in_worker=False)
            for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        )

    def carry(self, kind: Kind, fields: bytes, message: Buffer | None = None) -> ReceivedMessage:
        """Sends a message and receives it."""
        self.ours.send(kind, 7, fields, messages.carrying(message))
        return self.theirs.receive()

    def close(self) -> None:
        """Ends it."""
        for each in (self.ours, self.theirs):
            each.close()
            each.channel.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(Pair()) as made:
        yield made


_each_example_alike = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@_each_example_alike
@given(
    deadline_ns=st.none() | st.integers(0, 2**63 - 1),
    method=st.text(max_size=50),
    message=st.none() | _MESSAGES,
)
def test_calls_arrive(pair: Pair, deadline_ns: int | None, method: str, message: bytes | None) -> None:
    fields = messages.encode_open(3, deadline_ns, method, message)
    opened = messages.decode_open(pair.carry(Kind.OPEN, fields, message))
    assert opened[:3] == (3, deadline_ns, method)
    assert (None if opened.message is None else bytes(opened.message)) == message


@_each_example_alike
@given(
    status=st.integers(0, 16),
    details=st.text(),
    trailing=_METADATA,
    compression=st.none() | st.just("gzip"),
    message=st.none() | _MESSAGES,
)
@example(status=0, details="", trailing=(("key", "value"),), compression=None, message=b"x")
def test_answers_arrive(
    pair: Pair,
    status: int,
    details: str,
    trailing: tuple[tuple[str, str | bytes], ...],
    compression: str | None,
    message: bytes | None,
) -> None:
    answer = Answer(status, details, trailing, compression, message)
    found = messages.decode_answer(pair.carry(Kind.ANSWER, messages.encode_answer(answer), message))
    assert found[:4] == answer[:4]
    assert (None if found.message is None else bytes(found.message)) == message


@given(st.lists(st.builds(CallerFacts, st.text(), st.lists(st.text()).map(tuple), _METADATA)))
def test_callers_arrive(callers: list[CallerFacts]) -> None:
    assert messages.decode_callers(messages.encode_callers(callers)) == callers


@_each_example_alike
@given(st.binary(max_size=60))
def test_other_bytes_are_refused(pair: Pair, fields: bytes) -> None:
    received = pair.carry(Kind.OPEN, fields)
    for decode in (
        messages.decode_open,
        messages.decode_answer,
        messages.decode_message,
        messages.decode_count,
        lambda each: messages.decode_callers(each.fields),
    ):
        try:
            decode(received)
        except WireError:
            pass
