"""`conch check`: reports all problems of model repositories, without a server."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path

from conch.backends import backend_names, load_backend
from conch.cli.command_parser import CommandParser
from conch.core.errors import ConchError
from conch.core.execution.placement import Devices
from conch.core.file_checks import load_file_checks
from conch.core.temporary_folder import TemporaryFolder
from conch.process.gpu_discovery import find_gpus
from conch.settings.option import FlagError
from conch.workers.backend_directory import backends_within
from conch.workers.python_based import based_names
from conch.workers.supervision.output_pipes import printed
from conch_check.model_checks import Rules
from conch_check.report import as_json, as_text, is_clean
from conch_check.repository_checks import UnknownModelError, check_repositories
from conch_control.control_options import ControlOptions, backend_options
from conch_control.repository.repository_kinds import open_repository

CLEAN, PROBLEMS, UNUSABLE = 0, 1, 2
"""Exit codes."""


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the process's exit code."""
    try:
        given = make_parser().parse_args(arguments)
    except SystemExit as left:  # argparse has printed why
        return left.code if isinstance(left.code, int) else UNUSABLE
    try:
        rules = _rules(given)
        with ExitStack() as opened:
            names = [_repository_of(name, opened) for name in given.repositories]
            repositories = [open_repository(name) for name in names]
            for repository in repositories:
                opened.callback(repository.close)
                repository.check()
            # Keeps prints of models that complete their configs out of the output.
            with redirect_stdout(sys.stderr), _output_of_workers():
                report = check_repositories(repositories, rules, given.model)
    except (FlagError, UnknownModelError) as error:
        sys.stderr.write(f"conch check: {error}\n")
        return UNUSABLE
    except ConchError as error:
        sys.stderr.write(f"conch check: {error.message}\n")
        return UNUSABLE
    if given.json:
        text = json.dumps(as_json(report, given.strict, given.show_config), indent=2)
    else:
        text = as_text(report, given.show_config)
    # File names need not be valid text.
    sys.stdout.write(text.encode(errors="backslashreplace").decode() + "\n")
    if report.unreadable:
        return UNUSABLE
    return CLEAN if is_clean(report, given.strict) else PROBLEMS


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="conch check",
        description="Finds everything that is wrong with model repositories, without loading a model.",
        epilog="exit codes: 0 nothing is wrong, 1 there are problems, 2 the command line is wrong or a "
        "repository can't be read",
    )
    parser.add_argument(
        "repositories",
        metavar="REPO",
        nargs="+",
        help="directory of models, URL of an object store, or a model's file",
    )
    parser.add_argument(
        "--model", metavar="NAME", action="append", default=[], help="report this model only; may be repeated"
    )
    parser.add_argument(
        "--show-config", action="store_true", help="print effective configs, with the origin of each value"
    )
    parser.add_argument(
        "--run-code", action="store_true", help="let models run their own code to complete their configs"
    )
    parser.add_argument(
        "--data-only",
        action="store_true",
        help="report as errors what is code, writes files or reaches out, for models of others",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; docs/check.md describes it")
    parser.add_argument("--strict", action="store_true", help="count warnings as errors")
    parser.add_argument(
        "--gpus",
        metavar="IDS",
        help="GPUs to check for, as 0,1, or none; default: this machine's",
    )
    parser.add_argument("--model-config-name", metavar="NAME", default="", help="as for conch serve")
    parser.add_argument("--disable-auto-complete-config", action="store_true", help="as for conch serve")
    parser.add_argument(
        "--backend-config", metavar="SETTING", action="append", default=[], help="as for conch serve"
    )
    parser.add_argument("--backend-directory", metavar="DIRECTORY", type=Path, help="as for conch serve")
    parser.add_argument("--repoagent-directory", metavar="DIRECTORY", type=Path, help="as for conch serve")
    return parser


@contextmanager
def _output_of_workers() -> Iterator[None]:
    """Prints on standard error what models print in worker processes."""
    handler, before = logging.StreamHandler(sys.stderr), printed.level
    printed.addHandler(handler)
    printed.setLevel(logging.INFO)
    try:
        yield
    finally:
        printed.removeHandler(handler)
        printed.setLevel(before)


def _repository_of(name: str, opened: ExitStack) -> str:
    """The repository that an argument names; of a file one with a link to it, as the only file of a model."""
    file = Path(name)
    if not file.is_file():
        return name
    root = opened.enter_context(TemporaryFolder("conch-check-"))
    version = root / file.stem / "1"
    version.mkdir(parents=True)
    (version / f"model{file.suffix}").symlink_to(file.absolute())
    return str(root)


def _rules(given: argparse.Namespace) -> Rules:
    devices = Devices()
    devices = Devices(find_gpus(devices.min_compute_capability) if given.gpus is None else _gpus(given.gpus))
    directory: Path | None = given.backend_directory
    options = ControlOptions(
        repositories=(),
        strict_model_config=given.disable_auto_complete_config,
        model_config_name=given.model_config_name,
        backend_options=backend_options(given.backend_config),
        devices=devices,
        backend_directory=directory,
        repoagent_directory=given.repoagent_directory,
    )
    names = tuple(sorted({*backend_names(), *based_names(directory)}))
    find = backends_within(directory, load_backend)
    return Rules(options, find, names, given.run_code, given.data_only, load_file_checks())


def _gpus(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    try:
        return tuple(sorted({int(number) for number in text.split(",")}))
    except ValueError:
        raise FlagError(f"--gpus: expected numbers separated by commas, or none, got '{text}'") from None
