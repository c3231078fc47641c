"""The core's end of one front."""

from __future__ import annotations

import gc
import os
import socket
import weakref
from functools import partial

import numpy as np
from tests.support.servers import eventually
from tests.support.workers import request_of

from conch.core.clock import monotonic_ns
from conch.door.operation_table import INFER
from conch.frontends.grpc.open_calls import OpenCalls
from conch.frontends.grpc.transport.port_state import PortOptions
from conch.fronts import front_messages as messages
from conch.fronts.connection_passing import ConnectionSender
from conch.fronts.decoded_requests import RequestReader
from conch.fronts.front_link import FrontLink, Handlers
from conch.fronts.front_messages import CallerFacts, FrontSettings
from conch.ipc import codec
from conch.ipc.channel import Kind, PacketChannel
from conch.ipc.loop import IO_LOOP
from conch.ipc.tensors import MessageStream


def _send_request(front: MessageStream) -> None:
    """Sends what a front sends until a request with a block is on its way."""
    front.send(Kind.HELLO, 0, codec.encode_hello(1))
    front.send(Kind.CALLERS, 0, messages.encode_callers([CallerFacts("ipv4:127.0.0.1:1", (), ())]))
    request, _ = request_of(IN=np.zeros(100_000, np.float32))
    payload = front.pack([request.inputs.values()])
    fields, texts = codec.encode_requests([request], numbers=[1], model=("m", ""))
    front.send(Kind.EXECUTE, 0, fields, payload, texts)


def test_a_lost_front_leaves_nothing_to_the_garbage_collector() -> None:
    """The collector may come after hundreds of losses, and each has buffers of 100 KB."""
    loop = IO_LOOP.hold()
    open_calls = OpenCalls()
    lost: list[str] = []
    cancelled: list[int] = []
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    given, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with taken:
        front = MessageStream(PacketChannel(theirs), in_worker=False)
        connections = ConnectionSender[tuple[int, str]](given, os.eventfd(0))
        link = FrontLink(
            "front 0",
            ours,
            connections,
            Handlers({INFER.grpc_method: lambda call, message: call.watch(cancelled.append, 1)}),
            RequestReader(),
            open_calls,
            loop,
            monotonic_ns,
            on_serving=lambda: None,
            on_state=lambda: None,
            on_lost=lost.append,
        )
        found = weakref.ref(link)
        settings = FrontSettings(PortOptions(), (None,), (), (), (), 0)
        gc.disable()
        try:
            loop.call_soon(partial(link.start, settings))
            del link
            _send_request(front)
            eventually(lambda: open_calls.unary, "its request is handled")
            open_calls.unary.clear()
            front.close()
            front.channel.close()

            def is_freed() -> bool:
                loop.call_soon(lambda: None)  # in the round before, it may have been the source of an event
                return found() is None

            eventually(is_freed, "it is freed")
        finally:
            gc.enable()
            IO_LOOP.release()
            connections.take_back()
    assert (lost, cancelled) == (["its process has ended"], [1])
