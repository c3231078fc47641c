"""`conch rollout report --html`: the report as one page without scripts and links."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape

from conch.core.rollouts import RolloutReport
from conch_rollout.cli.rollout_output import Rows, findings, history_rows, rollout_line, sides
from conch_rollout.cli.shadow_output import shadow_lines, worst_pairs

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border: 1px solid #8888; padding: 0.25rem 0.6rem; text-align: left; }
pre { background: #8882; padding: 0.75rem; overflow-x: auto; }
"""


def rollout_page(report: RolloutReport) -> str:
    """The report of a model's rollout as a page."""
    return "\n".join(_page(report))


def _page(report: RolloutReport) -> Iterator[str]:
    title = escape(f"Rollout of {report.model}")
    yield f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>'
    yield f"<style>{_STYLE}</style>\n<h1>{title}</h1>"
    yield from _paragraphs([rollout_line(report)])
    yield _table(sides(report))
    yield from _paragraphs(findings(report))
    if report.shadow_report:
        yield "<h2>Shadow</h2>"
        yield from _paragraphs(shadow_lines(report.shadow_report))
        yield _table(worst_pairs(report.shadow_report))
    if report.declaration:
        yield "<h2>Declaration</h2>"
        yield f"<pre>{escape(json.dumps(report.declaration, indent=2, ensure_ascii=False))}</pre>"
    if report.history:
        yield f"<h2>History</h2>\n{_table(history_rows(report.history))}"
    yield "</html>\n"


def _paragraphs(lines: list[str]) -> Iterator[str]:
    return (f"<p>{escape(line)}</p>" for line in lines)


def _table(content: Rows) -> str:
    header, rows = content
    if not rows:
        return ""
    body = "".join(_row("td", row) for row in rows)
    return f"<table>{_row('th', header)}{body}</table>"


def _row(tag: str, cells: list[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
