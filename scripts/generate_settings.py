"""Writes docs/settings.md and the keyword types of `conch.Server` from the definitions of the settings."""

from __future__ import annotations

from pathlib import Path

from conch.cli.settings.settings_reference import docs_text, keywords_text

ROOT = Path(__file__).resolve().parents[1]
FILES = {"docs/settings.md": docs_text, "services/conch/api/server_keywords.py": keywords_text}

if __name__ == "__main__":
    for name, text in FILES.items():
        (ROOT / name).write_text(text(), encoding="utf-8")
        print(ROOT / name)
