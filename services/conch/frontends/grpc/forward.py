"""Call metadata forwarded to models as request parameters (``--grpc-header-forward-pattern``)."""

from __future__ import annotations

import re

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest
from conch.frontends.grpc.adapter import Metadata

_RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)


class HeaderForwarder:
    """Adds matching metadata to a request's parameters.

    Args:
        pattern: Regular expression, searched for anywhere in a key, ignoring case.

    Raises:
        ValueError: The pattern is not a regular expression.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._search = re.compile(pattern, re.IGNORECASE).search
        except re.error as error:
            raise ValueError(f"'{pattern}' is not a regular expression: {error}") from None

    def __call__(self, request: InferenceRequest, metadata: Metadata) -> None:
        """Adds the metadata of a call, or of the stream the request came on.

        Raises:
            InvalidArgumentError: A matching key is reserved.
        """
        for key, value in metadata:
            if isinstance(value, bytes) or self._search(key) is None:
                continue
            if key in _RESERVED or key.startswith("triton_"):
                raise InvalidArgumentError(
                    f"Header '{key}' is reserved for Triton usage and cannot be forwarded."
                )
            # A new mapping: requests that are alike may share theirs.
            request.parameters = {**(request.parameters or {}), key: value}
