"""Gives model classes with methods for text an `execute`; entry point of ``conch.python_models``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from conch.backends.python.api import pb_utils
from conch.backends.python.api.pb_errors import as_triton_error
from conch.backends.python.api.pb_request import ReceivedRequest
from conch.backends.python.api.pb_response import InferenceResponse
from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch_llm.contract import (
    ADAPTER,
    ANSWER_OUTPUT,
    BODY_INPUT,
    CHAT,
    COMPLETIONS,
    DECLARATION,
    DETOKENIZE,
    EMBEDDINGS,
    RERANK,
    ROUTE,
    SCORE,
    TOKENIZE,
)
from conch_llm.models.answer_parsers import Parsers, Reading, check_form, read_chat
from conch_llm.models.answers import DeltaForm, Form, ModelAnswer, TensorForm, text_response
from conch_llm.models.method_calls import Cancellation, Responses, Threads, merged
from conch_llm.models.model_requests import (
    Body,
    ChatRequest,
    CompletionRequest,
    chat_request,
    choices_of,
    completion_requests,
    detokenize_request,
    embedding_request,
    pairs,
    texts,
    tokenize_request,
    with_tokens,
)
from conch_llm.models.model_template import ModelTemplate

_METHODS = ("chat", "complete", "embed", "score", "tokenize", "detokenize")
_DECLARED = {"detokenize": "tokenize"}
"""Declarations of other names than their method."""
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
        self._threads = Threads()
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
        # The chat template makes a prompt of a conversation.
        implied = {"chat"} if "complete" in cls.methods else set()
        declared = implied | {_DECLARED.get(method, method) for method in cls.methods}
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
        parameters = {
            key: value.get("string_value", "") for key, value in config.get("parameters", {}).items()
        }
        self._parsers = Parsers.of(parameters)
        version_directory = Path(args["model_repository"], args["model_version"])
        template = ModelTemplate(self._name, version_directory, parameters)
        self._render = getattr(self._model, "render_prompt", template.render)
        if hasattr(self._model, "initialize"):
            self._model.initialize(args)
        if not self._parsers.tools:
            self._parsers = replace(self._parsers, tools=self._tools_of(template))

    def _tools_of(self, template: ModelTemplate) -> str:
        """Name of the tool parser by the chat template, the model's own or that of its files."""
        chats = "chat" in self.methods or "complete" in self.methods
        if not chats or getattr(self._model, "handles_tools", False):
            return ""
        source = self._model if hasattr(self._model, "render_prompt") else template
        try:
            found = str(getattr(source, "tool_parser", ""))
        except ConchError:
            return ""  # the first chat tells
        if found:
            text = f"model '{self._name}': by its chat template, its tool calls are {found}"
            pb_utils.Logger.log_info(text)
        return found

    def finalize(self) -> None:
        """Finalizes the model."""
        self._threads.close()
        if hasattr(self._model, "finalize"):
            self._model.finalize()

    async def execute(
        self, requests: Sequence[ReceivedRequest]
    ) -> AsyncGenerator[InferenceResponse | None, None]:
        """Answers a request; there is one, as the model does not batch."""
        (request,) = requests
        cancellation = Cancellation(request)
        try:
            async with aclosing(self._responses(request)) as responses:
                while (response := await cancellation.wait_for(anext(responses, None))) is not None:
                    yield response
        except asyncio.CancelledError:
            if not request.is_cancelled():
                raise  # the instance closes
        except ConchError as error:
            yield InferenceResponse(error=as_triton_error(error))
        yield None  # here the runtime fails a request that was abandoned

    def _responses(self, request: ReceivedRequest) -> Responses:
        parameters = json.loads(request.parameters())
        route = parameters.pop(ROUTE, None)
        text = _value(request, BODY_INPUT)
        if route is None:
            return self._to_tensors(request, text, parameters)
        body = _object(text, "the body of the request")
        body[ADAPTER] = parameters.get(ADAPTER, "")  # the route's choice, not the client's
        if route == CHAT and ("chat" in self.methods or "complete" in self.methods):
            chat, reading = read_chat(
                chat_request(body, self._render, request.request_id()), self._parsers, self._model
            )
            return self._chat(request, chat, DeltaForm(), reading)
        if route == COMPLETIONS and "complete" in self.methods:
            asked = completion_requests(body, request.request_id())
            echo = body.get("echo") is True
            return self._generate(request, self._model.complete, asked, DeltaForm(), echo=echo)
        if route == EMBEDDINGS and "embed" in self.methods:
            return self._embed(request, body)
        if route in (RERANK, SCORE) and "score" in self.methods:
            return self._score(request, body)
        if route == TOKENIZE and "tokenize" in self.methods:
            return self._tokenize(request, body)
        if route == DETOKENIZE and "detokenize" in self.methods:
            return self._detokenize(request, body)
        raise InvalidArgumentError(
            f"model '{self._name}' can't answer {route}: it has {', '.join(self.methods)}"
        )

    def _to_tensors(self, request: ReceivedRequest, text: str, parameters: Mapping[str, Any]) -> Responses:
        """Responds to a request of tensors: a prompt, or one message of a user."""
        written = _value(request, "sampling_parameters")
        sampling = parameters if written is None else _object(written, "sampling_parameters")
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
            form = TensorForm(asked[0].n, outputs, before)
            return self._generate(request, self._model.complete, asked, form)
        if "chat" in self.methods:
            body["messages"] = [{"role": "user", "content": text}]
            # The text has all of it: calls, and reasoning.
            chat, _ = read_chat(
                chat_request(body, self._render, request.request_id()), self._parsers, self._model
            )
            return self._chat(request, chat, TensorForm(chat.n, outputs, before), Reading())
        raise InvalidArgumentError(
            f"model '{self._name}' has {' and '.join(self.methods)} only, which requests with parameter "
            f"'{ROUTE}' reach"
        )

    async def _chat(
        self, request: ReceivedRequest, asked: ChatRequest, form: Form, reading: Reading
    ) -> Responses:
        if "chat" in self.methods:
            steps = self._generate(request, self._model.chat, [asked], form, reading)
        else:
            completion = await self._threads.run(lambda: CompletionRequest.of(asked))
            steps = self._generate(request, self._model.complete, [completion], form, reading)
        async with aclosing(steps) as responses:
            async for response in responses:
                yield response

    async def _generate(
        self,
        request: ReceivedRequest,
        method: Callable[[Any], Any],
        asked: Sequence[ChatRequest] | Sequence[CompletionRequest],
        form: Form,
        reading: Reading | None = None,
        echo: bool = False,
    ) -> Responses:
        """Runs a method for all choices of all prompts."""
        check_form(asked[0], self._model)
        n = asked[0].n
        answer = ModelAnswer(request, form, asked[0], len(asked), reading or Reading())
        runs: list[Responses] = []
        for number, each in enumerate(asked):
            if echo and isinstance(each, CompletionRequest):
                for response in answer.echo(number, each.prompt):
                    yield response
            parts = [each] if getattr(self._model, "handles_n", False) else choices_of(each)
            for place, part in enumerate(parts):
                call = answer.call(number * n + place, part.n)
                runs.append(self._threads.generate(method, part, call))
        try:
            async with aclosing(merged(runs)) as responses:
                async for response in responses:
                    yield response
        finally:
            answer.closed = True  # threads stop
        for response in answer.end():
            yield response

    async def _embed(self, request: ReceivedRequest, body: Body) -> Responses:
        inputs = texts(body.get("input"), "input")
        asked = embedding_request(body, request.request_id())
        found, tokens = with_tokens(await self._threads.call(self._model.embed, inputs, asked))
        rows = self._numbers("embed", found, len(inputs), 2)
        yield text_response(_encoded({"data": rows, "prompt_tokens": tokens}))

    async def _score(self, request: ReceivedRequest, body: Body) -> Responses:
        asked = embedding_request(body, request.request_id())
        scores: list[float] = []
        counts: list[int | None] = []
        for query, documents in pairs(body):
            returned = await self._threads.call(self._model.score, query, documents, asked)
            found, tokens = with_tokens(returned)
            scores += self._numbers("score", found, len(documents), 1)
            counts.append(tokens)
        known = [count for count in counts if count is not None]
        total = sum(known) if len(known) == len(counts) else None
        yield text_response(_encoded({"scores": scores, "prompt_tokens": total}))

    async def _tokenize(self, request: ReceivedRequest, body: Body) -> Responses:
        text, asked = tokenize_request(body, self._render, request.request_id())
        found = await self._threads.call(self._model.tokenize, text, asked)
        given = dict(found) if isinstance(found, Mapping) else {"tokens": found}
        tokens = np.asarray(given.get("tokens", ()))
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise InternalError(
                f"tokenize of model '{self._name}' must return a list of tokens, or a dict with 'tokens' and "
                f"perhaps 'token_strs' and 'max_model_len'"
            )
        answer = {
            "count": tokens.size,
            "max_model_len": given.get("max_model_len"),
            "tokens": tokens.tolist(),
            "token_strs": given.get("token_strs") if asked.token_strs else None,
        }
        yield text_response(_encoded(answer))

    async def _detokenize(self, request: ReceivedRequest, body: Body) -> Responses:
        tokens, asked = detokenize_request(body, request.request_id())
        text = await self._threads.call(self._model.detokenize, tokens, asked)
        if not isinstance(text, str):
            raise InternalError(
                f"detokenize of model '{self._name}' must return str, not {type(text).__name__}"
            )
        yield text_response(_encoded({"prompt": text}))

    def _numbers(self, method: str, found: Any, rows: int, rank: int) -> list[Any]:
        """Checks the numbers that a method has returned, and lists them by row."""
        array = np.asarray(found, np.float64)
        if array.ndim != rank or len(array) != rows or not np.isfinite(array).all():
            raise InternalError(
                f"{method} of model '{self._name}' must return finite numbers in {rank} dimensions, with "
                f"{rows} rows, and returned shape {list(array.shape)}"
            )
        listed: list[Any] = array.tolist()
        return listed


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


def _object(text: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{name}: must be JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgumentError(f"{name}: must be a JSON object")
    return found


def _encoded(found: Mapping[str, Any]) -> bytes:
    return json.dumps(found, separators=(",", ":")).encode()
