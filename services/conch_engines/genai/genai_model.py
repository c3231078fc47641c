"""Runs a language model of OpenVINO GenAI as a Python model, mostly in a worker.

The server imports this module for the declaration, without the engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conch.backends.python.api.pb_metrics import MetricFamily
from conch_engines.genai.engine_settings import EngineSettings
from conch_engines.genai.model_on_disk import find_model, parameters_of
from conch_engines.genai.sampling import read_sampling
from conch_llm.deltas import Delta
from conch_llm.models.model_requests import ChatRequest, CompletionRequest, TokenizeRequest
from conch_llm.models.model_template import ModelTemplate

if TYPE_CHECKING:
    from conch_engines.genai.engine import Engine

_DEFAULT_TOKENS = 16
"""Most tokens of a completion, as in OpenAI's API."""


class TritonPythonModel:
    """One instance: an engine."""

    handles_schemas = True

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the model."""
        from conch_engines.genai.engine import Engine

        name = args["model_name"]
        parameters = parameters_of(args)
        settings = EngineSettings.of(parameters)
        directory = Path(args["model_repository"], args["model_version"])
        files = find_model(directory, name)
        self._own = files.sampling
        self._metrics = _Metrics(name, args["model_version"])
        self._engine: Engine = Engine(name, files, settings, self._metrics.set)
        self._template = ModelTemplate(name, directory, parameters, self._engine.tokenizer_config)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Delta, None]:
        """Answers a conversation."""
        sampling = read_sampling(request, self._own)
        prompt = await self._engine.tokens_of(request.prompt(), add_special_tokens=False)
        deltas = self._engine.generate(prompt, request.max_tokens, sampling, as_chat=True)
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[Delta, None]:
        """Continues a prompt."""
        sampling = read_sampling(request, self._own)
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt = await self._engine.tokens_of(prompt, add_special_tokens=True)
        else:
            self._engine.check_tokens("prompt", prompt)
        most = request.max_tokens or _DEFAULT_TOKENS
        deltas = self._engine.generate(prompt, most, sampling, as_chat=False)
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta

    async def tokenize(
        self, text: str | Sequence[Mapping[str, Any]], request: TokenizeRequest
    ) -> dict[str, Any]:
        """The tokens of a text or of a conversation."""
        prompt = text if isinstance(text, str) else _chat_of(request).prompt()
        ids = await self._engine.tokens_of(prompt, request.add_special_tokens)
        return {
            "tokens": ids,
            "token_strs": self._engine.token_strings(ids) if request.token_strs else None,
            "max_model_len": self._engine.context_length,
        }

    async def detokenize(self, tokens: Sequence[int], request: TokenizeRequest) -> str:
        """The text of tokens."""
        return self._engine.decode(tokens)

    def render_prompt(self, request: ChatRequest) -> str:
        """The prompt of a conversation."""
        return self._template.render(request)

    @property
    def tool_parser(self) -> str:
        """Name of the parser of the calls that the chat template writes; empty if it is not known."""
        return self._template.tool_parser


def _chat_of(request: TokenizeRequest) -> ChatRequest:
    assert request.chat is not None, "messages belong to a chat"
    return request.chat


class _Metrics:
    """Gauges of one model version; written when they change."""

    def __init__(self, name: str, version: str) -> None:
        labels = {"model": name, "version": version}
        self._gauges = []
        for metric, help in (
            ("openvino_genai:num_requests_running", "Number of requests in the engine"),
            ("openvino_genai:kv_cache_usage_perc", "Used share of the KV cache"),
        ):
            family = MetricFamily(name=metric, description=help, kind=MetricFamily.GAUGE)
            self._gauges.append((family, family.Metric(labels=labels)))
        self._last = (-1.0, -1.0)

    def set(self, running: int, usage: float) -> None:
        """Sets the gauges; the engine's usage is a percentage."""
        now = (float(running), round(usage / 100, 3))
        if now != self._last:
            for (_, gauge), value, last in zip(self._gauges, now, self._last, strict=True):
                if value != last:
                    gauge.set(value)
            self._last = now
