"""The server as a worker's model calls it: `conch.core.bls.ServerCalls` over the socket.

Owns: open calls and queries by number, known models. Threads: any; replies arrive on the thread that reads.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from conch.backends.python.calls.bls_call import refusal
from conch.backends.python.runtime.event_loop import in_coroutine
from conch.core.bls import Waiter
from conch.core.errors import ConchError, UnavailableError
from conch.core.model_control import LoadParameter
from conch.core.recognition import Table
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.servable import InlineClaim, Servable
from conch.ipc import codec
from conch.ipc.channel import ChannelClosedError, Kind, WireError
from conch.ipc.codec import (
    EMPTY_FINAL,
    EXPECTS_DECOUPLED,
    EXPECTS_SINGLE,
    FAILED,
    FINAL,
    decode_responses,
    encode_requests,
)
from conch.ipc.tensors import MessageStream, ReceivedMessage, UnreachableError
from conch.workers.host.host_reader import BackupReader, HostReader
from conch.workers.host.hosted_requests import HostedRequest

_MOST_FOUND = 1000
_GONE = "the server is gone"


class _Reply:
    """The pending result of a query."""

    __slots__ = ("arrived", "error", "value")

    def __init__(self) -> None:
        self.arrived = False
        self.error: Exception | None = None
        self.value: Any = None


class ServerClient:
    """Sends calls and queries, and matches replies to them."""

    passes_blocks = False

    def __init__(self, stream: MessageStream, reader: HostReader, backup_reader: BackupReader) -> None:
        self._stream = stream
        self._reader = reader
        self._backup_reader = backup_reader
        self._numbers = itertools.count(1)
        self._open: dict[int, InferenceRequest] = {}
        self._by_request: dict[int, int] = {}
        self._queries: dict[int, _Reply] = {}
        self._found: Table[tuple[str, str], SimpleNamespace] = Table(_MOST_FOUND)
        self.waiters: set[Waiter] = set()

    # --- called by models ---------------------------------------------------------------------------------

    def find(self, request: InferenceRequest) -> Servable:
        """Finds the model of a request; only its ``spec.decoupled`` is valid.

        The result of an earlier call is assumed, which saves a query: `submit` sends the assumption, and the
        server refuses the request if it no longer holds.

        Raises:
            ConchError: There is no such model.
        """
        key = request.model_name, request.model_version
        found = None if request.correlation_id else self._found.get(key)
        if found is None:
            value = self.query(
                "find",
                name=request.model_name,
                version=request.model_version,
                correlation=request.correlation_id,
                start=request.sequence_start,
            )
            found = SimpleNamespace(spec=SimpleNamespace(**value))
            if not request.correlation_id:
                self._found.keep(key, found)
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
        flags = (EMPTY_FINAL if request.empty_final else 0) | _assumption(model)
        called = request.model_name, request.model_version
        numbers = [parent.number] if isinstance(parent, HostedRequest) else None
        fields, texts = encode_requests(
            [request], request.batch_size, numbers=numbers, flags=flags, model=called
        )
        payload = self._stream.pack([list(request.inputs.values())], True)
        self._open[number] = request
        self._by_request[id(request)] = number
        try:
            self._stream.send(Kind.CALL, number, fields, payload, texts)
        except ChannelClosedError:
            self._ended(number)
            raise UnavailableError(_GONE) from None
        except BaseException:  # raised again
            self._ended(number)
            raise
        if in_coroutine():
            # A coroutine will wait; a thread would read by itself, see `wait`.
            self._backup_reader.read_now()
        return None

    def cancel(self, request: InferenceRequest) -> None:
        """Cancels a call."""
        request.cancelled = True
        number = self._by_request.get(id(request))
        if number is not None:
            try:
                self._stream.send(Kind.CALL_CANCEL, number)
            except ChannelClosedError:
                self._ended(number)

    def model_ready(self, name: str, version: str) -> bool:
        """See `ServerCalls.model_ready`."""
        return bool(self.query("ready", name=name, version=version)["ready"])

    def properties(self, name: str, version: str) -> tuple[bool, bool]:
        """Flags of a model: True if it is decoupled, and True if it batches."""
        found = self.query("properties", name=name, version=version)
        return bool(found["decoupled"]), bool(found["batches"])

    def fact(self, kind: str, name: str = "", version: str = "") -> object:
        """See `ServerCalls.fact`."""
        return self.query("fact", kind=kind, name=name, version=version)["fact"]

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """See `ServerCalls.load`."""
        self.query("load", name=name, parameters=_pack_parameters(parameters))

    def unload(self, name: str, unload_dependents: bool) -> None:
        """See `ServerCalls.unload`."""
        self.query("unload", name=name, dependents=unload_dependents)

    def wait(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until `done()`; the calling thread reads meanwhile, which is the fastest way."""
        try:
            return self._reader.until(done, timeout_s)
        except ChannelClosedError:
            raise UnavailableError(_GONE) from None

    def waits(
        self, request: InferenceRequest, parents: Sequence[InferenceRequest], has_come: Callable[[], bool]
    ) -> bool:
        """Reports to the server that the calling thread waits for a call; a deadlocked call is failed.

        Args:
            request: The call.
            parents: The requests that the thread executes, if it is the one that executes.
            has_come: True if a response of the call has arrived.

        Returns:
            True if the call waits for other calls only; then it is worth to check again soon.
        """
        numbers = [each.number for each in parents if isinstance(each, HostedRequest)]
        for _ in range(2):  # the server accepts the second report
            number = self._by_request.get(id(request))
            if number is None or has_come():
                return False
            reply = self.query("waits", call=number, requests=numbers)
            if reply["known"]:
                return bool(reply["found"])
        return False

    # --- replies -------------------------------------------------------------------------------------------

    def query(self, kind: str, /, **fields: object) -> dict[str, Any]:
        """Sends a query and waits for its result.

        Raises:
            ConchError: The server replied with an error, or has closed the socket.
        """
        number = next(self._numbers)
        encoded = codec.encode_json({"query": kind, **fields})
        reply = self._queries[number] = _Reply()
        try:
            self._stream.send(Kind.QUERY, number, encoded)
            self._reader.until(lambda: reply.arrived)
        except ChannelClosedError:
            raise UnavailableError(_GONE) from None
        finally:
            self._queries.pop(number, None)
        if reply.error is not None:
            try:
                raise reply.error
            finally:
                del reply  # the error would keep this frame and the model's alive
        value: dict[str, Any] = reply.value
        return value

    def on_result(self, number: int, received: ReceivedMessage) -> None:
        """Handles the result of a query."""
        reply = self._queries.pop(number, None)
        if reply is None:
            return
        fields = codec.decode_json(received.fields)
        if "code" in fields:
            reply.error = codec.decode_error(received.fields)
        else:
            reply.value = fields
        reply.arrived = True

    def on_reply(self, number: int, received: ReceivedMessage) -> None:
        """Handles a response of a called model."""
        columns = decode_responses(received, 1)
        if columns.error is not None or columns.flags is None:
            raise WireError("a reply has flags, and is no outcome of a batch")
        (response,), (flags,) = columns.responses, columns.flags
        error = None if response is None else response.error
        if isinstance(error, UnreachableError):
            self.lost(number, Kind.REPLY, error)
            return
        request = self._open.get(number)
        final = flags & FINAL != 0
        if final:
            self._ended(number)
        if request is None:
            return
        if flags & FAILED and error is not None:  # refused: the assumption may be wrong
            self._found.pop((request.model_name, request.model_version), None)
            response = InferenceResponse([], type(error)(refusal(request.model_name, error.message)))
        request.respond(response, final)

    def lost(self, number: int, kind: Kind, error: ConchError) -> None:
        """Fails a call or query whose reply could not be read."""
        if kind is Kind.RESULT:
            reply = self._queries.pop(number, None)
            if reply is not None:
                reply.error = error
                reply.arrived = True
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


def _assumption(model: Servable | None) -> int:
    if model is None:
        return 0
    return EXPECTS_DECOUPLED if model.spec.decoupled else EXPECTS_SINGLE


def _pack_parameters(parameters: Mapping[str, LoadParameter]) -> dict[str, Any]:
    return {
        key: {"file": base64.b64encode(value).decode("ascii")} if isinstance(value, bytes) else value
        for key, value in parameters.items()
    }
