"""The `conch` command: `main` runs one subcommand, imported only when it is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from conch.cli.command import all_commands, find_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the process's exit code.

    Without arguments it takes those of the process, which then ends without native exit handlers.
    """
    return run_process(main) if arguments is None else _run(arguments)


def run_process(run: Callable[[list[str]], int]) -> int:
    """Runs this process's arguments by `run`; returns the exit code with which the process then ends."""
    from conch.core.process_setup import ProcessEnd

    end = ProcessEnd()
    # Models in this process see no arguments, as in Triton, and may use argparse.
    arguments, sys.argv = sys.argv[1:], [""]
    end.code = run(arguments)
    return end.code


def _run(arguments: Sequence[str]) -> int:
    try:
        try:
            return _command(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has closed it; the rest of the output must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _command(arguments: Sequence[str]) -> int:
    command, *rest = arguments or ["--help"]
    if command in ("--version", "version"):
        from conch import __version__
        from conch.core.compiled import build

        print(f"conch {__version__} ({build()})")
        return 0
    if command in ("--help", "-h", "help"):
        usages = {f"conch {name} {each.usage}": each.help for name, each in all_commands().items()}
        usages["conch --version"] = "print the version"
        lines = (f"{usage:<24} {text}" for usage, text in usages.items())
        print("usage: " + "\n       ".join(lines))
        return 0
    found = find_command(command)
    if found is not None:
        code: int = import_module(found.module).run(rest)
        return code
    from conch.cli.settings.settings_reader import did_you_mean

    hint = did_you_mean(command, (*all_commands(), "--help", "--version")) or "; try conch --help"
    print(f"conch: unknown command '{command}'{hint}", file=sys.stderr)
    return 2


def tritonserver() -> int:
    """Runs `conch serve` as `tritonserver`: flags of Triton that have no effect are warnings."""
    return run_process(_serve_as_triton)


def _serve_as_triton(arguments: Sequence[str]) -> int:
    code: int = import_module("conch.cli.serve_command").run(arguments, "tritonserver", as_triton=True)
    return code
