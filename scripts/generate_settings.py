"""Writes docs/settings.md and the keyword types of `conch.Server` from the definitions of the settings.

With ``--check`` it writes nothing, and fails if a file is not up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from conch.cli.settings.settings_reference import docs_text, keywords_text

ROOT = Path(__file__).resolve().parents[1]
FILES = {"docs/settings.md": docs_text, "services/conch_api/server_keywords.py": keywords_text}


def main() -> None:
    """Writes or checks the files."""
    check = sys.argv[1:] == ["--check"]
    for name, text in FILES.items():
        path, made = ROOT / name, text()
        if not check:
            path.write_text(made, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != made:
            sys.exit(f"{name} is not up to date: run `make settings`")


if __name__ == "__main__":
    main()
