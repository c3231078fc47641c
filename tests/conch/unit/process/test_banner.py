"""Announcements of a server at its start."""

from __future__ import annotations

import logging

from conch.core.model_control import NOT_RESIDENT, IndexEntry
from conch.process.banner import failure_announcement, start_announcement


def test_cold_models_are_counted() -> None:
    cold = [IndexEntry(f"cold{number}", state="UNAVAILABLE", reason=NOT_RESIDENT) for number in range(1200)]
    models = [
        *cold,
        IndexEntry("pinned", "1", "READY"),
        IndexEntry("wrong", state="UNAVAILABLE", reason="why"),
    ]
    announced = start_announcement(models, [], "open")
    assert [line for _, line, _ in announced.lines] == [
        "model 'pinned' version 1 is READY",
        "model 'wrong' is UNAVAILABLE: why",
        "1,200 models are loaded for their first request",
        "open",
    ]
    assert "cold0" not in announced.text
    assert "1,200 models" in announced.text


def test_a_start_that_fails_logs_as_errors_what_failed_only() -> None:
    models = [
        IndexEntry("good", "1", "READY"),
        IndexEntry("cold", state="UNAVAILABLE", reason=NOT_RESIDENT),
        IndexEntry("unused"),
        IndexEntry("wrong", "1", "UNAVAILABLE", "why"),
    ]
    announced = failure_announcement(models, "error: creating server: no", "  because")
    assert [(level, line) for level, line, _ in announced.lines] == [
        (logging.INFO, "model 'good' version 1 is READY"),
        (logging.INFO, f"model 'cold' is UNAVAILABLE: {NOT_RESIDENT}"),
        (logging.INFO, "model 'unused' is not loaded"),
        (logging.ERROR, "model 'wrong' version 1 is UNAVAILABLE: why"),
        (logging.ERROR, "error: creating server: no"),
        (logging.ERROR, "because"),
    ]
