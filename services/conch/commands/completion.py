"""``conch completion``: a script that completes commands, flags and values in bash and zsh."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from conch.commands import check, control, models
from conch.commands.parser import CommandParser, commands_of, flags_of
from conch.flags import FLAGS

_SHELLS = ("bash", "zsh")
_FREE = (" ",)
"""The values of a flag that takes any: matches nothing, so that the shell offers names of files."""

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
    """The script for a shell, from the definitions of the flags."""
    names = {"": ["serve", "models", "control", "check", "completion", "--help", "--version"]}
    names["serve"] = [*(f"--{flag.name}" for flag in FLAGS if flag.listed), "--help"]
    values = {
        f"serve --{flag.name}": ("true", "false") if flag.is_switch else flag.choices or _FREE
        for flag in FLAGS
        if flag.listed
    }
    for command, module in (("models", models), ("control", control), ("check", check)):
        _add(command, module.make_parser(), names, values)
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
    """Adds a command and those below it: what may follow it, and what may follow its flags."""
    below, flags = commands_of(parser), flags_of(parser)
    names[path] = [*below, *flags]
    for name, action in flags.items():
        if action.nargs != 0:
            values[f"{path} {name}"] = tuple(map(str, action.choices or _FREE))
    for name, each in below.items():
        _add(f"{path} {name}", each, names, values)
