"""Writes docs/settings.md from the definitions of the settings."""

from __future__ import annotations

from pathlib import Path

from conch.cli.settings.reference import docs_text

DOCS = Path(__file__).resolve().parents[1] / "docs" / "settings.md"

if __name__ == "__main__":
    DOCS.write_text(docs_text(), encoding="utf-8")
    print(DOCS)
