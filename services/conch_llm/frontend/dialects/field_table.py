"""Tables of an API's fields: each is copied to the chat, read by the translation, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conch.core.errors import ConchError, InvalidArgumentError
from conch_llm.calls.generation import FieldError
from conch_llm.frontend.openai_errors import RequestError
from conch_llm.frontend.request_fields import CHAT_FIELDS, Check, wrong

_SAMPLING = (
    *("seed", "stop", "presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty"),
    *("min_tokens", "ignore_eos", "stop_token_ids", "logit_bias", "skip_special_tokens", "bad_words"),
    *("include_stop_str_in_output", "allowed_token_ids", "structured_outputs", "priority", "cache_salt"),
    "chat_template_kwargs",
)
_MOST_MEMBERS = 16
_MOST_KEY = 64
_MOST_VALUE = 512


@dataclass(frozen=True, slots=True)
class Copied:
    """A field that a chat has under the name `to`, and whose values are checked as there."""

    to: str


@dataclass(frozen=True, slots=True)
class Read:
    """A field that the translation reads."""


@dataclass(frozen=True, slots=True)
class Noted:
    """A field that says something about the request and asks for nothing; `check` bounds it."""

    check: Check


@dataclass(frozen=True, slots=True)
class Only:
    """A field of which only these values can be held; `reason` says why."""

    values: Sequence[Any]
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is refused, whatever its value."""

    reason: str


Field = Copied | Read | Noted | Only | Refused
FieldTable = Mapping[str, Field]


def further_fields() -> dict[str, Field]:
    """Fields of chats that neither API has: they mean the same as in a chat."""
    return {name: Copied(name) for name in _SAMPLING}


def checked_body(
    route: str, body: Mapping[str, Any], table: FieldTable
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a body that are not null: those of the chat by its names, and all by their own.

    Raises:
        RequestError: A field is unknown, wrong or refused; it names the field.
    """
    chat: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        field = table.get(name)
        if field is None:
            shown = name if len(name) <= _MOST_KEY else f"{name[:_MOST_KEY]}…"
            raise RequestError(f"`{shown}` is no field of {route}", shown, "unknown_parameter")
        given[name] = value
        if isinstance(field, Copied):
            chat[field.to] = given[name] = CHAT_FIELDS[field.to](name, value)
        elif isinstance(field, Noted):
            given[name] = field.check(name, value)
        elif isinstance(field, Only):
            check_only(name, value, field)
        elif isinstance(field, Refused):
            raise refused(name, field.reason)
    return chat, given


def check_only(name: str, value: Any, field: Only) -> None:
    """Raises RequestError: a value is none that can be held."""
    # True equals 1.
    if not any(value == each and type(value) is type(each) for each in field.values):
        shown = " or ".join(_written(each) for each in field.values)
        raise wrong(name, f"{shown} ({field.reason})", value)


def _written(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


def refused(name: str, reason: str) -> RequestError:
    """The error for a field that can't be held."""
    return RequestError(f"`{name}` is not supported: {reason}", name)


def members(
    name: str, value: Any, known: Collection[str], harmless: Mapping[str, Only] | None = None
) -> Mapping[str, Any]:
    """The members of an object that are not null.

    Args:
        name: Its name.
        value: The object.
        known: Members that are read.
        harmless: Members of which only some values can be held.

    Raises:
        RequestError: It is no object, or has a member that is not known.
    """
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    found = {key: each for key, each in value.items() if each is not None}
    for key, each in found.items():
        if key in known:
            continue
        limited = (harmless or {}).get(key)
        if limited is None:
            raise refused(f"{name}.{key[:_MOST_KEY]}", "it can't be held")
        check_only(f"{name}.{key}", each, limited)
    return found


def text_of(name: str, value: Any) -> str:
    """A text. Raises RequestError: it is none."""
    if not isinstance(value, str):
        raise wrong(name, "a text", value)
    return value


def list_of(name: str, value: Any) -> list[Any]:
    """A list. Raises RequestError: it is none."""
    if not isinstance(value, list):
        raise wrong(name, "a list", value)
    return value


def metadata(name: str, value: Any) -> dict[str, str]:
    """A check of OpenAI's metadata: a few short texts by short keys."""
    limits = f"an object of at most {_MOST_MEMBERS} texts of {_MOST_VALUE} characters"
    if not isinstance(value, dict) or len(value) > _MOST_MEMBERS:
        raise wrong(name, limits, value)
    for key, each in value.items():
        if not isinstance(each, str) or len(each) > _MOST_VALUE or len(key) > _MOST_KEY:
            raise wrong(name, limits, value)
    return value


def renamed(error: ConchError, names: Mapping[str, str]) -> ConchError:
    """An error about a field of a chat as one about the client's field; others as they are."""
    if not isinstance(error, InvalidArgumentError):
        return error
    message, code, param = error.message, None, ""
    if isinstance(error, RequestError | FieldError):
        param, code = error.param or "", error.error_code
    begins = re.match(r"[a-z_]+", param or message)
    name = begins[0] if begins else ""
    if name not in names:
        return error
    new = names[name]
    # Places within a chat's messages are not those within the client's.
    message = re.sub(rf"^{name}[\w.\[\]]*", new, message)
    message = re.sub(rf"`{name}\b[^`]*`", f"`{new}`", message)
    return RequestError(message, new, code)
