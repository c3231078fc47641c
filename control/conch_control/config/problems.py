"""Config checks as generators of problems.

A load raises the first problem (`result_or_raise`); `conch check` collects all (`collect`). Both run the
same rules in the same order. A check continues after a problem, and skips consequences of it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from conch.core.errors import ConchError, InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a config.

    Attributes:
        path: Field path, such as ``input[1].dims[0]``, also of a missing field; empty for the whole config.
        message: The problem, as a failing load reports it to clients.
        expected: The valid value, if the message does not name it.
        found: The value found; empty for the one at the path.
        nearest: A similar valid name, if any.
        kind: Error class of a failing load.
    """

    path: str
    message: str
    expected: str = ""
    found: str = ""
    nearest: str = ""
    kind: type[ConchError] = InvalidArgumentError
    cause: BaseException | None = field(default=None, compare=False)

    def error(self) -> ConchError:
        """The problem as an exception."""
        return self.kind(self.message)


Problems = Generator[Problem, None, None]
"""A check."""

Checked = Generator[Problem, None, T]
"""A check with a result, valid only without problems."""


def result_or_raise(checked: Checked[T]) -> T:
    """Result of a check. Raises ConchError: its first problem."""
    try:
        problem = next(checked)
    except StopIteration as done:
        result: T = done.value
        return result
    checked.close()
    raise problem.error() from problem.cause


def raise_first(problems: Iterable[Problem]) -> None:
    """Raises the first problem of a check, if any."""
    for problem in problems:
        raise problem.error() from problem.cause


def collect(checked: Checked[T], found: list[Problem]) -> T:
    """Runs a check to its end and returns its result."""
    while True:
        try:
            found.append(next(checked))
        except StopIteration as done:
            result: T = done.value
            return result


def attempt(path: str, action: Callable[[], T]) -> Checked[T | None]:
    """Runs an action; a `ConchError` becomes a problem, with the result None."""
    try:
        return action()
    except ConchError as error:
        yield Problem(path, error.message, kind=type(error), cause=error.__cause__)
        return None


def entry_path(path: str, key: str | int | bool) -> str:
    """Path of a map entry's value."""
    return f"{path}[{json.dumps(key, ensure_ascii=False)}]"


_UNKNOWN_FIELD = re.compile(r'Message type "(?P<type>[\w.]+)" has no field named "(?P<name>\w+)"')
_UNKNOWN_VALUE = re.compile(r'Enum type "(?P<type>[\w.]+)" has no value named (?P<name>\w+)')
_UNKNOWN_JSON_VALUE = re.compile(r"Invalid enum value (?P<name>\w+) for enum type (?P<type>[\w.]+?)\.? at ")


def nearest(name: str, names: Iterable[str]) -> str:
    """The most similar name; empty if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), "")


def unknown_name(message: str) -> tuple[str, str] | None:
    """The unknown name in a parser's message and the most similar known one; None for other messages."""
    pool = ModelConfig.DESCRIPTOR.file.pool
    if match := _UNKNOWN_FIELD.search(message):
        known = list(pool.FindMessageTypeByName(match["type"]).fields_by_name)
    elif match := _UNKNOWN_VALUE.search(message) or _UNKNOWN_JSON_VALUE.search(message):
        known = list(pool.FindEnumTypeByName(match["type"]).values_by_name)
    else:
        return None
    return match["name"], nearest(match["name"], known)


def with_suggestion(message: str) -> str:
    """Appends ``did you mean 'x'?`` to a message about an unknown name, if a similar one exists."""
    _, near = unknown_name(message) or ("", "")
    return f"{message.rstrip('.')}; did you mean '{near}'?" if near else message
