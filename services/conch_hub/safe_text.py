"""Texts of others, safe for terminals."""

from __future__ import annotations


def safe(text: str, kept: str = "") -> str:
    """A text without characters that control terminals, but for those in `kept`."""
    return "".join(each if each.isprintable() or each in kept else "?" for each in text)
