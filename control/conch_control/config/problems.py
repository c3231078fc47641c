"""What is wrong with a config, one thing after the other.

The checks of this package are generators. Who loads a model wants the first problem, as an exception
(`result_or_raise`); who checks a repository wants all of them (`collect`). Both run the same rules in the
same order. So a check that has found something goes on as well as it can, and does not follow up with what
is only a consequence.
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
    """Something wrong with a config.

    Attributes:
        path: Path of the field, such as ``input[1].dims[0]``; a field that is missing has one too. Empty for
            the config as a whole.
        message: What is wrong, as clients are told by a load that fails of it.
        expected: What belongs there; empty where the message says all there is.
        found: What is there instead; empty for what the config has at the path.
        nearest: A valid name that is close to the one found, if any.
        kind: The error that a load fails with.
        cause: What led to it, if it was an exception.
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
"""A check that also makes something of what it has read; of use only if there was no problem."""


def result_or_raise(checked: Checked[T]) -> T:
    """What a check has made.

    Raises:
        ConchError: The first problem that it has found.
    """
    try:
        problem = next(checked)
    except StopIteration as done:
        result: T = done.value
        return result
    checked.close()
    raise problem.error() from problem.cause


def raise_first(problems: Iterable[Problem]) -> None:
    """Raises the first problem of a check as a `ConchError`, if there is one."""
    for problem in problems:
        raise problem.error() from problem.cause


def collect(checked: Checked[T], found: list[Problem]) -> T:
    """Runs a check to its end.

    Args:
        checked: The check.
        found: Gets its problems.

    Returns:
        What it has made.
    """
    while True:
        try:
            found.append(next(checked))
        except StopIteration as done:
            result: T = done.value
            return result


def attempt(path: str, action: Callable[[], T]) -> Checked[T | None]:
    """Does what raises an error where it finds a problem; the result is None then.

    Args:
        path: Path of the field that the problem is about.
        action: What to do.
    """
    try:
        return action()
    except ConchError as error:
        yield Problem(path, error.message, kind=type(error), cause=error.__cause__)
        return None


def entry_path(path: str, key: str | int | bool) -> str:
    """Path of the value under a key of a map."""
    return f"{path}[{json.dumps(key, ensure_ascii=False)}]"


_UNKNOWN_FIELD = re.compile(r'Message type "(?P<type>[\w.]+)" has no field named "(?P<name>\w+)"')
_UNKNOWN_VALUE = re.compile(r'Enum type "(?P<type>[\w.]+)" has no value named (?P<name>\w+)')
_UNKNOWN_JSON_VALUE = re.compile(r"Invalid enum value (?P<name>\w+) for enum type (?P<type>[\w.]+?)\.? at ")


def nearest(name: str, names: Iterable[str]) -> str:
    """The name that is closest to one, or nothing if none is close."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), "")


def unknown_name(message: str) -> tuple[str, str] | None:
    """The unknown name that a parser's message is about and the known one nearest to it, if any.

    None for messages about something else.
    """
    pool = ModelConfig.DESCRIPTOR.file.pool
    if match := _UNKNOWN_FIELD.search(message):
        known = list(pool.FindMessageTypeByName(match["type"]).fields_by_name)
    elif match := _UNKNOWN_VALUE.search(message) or _UNKNOWN_JSON_VALUE.search(message):
        known = list(pool.FindEnumTypeByName(match["type"]).values_by_name)
    else:
        return None
    return match["name"], nearest(match["name"], known)


def with_suggestion(message: str) -> str:
    """Adds ``did you mean 'x'?`` to a parser's message about an unknown name, if a known one is near."""
    _, near = unknown_name(message) or ("", "")
    return f"{message.rstrip('.')}; did you mean '{near}'?" if near else message
