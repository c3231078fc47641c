"""gRPC's interoperability cases that other tests do not have, by grpcio's and grpclib's clients.

Source: interop-test-descriptions.md of the gRPC project.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpclib.client import Channel
from grpclib.const import Cardinality
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, StreamTerminatedError
from tests.support.servers import WAIT_S, past_deadline

from conch.frontends.grpc.rpc_calls import StreamRpc, UnaryRpc
from conch.frontends.grpc.transport.port_state import PortOptions
from conch.frontends.grpc.transport.transport_server import TransportServer

SIZES = (27_182, 8, 1_828, 45_904)
"""Sizes of the cases' requests."""
ANSWERS = (31_415, 9, 2_653, 58_979)
"""Sizes of the cases' responses."""
SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"
TRAILING = ("x-grpc-test-echo-trailing-bin", b"\xab\xab\xab")
KINDS = {
    (False, False): Cardinality.UNARY_UNARY,
    (False, True): Cardinality.UNARY_STREAM,
    (True, False): Cardinality.STREAM_UNARY,
    (True, True): Cardinality.STREAM_STREAM,
}
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass
class Case:
    """A call.

    Attributes:
        method: Its path.
        messages: Messages of the client: each after the answer to the one before it, if `in_turns`.
        streams: Two flags: the client's and the server's side are streams.
        cancel_after: Number of answers after which the client cancels.
    """

    method: str
    messages: Sequence[bytes] = ()
    streams: tuple[bool, bool] = (False, False)
    metadata: Metadata = ()
    timeout_s: float = WAIT_S
    in_turns: bool = False
    cancel_after: int | None = None


@dataclass
class Outcome:
    status: int
    details: str = ""
    answers: list[bytes] = field(default_factory=list)
    trailing: Metadata = ()


class Site:
    """The service of the cases."""

    def __init__(self) -> None:
        self.cancelled: queue.Queue[str] = queue.Queue()
        self.server = TransportServer(PortOptions())
        self.server.serve(
            {"/i.I/Unary": self.unary},
            {
                "/i.I/Sum": self.sum,
                "/i.I/Sizes": self.sizes,
                "/i.I/Each": self.each,
                "/i.I/Fail": lambda call: call.refuse(2, SPECIAL),
            },
            {},
        )
        self.port = self.server.add_port("127.0.0.1:0")
        self.server.start()

    def unary(self, call: UnaryRpc, message: Any) -> None:
        """Answers with the message; a text is an error's."""
        trailing = tuple(pair for pair in call.metadata if pair[0] == TRAILING[0])
        if bytes(message).startswith(b"error "):
            call.abort(2, bytes(message)[6:].decode(), trailing)
        else:
            call.reply_with(bytes(message), "gzip", trailing)

    def sum(self, call: StreamRpc) -> None:
        """Counts bytes."""
        total = 0

        def take(message: Any) -> None:
            nonlocal total
            if message is None:
                call.write(b"%d" % total)
                call.close()
            else:
                total += len(message)
                call.read_next()

        call.start(take, lambda: self.cancelled.put("sum"))

    def sizes(self, call: StreamRpc) -> None:
        """Answers one message with messages of the sizes that it names."""

        def take(message: Any) -> None:
            if message is not None:
                for size in bytes(message).split():
                    call.write(bytes(int(size)))
                call.close()

        call.start(take, lambda: self.cancelled.put("sizes"), "gzip")

    def each(self, call: StreamRpc) -> None:
        """Answers each message with itself; says at the end what has been echoed in metadata."""
        trailing = tuple(pair for pair in call.metadata if pair[0] == TRAILING[0])

        def take(message: Any) -> None:
            if message is None:
                call.close(0, "", trailing)
            else:
                call.write(bytes(message))
                call.read_next()

        call.start(take, lambda: self.cancelled.put("each"))


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    assert site.server.stop(WAIT_S)


def by_grpcio(port: int, case: Case, compression: grpc.Compression | None = None) -> Outcome:
    """Makes a call with grpcio."""
    turns: queue.Queue[bool] = queue.Queue()
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        for message in case.messages:
            yield message
            if case.in_turns:
                turns.get(timeout=WAIT_S)
        if case.cancel_after is not None:
            over.wait(WAIT_S)

    with closing(grpc.insecure_channel(f"127.0.0.1:{port}")) as channel:
        settings: dict[str, Any] = {
            "timeout": case.timeout_s,
            "metadata": case.metadata,
            "compression": compression,
        }
        if case.streams == (False, False):
            call = channel.unary_unary(case.method).future(case.messages[0], **settings)
            answers = [] if call.exception() else [call.result()]
        elif case.streams == (True, False):
            call = channel.stream_unary(case.method).future(messages(), **settings)
            if case.cancel_after == 0:
                call.cancel()
                over.set()
                return Outcome(call.code().value[0])
            answers = [] if call.exception() else [call.result()]
        else:
            if case.streams[0]:
                call = channel.stream_stream(case.method)(messages(), **settings)
            else:
                call = channel.unary_stream(case.method)(case.messages[0], **settings)
            answers = []
            try:
                for answer in call:
                    answers.append(answer)
                    turns.put(True)
                    if len(answers) == case.cancel_after:
                        call.cancel()
            except grpc.RpcError:
                pass
            over.set()
        details = call.details() or ""
        trailing = tuple((key, value) for key, value in call.trailing_metadata() or ())
        return Outcome(call.code().value[0], details, answers, trailing)


class RawCodec(CodecBase):
    """Messages are bytes."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: Any) -> bytes:
        return message

    def decode(self, data: bytes, message_type: Any) -> bytes:
        return data


def by_grpclib(port: int, case: Case) -> Outcome:
    """Makes a call with grpclib."""

    async def call() -> Outcome:
        channel = Channel("127.0.0.1", port, codec=RawCodec())
        answers: list[bytes] = []
        trailing: Any = {}
        try:
            async with channel.request(
                case.method,
                KINDS[case.streams],
                bytes,
                bytes,
                timeout=case.timeout_s,
                metadata=list(case.metadata),
            ) as stream:
                await stream.send_request()
                for message in case.messages:
                    await stream.send_message(message)
                    if case.in_turns:
                        answers.append(await stream.recv_message() or b"")
                if case.cancel_after is not None:
                    while len(answers) < case.cancel_after:
                        answers.append(await stream.recv_message() or b"")
                    await stream.cancel()
                    return Outcome(1, "", answers)
                await stream.end()
                while (answer := await stream.recv_message()) is not None:
                    answers.append(answer)
                await stream.recv_trailing_metadata()
                trailing = stream.trailing_metadata
        except GRPCError as error:
            trailing = stream.trailing_metadata if stream.trailing_metadata is not None else {}
            return Outcome(error.status.value, error.message or "", answers, tuple(trailing.items()))
        except (TimeoutError, StreamTerminatedError):
            return Outcome(4, "", answers)
        finally:
            channel.close()
        return Outcome(0, "", answers, tuple(trailing.items()))

    return asyncio.run(asyncio.wait_for(call(), WAIT_S))


Client = Callable[[int, Case], Outcome]


@pytest.fixture(params=[by_grpcio, by_grpclib], ids=["grpcio", "grpclib"])
def client(request: pytest.FixtureRequest) -> Client:
    chosen: Client = request.param
    return chosen


def zeros(sizes: Sequence[int]) -> list[bytes]:
    return [bytes(size) for size in sizes]


TO_THE_END = {
    "empty_unary": (Case("/i.I/Unary", [b""]), [b""]),
    "large_unary": (Case("/i.I/Unary", zeros([271_828])), zeros([271_828])),
    "client_streaming": (Case("/i.I/Sum", zeros(SIZES), (True, False)), [b"74922"]),
    "server_streaming": (
        Case("/i.I/Sizes", [b" ".join(b"%d" % size for size in ANSWERS)], (False, True)),
        zeros(ANSWERS),
    ),
    "ping_pong": (Case("/i.I/Each", zeros(SIZES), (True, True), in_turns=True), zeros(SIZES)),
    "empty_stream": (Case("/i.I/Each", [], (True, True)), []),
}


@pytest.mark.parametrize(("case", "answers"), TO_THE_END.values(), ids=TO_THE_END)
def test_calls_to_the_end(site: Site, client: Client, case: Case, answers: list[bytes]) -> None:
    outcome = client(site.port, case)
    assert (outcome.status, outcome.answers) == (0, answers)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("name", ["large_unary", "client_streaming", "server_streaming", "ping_pong"])
def test_compressed_calls(site: Site, name: str, compression: grpc.Compression) -> None:
    """client_compressed_* and server_compressed_*; grpclib has no compression."""
    case, answers = TO_THE_END[name]
    outcome = by_grpcio(site.port, case, compression)
    assert (outcome.status, outcome.answers) == (0, answers)


def test_cancel_after_begin(site: Site, client: Client) -> None:
    assert client(site.port, Case("/i.I/Sum", [], (True, False), cancel_after=0)).status == 1
    # A client may cancel before it has sent anything: then the next call is the first.
    outcome = client(site.port, Case("/i.I/Sum", [b"1"], (True, False)))
    assert (outcome.status, outcome.answers) == (0, [b"1"])


def test_cancel_after_first_response(site: Site, client: Client) -> None:
    case = Case("/i.I/Each", [bytes(SIZES[0])], (True, True), cancel_after=1)
    outcome = client(site.port, case)
    assert (outcome.status, outcome.answers) == (1, [bytes(SIZES[0])])
    assert site.cancelled.get(timeout=WAIT_S) == "each"


def test_timeout_on_sleeping_server(site: Site, client: Client) -> None:
    """The client's message waits for an answer that never comes: only the deadline ends the call."""

    def status(timeout_s: float) -> int:
        case = Case("/i.I/Each", [b"a", b"b"], (True, True), timeout_s=timeout_s, cancel_after=3)
        return client(site.port, case).status

    assert past_deadline(status, lambda: not site.cancelled.empty()) == 4
    assert site.cancelled.get() == "each"


@pytest.mark.parametrize("text", ["test status message", SPECIAL])
def test_status_code_and_message(site: Site, client: Client, text: str) -> None:
    outcome = client(site.port, Case("/i.I/Unary", [f"error {text}".encode()], metadata=(TRAILING,)))
    assert (outcome.status, outcome.details, outcome.answers) == (2, text, [])
    assert TRAILING in outcome.trailing


def test_special_status_message_of_a_stream(site: Site, client: Client) -> None:
    outcome = client(site.port, Case("/i.I/Fail", [b""], (True, True)))
    assert (outcome.status, outcome.details) == (2, SPECIAL)


@pytest.mark.parametrize("method", ["/i.I/Unimplemented", "/i.Unimplemented/Unary"])
@pytest.mark.parametrize("kind", KINDS)
def test_unimplemented(site: Site, client: Client, method: str, kind: tuple[bool, bool]) -> None:
    assert client(site.port, Case(method, [b""], kind)).status == 12


@pytest.mark.parametrize("method", ["Unary", "Each"])
def test_custom_metadata(site: Site, client: Client, method: str) -> None:
    """Without the case's initial metadata: handlers send trailing metadata only."""
    kind = (method == "Each",) * 2
    outcome = client(site.port, Case(f"/i.I/{method}", [bytes(271_828)], kind, (TRAILING,)))
    assert outcome.status == 0
    assert TRAILING in outcome.trailing
