"""Forwards headers and call metadata to models as request parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest

_RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)

_TOKEN = re.compile(
    r"""\\.                                            # an escape
    | \[\^?\]?(?:\\.|\[:\^?[a-z]+:\]|[^\]\\])*\]      # a class of characters
    | \(\?[imsU]*(?:-[imsU]+)?\)                     # flags up to the end of the group
    | .                                              # all else, brackets and bars among them
    """,
    re.DOTALL | re.VERBOSE,
)
_POSIX_CLASSES = {
    "[:alnum:]": "0-9A-Za-z",
    "[:alpha:]": "A-Za-z",
    "[:ascii:]": r"\x00-\x7f",
    "[:blank:]": r"\t ",
    "[:cntrl:]": r"\x00-\x1f\x7f",
    "[:digit:]": "0-9",
    "[:graph:]": "!-~",
    "[:lower:]": "a-z",
    "[:print:]": " -~",
    "[:punct:]": r"!-/:-@\[-`{-~",
    "[:space:]": r"\s",
    "[:upper:]": "A-Z",
    "[:word:]": r"\w",
    "[:xdigit:]": "0-9A-Fa-f",
}


def _from_re2(pattern: str) -> str:
    """Translates a pattern from RE2's syntax to Python's, which has flags only before or around a pattern.

    Raises:
        ValueError: It has a class of characters that does not exist.
    """
    text = ""
    scopes: list[list[str]] = [[]]  # for each open group, the flag groups opened in it
    for token in _TOKEN.findall(pattern):
        flags = scopes[-1]
        if token.startswith("(?"):
            flags.append(f"{token[:-1]}:")
            text += flags[-1]
        elif token == "|":  # flags apply behind it too
            text += ")" * len(flags) + "|" + "".join(flags)
        elif token == ")" and len(scopes) > 1:
            text += ")" * len(scopes.pop()) + ")"
        elif token == r"\z":
            text += r"\Z"
        elif token.startswith("["):
            text += re.sub(r"\[:\^?[a-z]+:\]", _posix_class, token)
        else:
            if token == "(":
                scopes.append([])
            text += token
    return text + ")" * len(scopes[0])


def _posix_class(found: re.Match[str]) -> str:
    try:
        return _POSIX_CLASSES[found[0]]
    except KeyError:
        raise ValueError(f"'{found[0]}' is not a class of characters") from None


class HeaderForwarder:
    """Adds matching headers to a request's parameters.

    Args:
        pattern: RE2 regular expression, searched anywhere in a key; ignores case but with ``(?-i)`` in front.

    Raises:
        ValueError: The pattern is not a regular expression.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._search = re.compile(_from_re2(pattern), re.IGNORECASE | re.ASCII).search
        except re.error as error:
            raise ValueError(f"'{pattern}' is not a regular expression: {error}") from None

    def forward(self, request: InferenceRequest, headers: Iterable[tuple[str, str | bytes]]) -> None:
        """Adds the headers of the request, or the metadata of its call or stream, but no binary values.

        Raises:
            InvalidArgumentError: A matching key is reserved.
        """
        for key, value in headers:
            if isinstance(value, bytes) or self._search(key) is None:
                continue
            if key in _RESERVED or key.startswith("triton_"):
                raise InvalidArgumentError(
                    f"Header '{key}' is reserved for Triton usage and cannot be forwarded."
                )
            # A new mapping: requests with one template share theirs.
            request.parameters = {**(request.parameters or {}), key: value}
