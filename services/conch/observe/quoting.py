"""Values as JSON that stays on its line."""

from __future__ import annotations

import json
import re

# JSON may hold these as they are, but some readers take them for the end of a line, and terminals for orders.
_BREAKING = re.compile("[\x7f-\x9f\u2028\u2029]")


def quoted(value: object) -> str:
    """A value as JSON, in which text stays readable; what JSON has no form for becomes its text."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return _BREAKING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
