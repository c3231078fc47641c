"""Report of a shadow in `conch rollout report`."""

from __future__ import annotations

import math

from tests.support.waiting import PATIENCE_S

from conch_rollout.cli.shadow_output import shadow_text
from conch_rollout.shadows.comparison import Difference, Figures
from conch_rollout.shadows.shadow import ShadowPolicy
from conch_rollout.shadows.shadow_service import Shadows


def test_counters_and_worst_pairs() -> None:
    shadows = Shadows()
    shadow = shadows.open("m", 8, b"1", ShadowPolicy())
    assert shadow is not None
    assert shadows.stop(PATIENCE_S)
    assert shadow_text(shadow.as_json()).splitlines() == [
        "shadow of version 8: 0 copies, 0 of them failed; 0 dropped",
        "pairs: 0 compared, 0 differ",
    ]
    shadow.report.add("one", 0.0, [Figures("OUT", Difference.VALUES, 0.5, 0.25, 0.99)], {})
    shadow.report.add("two", 0.0, [Figures("OUT", Difference.VALUES, 0.5, math.inf)], {})
    shadow.report.add("three", 0.0, [Figures("", Difference.ERROR, 0.0, note="stable: an answer")], {})
    text = shadow_text(shadow.as_json())
    assert "pairs: 3 compared, 3 differ (error 1, values 2)" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "| " in line]
    assert rows[1:] == [
        ["two", "OUT", "values", "0.5", "infinite", "", "", ""],
        ["three", "", "error", "0", "", "", "", "stable: an answer"],
        ["one", "OUT", "values", "0.5", "0.25", "0.99", "", ""],
    ]
