"""Requests to models for OpenAI's routes, in each of the ways that a model can have.

A call is one request to the model, or several whose answers are merged: one for each choice of each prompt,
or for each input of embeddings. Their responders run on the threads of models, read responses there and queue
what they mean; the consumer takes all that has come on the event loop. The queue is the reader of its
requests: a model waits, or an engine joins what it makes, while the consumer is behind.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import orjson

from conch.core.admission import Admission
from conch.core.clock import Clock
from conch.core.errors import ConchError, InternalError
from conch.core.request import InferenceRequest, InferenceResponse, Parameter
from conch.core.request_log import Caller
from conch.core.response_errors import unsendable
from conch.core.servable import Servable
from conch.core.tensor import Tensor, decode_bytes
from conch.door.door import Door
from conch.frontends.http.mailbox import Mailbox, ResponseQueue
from conch.frontends.unread_bytes import UnreadBytes
from conch_llm.calls.answer_facts import AnswerFacts, BodyFacts, DeltaFacts
from conch_llm.calls.generation import (
    EchoedPrompts,
    EmbeddingCall,
    Embeddings,
    FieldError,
    Generation,
    GenerationCall,
    Piece,
    Scores,
    TokenCounter,
    check_ids,
)
from conch_llm.calls.text_answer import AnswerForm, TextAnswer, text_mode
from conch_llm.calls.text_request import coded_prompt, logprobs_wanted, text_request
from conch_llm.calls.vectors import embedding_request, pooled, vector_of
from conch_llm.capability import Capability, capability
from conch_llm.contract import (
    ADAPTER,
    ANSWER_OUTPUT,
    BODY_INPUT,
    CHAT,
    CONTENT_TYPE,
    EMBEDDINGS,
    ROUTE,
    SCORE,
    STATUS,
    TOKENIZE,
)
from conch_llm.deltas import Delta, decode_deltas

_MOST_BYTES = 1 << 20  # queued for one call before its models wait
_AT_ONCE = 32
"""Requests of one call that a model has at a time: another client's waits for no more of them."""
_BETWEEN = 8  # requests made before the event loop goes on, in about a millisecond
_SHORT = 1024  # characters or tokens of an input that is encoded at once
_LONG_BYTES = 1 << 16  # of a body whose texts are encoded on another thread

T = TypeVar("T")
Reader = Callable[[InferenceResponse | None, bool], T | None]
"""Makes of a response, and whether it is the last one, what is queued; on a thread of the model."""
Counters = Callable[[Servable], TokenCounter | None]
Run = Callable[[Callable[[], Any]], Awaitable[Any]]


def _no_counter(model: Servable) -> TokenCounter | None:
    return None


async def _run_here(work: Callable[[], Any]) -> Any:
    return work()


class ModelCalls:
    """Calls models for one front end.

    Args:
        door: The core.
        admission: Admission of the front end.
        clock: Monotonic time in nanoseconds.
        counters: Gives the tokenizer of a model; None for a model without one.
        run: Runs long work on another thread.
    """

    def __init__(
        self,
        door: Door,
        admission: Admission,
        clock: Clock,
        counters: Counters = _no_counter,
        run: Run = _run_here,
    ) -> None:
        self._door = door
        self._admission = admission
        self._clock = clock
        self._counters = counters
        self._run = run
        self._mailbox: Mailbox | None = None  # of the event loop, on which the first call is made

    async def generate(self, model: Servable, call: GenerationCall, exchange: Caller) -> Generation:
        """Begins the answer to a chat or a completion.

        Raises:
            ConchError: The request does not fit the model, or is refused.
        """
        can = capability(model.spec)
        sent: _Sent[list[Delta]] = self._sent(model, exchange, call.request_id, len(call.body))
        try:
            if call.prompts:
                await self._send_prompts(sent, can, call)
            else:
                inputs = _body_inputs(model, call.body)
                asked = {ROUTE: call.route, **({ADAPTER: call.adapter} if call.adapter else {})}
                priority = call.fields.get("priority", 0)
                sent.send(inputs, _read_deltas(model), asked, priority, self._facts_of(model, call))
        except BaseException as error:  # raised again
            sent.refuse(error)
            raise
        return _SentGeneration(sent)

    async def native(
        self,
        model: Servable,
        route: str,
        body: bytes,
        request_id: str,
        exchange: Caller,
        fields: Mapping[str, Any],
    ) -> NativeAnswer:
        """The answer of a model to a body, once its first piece is there; `fields` are the body's members.

        Raises:
            ConchError: The model refuses the request, or has failed.
        """
        sent: _Sent[Piece] = self._sent(model, exchange, request_id, len(body))
        try:
            facts = BodyFacts(route, str(fields.get("model", model.spec.name)), fields, self._clock)
            sent.send(_body_inputs(model, body), _read_piece, {ROUTE: route}, facts=facts)
        except BaseException as error:  # raised again
            sent.refuse(error)
            raise
        answer = NativeAnswer(sent)
        try:
            await answer.begin()
        except BaseException:  # raised again
            answer.close()
            raise
        return answer

    async def embed(self, model: Servable, call: EmbeddingCall, exchange: Caller) -> Embeddings:
        """Vectors of texts.

        Raises:
            ConchError: The request does not fit the model, or the model has failed.
        """
        can = capability(model.spec)
        if can.takes_body(EMBEDDINGS):
            found = await self._answered(model, EMBEDDINGS, call.body, call.request_id, exchange, "data")
            return Embeddings(found["data"], found.get("prompt_tokens"))
        sent: _Sent[tuple[int, tuple[Any, int | None]]]
        sent = self._sent(model, exchange, call.request_id, len(call.body))
        vectors: dict[int, tuple[Any, int | None]] = {}
        try:
            counter = self._counters(model)
            run = self._run if len(call.body) > _LONG_BYTES else _run_here
            for index, given in enumerate(call.inputs):
                make = partial(embedding_request, model.spec, call, given, counter)
                inputs = make() if len(given) <= _SHORT else await self._run(make)
                facts = AnswerFacts[object](EMBEDDINGS, model.spec.name, {}, self._clock)
                sent.send(inputs, _indexed(index, vector_of(model.spec)), {}, facts=facts)
                if index % _BETWEEN == _BETWEEN - 1:
                    await asyncio.sleep(0)
            while (taken := await sent.take()) is not None:
                vectors.update(taken)
        except BaseException as error:  # raised again
            sent.refuse(error)
            raise
        rows = [vectors.get(index) for index in range(len(call.inputs))]
        return cast(Embeddings, await run(partial(pooled, model.spec, call, rows, counter)))

    async def score(
        self,
        model: Servable,
        query: str,
        documents: Sequence[str],
        exchange: Caller,
        request_id: str = "",
    ) -> Scores:
        """Scores of documents by a query, of a model that declares ``score``.

        Raises:
            ConchError: The model refuses the request, or has failed.
        """
        size = len(query) + sum(map(len, documents))
        run = self._run if size > _LONG_BYTES else _run_here
        body = await run(partial(orjson.dumps, {"query": query, "documents": list(documents)}))
        found = await self._answered(model, SCORE, body, request_id, exchange, "scores")
        if len(found["scores"]) != len(documents):
            raise InternalError(
                f"model '{model.spec.name}' gives {len(found['scores'])} scores of {len(documents)} documents"
            )
        return Scores(found["scores"], found.get("prompt_tokens"))

    async def echo(self, model: Servable, call: GenerationCall, exchange: Caller) -> Generation:
        """The answer to a completion of no tokens; its prompts are counted by the model or its tokenizer.

        Raises:
            ConchError: A prompt is no text, or log probabilities are wanted, or the model has failed.
        """
        texts, counter, total = call.fields["prompt"], self._counters(model), None
        if any(not isinstance(each, str) for each in texts):
            return EchoedPrompts(call, None)  # raises
        if capability(model.spec).takes_body(TOKENIZE):
            total = 0
            for text in texts:
                body = json.dumps({"prompt": text}).encode()
                total += await self.count(model, body, call.request_id, exchange)
        elif counter is not None:
            run = self._run if len(call.body) > _LONG_BYTES else _run_here
            total = await run(lambda: sum(map(counter.count, texts)))
        return EchoedPrompts(call, total)

    async def count(self, model: Servable, body: bytes, request_id: str, exchange: Caller) -> int:
        """The tokens of the body of a request to /tokenize, of a model that takes it.

        Raises:
            ConchError: The model refuses the request, or has failed.
        """
        found = await self._answered(model, TOKENIZE, body, request_id, exchange, "tokens")
        return len(found["tokens"])

    async def _answered(
        self, model: Servable, route: str, body: bytes, request_id: str, exchange: Caller, member: str
    ) -> dict[str, Any]:
        """The JSON object that a model answers to a body; `member` is the list that it must have."""
        answer = await self.native(model, route, body, request_id, exchange, {})
        pieces = []
        try:
            while (piece := await answer.take()) is not None:
                pieces.append(piece)
        finally:
            answer.close()
        try:
            found = json.loads(b"".join(pieces))
        except ValueError:
            found = None
        if not isinstance(found, dict) or not isinstance(found.get(member), list):
            raise InternalError(f"model '{model.spec.name}' answers {route} without a list '{member}'")
        return found

    async def _send_prompts(self, sent: _Sent[list[Delta]], can: Capability, call: GenerationCall) -> None:
        model = sent.model
        mode = text_mode(model.spec)
        counter = self._counters(model)
        run = self._run if len(call.body) > _LONG_BYTES else _run_here

        def checked(prompt: str | Sequence[int]) -> Any:
            check_ids(model.spec.name, counter, prompt, "prompt")
            return coded_prompt(model.spec, can.prompt, prompt)

        coded = await run(lambda: [checked(each) for each in call.prompts])
        for number, prompt in enumerate(call.prompts):
            for choice in range(call.choices):
                if (number * call.choices + choice) % _BETWEEN == _BETWEEN - 1:
                    await asyncio.sleep(0)
                made = text_request(model.spec, can.prompt, call, coded[number], choice)
                text = prompt if isinstance(prompt, str) else ""
                form = AnswerForm(
                    output=can.output,
                    mode=mode,
                    max_tokens=call.max_tokens,
                    counter=counter,
                    prompt=prompt,
                    counts_prompt=choice == 0,
                    echo=text if call.fields.get("echo") else "",
                    logprobs=logprobs_wanted(call),
                    chat=call.route == CHAT,
                )
                answer = TextAnswer(number * call.choices + choice, form)
                priority = call.fields.get("priority", 0)
                facts = self._facts_of(model, call)
                sent.send(made.inputs, answer.read, made.parameters, priority, facts)

    def _facts_of(self, model: Servable, call: GenerationCall) -> DeltaFacts:
        fields = {**call.fields, "max_tokens": call.max_tokens}
        return DeltaFacts(call.route, call.adapter or model.spec.name, fields, self._clock)

    def _sent(self, model: Servable, exchange: Caller, request_id: str, size: int) -> _Sent[Any]:
        self._admission.check_open()
        self._door.check_running()
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop(), UnreadBytes())
        queue: ResponseQueue[Any] = ResponseQueue(self._mailbox, _MOST_BYTES)
        return _Sent(self._admission, queue, model, exchange, request_id, size, self._clock())


class _Sent(Generic[T]):
    """The requests of one call, and what they are answered.

    Args:
        admission: Admission of the front end.
        queue: Has what has been answered.
        model: The model.
        exchange: The HTTP request.
        request_id: Its id.
        size: Size of its body, counted for the first request.
        received_ns: Time of its arrival.
    """

    def __init__(
        self,
        admission: Admission,
        queue: ResponseQueue[_Item[T]],
        model: Servable,
        exchange: Caller,
        request_id: str,
        size: int,
        received_ns: int,
    ) -> None:
        self._admission = admission
        self._queue = queue
        self.model = model
        self._exchange = exchange
        self._id = request_id
        self._size = size
        self._received_ns = received_ns
        self._requests: list[InferenceRequest] = []
        self._refused: InferenceRequest | None = None
        self._open = 0
        self._later: deque[tuple[InferenceRequest, int]] = deque()
        self._failure: ConchError | None = None

    def send(
        self,
        inputs: dict[str, Tensor],
        read: Reader[T],
        parameters: Mapping[str, Parameter],
        priority: int = 0,
        facts: AnswerFacts[T] | None = None,
    ) -> None:
        """Submits one request, or keeps it until others have ended. Raises ConchError: it is refused."""
        if priority < 0:
            raise FieldError("`priority` must be at least 0: 1 is the highest, 0 the default", "priority")
        respond = _Responder(self._queue, read, facts)
        request = InferenceRequest(
            self.model.spec.name,
            "",
            inputs,
            respond,
            self._received_ns,
            self._id,
            parameters=dict(parameters) or None,
        )
        request.priority = priority
        request.reader = self._queue
        request.context = self._exchange
        size = 0 if self._requests or self._later else self._size
        if self._open < _AT_ONCE:
            self._submit(request, size)
        else:
            self._later.append((request, size))

    def _submit(self, request: InferenceRequest, size: int) -> None:
        self._refused = request
        routed = self._admission.resolve_name(self.model.spec.identifier, "") is None
        self._admission.admit(request, False, None if routed else self.model, self._exchange, size)
        self._refused = None
        self._requests.append(request)
        self._open += 1

    def refuse(self, error: BaseException) -> None:
        """Ends the call: its next request could not be made or submitted."""
        if isinstance(error, ConchError) and not self._requests:
            refused = self._refused or InferenceRequest(
                self.model.spec.name, "", {}, _ignore_response, self._received_ns, self._id
            )
            self._admission.refuse(refused, error, self._exchange, self._size, self._received_ns)
        self.close()

    async def take(self) -> list[T] | None:
        """Waits for content, at least one; None after the last. Raises ConchError: a request has failed."""
        found: list[T] = []
        while not found:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                self.close()
                raise failure
            if not self._open:
                return None
            items = await self._queue.take_all()
            if items is None:
                return None  # closed
            for item in items:
                if item.failure is not None:
                    self._failure = item.failure
                    break
                if item.content:
                    found.append(item.content)
                self._open -= item.final
            try:
                while self._later and self._open < _AT_ONCE and self._failure is None:
                    self._submit(*self._later.popleft())
            except ConchError as error:
                self._failure = error
        return found

    def close(self) -> None:
        """Cancels what still runs."""
        self._later.clear()
        self._queue.close()
        for request in self._requests:
            if not request.completed:
                self._admission.cancel(request)


class _Item(NamedTuple, Generic[T]):
    """Content of a response.

    Attributes:
        content: Pieces or deltas of the answer; None for none.
        final: True if it is the last one of its request.
        failure: The error that it is.
    """

    content: T | None
    final: bool
    failure: ConchError | None = None


class _Responder(Generic[T]):
    """Takes the responses to one request, on threads of the model."""

    def __init__(self, queue: ResponseQueue[_Item[T]], read: Reader[T], facts: AnswerFacts[T] | None) -> None:
        self._queue = queue
        self._read = read
        self._facts = facts

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        size = 0 if response is None else sum(tensor.nbytes for tensor in response.outputs)
        item = self._item(request, response, final)
        if request.watch is not None:
            request.watch.bytes_out += size
            if self._facts is not None:
                self._facts.add(item.content)
                if item.final:
                    self._facts.tell(request)
        self._queue.put(item, size)

    def _item(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> _Item[T]:
        if response is not None and response.error is not None:
            return _Item(None, final, response.error)
        try:
            return _Item(self._read(response, final), final)
        except ConchError as error:
            return _Item(None, final, error)
        except Exception as error:  # boundary: outputs that user code has made
            return _Item(None, True, unsendable(request.model_name, response, error))


class _SentGeneration(Generation):
    """The merged answers to the requests of a call."""

    def __init__(self, sent: _Sent[list[Delta]]) -> None:
        self._sent = sent

    async def take(self) -> Sequence[Delta] | None:
        found = await self._sent.take()
        return None if found is None else [delta for deltas in found for delta in deltas]

    def close(self) -> None:
        self._sent.close()


class NativeAnswer:
    """The answer of a model to a body, in pieces; event loop only.

    Attributes:
        status: HTTP status.
        content_type: Its content type.
    """

    def __init__(self, sent: _Sent[Piece]) -> None:
        self._sent = sent
        self._first: bytes | None = None
        self.status = 200
        self.content_type = "application/json"

    async def begin(self) -> None:
        """Waits for the first piece; called once. Raises ConchError: there is none."""
        pieces = await self._sent.take()
        if pieces is None:
            raise InternalError(f"model '{self._sent.model.spec.name}' has not answered")
        given = pieces[0].parameters
        self.status = int(given.get(STATUS, self.status))
        self.content_type = str(given.get(CONTENT_TYPE, self.content_type))
        self._first = _joined(pieces)

    async def take(self) -> bytes | None:
        """All that has come since; None after the last.

        Raises:
            ConchError: The model has failed, possibly after some pieces.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return first
        pieces = await self._sent.take()
        return None if pieces is None else _joined(pieces)

    def close(self) -> None:
        """Cancels what still runs; may be called again."""
        self._sent.close()


def _joined(pieces: Sequence[Piece]) -> bytes:
    return b"".join([piece.body for piece in pieces])


def _body_inputs(model: Servable, body: bytes) -> dict[str, Tensor]:
    rule = next((each for each in model.spec.inputs if each.name == BODY_INPUT), None)
    if rule is None:
        raise InternalError(
            f"model '{model.spec.name}' has no input '{BODY_INPUT}', which its declaration needs"
        )
    array = np.empty(1, object)
    array[0] = body
    shape = tuple(1 for _ in model.spec.full_dims(rule))
    return {BODY_INPUT: Tensor(BODY_INPUT, "BYTES", shape, None, array.reshape(shape))}


def _answer_bytes(response: InferenceResponse) -> bytes:
    for tensor in response.outputs:
        if tensor.name == ANSWER_OUTPUT:
            found = decode_bytes(tensor.data)
            return bytes(found[0]) if len(found) else b""
    return b""


def _read_deltas(model: Servable) -> Reader[list[Delta]]:
    def read(response: InferenceResponse | None, final: bool) -> list[Delta]:
        data = b"" if response is None else _answer_bytes(response)
        try:
            return decode_deltas(data) if data else []
        except ValueError as error:
            raise InternalError(
                f"model '{model.spec.name}' responds with no list of deltas: {error}"
            ) from None

    return read


def _read_piece(response: InferenceResponse | None, final: bool) -> Piece | None:
    return None if response is None else Piece(_answer_bytes(response), response.parameters or {})


def _indexed(index: int, read: Callable[[InferenceResponse], T]) -> Reader[tuple[int, T]]:
    def read_one(response: InferenceResponse | None, final: bool) -> tuple[int, T] | None:
        return None if response is None else (index, read(response))

    return read_one


def _ignore_response(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """Responder of a request that was not made."""
