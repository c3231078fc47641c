"""Argument parser of the commands: argparse, with errors that name the nearest known name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import NoReturn

from conch.cli.settings.settings_reader import did_you_mean

_UNKNOWN_CHOICE = re.compile(r"invalid choice: '(?P<given>.*)' \(choose from (?P<known>.*)\)", re.DOTALL)
_UNKNOWN_FLAG = re.compile(r"unrecognized arguments: (?P<given>--[^\s=]+)")


class CommandParser(argparse.ArgumentParser):
    """Parser of one command; flags can't be shortened."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Exits with a usage text and the nearest known name."""
        hint = ""
        if found := _UNKNOWN_FLAG.search(message):
            hint = did_you_mean(found["given"], {flag for parser in self._all() for flag in flags_of(parser)})
        elif found := _UNKNOWN_CHOICE.search(message):
            hint = did_you_mean(found["given"], [known.strip("'") for known in found["known"].split(", ")])
        super().error(message + hint)

    def _all(self) -> Iterator[argparse.ArgumentParser]:
        yield self
        yield from commands_of(self).values()


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The flags in a parser's help, by name."""
    return {
        name: action
        for action in parser._actions  # argparse has no public list
        for name in action.option_strings
        if name.startswith("--") and action.help != argparse.SUPPRESS
    }


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The subcommands of a parser, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}
