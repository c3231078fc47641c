"""What a server announces at its start."""

from __future__ import annotations

from conch.core.model_control import NOT_RESIDENT, IndexEntry
from conch.process.banner import start_announcement


def test_cold_models_are_counted() -> None:
    cold = [IndexEntry(f"cold{number}", state="UNAVAILABLE", reason=NOT_RESIDENT) for number in range(1200)]
    models = [
        *cold,
        IndexEntry("pinned", "1", "READY"),
        IndexEntry("wrong", state="UNAVAILABLE", reason="why"),
    ]
    announced = start_announcement(models, [], "open")
    assert [line for line, _ in announced.lines] == [
        "model 'pinned' version 1 is READY",
        "model 'wrong' is UNAVAILABLE: why",
        "1,200 models are loaded for their first request",
        "open",
    ]
    assert "cold0" not in announced.text
    assert "1,200 models" in announced.text
