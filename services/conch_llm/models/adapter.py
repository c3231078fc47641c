"""Gives model classes with methods for text an `execute`; entry point of ``conch.python_models``."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from conch.backends.python.api import pb_utils
from conch.backends.python.api.pb_errors import as_triton_error
from conch.backends.python.api.pb_request import ReceivedRequest
from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch_llm.contract import (
    ANSWER_OUTPUT,
    BODY_INPUT,
    CHAT,
    COMPLETIONS,
    DECLARATION,
    EMBEDDINGS,
    RERANK,
    ROUTE,
    SCORE,
)
from conch_llm.deltas import Delta
from conch_llm.models.answers import Answer, DeltaForm, Form, TensorForm, text_response
from conch_llm.models.model_requests import (
    Body,
    ChatRequest,
    CompletionRequest,
    chat_request,
    choices_of,
    completion_requests,
    embedding_request,
    pairs,
    texts,
    with_tokens,
)

_METHODS = ("chat", "complete", "embed", "score")
_MOST_THREADS = 1024
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_INPUTS = (
    {"name": BODY_INPUT, "data_type": "TYPE_STRING", "dims": [1]},
    {"name": "stream", "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
    {"name": "sampling_parameters", "data_type": "TYPE_STRING", "dims": [1], "optional": True},
    {"name": "exclude_input_in_output", "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
)
_OUTPUTS = (
    {"name": ANSWER_OUTPUT, "data_type": "TYPE_STRING", "dims": [-1]},
    {"name": "finish_reason", "data_type": "TYPE_STRING", "dims": [-1]},
    {"name": "num_input_tokens", "data_type": "TYPE_UINT32", "dims": [1]},
    {"name": "num_output_tokens", "data_type": "TYPE_UINT32", "dims": [-1]},
)

Result = TypeVar("Result")


def adapt(model_class: type[Any]) -> type[Any] | None:
    """The class that runs a model class; None for a class without any of the methods."""
    methods = tuple(name for name in _METHODS if callable(getattr(model_class, name, None)))
    if not methods:
        return None
    return type("TritonPythonModel", (TextModel,), {"model_class": model_class, "methods": methods})


class TextModel:
    """Runs a model that has some of the methods."""

    model_class: ClassVar[type[Any]]
    methods: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._model = self.model_class()
        self._name = ""
        # Enough for methods that block: requests beyond wait for a thread.
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "conch-text")
        if hasattr(self._model, "is_ready"):
            self.is_ready = self._model.is_ready

    @classmethod
    def auto_complete_config(cls, config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        """Completes the config, after the model's own completion."""
        own = getattr(cls.model_class, "auto_complete_config", None)
        if own is not None:
            config = own(config)
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        for tensor in _INPUTS:
            config.add_input(tensor)
        for tensor in _OUTPUTS:
            config.add_output(tensor)
        declared = {name: None for name in cls.methods}
        if "complete" in declared:
            declared["chat"] = None  # by the chat template
        config.set_parameter(DECLARATION, ",".join(sorted(declared)))
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Initializes the model."""
        self._name = args["model_name"]
        config = json.loads(args["model_config"])
        if not config.get("model_transaction_policy", {}).get("decoupled"):
            raise InvalidArgumentError(
                f"model '{self._name}' has {' and '.join(self.methods)}, so it must be decoupled: leave "
                f"that to auto-completion, or write model_transaction_policy {{ decoupled: true }}"
            )
        self._version = Path(args["model_repository"], args["model_version"])
        self._parameters = {
            key: value.get("string_value", "") for key, value in config.get("parameters", {}).items()
        }
        if hasattr(self._model, "initialize"):
            self._model.initialize(args)

    def finalize(self) -> None:
        """Finalizes the model."""
        self._threads.shutdown(wait=False)
        if hasattr(self._model, "finalize"):
            self._model.finalize()

    async def execute(self, requests: Sequence[ReceivedRequest]) -> AsyncGenerator[None, None]:
        """Answers a request; there is one, as the model does not batch."""
        (request,) = requests
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._answer(request))
        request.call_if_cancelled(partial(_cancel, loop, task))
        try:
            await task
        except asyncio.CancelledError:
            if not request.is_cancelled():
                raise  # the instance closes
        except ConchError as error:
            failed = pb_utils.InferenceResponse(error=as_triton_error(error))
            request.get_response_sender().send(failed, _FINAL)
        yield None  # here the runtime fails a request that was abandoned

    async def _answer(self, request: ReceivedRequest) -> None:
        parameters = json.loads(request.parameters())
        route = parameters.pop(ROUTE, None)
        text = _value(request, BODY_INPUT)
        if route is None:
            await self._answer_tensors(request, text, parameters)
            return
        try:
            body = json.loads(text)
        except ValueError as error:
            raise InvalidArgumentError(f"the body of the request is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise InvalidArgumentError("the body of the request must be a JSON object")
        body = {**parameters, **body}
        if route == CHAT and ("chat" in self.methods or "complete" in self.methods):
            await self._chat(request, chat_request(body, self._template, request.request_id()), DeltaForm())
        elif route == COMPLETIONS and "complete" in self.methods:
            asked = completion_requests(body, request.request_id())
            await self._complete(request, asked, DeltaForm(), body.get("echo") is True)
        elif route == EMBEDDINGS and "embed" in self.methods:
            await self._embed(request, body)
        elif route in (RERANK, SCORE) and "score" in self.methods:
            await self._score(request, body)
        else:
            raise InvalidArgumentError(
                f"model '{self._name}' can't answer {route}: it has {', '.join(self.methods)}"
            )

    async def _answer_tensors(
        self, request: ReceivedRequest, text: str, parameters: Mapping[str, Any]
    ) -> None:
        """Answers a request of tensors: a prompt, or one message of a user."""
        written = _value(request, "sampling_parameters")
        try:
            sampling = parameters if written is None else json.loads(written)
        except ValueError as error:
            raise InvalidArgumentError(f"sampling_parameters: must be JSON: {error}") from None
        if not isinstance(sampling, dict):
            raise InvalidArgumentError("sampling_parameters: must be a JSON object")
        stream = bool(_value(request, "stream"))
        excluded = _value(request, "exclude_input_in_output")
        echo = excluded is not None and not excluded
        if stream and echo:
            raise InvalidArgumentError("When streaming, `exclude_input_in_output` = False is not allowed.")
        body = {**sampling, "stream": stream}
        outputs = request.requested_output_names()
        before = text if echo else ""
        if "complete" in self.methods:
            asked = completion_requests({**body, "prompt": text}, request.request_id())
            await self._complete(request, asked, TensorForm(asked[0].n, outputs, before))
        elif "chat" in self.methods:
            body["messages"] = [{"role": "user", "content": text}]
            chat = chat_request(body, self._template, request.request_id())
            await self._chat(request, chat, TensorForm(chat.n, outputs, before))
        else:
            raise InvalidArgumentError(
                f"model '{self._name}' has {' and '.join(self.methods)} only, which requests with parameter "
                f"'{ROUTE}' reach"
            )

    async def _chat(self, request: ReceivedRequest, asked: ChatRequest, form: Form) -> None:
        if "chat" in self.methods:
            await self._generate(request, self._model.chat, [asked], form)
            return
        shared = {
            name: getattr(asked, name)
            for name in ("params", "max_tokens", "stop", "seed", "n", "stream", "lora", "id", "raw")
        }
        prompt = await self._in_thread(asked.prompt)
        await self._complete(request, [CompletionRequest(prompt=prompt, **shared)], form)

    async def _complete(
        self,
        request: ReceivedRequest,
        asked: Sequence[CompletionRequest],
        form: Form,
        echo: bool = False,
    ) -> None:
        prompts = [each.prompt for each in asked] if echo else []
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise InvalidArgumentError("echo: needs prompts of text, not of tokens")
        await self._generate(request, self._model.complete, asked, form, prompts)

    async def _generate(
        self,
        request: ReceivedRequest,
        method: Callable[[Any], Any],
        asked: Sequence[Any],
        form: Form,
        echoed: Sequence[Any] = (),
    ) -> None:
        """Runs a method for all choices and sends the answer."""
        one = asked[0]
        answer = Answer(request, form, one.stream, len(asked), one.n, one.stop, one.max_tokens)
        for number, prompt in enumerate(echoed):
            for index in range(number * one.n, (number + 1) * one.n):
                answer.add_text(index, prompt)
        calls: list[tuple[int, Any]] = []
        for number, each in enumerate(asked):
            parts = [each] if getattr(self._model, "handles_n", False) else choices_of(each)
            calls += [(number * one.n + place, part) for place, part in enumerate(parts)]
        runs = [self._run(method, part, answer, partial(answer.take, first, part.n)) for first, part in calls]
        await _all(runs, answer)
        if answer.waits():
            await self._in_thread(answer.end)
        else:
            answer.end()

    async def _run(
        self, method: Callable[[Any], Any], asked: Any, answer: Answer, take: Callable[[object], bool]
    ) -> None:
        """Runs a method to its end, or until nothing more is wanted, and closes its generator."""
        if inspect.isasyncgenfunction(method) or inspect.iscoroutinefunction(method):
            result = method(asked)
        else:
            result = await self._in_thread(lambda: _consume(method(asked), take))
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, AsyncIterator):
            async with AsyncExitStack() as stack:
                if hasattr(result, "aclose"):
                    stack.push_async_callback(result.aclose)
                async for item in result:
                    if not (await self._in_thread(partial(take, item)) if answer.waits() else take(item)):
                        return
        elif result is not None:
            await self._in_thread(lambda: _consume(result, take))

    async def _embed(self, request: ReceivedRequest, body: Body) -> None:
        inputs = texts(body.get("input"), "input")
        asked = embedding_request(body, request.request_id())
        found, tokens = with_tokens(await self._call(self._model.embed, inputs, asked))
        rows = np.asarray(found, np.float64)
        if rows.ndim != 2 or len(rows) != len(inputs) or not np.isfinite(rows).all():
            raise InternalError(
                f"embed of model '{self._name}' must return {len(inputs)} rows of finite numbers, and "
                f"returned an array of shape {list(rows.shape)}"
            )
        _send_json(request, {"data": rows.tolist(), "prompt_tokens": tokens})

    async def _score(self, request: ReceivedRequest, body: Body) -> None:
        asked = embedding_request(body, request.request_id())
        scores: list[float] = []
        counts: list[int | None] = []
        for query, documents in pairs(body):
            found, tokens = with_tokens(await self._call(self._model.score, query, documents, asked))
            values = np.asarray(found, np.float64)
            if values.shape != (len(documents),) or not np.isfinite(values).all():
                raise InternalError(
                    f"score of model '{self._name}' must return {len(documents)} finite numbers, and "
                    f"returned an array of shape {list(values.shape)}"
                )
            scores += values.tolist()
            counts.append(tokens)
        known = [count for count in counts if count is not None]
        tokens = sum(known) if len(known) == len(counts) else None
        _send_json(request, {"scores": scores, "prompt_tokens": tokens})

    async def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*args)
        result = await self._in_thread(lambda: method(*args))
        return await result if inspect.isawaitable(result) else result

    def _in_thread(self, function: Callable[[], Result]) -> Awaitable[Result]:
        run = contextvars.copy_context().run
        return asyncio.get_running_loop().run_in_executor(self._threads, run, function)

    def _template(self, request: ChatRequest) -> str:
        raise InvalidArgumentError(f"model '{self._name}' has no chat template; completions work without one")


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with suppress(RuntimeError):  # the instance has closed its loop
        loop.call_soon_threadsafe(task.cancel)


def _consume(result: Any, take: Callable[[object], bool]) -> Any:
    """Takes a result's items; returns one that only the event loop can take."""
    if isinstance(result, str | Delta):
        take(result)
    elif isinstance(result, AsyncIterator) or inspect.isawaitable(result):
        return result
    elif isinstance(result, Iterable) and not isinstance(result, bytes | Mapping):
        with ExitStack() as stack:
            if hasattr(result, "close"):
                stack.callback(result.close)
            for item in result:
                if not take(item):
                    break
    else:
        raise TypeError(f"a model must yield or return str or conch_llm.Delta, not {type(result).__name__}")
    return None


async def _all(runs: Sequence[Coroutine[Any, Any, None]], answer: Answer) -> None:
    """Runs the calls of an answer concurrently; the first exception ends all."""
    if len(runs) == 1:
        await runs[0]
        return
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        await asyncio.gather(*tasks)
    finally:
        if not all(task.done() for task in tasks):
            answer.over = True  # threads notice
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _value(request: ReceivedRequest, name: str) -> Any:
    """The value of an input; None without one."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    value = tensor.as_numpy().reshape(-1)[0]
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{name}: must be UTF-8: {error}") from None


def _send_json(request: ReceivedRequest, found: Mapping[str, Any]) -> None:
    text = json.dumps(found, separators=(",", ":")).encode()
    request.get_response_sender().send(text_response(text), _FINAL)
