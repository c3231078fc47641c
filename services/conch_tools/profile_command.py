"""`conch profile`: writes the profile of a training set, with which a server compares its requests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conch.cli.command_parser import CommandParser
from conch_frames.frame_error import FrameError
from conch_profiles.profile_settings import MISSING, is_installed
from conch_tools.infer.row_files import FORMATS, RowFileError, RowReader, format_of
from conch_tools.whole_files import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from conch_frames.conversion import Table
    from conch_profiles.training_profile import TrainingProfile

DONE, FAILED, USAGE = 0, 1, 2
"""Exit codes."""


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="conch profile",
        description="Writes the profile of a training set: deciles of its numbers, its categories, its "
        "nulls. A server that profiles a model's inputs (--profile-inputs) compares them with profile.json "
        "in the directory of the model's version.",
        epilog="exit codes: 0 done, 1 the file can't be read or written, 2 wrong usage",
    )
    parser.add_argument("file", help="the rows that the model was trained with: .parquet, .csv or .jsonl")
    parser.add_argument(
        "-o",
        "--out",
        default="-",
        metavar="FILE",
        help="file to write, or the directory of a version, as in models/churn/1 (standard output)",
    )
    parser.add_argument("--format", choices=FORMATS, help="format of the rows (by the file's ending)")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    given = make_parser().parse_args(arguments)
    if not is_installed():
        print(f"conch profile: {MISSING}", file=sys.stderr)
        return FAILED
    from conch_profiles.training_profile import FILE_NAME

    out = Path(given.out)
    if out.is_dir():
        versions = sorted((e.name for e in out.iterdir() if e.name.isdecimal() and e.is_dir()), key=int)
        if versions and not out.name.isdecimal():
            print(
                f"conch profile: {out} is a model's directory: name one of a version: {out / versions[-1]}",
                file=sys.stderr,
            )
            return USAGE
        out = out / FILE_NAME
    elif given.out != "-" and out.suffix != ".json":
        print(
            f"conch profile: {out} is no directory: make it first, or name a file that ends in .json",
            file=sys.stderr,
        )
        return USAGE
    try:
        profile, left_out = _profile(Path(given.file), given.format or format_of(given.file))
        if given.out == "-":
            sys.stdout.write(profile.text())
        else:
            write_whole(out, profile.text())
            print(f"{out}: {profile.rows} rows, {len(profile.columns)} columns")
    except (FrameError, RowFileError) as error:
        print(f"conch profile: {given.file}: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"conch profile: {error}", file=sys.stderr)
        return FAILED
    for name, reason in left_out.items():
        print(f"conch profile: column '{name}' is left out: {reason}", file=sys.stderr)
    return DONE


def _profile(path: Path, kind: str) -> tuple[TrainingProfile, dict[str, str]]:
    """The profile of a file, and the columns that are left out with the reason."""
    from conch_profiles.training_counter import TrainingCounter

    counter = TrainingCounter()
    for take in (counter.scan, counter.count):
        _read(path, kind, take)
    if not counter.rows:
        raise RowFileError("it has no rows")
    return counter.profile(), counter.left_out


def _read(path: Path, kind: str, take: Callable[[Table], None]) -> None:
    with path.open("rb") as file:
        for table in RowReader(file, kind, path.stat().st_size).tables(0, lambda name: True):
            take(table)
