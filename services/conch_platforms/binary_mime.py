"""Binary tensors where a platform strips headers: the length of the JSON is part of the Content-Type."""

from __future__ import annotations

import re

from conch.core.errors import InvalidArgumentError
from conch.frontends.http.http_exchange import Headers, HttpExchange
from conch.frontends.http.infer.infer_response import HEAD_LENGTH

_CONTENT_TYPE = b"content-type"
_NUMBER = re.compile(rb"[-+]?[0-9]+")
_MOST = 2**31 - 1


class BinaryMime:
    """The MIME type of one platform, such as ``application/vnd.x.binary+json;json-header-size=``."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()

    def read(self, exchange: HttpExchange) -> None:
        """Moves the length of the JSON to the header in which REST has it; that one itself does not count.

        Raises:
            InvalidArgumentError: It is no number in range; the texts are Triton's.
        """
        fields = {name: value for name, value in exchange.fields.items() if name != HEAD_LENGTH}
        given = fields.get(_CONTENT_TYPE, b"")
        position = given.find(self._prefix)
        if position > 0:
            raise InvalidArgumentError(
                f"expect MIME type for binary data starts with '{self._prefix.decode()}', got: "
                f"{given.decode('latin-1')}"
            )
        if position == 0:
            fields[HEAD_LENGTH] = _length(given[len(self._prefix) :])
        exchange.fields = fields

    def headers(self, headers: Headers, keep_length: bool = False) -> Headers:
        """The headers of a response, with the length of the JSON in the Content-Type, or there too."""
        length = next((value for name, value in headers if name == HEAD_LENGTH), None)
        if length is None:
            return headers
        moved = (_CONTENT_TYPE,) if keep_length else (HEAD_LENGTH, _CONTENT_TYPE)
        kept = [each for each in headers if each[0] not in moved]
        return [(_CONTENT_TYPE, self._prefix + length), *kept]


def _length(text: bytes) -> bytes:
    shown = text.decode("latin-1")
    if _NUMBER.fullmatch(text) is None:
        raise InvalidArgumentError(f"Unable to parse inference header size, got: {shown}")
    if len(text) > 12 or not -_MOST <= int(text) <= _MOST:
        raise InvalidArgumentError(
            f"Unable to parse inference header size, value is out of range, got: {shown}"
        )
    return text
