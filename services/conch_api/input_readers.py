"""Inputs of requests as a bound function's example had them: texts as `str`, categories checked. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Array

_SHOWN = 5


class InputReader:
    """Reads an input.

    Args:
        name: The input.
        texts: True if its values are texts.
        null: The text that stands for a missing one, which is None for the function; None if there is none.
        categories: The values that may come; None for any.
        limits: Least and largest value of whole numbers that come as floats; None for other inputs.
    """

    def __init__(
        self,
        name: str,
        texts: bool,
        null: str | None = None,
        categories: Sequence[Any] | None = None,
        limits: tuple[int, int] | None = None,
    ) -> None:
        self._name = name
        self._texts = texts
        self._null = null
        self._categories = categories
        self._known = None if categories is None else frozenset(categories)
        self._limits = limits

    def __call__(self, array: Array) -> Array:
        """An input for the function.

        Raises:
            InvalidArgumentError: It has bytes that are no text, or a value that the example can't have.
        """
        if self._texts:
            array = self._decoded(array)
        if self._known is not None:
            self._check(array, self._known)
        if self._limits is not None:
            self._check_whole(array, *self._limits)
        return array

    def _decoded(self, array: Array) -> Array:
        texts: list[str | None] = []
        for each in array.ravel().tolist():
            try:
                text = each.decode()
            except UnicodeDecodeError:
                raise self._refused(len(texts), array, f"{each!r} is no text in UTF-8") from None
            texts.append(None if text == self._null else text)
        made = np.empty(array.size, object)
        made[:] = texts
        return made.reshape(array.shape)

    def _check(self, array: Array, known: frozenset[Any]) -> None:
        for at, value in enumerate(array.ravel().tolist()):
            missing = value is None or (isinstance(value, float) and math.isnan(value))
            if value not in known and not missing:
                shown = ", ".join(repr(each) for each in (self._categories or ())[:_SHOWN])
                more = len(known) - _SHOWN
                rest = f" and {more} more" if more > 0 else ""
                raise self._refused(at, array, f"{value!r} is none of the categories {shown}{rest}")

    def _check_whole(self, array: Array, least: int, most: int) -> None:
        # As a float the most of 64 bits would be rounded to one that is too large.
        wrong = ~np.isnan(array) & ~((np.floor(array) == array) & (array >= least) & (array < most + 1))
        if wrong.any():
            at = int(np.argmax(wrong))
            value = array.ravel()[at].item()
            raise self._refused(at, array, f"{value!r} is no whole number from {least} to {most}")

    def _refused(self, at: int, array: Array, why: str) -> InvalidArgumentError:
        row = int(np.unravel_index(at, array.shape)[0]) if array.ndim else 0
        return InvalidArgumentError(f"input '{self._name}', row {row}: {why}")
