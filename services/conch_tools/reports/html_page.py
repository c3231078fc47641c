"""One HTML page that needs no network: figures, each with its data as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --back: #fff; --soft: #5c6370; --rule: #d9dce1;
  --c0: #2563c4; --c1: #c2570c; --c2: #147a4b; --c3: #9333a8; --c4: #a16207; --c5: #b4233c; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --back: #16181c; --soft: #a0a7b4;
  --rule: #363b44; --c0: #7aa7f5; --c1: #f2975a; --c2: #58c08f; --c3: #d18be0; --c4: #dcb14a;
  --c5: #f0788c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
figure { margin: 1rem 0; break-inside: avoid; } figcaption { color: var(--soft); }
svg { width: 100%; height: auto; } svg text { fill: var(--text); font-size: 12px; }
.grid { stroke: var(--rule); fill: none; } .median { stroke: var(--back); stroke-width: 2; }
.line { fill: none; stroke-width: 2; } .line.dashed { stroke-dasharray: 6 4; }
.line.dotted { stroke-dasharray: 2 3; }
.halo { paint-order: stroke; stroke: var(--back); stroke-width: 4px; }
.series-0 { --c: var(--c0); } .series-1 { --c: var(--c1); } .series-2 { --c: var(--c2); }
.series-3 { --c: var(--c3); } .series-4 { --c: var(--c4); } .series-5 { --c: var(--c5); }
.line { stroke: var(--c); } .fill { fill: var(--c); }
.table { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; }
th:first-child, td.text { text-align: left; }
pre { overflow-x: auto; border: 1px solid var(--rule); padding: .6rem; }
@media print { body { max-width: none; margin: 0; } details > * { display: block; } }
"""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts and numbers."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]

    def html(self) -> str:
        """The table; every text is escaped."""
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in self.columns)
        body = "\n".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in self.rows)
        return (
            f'<div class="table"><table><caption>{escape(self.caption)}</caption>\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
        )

    def markdown(self) -> str:
        """The table in Markdown."""
        rows = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        return "\n".join("| " + " | ".join(_in_markdown(cell) for cell in row) + " |" for row in rows)


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with what it shows and its data.

    Attributes:
        svg: From `svg_chart`; not escaped again.
    """

    title: str
    note: str
    svg: str
    table: Table

    def html(self) -> str:
        """The figure with its table below, folded."""
        return (
            f"<h2>{escape(self.title)}</h2>\n<figure>\n{self.svg}\n"
            f"<figcaption>{escape(self.note)}</figcaption>\n"
            f"<details><summary>Data</summary>\n{self.table.html()}\n</details>\n</figure>"
        )


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of a log or a file under a title."""

    title: str
    text: str

    def html(self) -> str:
        """The title and the lines; both are escaped."""
        return f"<h2>{escape(self.title)}</h2>\n<pre>{escape(self.text)}</pre>"


def page(title: str, lead: str, parts: Sequence[Figure | Table | Lines]) -> str:
    """The whole page."""
    body = "\n".join(part.html() for part in parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\"/>\n"
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(lead)}</p>\n{body}\n</body>\n</html>\n"
    )


def cell_text(cell: object) -> str:
    """A cell's text: numbers with up to 3 decimals, None as a dash."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3f}".rstrip("0").rstrip(".")
    return str(cell)


def _cell(cell: object) -> str:
    kind = ' class="text"' if isinstance(cell, str) else ""
    return f"<td{kind}>{escape(cell_text(cell))}</td>"


def _in_markdown(cell: object) -> str:
    text = escape(cell_text(cell), quote=False).replace("\\", "\\\\").replace("|", "\\|")
    return " ".join(text.split())
