"""The report of a run as one HTML page."""

from __future__ import annotations

from conch_tools.perf.measure.comparison import Comparison
from conch_tools.perf.measure.results import PerfResult
from conch_tools.perf.reports.figures import figures
from conch_tools.perf.reports.tables import (
    comparison_tables,
    error_table,
    facts_table,
    limits_table,
    percentile_table,
    summary_table,
    token_table,
    verdict_table,
)
from conch_tools.reports.html_page import Figure, Table, page


def as_html(result: PerfResult, comparison: Comparison | None = None) -> str:
    """The page: points, verdicts, charts, comparison, facts."""
    parts: list[Figure | Table] = [summary_table(result), verdict_table(result)]
    parts += [table for table in (limits_table(result), token_table(result)) if table.rows]
    if comparison is not None:
        parts += comparison_tables(comparison)
    parts += figures(result)
    parts += [percentile_table(point) for point in result.points]
    errors = error_table(result)
    if errors.rows:
        parts.append(errors)
    parts.append(facts_table(result))
    return page(f"Load test of {result.model}", f"{result.protocol}, started {result.started}", parts)
