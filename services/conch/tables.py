"""Plain tables for people to read."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a border, as wide as its contents; cells may have several lines."""
    split = [[cell.splitlines() or [""] for cell in row] for row in (header, *rows)]
    widths = [max(len(line) for row in split for line in row[column]) for column in range(len(header))]
    border = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [border]
    for number, row in enumerate(split):
        for level in range(max(map(len, row))):
            cells = (cell[level] if level < len(cell) else "" for cell in row)
            lines.append(
                "|" + "|".join(f" {cell:<{width}} " for cell, width in zip(cells, widths, strict=True)) + "|"
            )
        if number == 0:
            lines.append(border)
    return "\n".join([*lines, border])
