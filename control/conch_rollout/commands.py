"""The command, for the entry-point group ``conch.commands``."""

from __future__ import annotations

from conch.cli.command import Command

ROLLOUT = Command(
    "conch_rollout.cli.rollout_command",
    "COMMAND",
    "move a model's requests to another version",
    True,
    after="check",
)
