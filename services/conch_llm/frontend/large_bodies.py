"""Parses bodies that are too large for the event loop, in steps that let other threads run.

Fast path: orjson, which holds the GIL until it is done. Careful path: the scanner of JSON, with the rules of
orjson. Test of both: ``tests/conch_llm/unit/test_large_bodies.py``. A list of token ids comes as an array of
64-bit numbers, since a million numbers of their own take long to free.

Threads and locks: any thread; no state.
"""

from __future__ import annotations

import codecs
from typing import Any, Final

import numpy as np
import orjson

from conch.core.tensor import Buffer
from conch.frontends.http.jsontext.json_scanner import (
    JsonDepthError,
    JsonMembersError,
    JsonSyntaxError,
    JsonValuesError,
    scan,
)
from conch.frontends.http.jsontext.json_values import BulkArray
from conch.frontends.yield_gil import yield_gil
from conch_llm.frontend.openai_errors import RequestError

QUICK_BYTES: Final = 16 << 10
"""Bodies up to this size are parsed and checked on the event loop, in about a millisecond at most."""
MOST_VALUES: Final = 1 << 20
"""Most values of a body: numbers, texts, lists, objects."""
_FAST_BYTES = 128 << 10
_STEP = 64 << 10
_BETWEEN = 4096
_IDS = ("prompt", "input", "tokens")


def read_body(body: Buffer) -> tuple[bytes, Any]:
    """Returns a body as bytes, and what it is as JSON.

    Raises:
        RequestError: It is no JSON, or has too many values.
    """
    if len(body) <= _FAST_BYTES:
        whole = bytes(body)
        return whole, quick_json(whole)
    _check_text(body)
    try:
        found = scan(body, standard=True, most_values=MOST_VALUES)
    except JsonSyntaxError as error:
        raise _malformed(error.message.rpartition("buffer: ")[2]) from None
    except JsonDepthError:
        raise _malformed("it is nested too deep") from None
    except (JsonMembersError, JsonValuesError) as error:
        raise RequestError(f"The body is too complex: {error.message}") from None
    # Last, since a copy holds the GIL: a body that is refused is not copied.
    return bytes(body), _unpacked(found)


def quick_json(body: bytes) -> Any:
    """The value of a short body. Raises RequestError: it is no JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _malformed(str(error)) from None


def _malformed(reason: str) -> RequestError:
    return RequestError(f"The body is not valid JSON: {reason}", None, "json_invalid")


def _check_text(body: Buffer) -> None:
    """Raises RequestError: it is not UTF-8, or has a NUL, which ends a text for the scanner."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(body), _STEP):
            piece = bytes(body[start : start + _STEP])
            decoder.decode(piece)
            if b"\0" in piece:
                raise _malformed(f"a NUL at {start + piece.index(0)}")
            if start // _STEP % 16 == 15:
                yield_gil()
        decoder.decode(b"", True)
    except UnicodeDecodeError as error:
        raise _malformed(f"it is not UTF-8: {error.reason}") from None


def _unpacked(found: Any) -> Any:
    """A value with lists in place of long arrays; those of token ids as arrays of numbers."""
    if not isinstance(found, dict):
        return None
    prompts = [found.get(name) for name in _IDS]
    seen = 0
    left: list[Any] = [found]
    for each in left:  # grows meanwhile
        for key, member in each.items() if isinstance(each, dict) else enumerate(each):
            value = member
            seen += 1
            if seen % _BETWEEN == 0:
                yield_gil()
            if isinstance(value, BulkArray):
                ids = key in _IDS if each is found else any(each is one for one in prompts)
                each[key] = value = _numbers(value) if ids else _listed(value)
            if isinstance(value, dict | list):
                left.append(value)
    return found


def _numbers(array: BulkArray) -> Any:
    pieces = [piece for piece in array.pieces if len(piece)]
    if all(map(_is_whole, pieces)):
        try:
            return np.concatenate([np.asarray(piece, np.int64) for piece in pieces])
        except OverflowError:
            pass
    return _listed(array)


def _is_whole(piece: Any) -> bool:
    if isinstance(piece, np.ndarray):
        return bool(piece.dtype == np.int64)
    return set(map(type, piece)) == {int}  # the last elements of a list are parsed one by one


def _listed(array: BulkArray) -> list[Any]:
    found: list[Any] = []
    for piece in array.pieces:
        found += piece if isinstance(piece, list) else piece.tolist()
        yield_gil()
    return found
