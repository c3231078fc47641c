"""Texts of others, safe for terminals."""

from __future__ import annotations

import unicodedata

_JOINERS = "\u200b\u200c\u200d\u200e\u200f\u2060"
"""Invisible characters of scripts and of pictures that control nothing."""


def safe(text: str, kept: str = "") -> str:
    """A text without characters that control terminals or turn its order, but for those in `kept`."""
    return "".join(each if each in kept or _is_harmless(each) else "?" for each in text)


def _is_harmless(character: str) -> bool:
    # Blanks of languages, such as the ideographic one, are not printable for Python.
    return character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs"
