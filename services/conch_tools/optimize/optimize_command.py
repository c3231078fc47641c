"""`conch optimize`: converts a model, and makes a repository of the best result."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conch.cli.command_parser import CommandParser
from conch.core.errors import ConchError
from conch_tools.flag_values import seconds_of
from conch_tools.terminable import terminable

if TYPE_CHECKING:
    from conch_tools.optimize.options import OptimizeOptions

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes; argparse ends with 2 for a wrong command line."""

_OBJECTIVES = ("balance", "latency", "throughput", "memory", "size")


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the process's exit code."""
    given = make_parser().parse_args(list(arguments))
    # Imports numpy and the server, which the help can do without.
    from conch.core.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
    from conch_tools.optimize.optimize_report import as_text
    from conch_tools.optimize.optimizer import optimize

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        with terminable():
            result = optimize(given.source, given.output, _options(given), progress)
    except ConchError as error:
        print(f"conch optimize: {error.message}", file=sys.stderr)
        wrong = isinstance(error, InvalidArgumentError | NotFoundError | AlreadyExistsError)
        return USAGE if wrong else FAILED
    except KeyboardInterrupt:
        print("conch optimize: interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED
    print(json.dumps(result.report, indent=1) if given.json else as_text(result.report))
    if result.repository is None:
        return FAILED
    if not given.json:
        print(f"report:    {result.folder / 'report.html'}")
        print(f"serve it:  conch serve --model-repository={result.repository}")
    return DONE


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="conch optimize",
        description="Converts a model in all ways that there are, compares the results with the original, "
        "measures those that agree with it, and writes a model repository with the best.",
        epilog="Exit codes: 0 done, 1 nothing has passed or the source can't be run, 2 wrong usage, 130 "
        "interrupted; the same command continues.",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="file or folder of a model, or FILE.py:FUNCTION, a function that returns a PyTorch module",
    )
    parser.add_argument(
        "-o", "--output", metavar="DIRECTORY", type=Path, required=True, help="where all goes"
    )
    parser.add_argument("--to", metavar="NAMES", default="", help="wanted kinds, as onnx,openvino,treelite")
    data = parser.add_argument_group("samples")
    data.add_argument(
        "--data",
        metavar="PATH",
        type=Path,
        help="samples of the inputs: an .npz file, a folder of .npy files, or perf_analyzer's JSON; "
        "default: random",
    )
    data.add_argument(
        "--shape",
        metavar="NAME:DIMS",
        action="append",
        default=[],
        help="dims of random samples, as IN:3,224",
    )
    data.add_argument(
        "--random-data-is-fine", action="store_true", help="let random samples set the scales of int8"
    )
    data.add_argument(
        "--max-batch-size", metavar="N", type=int, default=32, help="largest batch; default: 32"
    )
    data.add_argument(
        "--no-batching",
        action="store_true",
        help="a PyTorch module or TorchScript takes one sample, without a batch dimension",
    )
    judged = parser.add_argument_group("accuracy")
    judged.add_argument("--atol", type=float, help="absolute difference of exact conversions; default: 1e-4")
    judged.add_argument("--rtol", type=float, help="relative difference that adds to it; default: 1e-3")
    judged.add_argument(
        "--min-cosine", type=float, help="of other conversions; default: 0.9999 with 16 bits, 0.99 with int8"
    )
    judged.add_argument(
        "--min-top1",
        type=float,
        help="share of equal best classes; default: 0.998 with 16 bits, 0.99 with int8",
    )
    judged.add_argument(
        "--metric",
        metavar="FILE.py:FUNCTION",
        default="",
        help="a function of outputs by name and targets that returns a number, the higher the better; it "
        "decides alone",
    )
    judged.add_argument("--targets", metavar="FILE.npy", type=Path, help="what the metric gets as targets")
    judged.add_argument("--max-drop", type=float, default=0.005, help="of the metric; default: 0.005")
    result = parser.add_argument_group("result")
    result.add_argument(
        "--objective",
        choices=_OBJECTIVES,
        default="balance",
        help="what to recommend; default: balance, the highest throughput within 1.2 times the best latency",
    )
    result.add_argument("--name", default="", help="the model's name; default: by the source")
    result.add_argument(
        "--labels", metavar="FILE", type=Path, help="labels of classes, one a line, for the config"
    )
    result.add_argument("--apply", metavar="REPO", type=Path, help="also put the model into this repository")
    result.add_argument(
        "--tune",
        metavar="TIME",
        type=seconds_of,
        default=0,
        help="then search settings of the recommended one with conch tune, for so long, as 5m",
    )
    steps = parser.add_argument_group("steps")
    steps.add_argument("--offline", action="store_true", help="build no environments: use what is installed")
    steps.add_argument(
        "--environment",
        metavar="DIRECTORY",
        type=Path,
        action="append",
        default=[],
        help="an environment to look for packages in, before one is built; may be repeated",
    )
    steps.add_argument(
        "--step-timeout", metavar="SECONDS", type=float, default=600.0, help="for each step; default: 600"
    )
    steps.add_argument(
        "--measure", metavar="SECONDS", type=float, default=1.0, help="for each batch size; default: 1"
    )
    steps.add_argument(
        "--restart", action="store_true", help="do all again, also what an earlier run has done"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON; its shape is stable")
    return parser


def _options(given: argparse.Namespace) -> OptimizeOptions:
    from conch_tools.optimize.judging import Limits
    from conch_tools.optimize.options import OptimizeOptions

    return OptimizeOptions(
        to=[each for each in given.to.split(",") if each],
        data=given.data,
        shapes=dict(_shape(each) for each in given.shape),
        random_data_is_fine=given.random_data_is_fine,
        max_batch_size=given.max_batch_size,
        batching=not given.no_batching,
        limits=Limits(given.atol, given.rtol, given.min_cosine, given.min_top1),
        metric=given.metric,
        targets=given.targets,
        max_drop=given.max_drop,
        objective=given.objective,
        name=given.name,
        labels=given.labels,
        apply=given.apply,
        tune_s=given.tune,
        offline=given.offline,
        environments=given.environment,
        step_timeout_s=given.step_timeout,
        measure_s=given.measure,
        restart=given.restart,
    )


def _shape(text: str) -> tuple[str, list[int]]:
    from conch.core.errors import InvalidArgumentError

    name, _, dims = text.rpartition(":")
    try:
        return name, [int(each) for each in dims.split(",") if each]
    except ValueError:
        raise InvalidArgumentError(f"--shape must be NAME:DIMS, as IN:3,224, not '{text}'") from None
