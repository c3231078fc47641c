"""Parses JSON: with orjson where the result is the same, else with the Triton-compatible scanner.

Fast path: orjson. Careful path: `scan`. Test of both: ``tests/conch/unit/http/test_json_text.py``.

Threads and locks: any thread; no state.
"""

from __future__ import annotations

from typing import Any

import orjson

from conch.core.tensor import Buffer
from conch.frontends.http.jsontext.json_scanner import Pairs, scan

QUICK_BYTES = 64 * 1024
"""Up to this size the fast parser takes less than a millisecond."""
_SHORT_BYTES = 1024
"""Up to this size the other one takes no longer."""
_QUICK_MEMBERS = 1024


class SlowTextError(Exception):
    """A text is too slow to parse on the event loop."""


def load(text: Buffer, pairs: bool = False, quick: bool = False) -> Any:
    """Parses a text; long arrays may come as `BulkArray`.

    Args:
        text: The text.
        pairs: True if objects come as `Pairs`; those in arrays do not always.
        quick: True if the thread must not compute for long; for the event loop.

    Raises:
        JsonSyntaxError: It is no JSON.
        JsonDepthError: It is nested too deep.
        JsonMembersError: It is long, and has too many objects or members of objects.
        SlowTextError: It would take long, with `quick`; nothing has come of it.
    """
    size = len(text)
    quick = quick and size > _SHORT_BYTES
    if size <= QUICK_BYTES:
        text = bytes(text)
        if quick and text.count(b"{") + text.count(b":") > _QUICK_MEMBERS:
            raise SlowTextError
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            pass  # an error, or a number such as NaN
        else:
            # orjson takes the last of members with the same name. Where it has found as many members as there
            # are colons there are no such. Objects in arrays that begin with a scalar are not counted.
            members = 0
            left = [value]
            for each in left:  # grows meanwhile
                if type(each) is dict:
                    members += len(each)
                    left += each.values()
                elif type(each) is list and each and type(each[0]) is dict:
                    left += each
            if members == text.count(b":"):
                try:
                    return _ordered(value) if pairs else value
                except RecursionError:
                    pass  # nested deep; `scan` does not recurse
    if quick:
        raise SlowTextError
    return scan(text, pairs)


def _ordered(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return Pairs((key, _ordered(each)) for key, each in value.items())
