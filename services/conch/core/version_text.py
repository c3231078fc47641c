"""Version texts of requests: numbers, and labels that name versions."""

from __future__ import annotations

import re

from conch.core.errors import InvalidArgumentError

STABLE = "stable"
"""The label whose version an empty version text means."""

LABEL_PATTERN = "[A-Za-z][A-Za-z0-9_.-]{0,63}"
"""Regular expression of labels, none of which is a number."""

_LARGEST_VERSION = 2**63 - 1
_MOST_DIGITS = 30
_MOST_SHOWN = 100


def check_label(label: str) -> None:
    """Raises InvalidArgumentError unless a text can be a label."""
    if re.fullmatch(LABEL_PATTERN, label) is None:
        raise InvalidArgumentError(
            f"label '{label[:_MOST_SHOWN]}' must begin with a letter, go on with letters, digits, '_', '-' "
            f"and '.', and have at most 64 characters"
        )


def parse_version(text: str) -> int:
    """Parses the version of a request; -1, for an empty text, means the default one.

    Raises:
        InvalidArgumentError: The text is not a positive integer.
    """
    if not text:
        return -1
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > _MOST_DIGITS:
        raise _not_a_version(text)
    version = sign * int(digits)
    if version > _LARGEST_VERSION:
        raise _not_a_version(text)
    if version < 0:
        raise InvalidArgumentError(
            f"invalid model version specified '{text}' , version should be an integral value > 0"
        )
    return version


def _not_a_version(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"failed to get model version from specified version string '{text[:_MOST_SHOWN]}' (details: stol), "
        f"version should be an integral value > 0"
    )
