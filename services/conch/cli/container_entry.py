"""The entry point of the container image: `python -m conch.cli.container_entry`.

Flags alone, or nothing, serve; a command of conch runs here; any other word is a program, such as
`tritonserver` or `conch`. There is no shell in between, so signals reach the server.
"""

from __future__ import annotations

import os
import sys

from conch.cli import main, run_process
from conch.cli.command import find_command


def run(words: list[str]) -> int:
    """Runs the words that a container is started with; returns the exit code unless a program replaces it."""
    if not words or words[0].startswith("-"):
        words = ["serve", *words]
    if find_command(words[0]) is not None:
        return main(words)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(
            f"{words[0]} can't be run: {error.strerror}; expected flags of conch serve, a command of conch, "
            "or a program of this image",
            file=sys.stderr,
        )
        return 127


if __name__ == "__main__":
    sys.exit(run_process(run))
