"""Constraints of answers in the engine's form, their check before, and the check of answers.

The engine has llguidance for schemas and patterns. A grammar that it can't compile makes the answer free
text, with a success, so llguidance's own package compiles each one first, and follows its answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import llguidance

from conch.core.errors import InternalError, InvalidArgumentError
from conch_engines.language.grammar_limits import check_limits
from conch_engines.language.grammars import Grammar

_HEAD = "%llguidance {}\n"
_SHOWN = 300
_SOURCE = "\n   1 |"  # begins what an error shows of the grammar
_FORM = "x-guidance"
_DROPPED = ("additionalItems", _FORM)
"""Keywords that llguidance ignores although they change what fits, or that are its own settings."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose members have names of the user's choice."""
_DATA = ("enum", "const", "default", "examples")
"""Keywords whose values are no schemas."""


class Constraint:
    """A constraint of one answer, which is compiled here, and follows the answer that comes in pieces.

    Args:
        grammar: The constraint.

    Attributes:
        text: The constraint as the engine takes it.

    Raises:
        InvalidArgumentError: It is malformed, over a limit, or has something that the engine can't hold.
    """

    def __init__(self, grammar: Grammar) -> None:
        check_limits(grammar)
        self.text = _text(grammar)
        self._matcher: Any = None  # the engine refuses grammars of its own, if malformed
        if self.text.startswith("%llguidance"):
            tokens_are_bytes = llguidance.LLTokenizer("byte")
            self._matcher = llguidance.LLMatcher(tokens_are_bytes, self.text)
            if fault := self._matcher.get_error():
                said = " ".join(fault.partition(_SOURCE)[0].split())
                raise InvalidArgumentError(f"{grammar.kind}: the engine can't hold it: {said[:_SHOWN]}")

    def take(self, text: str, ends: bool) -> None:
        """Takes a piece. Raises InternalError: the answer does not obey, or ends too early."""
        if self._matcher is None:
            return
        data = list(text.encode())
        fits = self._matcher.try_consume_tokens(data) == len(data)
        if not fits or (ends and not self._matcher.is_accepting()):
            raise InternalError("the engine's answer does not obey the schema or grammar of the request")


def _text(grammar: Grammar) -> str:
    if grammar.kind == "grammar":
        return grammar.text
    if grammar.kind == "regex":
        return f"{_HEAD}start: /{_quoted(grammar.text)}/"
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError):
        raise InvalidArgumentError("json_schema: must be JSON") from None
    for name in _keywords(schema):
        if name in _DROPPED:
            raise InvalidArgumentError(f"json_schema: the engine llama_cpp does not hold '{name}'")
    # One line: where blanks may be of any number, a greedy model may never end.
    form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    if not isinstance(schema, dict):
        schema = {"allOf": [schema]}
    return f"{_HEAD}start: %json {json.dumps({**schema, _FORM: form})}"


def _quoted(pattern: str) -> str:
    """A pattern between slashes."""
    pieces: list[str] = []
    characters = iter(pattern)
    for character in characters:
        if character == "\\":
            pieces.append(character + next(characters, ""))
        else:
            pieces.append({"/": "\\/", "\n": "\\n", "\r": "\\r"}.get(character, character))
    return "".join(pieces)


def _keywords(schema: Any) -> Iterator[str]:
    left = [schema]
    while left:
        found = left.pop()
        if isinstance(found, list):
            left += found
        elif isinstance(found, dict):
            yield from found
            for name, value in found.items():
                if name in _NAMED and isinstance(value, dict):
                    left += value.values()
                elif name not in _DATA:
                    left.append(value)
