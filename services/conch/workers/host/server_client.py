"""The server that a worker belongs to, as its model calls it."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from conch.backends.python.calls.bls_call import refusal
from conch.core.bls import Waiter
from conch.core.errors import ConchError, UnavailableError, without_traceback
from conch.core.model_control import LoadParameter
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.servable import InlineClaim, Servable
from conch.workers.connection.message_stream import MessageStream
from conch.workers.connection.packet_channel import ChannelClosedError
from conch.workers.host.host_reader import Reading, Watch
from conch.workers.host.hosted_requests import HostRequest
from conch.workers.protocol import message_records, wire
from conch.workers.protocol.message_records import ResponseRecord
from conch.workers.protocol.received_message import ReceivedMessage
from conch.workers.protocol.tensor_transport import UnreachableError
from conch.workers.protocol.wire import Kind

_MOST_FOUND = 1000
_GONE = "the server is gone"


class _Answer:
    """What a question to the server comes to."""

    __slots__ = ("error", "here", "value")

    def __init__(self) -> None:
        self.here = False
        self.error: Exception | None = None
        self.value: Any = None


class WorkerCalls:
    """`conch.core.bls.ServerCalls` over the socket.

    Args:
        exchange: Where calls go.
        reading: Who reads the answers.
        watch: Reads while the main thread waits for something else.
    """

    def __init__(self, stream: MessageStream, reading: Reading, watch: Watch) -> None:
        self._stream = stream
        self._reading = reading
        self._watch = watch
        self._numbers = itertools.count(1)
        self._open: dict[int, InferenceRequest] = {}
        self._by_request: dict[int, int] = {}
        self._asked: dict[int, _Answer] = {}
        self._found: dict[tuple[str, str], SimpleNamespace] = {}
        self.waiters: set[Waiter] = set()

    # --- what models call ---------------------------------------------------------------------------------

    def find(self, request: InferenceRequest) -> Servable:
        """The model that a request would go to: its ``spec.decoupled``, and nothing else of it.

        What is known of it from an earlier call is believed, which saves a question: `submit` says what was
        believed, and the server refuses the request if that is not so any more.

        Raises:
            ConchError: There is no such model.
        """
        key = request.model_name, request.model_version
        found = None if request.correlation_id else self._found.get(key)
        if found is None:
            value = self.ask(
                "find",
                name=request.model_name,
                version=request.model_version,
                correlation=request.correlation_id,
                start=request.sequence_start,
            )
            found = SimpleNamespace(spec=SimpleNamespace(**value))
            if not request.correlation_id:
                if len(self._found) >= _MOST_FOUND:
                    self._found.clear()
                self._found[key] = found
        return cast(Servable, found)

    def submit(
        self,
        request: InferenceRequest,
        may_claim: bool = False,
        model: Servable | None = None,
        *,
        parent: InferenceRequest | None = None,
    ) -> InlineClaim | None:
        """Sends a request; its responder gets the outcome."""
        number = next(self._numbers)
        flags = (
            (message_records.SEQUENCE_START if request.sequence_start else 0)
            | (message_records.SEQUENCE_END if request.sequence_end else 0)
            | (message_records.EMPTY_FINAL if request.empty_final else 0)
            | _believed(model)
        )
        head = message_records.encode_request(
            request, number, flags, (request.model_name, request.model_version)
        )
        payload = self._stream.pack([list(request.inputs.values())], True)
        fields = head + payload.lists[0]
        self._open[number] = request
        self._by_request[id(request)] = number
        try:
            self._stream.send(Kind.CALL, number, fields, payload)
        except ChannelClosedError:
            self._ended(number)
            raise UnavailableError(_GONE) from None
        except BaseException:
            self._ended(number)
            raise
        if asyncio._get_running_loop() is not None:
            # A coroutine is going to wait; a thread would receive by itself, see `wait`.
            self._watch.attend()
        return None

    def cancel(self, request: InferenceRequest) -> None:
        """Says that nobody waits for a request any more."""
        request.cancelled = True
        number = self._by_request.get(id(request))
        if number is not None:
            try:
                self._stream.send(Kind.CALL_CANCEL, number)
            except ChannelClosedError:
                self._ended(number)

    def model_ready(self, name: str, version: str) -> bool:
        """See `ServerCalls.model_ready`."""
        return bool(self.ask("ready", name=name, version=version)["ready"])

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """See `ServerCalls.load`."""
        self.ask("load", name=name, parameters=_pack_parameters(parameters))

    def unload(self, name: str, unload_dependents: bool) -> None:
        """See `ServerCalls.unload`."""
        self.ask("unload", name=name, dependents=unload_dependents)

    def wait(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits for what a reply brings on the calling thread, which receives meanwhile: the fastest way."""
        try:
            return self._reading.until(done, timeout_s)
        except ChannelClosedError:
            raise UnavailableError(_GONE) from None

    def waits(
        self, request: InferenceRequest, parents: Sequence[InferenceRequest], has_come: Callable[[], bool]
    ) -> bool:
        """Tells the server that the calling thread waits for a call; it answers one that would wait for ever.

        Args:
            request: The call.
            parents: The requests that the thread executes, if it is the one that executes.
            has_come: Whether something has come for the call that nobody has taken.

        Returns:
            Whether the call waits for calls only, so that it is worth to look again soon.
        """
        numbers = [each.number for each in parents if isinstance(each, HostRequest)]
        for _ in range(2):  # the server believes it the second time
            number = self._by_request.get(id(request))
            if number is None or has_come():
                return False
            answer = self.ask("waits", call=number, requests=numbers)
            if answer["known"]:
                return bool(answer["found"])
        return False

    # --- the other side ------------------------------------------------------------------------------------

    def ask(self, question: str, **more: object) -> dict[str, Any]:
        """Asks the server something, and waits for the answer.

        Raises:
            ConchError: What the server says instead.
        """
        number = next(self._numbers)
        fields = wire.encode_json({"ask": question, **more})
        answer = self._asked[number] = _Answer()
        try:
            self._stream.send(Kind.ASK, number, fields)
            self._reading.until(lambda: answer.here)
        except ChannelClosedError:
            raise UnavailableError(_GONE) from None
        finally:
            self._asked.pop(number, None)
        if answer.error is not None:
            try:
                raise answer.error
            finally:
                del answer  # else the error would keep this frame, and that the model's
        value: dict[str, Any] = answer.value
        return value

    def on_answer(self, number: int, received: ReceivedMessage) -> None:
        """Takes the answer to a question."""
        answer = self._asked.pop(number, None)
        if answer is None:
            return
        fields = wire.decode_json(received.message.fields)
        if "code" in fields:
            answer.error = message_records.decode_error(received.message.fields)
        else:
            answer.value = fields
        answer.here = True

    def on_reply(self, number: int, received: ReceivedMessage) -> None:
        """Takes a response of another model."""
        record = ResponseRecord.decode(received.reader)
        try:
            outputs = received.tensors() if record.has_tensors else []
        except UnreachableError as unreachable:
            self.lost(number, Kind.REPLY, without_traceback(unreachable))
            return
        request = self._open.get(number)
        if record.final:
            self._ended(number)
        if request is None:
            return
        error = record.error
        if record.failed and error is not None:  # it was refused: perhaps something has changed
            self._found.pop((request.model_name, request.model_version), None)
            record.error = type(error)(refusal(request.model_name, error.message))
        parameters = None if record.parameters is None else dict(record.parameters)
        response = InferenceResponse(outputs, record.error, parameters) if record.present else None
        request.respond(response, record.final)

    def lost(self, number: int, kind: Kind, error: ConchError) -> None:
        """Ends a call, or a question, whose answer could not be read."""
        if kind is Kind.ANSWER:
            answer = self._asked.pop(number, None)
            if answer is not None:
                answer.error = error
                answer.here = True
            return
        request = self._open.get(number)
        if request is not None:
            self.cancel(request)
            self._ended(number)
            request.respond(InferenceResponse([], error), True)

    def _ended(self, number: int) -> None:
        request = self._open.pop(number, None)
        if request is not None:
            self._by_request.pop(id(request), None)


def _believed(model: Servable | None) -> int:
    if model is None:
        return 0
    return message_records.BELIEVED_DECOUPLED if model.spec.decoupled else message_records.BELIEVED_SINGLE


def _pack_parameters(parameters: Mapping[str, LoadParameter]) -> dict[str, Any]:
    return {
        key: {"file": base64.b64encode(value).decode("ascii")} if isinstance(value, bytes) else value
        for key, value in parameters.items()
    }
