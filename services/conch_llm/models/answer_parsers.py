"""Tool calls and reasoning in answers to chats: what config and class of a model say, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch_llm.language.answer_reader import AnswerReader
from conch_llm.language.reasoning import ReasoningSplitter, begins_reasoning
from conch_llm.language.tool_calls import (
    ToolCallParser,
    forced_call_parser,
    schema_of_call,
    tool_call_parser,
)
from conch_llm.models.model_requests import ChatRequest, TextRequest

TOOL_PARSER = "CONCH_TOOL_PARSER"
REASONING_PARSER = "CONCH_REASONING_PARSER"
PARAMETERS = (TOOL_PARSER, REASONING_PARSER)

_THINK = "think"
_FORMS = ("response_format", "structured_outputs")


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of a model.

    Attributes:
        tools: Name of the parser of tool calls; empty for none.
        reasoning: True if reasoning between ``<think>`` and ``</think>`` is split off.
    """

    tools: str = ""
    reasoning: bool = False

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Parsers:
        """Reads a config's parameters. Raises InvalidArgumentError: there is no such parser."""
        tools = parameters.get(TOOL_PARSER, "")
        if tools:
            try:
                tool_call_parser(tools)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"parameter '{TOOL_PARSER}': {error}") from None
        reasoning = parameters.get(REASONING_PARSER, "")
        if reasoning not in ("", _THINK):
            raise InvalidArgumentError(
                f"parameter '{REASONING_PARSER}': unknown reasoning parser {reasoning!r}; known is {_THINK}"
            )
        return cls(tools, bool(reasoning))


class Reading:
    """Reading of the answer to one request.

    Args:
        tools: Makes the parser of tool calls of one choice; None leaves them in the text.
        reasoning: True if reasoning is split off.
    """

    def __init__(self, tools: Callable[[], ToolCallParser] | None = None, reasoning: bool = False) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self._begun = False

    def template(self, template: Callable[[ChatRequest], str]) -> Callable[[ChatRequest], str]:
        """A template that notes whether its prompts end inside the reasoning."""

        def render(request: ChatRequest) -> str:
            prompt = template(request)
            self._begun = begins_reasoning(prompt)
            return prompt

        return render

    def reader(self, asked: TextRequest, index: int) -> AnswerReader:
        """The reader of a choice; its prompt must have been rendered."""
        # A schema leaves no room for the end of a reasoning that the prompt has begun.
        begun = self._begun and not any(_is_form(asked.params.get(name)) for name in _FORMS)
        return AnswerReader(
            tool_parser=self._tools() if self._tools else None,
            reasoning=ReasoningSplitter(begun) if self._reasoning else None,
            stop=asked.stop,
            include_stop=asked.params.get("include_stop_str_in_output") is True,
            index=index,
            hides_reasoning=asked.params.get("include_reasoning") is False,
        )


def read_chat(asked: ChatRequest, parsers: Parsers, model: object) -> tuple[ChatRequest, Reading]:
    """The request that a model gets, and how its answer is read.

    Args:
        asked: The request.
        parsers: The model's parsers.
        model: The model. With ``handles_tools`` it obeys ``tool_choice`` and yields calls by itself; with
            ``handles_schemas`` it obeys ``response_format``, which a forced call then has.

    Raises:
        InvalidArgumentError: The model can't obey ``tool_choice``; the text names it.
    """
    tools = None
    if not getattr(model, "handles_tools", False):
        asked, tools = _with_tools(asked, parsers, model)
    reading = Reading(tools, parsers.reasoning)
    return replace(asked, template=reading.template(asked.template)), reading


def _with_tools(
    asked: ChatRequest, parsers: Parsers, model: object
) -> tuple[ChatRequest, Callable[[], ToolCallParser] | None]:
    choice = asked.params.get("tool_choice")
    schema = schema_of_call(asked.tools, choice)
    if schema is not None:
        assert choice is not None
        if not getattr(model, "handles_schemas", False):
            raise InvalidArgumentError(
                'tool_choice: the model takes no JSON schemas, so no call can be forced; use "auto" or "none"'
            )
        for name in _FORMS:
            if _is_form(asked.params.get(name)):
                raise InvalidArgumentError(f"{name}: a forced tool call has a schema of its own")
        form = {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}
        asked = replace(asked, params={**asked.params, "response_format": form})
        return asked, lambda: forced_call_parser(choice)
    if not asked.tools or choice == "none":
        return asked, None
    if not parsers.tools:
        raise InvalidArgumentError(
            f'tool_choice: "auto" tool choice requires the model\'s parameter {TOOL_PARSER} to be set'
        )
    parallel = asked.params.get("parallel_tool_calls") is not False
    return asked, lambda: tool_call_parser(parsers.tools, parallel=parallel, tools=asked.tools)


def check_form(asked: TextRequest, model: object) -> None:
    """Raises InvalidArgumentError: an answer must obey a schema, but the model takes none."""
    if getattr(model, "handles_schemas", False):
        return
    for name in _FORMS:
        if _is_form(asked.params.get(name)):
            raise InvalidArgumentError(f"{name}: the model takes no schemas, so its answers are free text")


def _is_form(found: Any) -> bool:
    """True if a value of ``response_format`` or ``structured_outputs`` asks for anything but text."""
    return bool(found) and not (isinstance(found, Mapping) and found.get("type") == "text")
