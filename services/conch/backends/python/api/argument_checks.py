"""Checks and converts texts and numbers that models pass, also bytes and numpy's types as in Triton.

Wrong values are refused at the call: later, in a worker's connection or a scheduler, the model would not see
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index


def text_of(value: object, what: str) -> str:
    """A text.

    Args:
        value: The model's value.
        what: Its role, for the error.

    Raises:
        TypeError: It is not a text.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise TypeError(f"{what} must be a string, not bytes that are no UTF-8") from None
    raise TypeError(f"{what} must be a string, not {type(value)}")


def texts_of(values: object, what: str) -> list[str]:
    """A list of texts.

    Raises:
        TypeError: It is not one.
    """
    # `isinstance` is slow for other types.
    if type(values) is not list and (isinstance(values, str | bytes) or not isinstance(values, Iterable)):
        raise TypeError(f"{what} must be a list of strings, not {type(values)}")
    return [value if type(value) is str else text_of(value, f"an element of {what}") for value in values]


def whole_of(value: object, what: str) -> int:
    """A whole number.

    Raises:
        TypeError: It is not one.
    """
    if type(value) is int:
        return value
    try:
        return int(index(value))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} must be a whole number, not {type(value)}") from None


def number_of(value: object, what: str) -> float:
    """A number.

    Raises:
        TypeError: It is not one.
    """
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{what} must be a number, not {type(value)}") from None
