"""`conch pull`: fetches a language model into a model repository."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from conch.cli.command_parser import CommandParser

DONE, REFUSED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="conch pull",
        description="Fetches a language model into a model repository: a GGUF file, or the folder of another "
        "engine. The model appears as a whole, also to a server that polls the repository; the same command "
        "goes on with what an interrupted one has left.",
        epilog="exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted",
    )
    parser.add_argument(
        "source",
        help="ORGANISATION/NAME or hf://ORGANISATION/NAME[/FILE] of a hub, https://… of a file, s3://…, "
        "gs://…, as://…, oci://HOST/NAME:TAG or ollama://NAME:TAG",
    )
    parser.add_argument(
        "--into",
        type=_directory,
        default=Path("models"),
        metavar="REPOSITORY",
        help="the repository (models)",
    )
    parser.add_argument("--name", metavar="NAME", help="name of the model (the source's)")
    parser.add_argument("--version", type=version_of, default=1, metavar="N", help="its version (1)")
    add_source_flags(parser)
    return parser


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that go with a source."""
    parser.add_argument("--revision", default="", metavar="R", help="branch, tag or commit of a hub (main)")
    parser.add_argument(
        "--file", default="", metavar="PATTERN", help="the file, if there are several, such as '*Q4_K_M*'"
    )
    parser.add_argument("--sha256", default="", metavar="HEX", help="SHA-256 of the file of a URL")
    parser.add_argument(
        "-H",
        "--header",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="header for the host of a URL or registry only; repeatable",
    )
    parser.add_argument(
        "--allow-http", action="store_true", help="fetch from other hosts than this one without TLS"
    )


def headers_of(given: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, str]:
    """The headers of flags; ends the process if one is malformed."""
    found = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        # The text is not repeated: it may be secret.
        if not equals or not _HEADER.fullmatch(name.strip()) or not (pair.isprintable() and pair.isascii()):
            parser.error("-H takes NAME=VALUE, such as 'Authorization=Bearer TOKEN'")
        found[name.strip()] = value
    return found


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("conch pull: interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    headers = headers_of(options.header, parser)
    # They import numpy, which the help can do without.
    from conch_hub.pull import Reporter, Wanted, pull
    from conch_hub.safe_text import safe
    from conch_hub.source import PullError
    from conch_hub.version_folder import VersionFolder

    wanted = Wanted(
        options.source, options.revision, options.file, options.sha256.lower(), headers, options.allow_http
    )
    reporter = Reporter()
    try:
        name = options.name or wanted.name
        with VersionFolder(options.into, name, options.version) as folder:
            pull(wanted, folder, reporter)
    except (PullError, OSError) as error:
        reporter.clear()
        text = str(error) if isinstance(error, PullError) else f"'{options.into}' can't be written: {error}"
        print(f"conch pull: {safe(text)}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        reporter.clear()
        raise
    print(folder.place)
    reporter.note(f"conch serve --model-repository={options.into} serves it")
    return DONE


def _directory(text: str) -> Path:
    if "://" in text:
        raise argparse.ArgumentTypeError(f"expected a directory of this machine, got '{text}'")
    return Path(text)


def version_of(text: str) -> int:
    """A version of a model."""
    if not (text.isdecimal() and text.isascii() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got '{text}'")
    return int(text)
