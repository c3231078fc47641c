"""A tree as SVG: a row for each node, further right than the node that it hangs on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _ROW, _INDENT, _EDGE = 720, 24, 36, 10


@dataclass(frozen=True, slots=True)
class Node:
    """A node.

    Attributes:
        parent: Index of an earlier node; None for a root.
        series: Its colour.
    """

    text: str
    parent: int | None
    series: int = 0


def tree_svg(title: str, nodes: Sequence[Node]) -> str:
    """The whole picture."""
    rows = [place for root in _children(nodes, None) for place in _walk(nodes, root, 0)]
    at = {index: (depth, row) for row, (index, depth) in enumerate(rows)}
    height = _ROW * len(rows) + 2 * _EDGE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">'
    )
    edges, marks = [], []
    for index, (depth, row) in at.items():
        node = nodes[index]
        across, down = _EDGE + depth * _INDENT, _EDGE + row * _ROW + _ROW // 2
        if node.parent is not None:
            over, up = at[node.parent]
            start = f"M{_EDGE + over * _INDENT} {_EDGE + up * _ROW + _ROW // 2}"
            edges.append(f'<path class="grid" d="{start}V{down}H{across}"/>')
        marks.append(f'<circle class="fill series-{node.series}" cx="{across}" cy="{down}" r="5"/>')
        marks.append(f'<text x="{across + 12}" y="{down + 4}">{escape(node.text)}</text>')
    return "\n".join([head, *edges, *marks, "</svg>"])


def _walk(nodes: Sequence[Node], index: int, depth: int) -> Iterator[tuple[int, int]]:
    yield index, depth
    for child in _children(nodes, index):
        yield from _walk(nodes, child, depth + 1)


def _children(nodes: Sequence[Node], parent: int | None) -> list[int]:
    return [index for index, node in enumerate(nodes) if node.parent == parent]
