"""`conch config`: prints the effective settings of flags, environment and file, with their sources."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from conch.cli.settings.settings_reader import read_flags
from conch.cli.settings.settings_reference import help_parser, setting_rows, settings_json
from conch.process.banner import table
from conch.settings.option import FlagError


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the process's exit code."""
    if "--help" in arguments or "-h" in arguments:
        help_parser("conch config", "conch config [--json] [flags of conch serve]").print_help()
        return 0
    try:
        settings = read_flags([each for each in arguments if each != "--json"])
    except FlagError as error:
        print(f"conch config: {error}\ntry conch config --help", file=sys.stderr)
        return 1
    for text in settings.warnings:
        print(f"conch config: {text}", file=sys.stderr)
    if "--json" in arguments:
        print(json.dumps(settings_json(settings), indent=2))
    else:
        print(table(["Setting", "Value", "From"], setting_rows(settings)))
    return 0
