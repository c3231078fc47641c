"""Prints where the C host or its headers are: ``python -m conch_native --include``."""

from __future__ import annotations

import argparse
import sys

from conch_native import include, library


def main() -> None:
    """Prints a path."""
    parser = argparse.ArgumentParser(prog="python -m conch_native")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--include", action="store_true", help="the folder with the headers")
    group.add_argument("--library", action="store_true", help="the library that backends are linked against")
    path = include() if parser.parse_args().include else library()
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
