"""The command, for the entry-point group ``conch.commands``."""

from __future__ import annotations

from conch.cli.command import Command

CONTROL = Command(
    "conch_fleet.control_command",
    "[flags]",
    "make a running server follow repositories, from another process",
    True,
    after="models",
)
