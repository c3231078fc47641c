"""Limits of grammars, checked before the engine's compiler gets them; pure.

The compiler can't be stopped, and its time and memory grow faster than the text: 60 KB of texts that begin
alike took it 17 s. A pattern counts as what its repetitions make of it: ``(a{9}){9}`` as 81.

openvino_genai's compiler tries all tokens at each state, which takes time where most of them fit: sets of
characters that are repeated by a count, such as ``.{0,200}``, but not ``[0-9]{200}`` or ``.*``. These are the
work of a pattern. Measured with 49,152 tokens: 16 to 33 ms of a CPU for each of up to some 256 states of one
repetition; those of a repeated group once, if they are at most 128, or else in each copy. If an answer can
be in many states at once, as of ``(.{0,8}){0,8}``, each state costs as much as these, and each token, too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from conch.core.errors import InvalidArgumentError
from conch_engines.language.grammars import Grammar

MOST_CHARACTERS: Final = {"regex": 4096, "json_schema": 16384, "grammar": 8192}
MOST_EXPANDED: Final = 65536
"""Most characters and sets of a pattern once its repetitions are written out, of all patterns of a schema."""
MOST_WORK: Final = 512
"""Most work of a pattern, of all rules of a grammar, or of the different lengths and patterns of a schema."""
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

_STATES = 256
"""Most states of one repeated set; longer ones are counted."""
_SHARED = 128
"""Most work of a group whose copies share it."""
_ENDLESS = 8
"""Copies of a group with ``*`` or ``+`` that an answer can be in at once."""
_SHORT, _LETTERS = 2, 4
"""Characters of branches of which so many beside the first are as a set."""
_LENGTHS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_REPEAT = re.compile(r"[*+?]|\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_MARK = re.compile(r"\?(?:P?<\w+>|<?[=!]|:)")
"""Begins a group that is not captured, or has a name."""
_COUNTS: Final = {"*": (0, 0), "+": (1, 0), "?": (0, 1)}
_MANY = re.compile(r"\.|\\[wWDS]")
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_RULE = re.compile(r"^[ \t]*([A-Za-z_][\w-]*)\s*::=", re.MULTILINE)
_BLANK = re.compile(r"\s+|#.*")
_FEW = re.compile(r"\[(?:(?:0-9|a-f|A-F|\\[ds]|\d|[^\]\\^\w-]|-(?=\])){,16}|\w{1,4})\]")
"""A set that fits few tokens."""
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
        parts: dict[str, _Part] = {}
        if kind == "grammar":
            _, *pieces = _RULE.split(text)
            rules = dict(zip(pieces[::2], pieces[1::2], strict=True))
            for name in rules:
                _rule(name, rules, parts)
        else:
            parts[""] = _measure(kind, text)
        _check_parts(kind, parts.values())


def _beyond(kind: str, what: str, most: int) -> InvalidArgumentError:
    return InvalidArgumentError(f"{kind}: has {what}, and at most {most} are allowed")


def _check_parts(kind: str, parts: Iterable[_Part], work: int = 0) -> None:
    size = 0
    for part in parts:
        size, work = size + part.size, work + part.work
    if size > MOST_EXPANDED:
        raise _beyond(kind, f"{size} characters and sets with its repetitions written out", MOST_EXPANDED)
    if work > MOST_WORK:
        raise InvalidArgumentError(
            f"{kind}: its counted repetitions of sets, such as .{{0,200}} or maxLength, are {work} states, "
            f"and at most {MOST_WORK} are allowed: count less, use * or +, have a character between two that "
            f"vary, or give texts of a schema the same maxLength"
        )


def _check_schema(schema: Any) -> None:
    kind, chosen = "json_schema", 0
    texts: dict[tuple[int, int], int] = {}  # work by lengths: equal ones are compiled once
    parts: dict[str, _Part] = {}
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
            parts |= {each: _measure(kind, each) for each in patterns if each not in parts}
            least, most = (
                int(value[name]) if _is_length(value.get(name)) else 0 for name in ("minLength", "maxLength")
            )
            texts[least, most] = min(max(least, most, 0), _STATES)
            _check_parts(kind, parts.values(), sum(texts.values()))
            chosen += sum(len(json.dumps(value[name])) for name in ("enum", "const") if name in value)
            if chosen > MOST_CHOSEN:
                raise _beyond(kind, f"{chosen} characters in enum and const", MOST_CHOSEN)
            left += [(each, depth + 1, inner) for each in value.values()]


def _is_length(value: Any) -> bool:
    """True for a number that the engine can take as a length; of others it says what is wrong."""
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


@dataclass(slots=True)
class _Part:
    """A pattern, group, character or set.

    Attributes:
        size: Characters and sets, with repetitions written out.
        work: States at which the compiler tries all tokens.
        row: Parts at its end of which each varies in length, with nothing between them that must be there.
        held: True if it has a character that must be there, so that its copies don't run into each other.
        levels: Deepest nesting of repetitions.
    """

    size: int = 0
    work: int = 0
    row: int = 0
    held: bool = False
    levels: int = 0

    def add(self, part: _Part) -> None:
        """Adds a part behind this one."""
        self.size += part.size
        self.work += part.work * (1 + 4 * self.row if part.row else 1)
        self.row = 0 if part.held else self.row + part.row
        self.held |= part.held
        self.levels = max(self.levels, part.levels)

    def branch(self, part: _Part) -> None:
        """Adds a part that is an alternative to this one."""
        self.size += part.size
        self.work += part.work
        self.row = max(self.row, part.row)
        self.held &= part.held
        self.levels = max(self.levels, part.levels)

    def repeat(self, least: int, most: int) -> None:
        """Repeats this part; most of 0 is no end."""
        copies = max(least, most, 1)
        varies = self.work > 0 and not self.held and 0 < most != least
        if self.row and not self.held:
            met = copies if most else max(copies, _ENDLESS)
            self.work *= met + 2 * self.row * met * (met - 1)
            self.row *= met
        elif self.size == self.work == 1:
            self.work = min(copies, _STATES)
        elif self.work > _SHARED:
            self.work *= copies
        elif self.work and copies > 1:
            self.work += min(copies, _STATES)
        self.size *= copies
        self.held &= least > 0
        self.row = max(self.row, int(varies))


def _rule(name: str, texts: Mapping[str, str], parts: dict[str, _Part], depth: int = 1) -> _Part:
    """A rule of a grammar. Each is compiled once: it adds to the work of others only if it varies."""
    if name not in parts and name in texts:
        if depth > MOST_DEPTH * 2:
            raise _beyond("grammar", "more rules within rules", MOST_DEPTH * 2)
        parts[name] = _Part(held=True)  # for a rule that names itself
        parts[name] = _measure("grammar", texts[name], lambda other: _rule(other, texts, parts, depth + 1))
    part = parts.get(name, _Part(held=True))
    return _Part(1, 0 if part.held else part.work, part.row, part.held)


def _measure(kind: str, text: str, rule: Callable[[str], _Part] | None = None) -> _Part:
    """A pattern, or with `rule` the text of a rule. Raises InvalidArgumentError: it is nested too deep."""
    # Of each open group: its branches, and the last part of the last branch, which may be repeated.
    stack: list[tuple[list[_Part], list[_Part]]] = [([_Part()], [])]
    position = 0
    while position < len(text):
        character, (branches, last) = text[position], stack[-1]
        end, part = position + 1, None
        if found := _REPEAT.match(text, position):
            end = found.end()
            if last:
                last[0].repeat(*_counts(found))
                last[0].levels += character != "?"
                if last[0].levels > MOST_REPEATED:
                    raise _beyond(kind, "more repetitions within repetitions", MOST_REPEATED)
        elif character == "|":
            _close(branches, last)
            branches.append(_Part())
        elif character == "(":
            stack.append(([_Part()], []))
            if len(stack) > MOST_NESTED + 1:
                raise _beyond(kind, "more groups within groups", MOST_NESTED)
            if found := _MARK.match(text, end):
                end = found.end()
        elif character == ")" and len(stack) > 1:
            part = _whole(*stack.pop())
            branches, last = stack[-1]
        else:
            end, part = _atom(text, position, rule)
        if part is not None:
            _close(branches, last)
            last.append(part)
        position = end
    while len(stack) > 1:  # the engine says that one is open
        part = _whole(*stack.pop())
        _close(*stack[-1])
        stack[-1][1].append(part)
    return _whole(*stack[0])


def _counts(found: re.Match[str]) -> tuple[int, int]:
    """Least and most of a repetition; most of 0 is no end."""
    if found[0] in _COUNTS:
        return _COUNTS[found[0]]
    # Python reads no number of many digits.
    least, most = (int(found[each].lstrip("0")[:9] or 0) for each in (1, 3))
    return least, most if found[2] else least


def _atom(text: str, position: int, rule: Callable[[str], _Part] | None) -> tuple[int, _Part | None]:
    """The end of a character, set, text or name, and the part that it is; None for a blank or an anchor."""
    if found := _SET.match(text, position):
        few = _FEW.fullmatch(found[0]) is not None
        return found.end(), _Part(1, int(not few), held=few)
    if rule is not None:
        if found := _BLANK.match(text, position):
            return found.end(), None
        if found := _NAME.match(text, position):
            return found.end(), rule(found[0])
        if found := _QUOTED.match(text, position):
            return found.end(), _Part(1, held=len(found[0]) > len('""'))
    wide = _MANY.match(text, position) is not None
    end = position + (2 if text[position] == "\\" else 1)
    if rule is None and text[position] in "^$":
        return end, None
    return end, _Part(1, int(wide), held=not wide)


def _close(branches: list[_Part], last: list[_Part]) -> None:
    """Adds the last part, which nothing repeats any more, to its branch."""
    if last:
        branches[-1].add(last.pop())


def _whole(branches: list[_Part], last: list[_Part]) -> _Part:
    _close(branches, last)
    lengths = {part.size for part in branches if part.work and not part.held}
    first, *others = branches
    for other in others:
        first.branch(other)
    first.row = max(first.row, int(len(lengths) > 1))
    if sum(part.size <= _SHORT for part in others) >= _LETTERS:  # a set written as ``(a|b|c|d|e)``
        first.work, first.held = first.work + 1, False
    return first
