"""Reads the constraint of an answer from a request: ``response_format``, or vLLM's ``structured_outputs``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from conch.core.errors import InvalidArgumentError


class Grammar(NamedTuple):
    """Constraint of an answer: ``json_schema``, ``regex`` or ``grammar`` (EBNF), and its text."""

    kind: str
    text: str


_GRAMMARS = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "grammar"}


def read_grammar(asked: Mapping[str, Any]) -> Grammar | None:
    """The constraint that ``structured_outputs`` or ``response_format`` asks for; None for free text.

    Raises:
        InvalidArgumentError: It is malformed; the text names the field.
    """
    found = asked.get("structured_outputs")
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise InvalidArgumentError(f"structured_outputs: must be JSON: {error}") from None
    form = asked.get("response_format")
    if found is None:
        return None if form is None else _response_format(form)
    if not isinstance(found, Mapping):
        raise InvalidArgumentError("structured_outputs: must be an object")
    if found.get("json_object"):
        return Grammar("json_schema", '{"type":"object"}')
    named = [name for name, value in found.items() if value is not None]
    if len(named) != 1 or named[0] not in _GRAMMARS:
        raise InvalidArgumentError(
            f"structured_outputs: one of json, json_object, regex, choice and grammar is required, not "
            f"{', '.join(named) or 'none'}"
        )
    (name,) = named
    value = found[name]
    if name == "json":
        return Grammar("json_schema", value if isinstance(value, str) else _schema(name, value))
    if name == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
            raise InvalidArgumentError("structured_outputs.choice: must be a list of texts")
        return Grammar(
            "grammar", "root ::= " + " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
        )
    if not isinstance(value, str):
        raise InvalidArgumentError(f"structured_outputs.{name}: must be a text")
    return Grammar(_GRAMMARS[name], value)


def _response_format(form: Any) -> Grammar | None:
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", '{"type":"object"}')
    if kind == "json_schema":
        written = form.get("json_schema")
        schema = written.get("schema") if isinstance(written, Mapping) else None
        return Grammar("json_schema", _schema("response_format.json_schema.schema", schema))
    if kind == "regex":
        pattern = form.get("pattern", form.get("regex"))
        if isinstance(pattern, str):
            return Grammar("regex", pattern)
        raise InvalidArgumentError("response_format.pattern: must be a text")
    raise InvalidArgumentError(
        f"response_format.type: must be text, json_object, json_schema or regex, not {kind!r}"
    )


def _schema(name: str, value: Any) -> str:
    if not isinstance(value, Mapping | bool):
        raise InvalidArgumentError(f"{name}: must be a JSON schema")
    return json.dumps(value)
