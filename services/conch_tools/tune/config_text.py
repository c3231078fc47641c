"""Changes fields in the text of a ``config.pbtxt``; all other text stays as it is, with its comments.

The text is cut into the spans of its top-level fields. Each span is parsed by itself: those whose field has
the same value in the new config are kept, others are written anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf import text_format

from conch.protocol.model_config_pb2 import ModelConfig

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BLANK = re.compile(r"(?:\s|#[^\n]*)*")
_TEXT = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", re.DOTALL)
_COMMENT = re.compile(r"#[^\n]*")
_SCALAR = re.compile(r"[^\s;,#\"'{}<>\[\]]+")
_PARAMETERS = "parameters"
_OPENING, _CLOSING = "{<[", "}>]"


@dataclass(frozen=True, slots=True)
class Changed:
    """A changed text.

    Attributes:
        dropped: Comments that are not in it, as they stood inside a field that was written anew.
    """

    text: str
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    start: int
    end: int
    parsed: ModelConfig


def change_text(text: str, new: ModelConfig) -> Changed:
    """Changes the text of a config so that it reads as `new`."""
    spans = list(_spans(text))
    parts: list[str] = []
    dropped: list[str] = []
    written: set[str] = set()
    at = 0
    for span in spans:
        replacement = _replacement(span, spans, new, written)
        if replacement is None:
            continue
        dropped += _COMMENT.findall(_TEXT.sub("", text[span.start : span.end]))
        parts += [text[at : span.start], replacement]
        at = span.end if replacement else _line_end(text, span)
    parts.append(text[at:])
    result = "".join(parts)
    missing = ModelConfig()
    missing.CopyFrom(new)
    for field, _ in text_format.Parse(result, ModelConfig()).ListFields():
        if field.name != _PARAMETERS:
            missing.ClearField(field.name)
    for key in text_format.Parse(result, ModelConfig()).parameters:
        missing.parameters.pop(key, None)
    if missing.ListFields():
        result = result + ("" if not result or result.endswith("\n") else "\n") + _text_of(missing) + "\n"
    assert text_format.Parse(result, ModelConfig()) == new, "the text has the new values and no others"
    return Changed(result, tuple(dropped))


def _replacement(span: _Span, spans: list[_Span], new: ModelConfig, written: set[str]) -> str | None:
    """The text for a span; None if the span stays. A field of several spans is written at the first."""
    if span.name == _PARAMETERS:
        keys = [key for key in span.parsed.parameters if key in new.parameters]
        made = ModelConfig()
        for key in keys:
            made.parameters[key].CopyFrom(new.parameters[key])
        return None if made == span.parsed else _text_of(made)
    whole = ModelConfig()
    for each in spans:
        if each.name == span.name:
            whole.MergeFrom(each.parsed)
    wanted = ModelConfig()
    wanted.CopyFrom(new)
    for field, _ in new.ListFields():
        if field.name != span.name:
            wanted.ClearField(field.name)
    if whole == wanted:
        return None
    first = span.name not in written
    written.add(span.name)
    return _text_of(wanted) if first else ""


def _line_end(text: str, span: _Span) -> int:
    """The end of a span, or of its lines if there is nothing else in them."""
    before = text.rfind("\n", 0, span.start) + 1
    after = text.find("\n", span.end) + 1 or len(text)
    alone = not (text[before : span.start] + text[span.end : after]).strip()
    return after if alone else span.end


def _text_of(config: ModelConfig) -> str:
    return text_format.MessageToString(config, as_utf8=True).rstrip("\n")


def _spans(text: str) -> Iterator[_Span]:
    """The top-level fields of a text that has been parsed."""
    at = _blank(text, 0)
    while at < len(text):
        name = _NAME.match(text, at)
        assert name is not None, "a field has a name"
        end = _value_end(text, name.end())
        yield _Span(name[0], at, end, text_format.Parse(text[at:end], ModelConfig()))
        at = _blank(text, end)
        if text[at : at + 1] in (";", ","):
            at = _blank(text, at + 1)


def _value_end(text: str, at: int) -> int:
    at = _blank(text, at)
    if text[at] == ":":
        at = _blank(text, at + 1)
    if text[at] in _OPENING:
        return _closed(text, at)
    string = _TEXT.match(text, at)
    if string is None:
        scalar = _SCALAR.match(text, at)
        assert scalar is not None, "a field has a value"
        return scalar.end()
    end = string.end()
    while (string := _TEXT.match(text, _blank(text, end))) is not None:
        end = string.end()
    return end


def _closed(text: str, at: int) -> int:
    """The end of a message or list that begins here."""
    depth = 0
    while True:
        string = _TEXT.match(text, at) or _COMMENT.match(text, at)
        if string is not None:
            at = string.end()
            continue
        depth += (text[at] in _OPENING) - (text[at] in _CLOSING)
        at += 1
        if not depth:
            return at


def _blank(text: str, at: int) -> int:
    """The end of spaces and comments."""
    found = _BLANK.match(text, at)
    assert found is not None, "it matches nothing, too"
    return found.end()
