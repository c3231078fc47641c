"""Texts that stay on their line: as JSON, or as they are without what could end it."""

from __future__ import annotations

import json
import re

# JSON may hold these as they are, but some readers take them for the end of a line, and terminals for orders.
_BREAKING = re.compile("[\x7f-\x9f\u2028\u2029]")
_CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")  # all but the tab


def quoted(value: object) -> str:
    """A value as JSON, in which text stays readable; what JSON has no form for becomes its text."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return _BREAKING.sub(_escaped, text)


def on_one_line(text: str) -> str:
    """A text as it is, but for characters that readers take for the end of a line or terminals for orders."""
    return _CONTROLS.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
