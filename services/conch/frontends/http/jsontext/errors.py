"""What is wrong with a text that is not JSON, or too much of it."""

from __future__ import annotations

from typing import Final

from conch.core.errors import InternalError, InvalidArgumentError

MOST_DEPTH: Final = 100
"""How deep the elements of a tensor may be nested."""
MOST_DOCUMENT_DEPTH: Final = 1024
"""How deep a text may be nested as a whole; the fast parser has the same limit."""
MOST_MEMBERS: Final = 65536
"""How many objects and members of objects a text may have together, if it is not short."""


class JsonSyntaxError(InternalError):
    """A text is not JSON; a client's fault with the status that Triton gives it."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(f"failed to parse the request JSON buffer: {reason} at {position}")


class JsonDepthError(InvalidArgumentError):
    """A text is nested too deep; the text of the error is Triton's."""

    def __init__(self) -> None:
        super().__init__(f"JSON nesting depth exceeds maximum allowed limit ({MOST_DEPTH})")


class JsonMembersError(InvalidArgumentError):
    """A text has too many objects, or members of objects."""

    def __init__(self) -> None:
        super().__init__(
            f"the request JSON has more than {MOST_MEMBERS} objects and members of objects; send large "
            f"tensors as arrays"
        )
