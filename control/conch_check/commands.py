"""The command, for the entry-point group ``conch.commands``."""

from __future__ import annotations

from conch.cli.command import Command

CHECK = Command(
    "conch_check.check_command",
    "REPO ...",
    "check model repositories; see conch check --help",
    True,
    after="control",
)
