"""`conch completion`: prints a script that completes commands, flags and values in bash and zsh."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from conch.cli.command import all_commands
from conch.cli.command_parser import CommandParser, commands_of, flags_of
from conch.server_settings import SETTINGS

_SHELLS = ("bash", "zsh")
_FREE = (" ",)
"""Choices of a flag that takes any value: match nothing, so the shell offers file names."""

_SCRIPT = """\
# Completes the command conch in {shell}; made by: conch completion {shell}
{start}_conch() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} flag=${{COMP_WORDS[COMP_CWORD-1]}} prefix= command= offers= word
    for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
        case "$command $word" in
            {commands}) command="${{command:+$command }}$word" ;;
        esac
    done
    if [[ $current == --*=* ]]; then  # a shell that does not split words at =
        flag=${{current%%=*}}
        prefix=$flag=
        current=${{current#*=}}
    elif [[ $current == "=" ]]; then
        current=
    elif [[ $flag == "=" ]]; then
        flag=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    case "$command $flag" in
{values}
        *)
            case "$command" in
{names}
            esac
            ;;
    esac
    COMPREPLY=( $(compgen -P "$prefix" -W "$offers" -- "$current") )
}}
complete -o default -F _conch conch
"""
_START = {"bash": "", "zsh": "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"}


def run(arguments: Sequence[str]) -> int:
    """Prints the script; returns the process's exit code."""
    shell = make_parser().parse_args(list(arguments)).shell
    print(script(shell), end="")
    return 0


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="conch completion",
        description="Prints a script that completes conch's commands, flags and their values.",
        epilog="bash: source <(conch completion bash); zsh: source <(conch completion zsh)",
    )
    parser.add_argument("shell", choices=_SHELLS)
    return parser


def script(shell: str) -> str:
    """The script for a shell, made from the definitions of settings and commands."""
    commands = {name: each for name, each in all_commands().items() if each.completed}
    names = {"": [*commands, "--help", "--version"]}
    listed = [each for each in SETTINGS if each.listed]
    names["serve"] = [*(each.flag for each in listed), "--help"]
    names["config"] = [*names["serve"], "--json"]
    values = {
        f"{command} {each.flag}": ("true", "false") if each.is_switch else each.choices or _FREE
        for command in ("serve", "config")
        for each in listed
    }
    for name in [each for each in commands if each not in ("serve", "config", "completion")]:
        _add(name, import_module(commands[name].module).make_parser(), names, values)
    names["completion"] = [*_SHELLS, "--help"]
    return _SCRIPT.format(
        shell=shell,
        start=_START[shell],
        commands=" | ".join(f'"{path if " " in path else f" {path}"}"' for path in names if path),
        values="\n".join(
            f'        "{flag}") offers="{" ".join(known)}" ;;' for flag, known in values.items()
        ),
        names="\n".join(
            f'                "{path}") offers="{" ".join(known)}" ;;' for path, known in names.items()
        ),
    )


def _add(
    path: str,
    parser: argparse.ArgumentParser,
    names: dict[str, list[str]],
    values: dict[str, tuple[str, ...]],
) -> None:
    """Adds a command and its subcommands: the words after it, and the values of its flags."""
    subcommands, flags = commands_of(parser), flags_of(parser)
    names[path] = [*subcommands, *flags]
    for name, action in flags.items():
        if action.nargs != 0:
            values[f"{path} {name}"] = tuple(map(str, action.choices or _FREE))
    for name, each in subcommands.items():
        _add(f"{path} {name}", each, names, values)
