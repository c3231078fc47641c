"""`Command`: a subcommand of `conch`, its own or an add-on's.

An add-on brings commands by the entry-point group ``conch.commands``: each names a `Command`, in a module
that imports little, as `conch --help` imports it. The help lists those of the distribution `conch` alone:
to look through all distributions takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand.

    Attributes:
        module: The module that is imported to run it: its ``run`` takes the arguments and returns the exit
            code; its ``make_parser``, if it is completed, returns their parser.
        usage: Its arguments in the help.
        help: Its description in the help.
        completed: True if shells complete its arguments.
        after: The command that it comes behind in the help; empty for the end.
    """

    module: str
    usage: str
    help: str
    completed: bool = False
    after: str = ""


_GROUP = "conch.commands"
_OWN: Mapping[str, Command] = {
    "serve": Command(
        "conch.cli.serve_command", "[flags]", "serve a model repository; see conch serve --help", True
    ),
    "demo": Command(
        "conch.cli.demo_command",
        "[flags]",
        "serve the example models, or with --llm a language model; takes the flags of conch serve",
    ),
    "config": Command(
        "conch.cli.config_command",
        "[flags]",
        "print the effective settings of these flags, with their sources",
        True,
    ),
    "models": Command(
        "conch.cli.models_command", "COMMAND", "show or change the models of a running server", True
    ),
    "access": Command(
        "conch.cli.access_command", "COMMAND", "make keys for an access policy, and check one", True
    ),
    "completion": Command(
        "conch.cli.completion_command",
        "SHELL",
        "print a script that completes commands in bash or zsh",
        True,
    ),
    "health": Command(
        "conch.cli.health_command", "[PID]", "ask the server on this machine whether it is ready"
    ),
}


@cache
def all_commands() -> Mapping[str, Command]:
    """The commands of this distribution, in the order of the help."""
    from importlib.metadata import distribution  # it takes as long to import as the rest of the help

    entries = distribution("conch").entry_points.select(group=_GROUP)
    found: dict[str, Command] = {entry.name: entry.load() for entry in entries}
    commands = dict(_OWN)
    while found:
        # Behind a command that is there; those whose command is missing come last.
        name = next((name for name, each in found.items() if each.after in commands), min(found))
        command = found.pop(name)
        at = list(commands).index(command.after) + 1 if command.after in commands else len(commands)
        items = list(commands.items())
        commands = dict([*items[:at], (name, command), *items[at:]])
    return commands


def find_command(name: str) -> Command | None:
    """The command of this name, which may be another distribution's."""
    command = _OWN.get(name) or all_commands().get(name)
    if command is None:
        from importlib.metadata import entry_points

        command = next((entry.load() for entry in entry_points(group=_GROUP, name=name)), None)
    return command
