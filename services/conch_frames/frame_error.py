"""The error of a table that does not fit a model."""

from __future__ import annotations

from conch.core.errors import InvalidArgumentError

NO_ROWS = "it has no rows"


class FrameError(InvalidArgumentError):
    """A column that a model can't take.

    Attributes:
        column: Its name; empty if the table as a whole is refused.
        row: Number of the first row that is refused, counted from 0; None if it is the whole column.
        reason: The refusal, without the place.
    """

    def __init__(self, column: str, row: int | None, reason: str) -> None:
        place = f"column '{column}'" if column else "the table"
        super().__init__(f"{place}: {reason}" if row is None else f"{place}, row {row}: {reason}")
        self.column = column
        self.row = row
        self.reason = reason

    def moved(self, rows: int) -> FrameError:
        """The same error in a table with so many rows before."""
        return self if self.row is None else FrameError(self.column, self.row + rows, self.reason)
