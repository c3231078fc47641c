"""Runs a language model of llama.cpp as a Python model, in a worker.

The server imports this module for the declaration, without the engine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conch.backends.python.api.pb_metrics import MetricFamily
from conch_engines.llama_cpp.llama_file import find_model
from conch_engines.llama_cpp.llama_sampling import Sampling, read_sampling
from conch_engines.llama_cpp.llama_settings import LlamaSettings
from conch_engines.llama_cpp.token_logprobs import chat_logprobs, completion_logprobs
from conch_engines.model_config import parameter_texts
from conch_llm.deltas import Delta
from conch_llm.models.model_requests import ChatRequest, CompletionRequest, TextRequest, TokenizeRequest
from conch_llm.models.model_template import ModelTemplate

if TYPE_CHECKING:
    from conch_engines.llama_cpp.llama_engine import Engine

log = logging.getLogger(__name__)

_DEFAULT_TOKENS = 16
"""Most tokens of a completion, as in OpenAI's API."""


class TritonPythonModel:
    """One instance: an engine."""

    handles_schemas = True

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the model."""
        from conch_engines.llama_cpp.llama_engine import Engine

        name = args["model_name"]
        config = json.loads(args["model_config"])
        parameters = parameter_texts(config)
        directory = Path(args["model_repository"], args["model_version"])
        settings = LlamaSettings.of(parameters)
        adapters = settings.lora_paths(directory)
        file = find_model(directory, name, config.get("default_model_filename", ""), adapters.values())
        longest = settings.context_length(file.context_length)
        log.info(
            "model '%s': a request may have %d tokens, prompt and answer together (the model was trained "
            "with %s); %d requests run at a time",
            *(name, longest, file.context_length or "an unknown number", settings.max_num_seqs),
        )
        self._file = file
        self._metrics = _Metrics(name, args["model_version"])
        self._engine: Engine = Engine(name, file.path, settings, longest, adapters, self._metrics.set)
        self._template = ModelTemplate(name, directory, parameters, self._tokenizer_config)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Delta, None]:
        """Answers a conversation."""
        sampling = self._sampling(request)
        prompt = await self._encoded(request.prompt(), add_special_tokens=False)
        form = chat_logprobs(sampling.logprobs or 0)
        async with aclosing(self._engine.generate(prompt, request.max_tokens, sampling, form)) as deltas:
            async for delta in deltas:
                yield delta

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[Delta, None]:
        """Continues a prompt."""
        sampling = self._sampling(request)
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt = await self._encoded(prompt, add_special_tokens=True)
        else:
            self._engine.check_tokens("prompt", prompt)
        most = request.max_tokens or _DEFAULT_TOKENS
        form = completion_logprobs(sampling.logprobs or 0)
        async with aclosing(self._engine.generate(prompt, most, sampling, form)) as deltas:
            async for delta in deltas:
                yield delta

    async def tokenize(
        self, text: str | Sequence[Mapping[str, Any]], request: TokenizeRequest
    ) -> dict[str, Any]:
        """The tokens of a text or of a conversation."""
        if not isinstance(text, str):
            assert request.chat is not None, "messages belong to a chat"
            text = request.chat.prompt()
        strings = None
        if request.token_strs:
            ids, strings = await self._engine.pieces(text, request.add_special_tokens)
        else:
            ids = await self._engine.encode(text, request.add_special_tokens)
        return {
            "tokens": ids,
            "token_strs": strings,
            "max_model_len": self._engine.context_length,
        }

    async def detokenize(self, tokens: Sequence[int], request: TokenizeRequest) -> str:
        """The text of tokens."""
        return await self._engine.decode(tokens)

    def render_prompt(self, request: ChatRequest) -> str:
        """The prompt of a conversation."""
        return self._template.render(request)

    @property
    def tool_parser(self) -> str:
        """Name of the parser of the calls that the chat template writes; empty if it is not known."""
        return self._template.tool_parser

    def finalize(self) -> None:
        """Cancels requests that still run, and ends the engine."""
        self._engine.close()

    async def _encoded(self, prompt: str, add_special_tokens: bool) -> list[int]:
        """The tokens of a prompt. Raises InvalidArgumentError: it is far too long."""
        self._file.check_size("prompt", prompt, self._engine.context_length)
        return await self._engine.encode(prompt, add_special_tokens)

    def _sampling(self, request: TextRequest) -> Sampling:
        engine = self._engine
        return read_sampling(request, self._file.sampling, engine.vocabulary, engine.context_length)

    def _tokenizer_config(self) -> dict[str, str]:
        """The chat template and its tokens in the model's own file; the template may be empty."""
        return {"chat_template": self._file.chat_template, **self._engine.special_tokens()}


class _Metrics:
    """Gauges of one model version; written when they change."""

    def __init__(self, name: str, version: str) -> None:
        labels = {"model": name, "version": version}
        self._gauges = []
        for metric, help in (
            ("llama_cpp:num_requests_running", "Number of requests in the engine's slots"),
            ("llama_cpp:num_requests_waiting", "Number of requests that wait for a slot"),
        ):
            family = MetricFamily(name=metric, description=help, kind=MetricFamily.GAUGE)
            self._gauges.append((family, family.Metric(labels=labels)))
        self._last = (-1, -1)

    def set(self, running: int, waiting: int) -> None:
        """Sets the gauges."""
        now = (running, waiting)
        for (_, gauge), value, last in zip(self._gauges, now, self._last, strict=True):
            if value != last:
                gauge.set(value)
        self._last = now
