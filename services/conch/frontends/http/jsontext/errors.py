"""What is wrong with a text that is not JSON."""

from __future__ import annotations

from conch.core.errors import InternalError


class JsonSyntaxError(InternalError):
    """A text is not JSON; a client's fault with the status that Triton gives it."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(f"failed to parse the request JSON buffer: {reason} at {position}")
