"""Limits of grammars, checked before the engine's compiler gets them; pure.

The compiler can't be stopped, and its time and memory grow faster than the text: 60 KB of texts that begin
alike took it 17 s. A pattern counts as what its repetitions make of it: ``(a{9}){9}`` as 81.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

from conch.core.errors import InvalidArgumentError
from conch_engines.language.grammars import Grammar

MOST_CHARACTERS: Final = {"regex": 4096, "json_schema": 16384, "grammar": 8192}
MOST_EXPANDED: Final = 65536
"""Most characters and sets of a pattern once its repetitions are written out, of all patterns of a schema."""
MOST_NESTED: Final = 16
"""Deepest nesting of groups."""
MOST_REPEATED: Final = 3
"""Deepest nesting of repeated groups."""
MOST_VALUES: Final = 4096
MOST_DEPTH: Final = 32
"""Deepest nesting of a schema, as JSON."""
MOST_ITEMS: Final = 1 << 20
"""Product of the lengths that a schema nests, such as ``maxItems``."""

MOST_CHOSEN: Final = 4096
"""Most characters of all ``enum`` and ``const`` of a schema."""

_LENGTHS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_REPEAT = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_SET = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]?", re.DOTALL)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)


def check_limits(grammar: Grammar) -> None:
    """Raises InvalidArgumentError: a grammar is over a limit."""
    kind, text = grammar
    if len(text) > MOST_CHARACTERS[kind]:
        raise _beyond(kind, f"{len(text)} characters", MOST_CHARACTERS[kind])
    if kind == "json_schema":
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError):
            return  # the engine says what is wrong
        _check_schema(schema)
    else:
        _check_expanded(kind, _expanded(kind, text))


def _beyond(kind: str, what: str, most: int) -> InvalidArgumentError:
    return InvalidArgumentError(f"{kind}: has {what}, and at most {most} are allowed")


def _check_expanded(kind: str, size: int) -> None:
    if size > MOST_EXPANDED:
        raise _beyond(kind, f"{size} characters and sets with its repetitions written out", MOST_EXPANDED)


def _check_schema(schema: Any) -> None:
    kind, size, chosen = "json_schema", 0, 0
    left: list[tuple[Any, int, int]] = [(schema, 1, 1)]
    for values, (value, depth, items) in enumerate(left, 1):  # grows meanwhile
        if values > MOST_VALUES:
            raise _beyond(kind, "more values", MOST_VALUES)
        if depth > MOST_DEPTH:
            raise _beyond(kind, "more levels", MOST_DEPTH)
        if isinstance(value, list):
            left += [(each, depth + 1, items) for each in value]
        elif isinstance(value, dict):
            lengths = [value[name] for name in _LENGTHS if _is_length(value.get(name))]
            inner = items * max(1, *map(int, lengths)) if lengths else items
            if inner > MOST_ITEMS:
                raise _beyond(kind, f"lengths, such as maxItems, whose product is {inner}", MOST_ITEMS)
            patterns = [value["pattern"]] if isinstance(value.get("pattern"), str) else []
            if isinstance(value.get("patternProperties"), dict):
                patterns += value["patternProperties"]
            size += sum(_expanded(kind, each) for each in patterns)
            _check_expanded(kind, size)
            chosen += sum(len(json.dumps(value[name])) for name in ("enum", "const") if name in value)
            if chosen > MOST_CHOSEN:
                raise _beyond(kind, f"{chosen} characters in enum and const", MOST_CHOSEN)
            left += [(each, depth + 1, inner) for each in value.values()]


def _is_length(value: Any) -> bool:
    """True for a number that the engine can take as a length; of others it says what is wrong."""
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _expanded(kind: str, text: str) -> int:
    """Characters and sets of a pattern with its repetitions written out.

    Raises:
        InvalidArgumentError: Groups are nested too deep.
    """
    # Of each open group: its size so far, the size and the repeated levels of its last part, and its levels.
    stack: list[list[int]] = [[0, 0, 0, 0]]
    position = 0
    while position < len(text):
        character = text[position]
        group = stack[-1]
        found = None
        if character in "*+?{":
            found = _REPEAT.match(text, position) if character == "{" else None
            if character != "{" or found is not None:
                count = 1
                if found is not None:
                    count = max(int(found[1] or 0) + bool(found[2] and not found[3]), int(found[3] or 0), 1)
                group[0] += group[1] * (count - 1)
                group[1] *= count
                if character != "?":
                    group[2] += 1
                    group[3] = max(group[3], group[2])
                    if group[3] > MOST_REPEATED:
                        raise _beyond(kind, "more repetitions within repetitions", MOST_REPEATED)
                position = position + 1 if found is None else found.end()
                if group[0] > MOST_EXPANDED:
                    return group[0]
                continue
        if character == "(":
            stack.append([0, 0, 0, 0])
            if len(stack) > MOST_NESTED + 1:
                raise _beyond(kind, "more groups within groups", MOST_NESTED)
        elif character == ")" and len(stack) > 1:
            size, _, _, levels = stack.pop()
            group = stack[-1]
            group[0], group[1], group[2] = group[0] + size, size, levels
            group[3] = max(group[3], levels)
        else:
            if character == "[":
                found = _SET.match(text, position)
            elif character == '"' and kind == "grammar":
                found = _QUOTED.match(text, position)
            end = position + 2 if character == "\\" else position + 1
            group[0], group[1], group[2] = group[0] + 1, 1, 0
            position = (end if found is None else found.end()) - 1
        position += 1
    return sum(each[0] for each in stack)
