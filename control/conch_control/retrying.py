"""Whether another try may succeed where one has failed."""

from __future__ import annotations

from conch.core.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError

_WILL_FAIL_AGAIN = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def may_pass(error: BaseException) -> bool:
    """Whether an error, or what has caused it, may be gone later although nothing is done about it."""
    return any(
        isinstance(each, UnavailableError | DeadlineExceededError | ResourceExhaustedError)
        or (isinstance(each, OSError) and not isinstance(each, _WILL_FAIL_AGAIN))
        for each in (error, error.__cause__)
    )
