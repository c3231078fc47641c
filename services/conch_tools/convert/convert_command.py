"""`conch convert`: makes a model that is served as it is of a pickle, without trusting the pickle."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from conch.cli.command_parser import CommandParser
from conch.core.errors import ConchError
from conch_tools.terminable import terminable

if TYPE_CHECKING:
    from conch_tools.convert.converter import Conversion, ConvertOptions

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes; argparse ends with 2 for a wrong command line."""


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the process's exit code."""
    given = make_parser().parse_args(list(arguments))
    # Imports numpy and the server, which the help can do without.
    from conch.core.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
    from conch.observability.tracing.waterfall import printable
    from conch_tools.convert.converter import convert

    def progress(line: str) -> None:
        print(printable(line), file=sys.stderr, flush=True)

    options = _options(given)
    try:
        with terminable():
            conversion = convert(options, progress)
    except ConchError as error:
        print(f"conch convert: {printable(error.message)}", file=sys.stderr)
        wrong = isinstance(error, InvalidArgumentError | NotFoundError | AlreadyExistsError)
        return USAGE if wrong else FAILED
    except KeyboardInterrupt:
        print("conch convert: interrupted", file=sys.stderr)
        return INTERRUPTED
    print(_as_json(conversion) if given.json else "\n".join(map(printable, _as_text(conversion, options))))
    return DONE if conversion.equal else FAILED


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="conch convert",
        description="Reads a pickle in a process without network and without the right to write, and writes "
        "a model that is served as it is: by skops, or in the format of XGBoost, LightGBM or CatBoost. "
        "Compares the answers of the served model with the pickle's predictions, and writes nothing where "
        "they differ.",
        epilog="Exit codes: 0 done, 1 the answers differ or there is no sandbox, 2 wrong usage or a pickle "
        "that can't be converted, 130 interrupted.",
    )
    parser.add_argument("source", metavar="MODEL", type=Path, help="a file .pkl, .pickle or .joblib")
    parser.add_argument(
        "--out",
        metavar="REPO/NAME",
        type=Path,
        help="directory of the model, in a repository; default: models/ and the file's name",
    )
    compared = parser.add_argument_group("comparison")
    compared.add_argument(
        "--data",
        metavar="FILE",
        type=Path,
        help="rows to compare: .csv with a header, .json or .jsonl of objects, or .parquet; default: rows "
        "made of what the model knows",
    )
    compared.add_argument("--rows", type=int, default=200, help="at most; default: 200")
    compared.add_argument(
        "--tolerance",
        type=float,
        help="allowed difference, relative above 1; default: 1e-12, and 1e-6 of 32-bit outputs",
    )
    reading = parser.add_argument_group("reading")
    version = reading.add_mutually_exclusive_group()
    version.add_argument(
        "--build",
        action="store_true",
        help="build an environment with the pickle's version of scikit-learn, if another one is installed",
    )
    version.add_argument(
        "--environment",
        metavar="DIRECTORY",
        type=Path,
        action="append",
        default=[],
        help="an environment to look for that version in; may be repeated",
    )
    version.add_argument(
        "--any-version", action="store_true", help="read it with the installed version all the same"
    )
    reading.add_argument(
        "--trust",
        metavar="TYPES",
        default="",
        help="types of yours in the model, with commas between them, for CONCH_TRUSTED_TYPES of the config",
    )
    reading.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=600.0, help="for reading; default: 600"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    return parser


def _options(given: argparse.Namespace) -> ConvertOptions:
    from conch_tools.convert.converter import ConvertOptions

    name = re.sub(r"[^A-Za-z0-9_-]+", "_", given.source.name.partition(".")[0]) or "model"
    return ConvertOptions(
        source=given.source,
        out=given.out or Path("models") / name,
        data=given.data,
        rows=given.rows,
        trust=[each.strip() for each in given.trust.split(",") if each.strip()],
        environments=given.environment,
        build=given.build,
        any_version=given.any_version,
        tolerance=given.tolerance,
        timeout_s=given.timeout,
    )


def _as_json(conversion: Conversion) -> str:
    return json.dumps(
        {
            "equal": conversion.equal,
            "notes": list(conversion.notes),
            "outputs": [
                {**asdict(each), "differing": list(each.differing), "largest": repr(each.largest)}
                for each in conversion.differences
            ],
        },
        indent=1,
    )


def _as_text(conversion: Conversion, options: ConvertOptions) -> list[str]:
    """Lines of texts of the pickle too, which may be meant for the terminal."""
    notes = conversion.notes if conversion.equal else conversion.notes[1:]
    lines = [*notes, f"{'output':<16} {'rows':>6} {'differ':>6}  largest difference"]
    for each in conversion.differences:
        lines.append(f"{each.output:<16} {each.rows:>6} {len(each.differing):>6}  {each.largest:.3g}")
        lines += [f"  {example}" for example in each.examples]
    if conversion.equal:
        lines.append(f"serve it:  conch serve --model-repository={options.out.parent}")
    else:
        lines.append("nothing is written, as the served model would answer otherwise than the pickle")
    return lines
