"""`conch tune`: searches the settings that serve a model best."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conch_tools.flag_values import FlagsError, seconds_of
from conch_tools.terminable import terminable

if TYPE_CHECKING:
    from conch_tools.tune.measurement import Measurement
    from conch_tools.tune.tune_file import TuneFile
    from conch_tools.tune.tuner import TuneSettings

DONE, REFUSED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""

_VERBS = ("apply", "show")
_LEAST_WINDOW_S, _LEAST_PAIRS = 2, 3


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="conch tune",
        usage="conch tune MODEL --model-repository DIR [flags]\n"
        "       conch tune [MODEL] -f FILE [flags]\n"
        "       conch tune show FILE\n"
        "       conch tune apply FILE --model-repository DIR",
        description="Serves variants of a model's config from a copy of its repository, measures them, and "
        "says whether the best one is surely better than today's. The same command continues a search that "
        "was stopped. apply writes the winner's config.pbtxt.",
        epilog="exit codes: 0 done, 1 refused, none meets the limits, 2 wrong usage, 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="MODEL")
    parser.add_argument(
        "-f",
        "--file",
        type=Path,
        help="YAML file of Triton's Model Analyzer, whose keys are flags; other flags replace them",
    )
    parser.add_argument(
        "--model-repository", type=Path, help="the directory with the model; only apply writes"
    )
    parser.add_argument("-o", "--output", type=Path, help="folder of tune.json and the reports (tune-MODEL)")
    parser.add_argument(
        "--objective",
        action="append",
        default=[],
        metavar="NAME[=WEIGHT]",
        help="throughput, p50, p90, p95, p99, memory or gpu_memory; several as throughput=2,p99 (throughput; "
        "p99 with --rate)",
    )
    parser.add_argument(
        "--max", action="append", default=[], metavar="LIMIT", help="as p99=20ms or memory=2GB; repeatable"
    )
    parser.add_argument("--min", action="append", default=[], metavar="LIMIT", help="as throughput=100")
    parser.add_argument(
        "--search",
        action="append",
        default=[],
        metavar="FIELD=A,B",
        help="values of instances, batch, delay_us, preferred, padding, placement, threads, spinning or "
        "execution; without values the field stays as it is",
    )
    parser.add_argument(
        "--budget", type=seconds_of, default=300, help="load of the search, as 10m or 90s (5m)"
    )
    parser.add_argument("--window", type=seconds_of, default=5, help="length of a full window (5s)")
    parser.add_argument("--pairs", type=_count, default=5, help="windows of the best and of today's (5)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("-c", "--concurrency", type=_count, default=32, help="requests in flight (32)")
    load.add_argument(
        "--rate", type=_count, help="requests a second, sent whether others are answered or not"
    )
    parser.add_argument("-b", "--batch", type=_count, default=1, help="rows of a request (1)")
    parser.add_argument("--shape", action="append", default=[], metavar="INPUT:DIMS", help="as IN:3,224")
    parser.add_argument(
        "--data", action="append", default=[], metavar="WHAT", help="random, zero, or a JSON file (random)"
    )
    parser.add_argument(
        "--load-model", action="append", default=[], metavar="NAME", help="another model that it calls"
    )
    parser.add_argument(
        "--serve-flag", action="append", default=[], metavar="FLAG", help="of conch serve; --serve-flag=--..."
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (0)")
    parser.add_argument("--restart", action="store_true", help="begin again, forget the folder's search")
    parser.add_argument("--json", action="store_true", help="print tune.json")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    options = make_parser().parse_args(arguments)
    verb = options.words[0] if options.words and options.words[0] in _VERBS else ""
    if len(options.words) != (2 if verb else 1) and (options.words or options.file is None):
        print("conch tune: it takes MODEL, show FILE or apply FILE", file=sys.stderr)
        return USAGE
    if verb and options.file is not None:
        print(f"conch tune: -f has no effect with {verb}", file=sys.stderr)
        return USAGE
    # They import numpy and gRPC, which the help can do without.
    from conch.core.errors import ConchError
    from conch_tools.perf.load.coordinator import LoadError
    from conch_tools.perf.load.input_data import DataError
    from conch_tools.perf.perf_settings import SettingError
    from conch_tools.server_api import AskError
    from conch_tools.tune.apply import NotAppliedError
    from conch_tools.tune.model_analyzer_file import YamlError
    from conch_tools.tune.trial_server import TrialError
    from conch_tools.tune.tune_file import FormatError
    from conch_tools.tune.tuner import NotTunedError

    try:
        if verb == "show":
            return _show(Path(options.words[1]), options.json)
        if verb == "apply":
            return _apply(Path(options.words[1]), options)
        if options.file is not None:
            options = _with_file(options, arguments)
        with terminable():
            return _tune(_settings(options, arguments), options.json)
    except (FlagsError, YamlError, SettingError, DataError) as error:
        print(f"conch tune: {error}", file=sys.stderr)
        return USAGE
    except ConchError as error:
        print(f"conch tune: {error.message}", file=sys.stderr)
        return REFUSED
    except (AskError, FormatError, NotAppliedError, NotTunedError, TrialError, LoadError, OSError) as error:
        print(f"conch tune: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("conch tune: interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED


def _with_file(options: argparse.Namespace, arguments: Sequence[str]) -> argparse.Namespace:
    """The options with those of a file of Model Analyzer."""
    from conch_tools.tune.model_analyzer_file import flags_of, without_replaced

    model, flags = flags_of(options.file, options.words[0] if options.words else "")
    given = make_parser().parse_args([*without_replaced(flags, arguments), *arguments])
    given.words = [model]
    return given


def _tune(settings: TuneSettings, as_json: bool) -> int:
    from conch_tools.tune.tune_report import write_reports
    from conch_tools.tune.tuner import run_tune

    file = run_tune(settings, _progress)
    write_reports(file, settings.folder)
    _print(file, as_json)
    return DONE if file.result["met"] else REFUSED


def _show(path: Path, as_json: bool) -> int:
    from conch_tools.tune.tune_file import TuneFile

    _print(TuneFile.read(path), as_json)
    return DONE


def _apply(path: Path, options: argparse.Namespace) -> int:
    """Writes the winner's config, if the model is the one that was measured."""
    from conch_tools.tune.apply import apply_winner
    from conch_tools.tune.tune_file import TuneFile

    if options.model_repository is None:
        raise FlagsError("apply needs --model-repository DIR")
    file = TuneFile.read(path)
    applied = apply_winner(file, options.model_repository)
    print(f"wrote {applied.config}" + (f"; the old one is {applied.backup.name}" if applied.backup else ""))
    for comment in applied.dropped:
        print(f"dropped a comment inside a field that has changed: {comment}")
    return DONE


def _print(file: TuneFile, as_json: bool) -> None:
    from conch_tools.tune.tune_report import as_text

    if as_json:
        print(json.dumps(file.to_json(), indent=1))
    else:
        print(as_text(file), end="")


def _progress(one: Measurement) -> None:
    from conch_tools.tune.tune_report import measurement_text

    print(measurement_text(one), file=sys.stderr, flush=True)


def _settings(options: argparse.Namespace, arguments: Sequence[str]) -> TuneSettings:
    from conch_tools.perf.measure.results import Load
    from conch_tools.tune.goals import Limit, Objectives
    from conch_tools.tune.tuner import TuneSettings

    if options.model_repository is None:
        raise FlagsError("--model-repository DIR is missing")
    if options.window < _LEAST_WINDOW_S:
        raise FlagsError("--window is at least 2 seconds: short windows have 1")
    if options.pairs < _LEAST_PAIRS:
        raise FlagsError("--pairs is at least 3: fewer say nothing about noise")
    if options.budget < 2 * (options.window + 1):
        raise FlagsError("--budget is below two windows, each with a second of warm-up")
    limits: dict[tuple[str, str], Limit] = {}
    for bound in ("max", "min"):
        for text in getattr(options, bound):
            try:
                limit = Limit.parse(bound, text)
            except ValueError as error:
                raise FlagsError(f"--{bound}: {error}") from None
            limits[bound, limit.name] = limit
    try:
        objectives = Objectives.parse(options.objective or ["p99" if options.rate else "throughput"])
    except ValueError as error:
        raise FlagsError(f"--objective: {error}") from None
    if options.rate and "throughput" in objectives.weights:
        raise FlagsError(
            "--objective throughput has no effect with --rate, which gives all variants the same"
        )
    load = Load("rate", options.rate, "poisson") if options.rate else Load("concurrency", options.concurrency)
    model = options.words[0]
    return TuneSettings(
        repository=options.model_repository,
        model=model,
        folder=options.output or Path(f"tune-{model}"),
        objectives=objectives,
        limits=list(limits.values()),
        load=load,
        budget_s=options.budget,
        window_s=options.window,
        pairs=options.pairs,
        batch=options.batch,
        shapes=dict(_shape(text) for text in options.shape),
        data=[each if each in ("random", "zero") else Path(each) for each in options.data or ["random"]],
        search=dict(_field(text) for text in options.search),
        others=options.load_model,
        serve_flags=options.serve_flag,
        seed=options.seed,
        restart=options.restart,
        arguments=list(arguments),
    )


def _field(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    if not equals:
        raise FlagsError(f"--search takes FIELD=A,B, such as instances=1,2,4, not '{text}'")
    return name, [each for each in values.split(",") if each]


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, colon, dims = text.rpartition(":")
    if not colon or not name or not all(dim.isdecimal() for dim in dims.split(",") if dims):
        raise FlagsError(f"--shape takes INPUT:DIM,DIM, such as IN:3,224, not '{text}'")
    return name, tuple(int(dim) for dim in dims.split(",")) if dims else ()


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("it is at least 1")
    return value
