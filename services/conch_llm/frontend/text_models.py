"""Chat templates, tokenizers, tool calls, reasoning and stop strings for models that get prompts.

A forced call (``tool_choice`` with a name, or ``required``) is JSON by a schema that the model must take.
Otherwise the model's tool parser looks for calls in its text.

Threads and locks: event loop only; templates are loaded and rendered on a thread of the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from conch.core.errors import ConchError
from conch.core.servable import Servable
from conch.door.door import ServedModels
from conch.frontends.http.http_pools import Pools, result_of
from conch_llm.calls.generation import Generation, GenerationCall
from conch_llm.contract import CHAT
from conch_llm.deltas import Delta
from conch_llm.frontend.openai_errors import RequestError
from conch_llm.language.answer_reader import AnswerReader
from conch_llm.language.chat_template import ChatTemplate, load_chat_template
from conch_llm.language.reasoning import ReasoningSplitter, begins_reasoning
from conch_llm.language.tokenizer import TextTokenizer, load_tokenizer
from conch_llm.language.tool_calls import (
    ToolCallParser,
    forced_call_parser,
    schema_of_call,
    tool_call_parser,
)
from conch_llm.models.answer_parsers import Parsers
from conch_llm.openai_settings import TextDefaults

log = logging.getLogger(__name__)

T = TypeVar("T")

TOOL_PARSER = "CONCH_TOOL_PARSER"
"""Config parameter: how a model writes tool calls, such as ``hermes``."""
CHAT_TEMPLATE = "chat_template"
"""Config parameter: file of the chat template."""
TOKENIZER = "tokenizer"
"""Config parameter: folder of the tokenizer, with its chat template."""
_IMAGE = "image"


class TextModels:
    """Makes prompts for models, and readers of their text.

    Args:
        models: The models.
        pools: Threads that load and render templates.
        defaults: Settings by flags, for models whose config has none.
    """

    def __init__(self, models: ServedModels, pools: Pools, defaults: TextDefaults) -> None:
        self._models = models
        self._pools = pools
        self._defaults = defaults
        self._entries: object = None
        self._templates: dict[str, ChatTemplate] = {}
        self._tokenizers: dict[str, TextTokenizer | None] = {}

    async def checked_chat(self, model: Servable, fields: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The fields of a chat, with the schema of a forced call; and the parser of calls, if it has one.

        Raises:
            RequestError: The model can't take one of them.
        """
        if "chat_template" in fields:
            raise RequestError(
                "`chat_template` is not taken from requests: a template is code; put it into the model's "
                f"directory, or name it by the parameter {CHAT_TEMPLATE} of its config",
                "chat_template",
            )
        if all(tensor.name != _IMAGE for tensor in model.spec.inputs):
            _check_parts(fields["messages"])
        found = dict(fields)
        if not fields.get("tools") or fields.get("tool_choice") == "none":
            found.pop("tools", None)
            return found, ""
        schema = schema_of_call(fields["tools"], fields.get("tool_choice"))
        if schema is None:
            parser = await self._tool_parser(model)
            if not parser:
                raise RequestError(
                    '"auto" tool choice requires --tool-call-parser to be set, or the parameter '
                    f"{TOOL_PARSER} of the model's config",
                    "tool_choice",
                )
            return found, parser
        for name in ("response_format", "structured_outputs"):
            if name in fields:
                raise RequestError(f"`{name}` can't be used with a forced tool call", name)
        found["structured_outputs"] = {"json": schema}
        return found, ""

    def check_completion(self, fields: Mapping[str, Any]) -> None:
        """Raises RequestError: a field is not for models that get prompts."""
        if fields.get("suffix"):
            raise RequestError("suffix is not currently supported", "suffix")

    async def chat_prompt(self, model: Servable, fields: Mapping[str, Any]) -> str:
        """The prompt of a chat. Raises ConchError: there is no template, or it refuses the messages."""
        more = dict(fields.get("chat_template_kwargs", {}))
        if "reasoning_effort" in fields:
            more.setdefault("reasoning_effort", fields["reasoning_effort"])

        def render() -> str:
            return self._template(model).render(
                fields["messages"],
                tools=fields.get("tools"),
                documents=fields.get("documents"),
                chat_template_kwargs=more,
            )

        return await self.run(render)

    async def has_template(self, model: Servable) -> bool:
        """True if a model has a chat template that can be used."""
        try:
            await self.run(lambda: self._template(model))
        except ConchError:
            return False
        return True

    async def tokenizer(self, model: Servable) -> TextTokenizer | None:
        """The tokenizer of a model; None if it has none. Raises ConchError: it is malformed."""
        key = self._key(model)
        if key in self._tokenizers:
            return self._tokenizers[key]
        return await self.run(lambda: self._tokenizer(model))

    def counter(self, model: Servable) -> TextTokenizer | None:
        """The tokenizer of a model, if `tokenizer` has found one."""
        return self._tokenizers.get(self._key(model))

    async def run(self, work: Callable[[], T]) -> T:
        """Runs work on a thread of the pool."""
        return await result_of(lambda: self._pools.parsing.submit(work))

    def read(self, model: Servable, call: GenerationCall, generation: Generation) -> Generation:
        """The answer with tool calls, reasoning and ends as the request has them."""
        readers = [
            self._reader(model, call, prompt, index * call.choices + choice)
            for index, prompt in enumerate(call.prompts)
            for choice in range(call.choices)
        ]
        return ReadGeneration(generation, readers)

    def _reader(
        self, model: Servable, call: GenerationCall, prompt: str | Sequence[int], index: int
    ) -> AnswerReader:
        fields = call.fields
        tools: ToolCallParser | None = None
        reasoning: ReasoningSplitter | None = None
        if call.route == CHAT:
            tools = _calls_in(call)
            begun = isinstance(prompt, str) and begins_reasoning(prompt)
            if begun or Parsers.of(model.spec.parameters).reasoning:
                reasoning = ReasoningSplitter(begun)
        return AnswerReader(
            tool_parser=tools,
            reasoning=reasoning,
            stop=fields.get("stop", ()),
            include_stop=fields.get("include_stop_str_in_output", False),
            index=index,
            hides_reasoning=fields.get("include_reasoning") is False,
        )

    async def _tool_parser(self, model: Servable) -> str:
        """The parser that the config names, or the chat template's calls need, or the flag names."""
        named = model.spec.parameters.get(TOOL_PARSER, "")
        if named:
            return named
        template = await self.run(lambda: self._template(model))
        return template.tool_parser or self._defaults.tool_parser

    def _template(self, model: Servable) -> ChatTemplate:
        """The template of a model, loaded once as long as the models stay as they are.

        Raises:
            ConchError: It has none, or a malformed one.
        """
        spec = model.spec
        key = self._key(model)
        found = self._templates.get(key)
        if found is None:
            found = self._loaded(model)
            if found is None:
                raise RequestError(
                    f"Model '{spec.name}' has no chat template: put chat_template.jinja into its version "
                    f"directory, or name a file by the parameter {CHAT_TEMPLATE} of its config; "
                    f"/v1/completions needs none",
                    "model",
                )
            self._templates[key] = found
            if found.tool_parser and not spec.parameters.get(TOOL_PARSER):
                log.info(
                    "model '%s': by its chat template, its tool calls are %s", spec.name, found.tool_parser
                )
        return found

    def _tokenizer(self, model: Servable) -> TextTokenizer | None:
        """The tokenizer of a model, kept as its template."""
        spec, default = model.spec, self._defaults.tokenizer
        key = self._key(model)
        if key not in self._tokenizers:
            found = load_tokenizer(spec.version_directory, tokenizer=spec.parameters.get(TOKENIZER, ""))
            if found is None and default is not None:
                found = load_tokenizer(spec.version_directory, tokenizer=str(default.absolute()))
            self._tokenizers[key] = found
        return self._tokenizers[key]

    def _key(self, model: Servable) -> str:
        """The key of a model; drops what is kept of others if models have changed."""
        entries = self._models.entries
        if self._entries is not entries:
            self._entries, self._templates, self._tokenizers = entries, {}, {}
        return f"{model.spec.identifier}/{model.spec.version}"

    def _loaded(self, model: Servable) -> ChatTemplate | None:
        spec, defaults = model.spec, self._defaults
        found = load_chat_template(
            spec.version_directory,
            chat_template=spec.parameters.get(CHAT_TEMPLATE, ""),
            tokenizer=spec.parameters.get(TOKENIZER, ""),
        )
        if found is None and (defaults.chat_template or defaults.tokenizer):
            template, tokenizer = (
                "" if path is None else str(path.absolute())
                for path in (defaults.chat_template, defaults.tokenizer)
            )
            found = load_chat_template(spec.version_directory, chat_template=template, tokenizer=tokenizer)
        return found


def _calls_in(call: GenerationCall) -> ToolCallParser | None:
    fields = call.fields
    if "tools" not in fields:
        return None
    choice = fields.get("tool_choice", "auto")
    if choice != "auto":
        return forced_call_parser(choice)
    parallel = fields.get("parallel_tool_calls", True)
    return tool_call_parser(call.tool_parser, parallel=parallel, tools=fields["tools"])


def _check_parts(messages: Sequence[Mapping[str, Any]]) -> None:
    for index, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] != "text":
                raise RequestError(
                    f"only text message is supported, but got {part['type']}", f"messages[{index}].content"
                )


class ReadGeneration(Generation):
    """An answer whose text is read for tool calls, reasoning and stop strings; it ends with its choices.

    Args:
        generation: The answer as the model gives it.
        readers: One for each choice.
    """

    def __init__(self, generation: Generation, readers: Sequence[AnswerReader]) -> None:
        self._generation = generation
        self._readers = list(readers)
        self._ended = False

    async def take(self) -> Sequence[Delta] | None:
        """The next deltas; None after the last."""
        while not self._ended:
            deltas = await self._generation.take()
            found: list[Delta] = []
            if deltas is None:
                self._ended = True
                for reader in self._readers:
                    found += reader.end()
            else:
                for delta in deltas:
                    found += self._readers[delta.index].read(delta)
                if all(reader.ended for reader in self._readers):
                    self._ended = True
                    self._generation.close()  # a model that knows no stop strings would go on
            if found:
                return found
        return None

    def close(self) -> None:
        """Cancels what still runs."""
        self._generation.close()
