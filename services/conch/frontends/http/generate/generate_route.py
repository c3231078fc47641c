"""Serves generate and generate_stream: requests in flat JSON, responses as JSON or server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from conch.core.admission import Admission
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import ConchError, InvalidArgumentError, UnsupportedError
from conch.core.request import InferenceRequest, InferenceResponse, Parameter
from conch.core.response_errors import unsendable, wrong_parameter
from conch.core.servable import Servable
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor, decode_bytes
from conch.door import operation_table as table
from conch.door.door import Door
from conch.door.operation_table import path_pattern
from conch.frontends.fair_pool import AbandonedError
from conch.frontends.http.generate.generate_request import map_request, parse_document
from conch.frontends.http.http_exchange import EVENT_STREAM, ClientDisconnectError, HttpExchange, Reply
from conch.frontends.http.http_pools import Pools, loaded
from conch.frontends.http.http_routing import Route, route
from conch.frontends.http.json_body import JSON, MOST_BYTES, error_body, parsed, read_body, retry_after
from conch.frontends.http.jsontext.json_loader import SlowTextError
from conch.frontends.http.mailbox import Mailbox, ResponseQueue
from conch.frontends.unread_bytes import UnreadBytes
from conch.frontends.yield_gil import yield_gil

_COMMENT = b":\n\n"
"""A comment, which clients of event streams ignore."""
_PIECE: Final = 16 * 1024
_SHORT: Final = 128 << 10
"""Bytes of tensors that the model's thread or the I/O loop encodes; the parsing pool encodes more."""
_MOST_TEMPLATES: Final = 512
_Template = tuple[list[tuple[bytes, int]], bytes]
"""The text before each value, with the value's index, in order; and the text behind the last one."""

_NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates "
    "various number of responses"
)


def generate_routes(
    door: Door,
    pools: Pools,
    most_bytes: int = MOST_BYTES,
    clock: Clock = monotonic_ns,
    admission: Admission | None = None,
) -> list[Route]:
    """Returns the routes.

    Args:
        door: The core.
        pools: Pools for large bodies.
        most_bytes: Limit of a body, and of its tensors together.
        clock: Monotonic time in nanoseconds.
        admission: Admission of the front end; None for a new one.
    """
    submit = Submission(door, pools, most_bytes, clock, admission or door.admission("http"))

    async def generate(exchange: HttpExchange, model: str, version: str) -> Reply:
        call = await submit(exchange, model, version)
        try:
            return await _single(call)
        finally:
            call.end()

    async def stream(exchange: HttpExchange, model: str, version: str) -> None:
        call = await submit(exchange, model, version)
        try:
            await _stream(exchange, call)
        finally:
            call.end()

    return [
        route(path_pattern(table.GENERATE.paths[0]), ["POST"], table.GENERATE.access, generate),
        route(path_pattern(table.GENERATE_STREAM.paths[0]), ["POST"], table.GENERATE_STREAM.access, stream),
    ]


class Item(NamedTuple):
    """One response.

    Attributes:
        body: Encoded body; None for a final marker.
        status: HTTP status.
        final: True for the last response.
        retry_after_ms: Milliseconds after which to retry, for an error that has such a time.
        refused: The error if no model has taken the request.
    """

    body: bytes | None
    status: int
    final: bool
    retry_after_ms: int | None = None
    refused: ConchError | None = None


class LongItem(NamedTuple):
    """A response that takes long to encode.

    Attributes:
        encode: Encodes it.
        size: Bytes of its tensors.
    """

    encode: Callable[[], Item]
    size: int


class GenerateCall:
    """A running request and its responses.

    Args:
        admission: Admission of the front end.
        mailbox: Wakes the event loop.
        exchange: The HTTP request.
        pools: Encode long responses.
    """

    def __init__(self, admission: Admission, mailbox: Mailbox, exchange: HttpExchange, pools: Pools) -> None:
        self._admission = admission
        self._exchange = exchange
        self._pools = pools
        self._request: InferenceRequest | None = None
        self._responses: ResponseQueue[Item | LongItem] = ResponseQueue(mailbox)

    def begin(self, request: InferenceRequest) -> None:
        """Sets the request before it is submitted; any thread."""
        self._request = request
        request.reader = self._responses
        request.context = self._exchange

    def end(self) -> None:
        """Closes the queue and cancels the request if it still runs."""
        self._responses.close()
        request, self._request = self._request, None  # breaks a reference cycle
        if request is not None and not request.completed:
            self._admission.cancel(request)

    def respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Queues a response, encoded if it is short, on the model's thread or the I/O loop."""
        item = _queued(request, response, final)
        size = item.size if isinstance(item, LongItem) else len(item.body or b"")
        if request.watch is not None:
            request.watch.bytes_out += size
        self._responses.put(item, size)

    async def take_all(self) -> list[Item] | None:
        """Waits for responses and takes those there are; None once the call has ended."""
        taken = await self._responses.take_all()
        return None if taken is None else [await self._finished(item) for item in taken]

    async def _finished(self, item: Item | LongItem) -> Item:
        if isinstance(item, Item):
            return item
        try:
            return await parsed(self._exchange, self._pools, item.encode)
        except ConchError as error:  # the server stops, or the client has gone
            return _failure(error, True)


def _queued(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> Item | LongItem:
    try:
        if response is not None and (size := sum(tensor.nbytes for tensor in response.outputs)) > _SHORT:
            # The model may write to its arrays when this thread goes on.
            outputs = [tensor.detached(tensor.name) for tensor in response.outputs]
            kept = InferenceResponse(outputs, parameters=response.parameters)
            return LongItem(partial(_encoded, request, kept, final), size)
    except Exception as error:  # boundary: outputs that user code has made
        return _failure(unsendable(request.model_name, response, error), True)
    return _encoded(request, response, final)


def _encoded(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> Item:
    try:
        return _item(request, response, final)
    except AbandonedError:
        raise
    except ConchError as error:
        return _failure(error, final)
    except Exception as error:  # boundary: outputs that user code has made
        # A missing response would go unnoticed, so the request ends, as after a worker's failure.
        return _failure(unsendable(request.model_name, response, error), True)


def _item(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> Item:
    if response is None:
        return Item(None, 200, final)
    model = request.model
    if response.error is not None:
        failure = _failure(response.error, final)
        return failure if model is not None else failure._replace(refused=response.error)
    assert model is not None, "only a request that has been submitted is answered"
    return Item(answer_object(model.spec.name, model.version_text, request.id, response), 200, final)


def _failure(error: ConchError, final: bool) -> Item:
    return Item(error_body(error.message), error.http_status, final, error.retry_after_ms)


class Submission:
    """Decodes and submits generate requests; for the arguments see `generate_routes`."""

    def __init__(self, door: Door, pools: Pools, most_bytes: int, clock: Clock, admission: Admission) -> None:
        self._door = door
        self._pools = pools
        self._most_bytes = most_bytes
        self._clock = clock
        self._admission = admission
        self._unread = UnreadBytes()
        self._mailbox: Mailbox | None = None

    async def __call__(self, exchange: HttpExchange, name: str, version: str) -> GenerateCall:
        """Submits a request. Raises ConchError: it is malformed, or its model does not take it."""
        received = _GenerateBody(name, version, self._clock())
        try:
            self._admission.check_open()
            self._door.check_running()
            model = await loaded(exchange, self._admission, name, version)
            if exchange.fields.get(b"content-encoding", b"identity") not in (b"identity", b""):
                raise UnsupportedError("Unsupported content-encoding, only 'identity' is supported.")
            received.body = await read_body(exchange, self._most_bytes)
            call = GenerateCall(
                self._admission, self._mailbox_of(asyncio.get_running_loop()), exchange, self._pools
            )
            exchange.on_disconnect = call.end
            try:
                try:
                    self._submit(received, call, model, exchange, True)
                except SlowTextError:
                    await parsed(exchange, self._pools, self._submit, received, call, model, exchange, False)
            except BaseException:  # raised again
                call.end()
                raise
        except ConchError as error:
            refused = received.request or InferenceRequest(
                name, version, {}, _ignore_response, received.received_ns
            )
            self._admission.refuse(refused, error, exchange, len(received.body), received.received_ns)
            raise
        return call

    def _mailbox_of(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        """The mailbox of the port's event loop, which is known from the first request on."""
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop, self._unread)
        return self._mailbox

    def _submit(
        self,
        received: _GenerateBody,
        call: GenerateCall,
        model: Servable | None,
        exchange: HttpExchange,
        quick: bool,
    ) -> None:
        def fit(request: InferenceRequest, spec: ModelSpec) -> None:
            mapped = map_request(parse_document(received.body, quick), spec, self._most_bytes)
            request.inputs, request.id = mapped.inputs, mapped.id
            request.parameters = mapped.parameters or None

        request = received.request = InferenceRequest(
            received.name, received.version, {}, call.respond, received.received_ns
        )
        call.begin(request)
        self._admission.admit(request, False, model, exchange, len(received.body), fit=fit)


@dataclass(slots=True)
class _GenerateBody:
    """An HTTP request while it is decoded."""

    name: str
    version: str
    received_ns: int
    body: memoryview | bytes = b""
    request: InferenceRequest | None = None


def _ignore_response(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """Responder of a malformed request."""


async def _single(call: GenerateCall) -> Reply:
    """Returns the only response of a request; an error if there is not exactly one."""
    found: list[Item] = []
    final = False
    while not final and len(found) < 2 and not (found and found[0].status != 200):
        items = await call.take_all()
        if items is None:
            raise ClientDisconnectError
        for item in items:
            if item.body is not None:
                found.append(item)
            if item.final:
                final = True
                break
    only = found[0] if found else None
    if only is None or (len(found) > 1 and only.status == 200):
        only = _failure(InvalidArgumentError(_NOT_ONE), True)
    return Reply(only.status, [JSON, *retry_after(only.retry_after_ms)], only.body or b"")


async def _stream(exchange: HttpExchange, call: GenerateCall) -> None:
    """Sends responses as server-sent events, as fast as the client reads; the first decides the status."""
    items = await call.take_all()
    if items is None:
        raise ClientDisconnectError
    if items[0].refused is not None:
        raise items[0].refused
    exchange.begin_response(items[0].status, [*EVENT_STREAM, *retry_after(items[0].retry_after_ms)], _COMMENT)
    final = False
    while items is not None and not final:
        events: list[bytes] = []
        for item in items:
            if item.body is not None:
                events += (b"data: ", item.body, b"\n\n")
            if item.final:
                final = True
                break
        if events:
            await exchange.send(b"".join(events))
        if not final:
            items = await call.take_all()
    exchange.end()


def answer_object(model_name: str, model_version: str, request_id: str, response: InferenceResponse) -> bytes:
    """Encodes a response as a JSON object with sorted members.

    Raises:
        InvalidArgumentError: It holds what JSON has no form for.
    """
    keys: list[str] = []
    values: list[bytes] = []
    if request_id:
        keys.append("id")
        values.append(orjson.dumps(request_id))
    for key, value in (response.parameters or {}).items():
        keys.append(key)
        values.append(_parameter(model_name, key, value))
    for tensor in response.outputs:
        keys.append(tensor.name)
        values.append(_tensor(tensor))
    pieces, end = _template(model_name, model_version, tuple(keys))
    parts: list[bytes] = []
    for text, index in pieces:
        parts += (text, values[index])
    parts.append(end)
    return b"".join(parts)


@lru_cache(_MOST_TEMPLATES)
def _template(model_name: str, model_version: str, keys: tuple[str, ...]) -> _Template:
    """An answer but for its values; of members with one name the last counts."""
    fixed = {-2: orjson.dumps(model_name), -1: orjson.dumps(model_version)}
    members = {"model_name": -2, "model_version": -1} | {key: index for index, key in enumerate(keys)}
    pieces: list[tuple[bytes, int]] = []
    text = b"{"
    # Triton sorts by bytes.
    for place, key in enumerate(sorted(members, key=str.encode)):
        text += (b"," if place else b"") + orjson.dumps(key) + b":"
        index = members[key]
        if index < 0:
            text += fixed[index]
        else:
            pieces.append((text, index))
            text = b""
    return pieces, text + b"}"


def _parameter(model: str, key: str, value: Parameter) -> bytes:
    if isinstance(value, float):
        return _dumps(value, bool(np.isfinite(value)))
    if not isinstance(value, bool | int | str) or not _is_64_bits(value):
        raise wrong_parameter(model, key, value)
    return _dumps(value)


def _is_64_bits(value: int | str) -> bool:
    return isinstance(value, str) or -(2**63) <= value < 2**64


def _tensor(tensor: Tensor) -> bytes:
    """Encodes the elements as a flat array; a single element as a scalar."""
    if tensor.datatype in ("FP16", "BF16"):
        raise InvalidArgumentError(
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data format "
            f"for output {tensor.name}"
        )
    if tensor.datatype == "BYTES":
        data = tensor.data
        if int.from_bytes(data[:4], "little") == len(data) - 4:  # one string, without an array
            return _dumps(str(data[4:], "utf-8", "surrogateescape"))
        elements = decode_bytes(data)
        if len(elements) == 1:
            return _dumps(elements[0].decode(errors="surrogateescape"))
        texts = (
            [element.decode(errors="surrogateescape") for element in elements[start : start + _PIECE]]
            for start in range(0, len(elements), _PIECE)
        )
        return _array(texts, True)
    array = tensor.numpy().ravel()
    finite = True
    if array.dtype.kind == "f":
        finite = bool(np.isfinite(array).all())
        array = array.astype(np.float64)  # or numbers would be rounded to the digits that FP32 needs
    if array.size == 1:
        return _dumps(array[0].item(), finite)
    return _array((array[start : start + _PIECE].tolist() for start in range(0, array.size, _PIECE)), finite)


def _array(pieces: Iterable[list[Any]], finite: bool) -> bytes:
    """One array of several; while one of them is written no other thread can run."""
    written: list[bytes] = []
    for piece in pieces:
        if written:
            yield_gil()
        written.append(_dumps(piece, finite)[1:-1])
    return b"[" + b",".join(written) + b"]"


def _dumps(value: Any, finite: bool = True) -> bytes:
    """JSON, with NaN and Infinity where they are, and bytes that are no UTF-8 passed on as they are."""
    if finite:
        try:
            return orjson.dumps(value)
        except TypeError:
            pass
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogateescape")
