"""The body of a generate request: an object whose members come in order, and may come twice."""

from __future__ import annotations

from conch.core.errors import InternalError
from conch.core.tensor import Buffer
from conch.frontends.http.jsontext.load import load, load_quickly
from conch.frontends.http.jsontext.scan import Pairs


def parse_document(body: Buffer, quick: bool = False) -> Pairs:
    """The members of a body; long arrays may come as `BulkArray`.

    Args:
        body: The body.
        quick: Whether the thread must not compute for long.

    Raises:
        InternalError: It is no JSON, or no object.
        InvalidArgumentError: It is nested too deep, or has too many members.
        SlowTextError: It would take long, where it must not.
    """
    value = load_quickly(body, pairs=True) if quick else load(body, pairs=True)
    if not isinstance(value, Pairs):
        raise InternalError("attempt to get members for non-object")
    return value
