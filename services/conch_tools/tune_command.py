"""`conch tune`: searches the settings that serve a model best."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conch_tools.tune.tune_file import Measurement, TuneFile
    from conch_tools.tune.tuner import TuneSettings

DONE, REFUSED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""

_VERBS = ("apply", "show")
_OBJECTIVES = ("throughput", "p50", "p90", "p95", "p99")
_BACKUP = "config.pbtxt.before-tune"
_LEAST_WINDOW_S, _LEAST_PAIRS = 2, 3


class FlagsError(Exception):
    """Flags that are wrong, or do not go together."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="conch tune",
        usage="conch tune MODEL --model-repository DIR [flags]\n"
        "       conch tune show FILE\n"
        "       conch tune apply FILE --model-repository DIR",
        description="Serves variants of a model's config from a copy of its repository, measures them, and "
        "says whether the best one is surely better than today's. The same command continues a search that "
        "was stopped. apply writes the winner's config.pbtxt.",
        epilog="exit codes: 0 done, 1 refused, none meets the limits, 2 wrong usage, 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="+", metavar="MODEL")
    parser.add_argument(
        "--model-repository", type=Path, help="the directory with the model; only apply writes"
    )
    parser.add_argument("-o", "--output", type=Path, help="folder of tune.json and the reports (tune-MODEL)")
    parser.add_argument("--objective", choices=_OBJECTIVES, default="throughput", help="(throughput)")
    parser.add_argument(
        "--max", action="append", default=[], metavar="LIMIT", help="as p99=20ms or memory=2GB; repeatable"
    )
    parser.add_argument(
        "--search",
        action="append",
        default=[],
        metavar="FIELD=A,B",
        help="values of instances, batch, delay_us, placement or threads; none leaves the field as it is",
    )
    parser.add_argument("--budget", type=_seconds, default=300, help="load of the search, as 10m or 90s (5m)")
    parser.add_argument("--window", type=_seconds, default=5, help="length of a full window (5s)")
    parser.add_argument("--pairs", type=_count, default=5, help="windows of the best and of today's (5)")
    parser.add_argument("-c", "--concurrency", type=_count, default=32, help="requests in flight (32)")
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
    verb = options.words[0] if options.words[0] in _VERBS else ""
    if len(options.words) != (2 if verb else 1):
        print("conch tune: it takes MODEL, show FILE or apply FILE", file=sys.stderr)
        return USAGE
    # They import numpy and gRPC, which the help can do without.
    from conch.core.errors import ConchError
    from conch_tools.perf.load.coordinator import LoadError
    from conch_tools.perf.load.input_data import DataError
    from conch_tools.perf.perf_settings import SettingError
    from conch_tools.tune.trial_server import TrialError
    from conch_tools.tune.tune_file import FormatError
    from conch_tools.tune.tuner import NotTunedError

    try:
        if verb == "show":
            return _show(Path(options.words[1]), options.json)
        if verb == "apply":
            return _apply(Path(options.words[1]), options)
        return _tune(_settings(options, arguments), options.json)
    except (FlagsError, SettingError, DataError) as error:
        print(f"conch tune: {error}", file=sys.stderr)
        return USAGE
    except ConchError as error:
        print(f"conch tune: {error.message}", file=sys.stderr)
        return REFUSED
    except (FormatError, NotTunedError, TrialError, LoadError, OSError) as error:
        print(f"conch tune: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("conch tune: interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED


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
    from conch.protocol.model_config_pb2 import ModelConfig
    from conch_control.config.parse import read_config
    from conch_tools.tune.space import apply_variant
    from conch_tools.tune.tune_file import TuneFile
    from conch_tools.tune.variants import CONFIG, changed, digest_of, write_config

    if options.model_repository is None:
        raise FlagsError("apply needs --model-repository DIR")
    file = TuneFile.read(path)
    winner = file.result.get("winner")
    if winner is None:
        print(f"conch tune: {path} has no winner to apply", file=sys.stderr)
        return REFUSED
    model = options.model_repository / file.identity["model"]["name"]
    if digest_of(model) != file.identity["model"]["digest"]:
        print(f"conch tune: '{model}' has changed since it was measured: tune it again", file=sys.stderr)
        return REFUSED
    config = model / CONFIG
    written = read_config(config) if config.exists() else ModelConfig()
    if config.exists():
        (model / _BACKUP).write_bytes(config.read_bytes())
    write_config(config, apply_variant(written, changed(winner, file.identity["today"])))
    print(f"wrote {config}" + (f"; the old one is {_BACKUP}" if (model / _BACKUP).exists() else ""))
    return DONE


def _print(file: TuneFile, as_json: bool) -> None:
    from conch_tools.tune.tune_report import as_text

    if as_json:
        whole = {**file.facts, **file.identity, "result": file.result, "stopped_by": file.stopped_by}
        print(json.dumps(whole, indent=1))
    else:
        print(as_text(file), end="")


def _progress(one: Measurement) -> None:
    name = " ".join(f"{field}={value}" for field, value in one.variant.items())
    found = (
        f"{one.throughput:,.0f}/s, p99 {one.latency_us['p99'] / 1e3:.2f} ms" if not one.failed else one.failed
    )
    print(f"{one.purpose} {one.window_s} s: {name}: {found}", file=sys.stderr, flush=True)


def _settings(options: argparse.Namespace, arguments: Sequence[str]) -> TuneSettings:
    from conch_tools.tune.tune_file import Most
    from conch_tools.tune.tuner import TuneSettings

    if options.model_repository is None:
        raise FlagsError("--model-repository DIR is missing")
    if options.window < _LEAST_WINDOW_S:
        raise FlagsError("--window is at least 2 seconds: short windows have 1")
    if options.pairs < _LEAST_PAIRS:
        raise FlagsError("--pairs is at least 3: fewer say nothing about noise")
    if options.budget < 2 * (options.window + 1):
        raise FlagsError("--budget is below two windows, each with a second of warm-up")
    try:
        limits = [Most.parse(text) for text in options.max]
    except ValueError as error:
        raise FlagsError(f"--max: {error}") from None
    model = options.words[0]
    return TuneSettings(
        repository=options.model_repository,
        model=model,
        folder=options.output or Path(f"tune-{model}"),
        objective=options.objective,
        limits=limits,
        concurrency=options.concurrency,
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


def _field(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    found = [each for each in values.split(",") if each]
    texts = name == "placement"
    if not equals or not (texts or all(each.isdecimal() for each in found)):
        raise FlagsError(f"--search takes FIELD=A,B, such as instances=1,2,4, not '{text}'")
    return name, list(found) if texts else sorted({int(each) for each in found})


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, colon, dims = text.rpartition(":")
    if not colon or not name or not all(dim.isdecimal() for dim in dims.split(",") if dims):
        raise FlagsError(f"--shape takes INPUT:DIM,DIM, such as IN:3,224, not '{text}'")
    return name, tuple(int(dim) for dim in dims.split(",")) if dims else ()


def _seconds(text: str) -> int:
    for unit, length in (("m", 60), ("s", 1)):
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * length
    return int(text)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("it is at least 1")
    return value
