"""Whether requests to run models are still taken."""

from __future__ import annotations

from conch.core.errors import UnavailableError


class ExitingError(UnavailableError):
    """The front end takes no more requests; the connection is closed with the answer."""


class Gate:
    """Lets requests in until the front end stops; used on the loop, and closed from any thread.

    Attributes:
        refused: How many requests came after that.
    """

    def __init__(self) -> None:
        self._closed = False
        self.refused = 0

    def close(self) -> None:
        """Lets no more in."""
        self._closed = True

    def check(self) -> None:
        """Lets one in.

        Raises:
            ExitingError: The front end stops.
        """
        if self._closed:
            self.refused += 1
            raise ExitingError("Server exiting")
