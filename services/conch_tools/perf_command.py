"""`conch perf`: measures a model of a running server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from conch import __version__
from conch.cli import main
from conch_tools.connection import UrlError, add_connection_flags, endpoint_of
from conch_tools.flag_values import FlagsError, parameter_of, shape_of
from conch_tools.terminable import terminable

if TYPE_CHECKING:
    from conch_tools.perf.measure.comparison import Comparison
    from conch_tools.perf.measure.records import RequestRecord
    from conch_tools.perf.measure.results import Load, PerfResult, Point
    from conch_tools.perf.measure.slices import Slice
    from conch_tools.perf.measure.slo_search import Limit
    from conch_tools.perf.perf_analyzer.flags import Translation
    from conch_tools.perf.perf_analyzer.perf_analyzer_command import Measured
    from conch_tools.perf.perf_settings import PerfSettings, SequenceSettings

DONE, REFUSED, USAGE, UNREACHED, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes."""

_END_OF_IDS = 2**63
_TEXT_LENGTH = 128
_WRITTEN = (".html", ".json", ".md", ".csv")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="conch perf",
        description="Sends requests to a model of a running server, conch or another one that speaks its "
        "protocols, and measures what comes of it. With -c so many requests are in flight at any time; with "
        "--rate they are sent at their times, whatever is unanswered, and latencies count from those times.",
        epilog="exit codes: 0 measured, 1 refused, every load failed, or a limit of --slo is missed, "
        "2 wrong usage, 3 no server, 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="name of the model")
    parser.add_argument("-x", "--version", default="", help="its version (the server's choice)")
    parser.add_argument(
        "--as",
        choices=["perf_analyzer"],
        help="as the first flag: take perf_analyzer's flags, write its files",
    )
    load = parser.add_argument_group("load")
    load.add_argument("-c", "--concurrency", metavar="N[,N...]", help="requests in flight, one load each (1)")
    load.add_argument(
        "--rate",
        metavar="R[,R...]",
        help="requests a second, or FROM:TO:STEP, or auto for the highest within --slo",
    )
    load.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="LIMIT",
        help="that each load is to meet, as p99=20ms, ttft_p95=200ms, itl_p95=50ms or errors=0.1%%",
    )
    load.add_argument(
        "--distribution",
        default="constant",
        metavar="HOW",
        help="of a rate: constant, poisson, or trace:FILE with microseconds between requests (constant)",
    )
    load.add_argument("--duration", type=_seconds, default=10, help="of each load, in whole seconds (10)")
    load.add_argument("--warmup", type=_seconds, default=2, help="before it, not counted (2)")
    load.add_argument("--stream", action="store_true", help="send requests on gRPC streams")
    load.add_argument("--connections", type=_count, default=0, help="of all processes (as many as needed)")
    load.add_argument("--processes", type=_count, default=0, help="that make the load (half of the cores)")
    load.add_argument(
        "--max-outstanding", type=_count, default=10_000, help="unanswered requests of a rate (10000)"
    )
    load.add_argument(
        "--sequences", type=_count, metavar="N", help="of a rate: live sequences of a model that has some (4)"
    )
    load.add_argument(
        "--sequence-length",
        type=_count,
        metavar="N",
        help="requests of a sequence (those of its data, or 20)",
    )
    load.add_argument(
        "--sequence-length-variation",
        type=_percentage,
        metavar="P",
        help="percentage of the length by which sequences are shorter or longer (20)",
    )
    load.add_argument(
        "--sequence-ids", type=_ids, metavar="FIRST:END", help="ids of sequences, without END (random ones)"
    )
    data = parser.add_argument_group("data")
    data.add_argument("-b", "--batch", type=_count, default=1, help="rows of a request (1)")
    data.add_argument(
        "--shape", action="append", default=[], metavar="INPUT:DIMS", help="dims of an input, as IN:3,224"
    )
    data.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="WHAT",
        help="random, zero, a JSON file of perf_analyzer, or a directory of raw files; repeatable (random)",
    )
    data.add_argument(
        "--shm",
        choices=["none", "system", "cuda"],
        default="none",
        help="where tensors are: in system shared memory, or in the requests (none)",
    )
    data.add_argument(
        "--shm-output-size",
        type=_count,
        metavar="BYTES",
        help="for an output of variable size in shared memory (102400)",
    )
    data.add_argument(
        "--endpoint",
        default="",
        metavar="PATH",
        help="post the payloads of --data here instead, as v2/models/llm/generate_stream; over HTTP",
    )
    data.add_argument("--reuse-data", action="store_true", help="send the same values each time")
    data.add_argument(
        "--string-length", type=_count, default=_TEXT_LENGTH, help=f"of random texts ({_TEXT_LENGTH})"
    )
    data.add_argument(
        "--parameter", action="append", default=[], metavar="NAME=VALUE", help="of each request; JSON or text"
    )
    data.add_argument(
        "--tensors",
        choices=("binary", "json"),
        default="binary",
        help="over HTTP, in both directions (binary)",
    )
    data.add_argument("--seed", type=int, default=0, help="of all that is random (0)")
    out = parser.add_argument_group("output")
    out.add_argument("--report", action="append", default=[], type=Path, metavar="FILE.html|json|md|csv")
    out.add_argument("--compare", type=Path, metavar="OLD.json", help="say what changed since another run")
    out.add_argument("--json", action="store_true", help="print the result as JSON")
    add_connection_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the process's exit code."""
    try:
        if list(arguments[:2]) != ["--as", "perf_analyzer"]:
            return _run(arguments)
        from conch_tools.perf.perf_analyzer import perf_analyzer_command

        return perf_analyzer_command.main(arguments[2:], _measured, __version__)
    except KeyboardInterrupt:
        print("conch perf: interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    try:
        settings = _settings(options, arguments)
        old = None if options.compare is None else _read(options.compare)
    except (FlagsError, UrlError) as error:
        print(f"conch perf: {error}", file=sys.stderr)
        return USAGE
    from conch_tools.perf.load.coordinator import LoadError
    from conch_tools.perf.load.input_data import DataError
    from conch_tools.perf.measure.comparison import compare
    from conch_tools.perf.measuring import PerfInterrupted, run_perf
    from conch_tools.perf.perf_settings import SettingError
    from conch_tools.server_api import AskError

    show: Callable[[Load, Slice], object] = _ignore if options.json or not sys.stderr.isatty() else _progress
    interrupted = False
    try:
        with terminable(), _status_line(f"connecting to {settings.endpoint.url} ..."):
            result = run_perf(settings, show)
    except PerfInterrupted as found:
        result, interrupted = found.result, True
    except (SettingError, DataError) as error:
        print(f"conch perf: {error}", file=sys.stderr)
        return USAGE
    except AskError as error:
        print(f"conch perf: {error}", file=sys.stderr)
        return REFUSED if error.reached else UNREACHED
    except LoadError as error:
        print(f"conch perf: {error}", file=sys.stderr)
        return REFUSED
    _report(result, options, None if old is None else compare(old, result))
    if interrupted:
        return INTERRUPTED
    met = result.limits is None or result.limits.met
    return DONE if met and any(point.answered for point in result.points) else REFUSED


def perf_analyzer() -> int:
    """Runs the process's arguments as those of `perf_analyzer`."""
    return main(["perf", "--as", "perf_analyzer", *sys.argv[1:]])


def _measured(asked: Translation) -> Measured:
    """Measures what perf_analyzer's flags ask for."""
    from conch_tools.perf.load.coordinator import LoadError
    from conch_tools.perf.load.input_data import DataError
    from conch_tools.perf.load.validation import DIFFERS, SIZE_DIFFERS
    from conch_tools.perf.measuring import PerfInterrupted, run_perf
    from conch_tools.perf.perf_analyzer.perf_analyzer_command import Measured, MeasureError
    from conch_tools.perf.perf_analyzer.profile_export import Experiment
    from conch_tools.perf.perf_settings import SettingError
    from conch_tools.server_api import AskError

    experiments: list[Experiment] = []

    def recorded(point: Point, records: list[RequestRecord], began_ns: int) -> None:
        if asked.windows is not None and point.slices:
            bounds = [began_ns + second * 1_000_000_000 for second in asked.windows.boundaries(point.slices)]
        else:
            bounds = [began_ns, began_ns + round(point.length_s * 1e9)]
        experiments.append(Experiment(point.load, records, bounds))

    try:
        settings = _settings(make_parser().parse_args(asked.arguments), asked.arguments)
        settings = replace(
            settings,
            composing=asked.composing,
            calls=asked.request_count,
            warm_up_calls=asked.warm_up_count,
            skips_unknown=True,
            end_rule=asked.windows,
            metrics_url=asked.metrics_url,
            metrics_interval_s=asked.metrics_interval_s,
        )
        with terminable():
            result = run_perf(settings, recorded=recorded if asked.profile_export else None)
        for point in result.points:
            for difference in (DIFFERS, SIZE_DIFFERS):
                if point.errors[difference]:
                    raise MeasureError(difference)
        return Measured(result, experiments)
    except PerfInterrupted as found:
        return Measured(found.result, experiments)
    except (FlagsError, UrlError, SettingError, DataError, AskError, LoadError) as error:
        raise MeasureError(str(error)) from None


@contextmanager
def _status_line(text: str) -> Iterator[None]:
    """Shows a text on a terminal; what has taken its place by the end is removed."""
    if not sys.stderr.isatty():
        yield
        return
    print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(end="\r\x1b[K", file=sys.stderr, flush=True)


def _settings(options: argparse.Namespace, arguments: Sequence[str]) -> PerfSettings:
    from conch_tools.perf.perf_settings import PerfSettings

    for path in options.report:
        if path.suffix not in _WRITTEN:
            raise FlagsError(f"--report {path}: the name ends in {', '.join(_WRITTEN)}")
    if options.concurrency is not None and options.rate is not None:
        raise FlagsError("-c and --rate are two kinds of load: give one of them")
    if options.shm == "cuda":
        raise FlagsError("--shm cuda is not supported: use --shm system")
    if options.shm_output_size is not None and options.shm == "none":
        raise FlagsError("--shm-output-size needs --shm system")
    if options.endpoint:
        unused = [flag for flag, value in _of_inference(options).items() if value]
        if unused:
            raise FlagsError(f"{unused[0]} has no effect with --endpoint: the payloads are sent as they are")
    loads, gaps = _loads(options)
    limits = _limits(options)
    return PerfSettings(
        endpoint=endpoint_of(options),
        model=options.model,
        version=options.version,
        loads=loads,
        limits=limits,
        distribution=options.distribution,
        seconds=max(options.duration, 1),
        warm_up=options.warmup,
        batch=options.batch,
        shapes=dict(shape_of(text) for text in options.shape),
        data=[each if each in ("random", "zero") else Path(each) for each in options.data or ["random"]],
        reuse_data=options.reuse_data,
        text_length=options.string_length,
        streams=options.stream,
        shared_memory=options.shm == "system",
        output_size=options.shm_output_size or 102_400,
        parameters=dict(parameter_of(text) for text in options.parameter),
        tensors=options.tensors,
        path=options.endpoint,
        connections=options.connections,
        processes=options.processes,
        most_outstanding=options.max_outstanding,
        gaps_us=gaps,
        sequences=_sequences(options),
        seed=options.seed,
        arguments=_without_secrets(arguments),
    )


def _of_inference(options: argparse.Namespace) -> dict[str, bool]:
    """Flags that payloads make void, True for each that is set."""
    return {
        "-x": bool(options.version),
        "--stream": options.stream,
        "-b": options.batch != 1,
        "--shape": bool(options.shape),
        "--parameter": bool(options.parameter),
        "--tensors": options.tensors != "binary",
        "--shm": options.shm != "none",
        "--reuse-data": options.reuse_data,
        "--string-length": options.string_length != _TEXT_LENGTH,
    }


def _loads(options: argparse.Namespace) -> tuple[list[Load], Sequence[float]]:
    from conch_tools.perf.load.schedules import read_gaps
    from conch_tools.perf.measure.results import Load

    kind, _, file = options.distribution.partition(":")
    if kind == "trace":
        if options.concurrency is not None or options.rate is not None:
            raise FlagsError("--distribution trace:FILE is a load of its own, without -c and --rate")
        try:
            gaps = read_gaps(Path(file).read_text())
        except (OSError, ValueError) as error:
            raise FlagsError(f"--distribution {options.distribution}: {error}") from None
        return [Load("rate", round(1e6 * len(gaps) / sum(gaps), 3), f"trace:{file}")], gaps
    if options.distribution not in ("constant", "poisson"):
        raise FlagsError(f"--distribution is constant, poisson or trace:FILE, not '{options.distribution}'")
    if options.rate == "auto":
        return [], ()
    if options.rate is not None:
        return [Load("rate", value, kind) for value in _numbers("--rate", options.rate)], ()
    if kind == "poisson":
        raise FlagsError("--distribution poisson needs --rate")
    values = _numbers("-c", options.concurrency or "1")
    if any(value != int(value) for value in values):
        raise FlagsError("-c takes whole numbers")
    return [Load("concurrency", int(value)) for value in values], ()


def _sequences(options: argparse.Namespace) -> SequenceSettings | None:
    from conch_tools.perf.perf_settings import SequenceSettings

    if options.sequences and options.rate is None and not options.distribution.startswith("trace:"):
        raise FlagsError("--sequences is for --rate; with -c there are as many live sequences as requests")
    of_files = not {"random", "zero"} >= set(options.data)
    if options.sequence_length_variation is not None and options.sequence_length is None and of_files:
        raise FlagsError("--sequence-length-variation needs --sequence-length with the data of files")
    given = {
        "live": options.sequences,
        "length": options.sequence_length,
        "variation": options.sequence_length_variation,
        "ids": options.sequence_ids,
    }
    found = {name: value for name, value in given.items() if value is not None}
    return SequenceSettings(**found) if found else None


def _limits(options: argparse.Namespace) -> list[Limit]:
    from conch_tools.perf.measure.slo_search import Limit

    if options.rate == "auto" and not options.slo:
        raise FlagsError("--rate auto needs --slo, as in --rate auto --slo p99=20ms")
    try:
        return [Limit.parse(text) for text in options.slo]
    except ValueError as error:
        raise FlagsError(f"--slo: {error}") from None


def _numbers(flag: str, text: str) -> list[float]:
    try:
        if ":" in text:
            first, last, step = map(float, text.split(":"))
            if step <= 0 or last < first:
                raise ValueError
            found = [first + number * step for number in range(int((last - first) / step + 1e-9) + 1)]
        else:
            found = [float(each) for each in text.split(",")]
        if not all(0 < value <= 1e7 for value in found):
            raise ValueError
    except ValueError:
        raise FlagsError(f"{flag} takes numbers above 0 with commas, or FROM:TO:STEP, not '{text}'") from None
    return found


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("it is at least 1")
    return value


def _percentage(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError("it is 0 to 100")
    return value / 100


def _ids(text: str) -> range:
    first, colon, end = text.partition(":")
    found = range(int(first), int(end) if colon else _END_OF_IDS)
    if found.start < 1 or not found or found.stop > _END_OF_IDS:
        raise argparse.ArgumentTypeError("it is FIRST or FIRST:END, with ids from 1 on below 2^63")
    return found


def _seconds(text: str) -> int:
    value = int(text.removesuffix("s"))
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError("it is 0 to 86400 seconds")
    return value


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """The arguments without values of headers."""
    found: list[str] = []
    for each in arguments:
        if found and found[-1] in ("-H", "--header"):
            found.append(f"{each.partition('=')[0]}=...")
        elif each.startswith("--header=") or (each.startswith("-H") and each != "-H"):
            found.append("--header=...")
        else:
            found.append(each)
    return found


def _ignore(load: Load, counts: Slice) -> None:
    """Shows nothing."""


def _progress(load: Load, counts: Slice) -> None:
    errors = sum(counts.errors.values())
    p50, p99 = (f"{counts.latency.quantile_ns(share) / 1e6:.2f} ms" for share in (0.5, 0.99))
    text = f"{load.mode} {load.value:g}: second {counts.second + 1}, {counts.answered:,} requests, p50 {p50}"
    failed = f", {errors} errors" if errors else ""
    print(f"\r\x1b[K{text}, p99 {p99}{failed}", end="", file=sys.stderr, flush=True)


def _read(path: Path) -> PerfResult:
    from conch_tools.perf.measure.results import PerfResult

    try:
        return PerfResult.from_json(path.read_text())
    except (OSError, ValueError) as error:
        raise FlagsError(f"--compare {path}: {error}") from None


def _report(result: PerfResult, options: argparse.Namespace, comparison: Comparison | None) -> None:
    from conch_tools.perf.reports.html_report import as_html
    from conch_tools.perf.reports.tables import as_csv, as_markdown, as_terminal, comparison_tables

    for path in options.report:
        if path.suffix == ".json":
            text = result.to_json()
        elif path.suffix == ".csv":
            text = as_csv(result)
        else:
            text = (as_html if path.suffix == ".html" else as_markdown)(result, comparison)
        path.write_text(text)
    if options.json:
        print(result.to_json(), end="")
        return
    print(as_terminal(result), end="")
    for table in () if comparison is None else comparison_tables(comparison):
        print(f"\n{table.caption}\n{table.markdown()}")
