"""Arbitrary messages of a worker end at most that worker; the server itself goes on."""

from __future__ import annotations

import logging
import os
import socket
import threading
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.core import WAIT_S, make_spec
from tests.support.profiles import scaled
from tests.support.servers import eventually
from tests.support.workers import PLACEMENT, Begun, NoCalls, batch_of, inline, placed, request_of

from conch.core.errors import ConchError, InternalError, UnavailableError
from conch.core.spec import ModelSpec
from conch.ipc import channel, codec
from conch.ipc.channel import ChannelClosedError, Kind, PacketChannel
from conch.ipc.codec import encode_failure, encode_requests, encode_responses
from conch.ipc.tensors import Payload, Place
from conch.workers.connection.worker_connection import WorkerConnection

SMALL = st.integers(0, 5)
FIELDS = st.one_of(
    st.binary(max_size=40),
    st.builds(
        encode_responses,
        st.just(1),
        st.none() | st.lists(st.integers(0, 31), min_size=1, max_size=1),
        st.booleans(),
        st.tuples(SMALL, SMALL, SMALL),
    ),
    st.just(encode_failure(InternalError("no"))[0]),
    st.just(encode_requests([request_of()[0]])[0]),
    st.sampled_from(
        [
            b"{}",
            b'{"query":"find","name":"x","version":""}',
            b'{"query":"load","name":"x","parameters":{"a":{"file":"%"}}}',
            b'{"query":"load","name":1}',
            b'{"query":"family","number":1,"name":"f_uzz","kind":"gauge","description":""}',
            b'{"query":"metric","number":2,"family":1,"labels":{},"bounds":null}',
            b'{"query":"metric","number":2,"family":[],"labels":{},"bounds":null}',
            b'{"query":"value","number":2}',
            b'{"query":"value","number":{}}',
            b'{"do":"increment","value":1}',
            b'{"do":"set","value":true}',
            b'{"ready":1}',
            b'{"name":"a","level":30,"text":"t","file":"f","line":1}',
            b'{"name":"a","level":99999999999999999999999999,"text":"t","file":"f","line":1}',
            b'{"code":"INTERNAL","text":"x"}',
            channel.encode_numbers([1, 2]),
        ]
    ),
)
TEXTS = st.sampled_from([b"", b"{}", b'{"model":["a","1"]}', b'{"code":"INTERNAL","text":"x"}'])
NUMBERS = st.sampled_from([0, 1, 2, channel.NEW, channel.NEW | 1, channel.NEW | 2])
TENSORS = st.sampled_from(
    [
        Payload(),
        placed((), []),
        placed((("OUT", "FP32", (2,)),), [Place(0, 0, 8)]),
        inline((("OUT", "FP32", (2,)),)),
        inline((("OUT", "BYTES", (1,)),), [8]),
        placed((("OUT", "INT32", (2,)),), [Place(1, 0, 8)]),
        placed((("OUT", "BYTES", (2,)),), [Place(channel.RETURNED | 1, 0, 8)]),
    ]
)


@st.composite
def packets(draw: st.DrawFn) -> bytes:
    """A packet whose parts are valid, but may not fit each other."""
    tensors = draw(TENSORS)
    texts = [*draw(st.lists(TEXTS, max_size=2)), *tensors.texts]
    numbers = draw(st.none() | st.lists(NUMBERS, min_size=len(texts), max_size=len(texts)))
    return channel.encode(
        draw(st.sampled_from(Kind)),
        draw(SMALL),
        draw(FIELDS) + tensors.fields,
        draw(st.lists(st.binary(min_size=8, max_size=8), max_size=2)),
        draw(SMALL),
        draw(st.sampled_from([0, 4096, 65536])),
        draw(st.booleans()),
        draw(st.lists(SMALL, max_size=2)),
        channel.encode_texts(texts, numbers, draw(st.booleans())),
    )


MESSAGES = st.one_of(
    st.binary(max_size=100),
    packets(),
    st.integers(0, 2**40).map(partial(channel.outline, channel.encode(Kind.DONE))),
)


@pytest.mark.parametrize("decoupled", [False, True])
@settings(max_examples=scaled(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(st.tuples(MESSAGES, st.sampled_from([None, "memfd", "pipe"])), max_size=5))
def test_a_worker_that_sends_anything(
    decoupled: bool, messages: list[tuple[bytes, str | None]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    _converse(make_spec(decoupled=decoupled), messages)
    unexpected = [record for record in caplog.records if record.exc_info and record.levelno >= logging.ERROR]
    assert unexpected == [], messages


def _converse(spec: ModelSpec, messages: list[tuple[bytes, str | None]]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lost = threading.Event()
    loaded = threading.Event()
    link = WorkerConnection(
        PacketChannel(ours, blocking=False), "m_0_0", spec, NoCalls(), lambda reason: lost.set()
    )
    worker = PacketChannel(theirs)

    def on_loaded(error: ConchError | None) -> None:
        loaded.set()

    worker.send([channel.encode(Kind.HELLO, 0, codec.encode_hello(1))])
    worker.send([channel.encode(Kind.LOADED, 0, b'{"readiness":true}')])
    link.load([PLACEMENT], on_loaded)
    assert loaded.wait(WAIT_S)
    request, answers = request_of("")
    begun: Begun = Begun(batch_of(request))
    link.start(begun.batch, begun.done)
    for message, kind in messages:
        try:
            _send(worker, message, kind)
        except ChannelClosedError:
            break
    worker.close()
    eventually(lambda: link.lost, "the end of the worker is noticed")
    try:
        begun.result()
    except ConchError as error:
        assert isinstance(error, UnavailableError) or error.message == "x"
    assert link.close(WAIT_S)
    del answers


def _send(worker: PacketChannel, message: bytes, kind: str | None) -> None:
    if kind is None:
        worker.send([message])
        return
    fds = [os.memfd_create("x", os.MFD_CLOEXEC)] if kind == "memfd" else list(os.pipe())
    try:
        if kind == "memfd":
            os.write(fds[0], message)
        worker.send([message], fds)
    finally:
        for fd in fds:
            os.close(fd)
