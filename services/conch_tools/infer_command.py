"""`conch infer`: sends requests to a model of a running server, and shows what comes back."""

from __future__ import annotations

import argparse
import codecs
import json
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conch.cli.command_parser import CommandParser
from conch_tools.connection import Endpoint, UrlError, add_connection_flags, endpoint_of
from conch_tools.flag_values import FlagsError, parameter_of, shape_of
from conch_tools.progress_bar import ProgressBar

if TYPE_CHECKING:
    from conch_tools.infer.client import InferRequest, InferResponse
    from conch_tools.infer.inference import RemoteModel
    from conch_tools.infer.signature import ModelSignature, TensorRule

DONE, REFUSED, USAGE, UNREACHED, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes."""

FORMATS = ("csv", "jsonl", "parquet")
_SCALINGS = ("none", "unit", "inception", "imagenet")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_SINGLE = (
    ("input", "-i"),
    ("text", "--text"),
    ("shape", "--shape"),
    ("output", "--output"),
    ("top", "--top"),
    ("id", "--id"),
    ("stream", "--stream"),
    ("save", "--save"),
    ("json", "--json"),
    ("image_scaling", "--image-scaling"),
)
_ROWS = (("format", "--format"), ("out_format", "--out-format"), ("start_row", "--start-row"))
_BULK = (("out", "-o"), ("workers", "--workers"), ("retries", "--retries"))


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="conch infer",
        description="Sends a request to a model of a running server, conch or another one that speaks its "
        "protocols, and prints the outputs; or, with --csv or --rows, answers each row of a file, and with "
        "--jsonl each request of a file.",
        epilog="exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 no server, 130 interrupted",
    )
    parser.add_argument("model", help="name of the model")
    parser.add_argument("-x", "--version", default="", help="its version (the server's choice)")
    inputs = parser.add_argument_group("inputs")
    inputs.add_argument(
        "-i",
        "--input",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="JSON, values with commas between, or a text for BYTES; @FILE has an array (.npy), an image, a "
        "text or JSON, @- is standard input; repeatable. The batch dimension may be left out",
    )
    inputs.add_argument(
        "--text",
        metavar="TEXT",
        help="the text input of a language model, or @FILE; prints the text of the answer as it comes",
    )
    inputs.add_argument(
        "--shape", action="append", default=[], metavar="INPUT:DIMS", help="shape of a flat value, as IN:2,3"
    )
    inputs.add_argument(
        "--image-scaling",
        choices=_SCALINGS,
        help="pixels from 0 to 255 (none, the default), 0 to 1 (unit), -1 to 1 (inception), or standardised",
    )
    request = parser.add_argument_group("request")
    request.add_argument(
        "--output", action="append", default=[], metavar="NAME", help="return this output; repeatable (all)"
    )
    request.add_argument("--top", type=_count, metavar="K", help="return the K best classes, with labels")
    request.add_argument("--id", default="", help="the request's id")
    request.add_argument(
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="JSON or text, such as priority=1 or sequence_id=7; repeatable",
    )
    request.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="of a request; also its time limit in the queue"
    )
    request.add_argument(
        "--traceparent", metavar="VALUE", help="W3C's trace context to go on with, or 'new' for one"
    )
    request.add_argument(
        "--stream",
        action="store_true",
        help="send on a stream and print each response as it comes; decoupled models get one in any case",
    )
    bulk = parser.add_argument_group("rows or requests from a file")
    bulk.add_argument(
        "--rows",
        metavar="FILE",
        help="a table whose columns are the model's inputs: .csv, .jsonl or .parquet; - is standard input",
    )
    bulk.add_argument("--csv", metavar="FILE", help="the same as --rows FILE --format csv")
    bulk.add_argument("--format", choices=FORMATS, help="format of the rows (by the file's ending)")
    bulk.add_argument(
        "--out-format",
        choices=FORMATS,
        help="format of the outputs (by the ending of -o, or that of the rows)",
    )
    bulk.add_argument(
        "--start-row",
        type=_number,
        metavar="N",
        help="leave out N rows, whose outputs -o has: goes on with a run that ended early",
    )
    bulk.add_argument(
        "--jsonl", metavar="FILE", help='a request a line: {"IN": [1]}, or as over HTTP; - is standard input'
    )
    bulk.add_argument(
        "-o", "--out", metavar="FILE", help="a row or result each, in the same order (standard output)"
    )
    bulk.add_argument(
        "--workers", type=_count, metavar="N", help="requests in flight (4 of rows, 10 of --jsonl)"
    )
    bulk.add_argument(
        "--retries", type=_number, metavar="N", help="of requests to a server that is away or too busy (3)"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print JSON, a line for each response")
    out.add_argument("--save", type=Path, metavar="DIR", help="write each output to NAME.npy")
    add_connection_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the process's exit code."""
    options = make_parser().parse_args(arguments)
    try:
        _check(options)
        endpoint = _endpoint(options)
        parameters = _parameters(options)
    except (FlagsError, UrlError) as error:
        return _failed(error, USAGE)
    from conch_tools.infer.display import SaveError
    from conch_tools.infer.inference import RemoteModel
    from conch_tools.infer.input_values import InputError
    from conch_tools.server_api import AskError

    try:
        with RemoteModel(endpoint, options.model, options.version) as model:
            if options.jsonl is not None:
                return _bulk(model, parameters, options)
            if options.rows is not None:
                return _rows(model, parameters, options)
            return _single(model, parameters, options)
    except (FlagsError, InputError) as error:
        return _failed(error, USAGE)
    except AskError as error:
        if error.reached:
            return _failed(error, REFUSED)
        return _failed(f"{error}; --url or CONCH_URL names the server", UNREACHED)
    except SaveError as error:
        return _failed(error, REFUSED)
    except KeyboardInterrupt:
        return INTERRUPTED


def _failed(error: Exception | str, code: int) -> int:
    print(f"conch infer: {error}", file=sys.stderr)
    return code


def _check(options: argparse.Namespace) -> None:
    if options.csv is not None:
        if options.rows is not None or options.format is not None:
            raise FlagsError("--csv is --rows with --format csv: give one of them")
        options.rows, options.format = options.csv, "csv"
    if options.rows is not None and options.jsonl is not None:
        raise FlagsError("--rows has rows, and --jsonl requests: give one of them")
    if options.rows is None:
        _check_none(options, _ROWS, "goes with --rows or --csv")
    if options.jsonl is None and options.rows is None:
        _check_none(options, _BULK, "goes with --rows, --csv or --jsonl")
    for name, flag in _SINGLE:
        if getattr(options, name) and (options.jsonl is not None or options.rows is not None):
            if options.jsonl is not None:
                raise FlagsError(f"{flag} is of one request, and each line of --jsonl has its own")
            if name != "output":
                raise FlagsError(f"{flag} is of one request, and a file of rows has many")
    if options.text is not None and options.top is not None:
        raise FlagsError("--text prints text, and --top classes: give one of them")
    if options.text is not None and options.save is not None:
        raise FlagsError("--text prints text: leave --save out, or give the text with -i")
    if options.traceparent not in (None, "new") and not _TRACEPARENT.fullmatch(options.traceparent):
        raise FlagsError(
            f"--traceparent is VERSION-TRACE-SPAN-FLAGS in hex, or new, not '{options.traceparent}'"
        )


def _check_none(options: argparse.Namespace, flags: Sequence[tuple[str, str]], why: str) -> None:
    for name, flag in flags:
        if getattr(options, name) is not None:
            raise FlagsError(f"{flag} {why}")


def _endpoint(options: argparse.Namespace) -> Endpoint:
    endpoint = endpoint_of(options)
    if options.traceparent is None:
        return endpoint
    value = options.traceparent
    if value == "new":
        value = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
        print(f"traceparent {value}", file=sys.stderr)
    return replace(endpoint, headers={**endpoint.headers, "traceparent": value})


def _parameters(options: argparse.Namespace) -> dict[str, Any]:
    """Request parameters, the time limit among them."""
    found: dict[str, Any] = dict(parameter_of(text) for text in options.parameter)
    if options.timeout is not None:
        found["timeout"] = round(options.timeout * 1e6)
    return found


def _single(model: RemoteModel, parameters: Mapping[str, Any], options: argparse.Namespace) -> int:
    signature = model.signature
    values = _values(signature, options)
    outputs = list(options.output)
    if options.text is not None:
        outputs = outputs or [_text_tensor("output", signature.name, signature.outputs, "text_output").name]
        rule = _text_tensor("input", signature.name, signature.inputs, "text_input")
        values.setdefault(rule.name, _read(signature, rule, options.text, options))
        stream = next((each for each in signature.inputs if each.name == "stream"), None)
        if stream is not None and stream.datatype == "BOOL" and (options.stream or signature.decoupled):
            values.setdefault(stream.name, True)
    missing = [rule.name for rule in signature.inputs if not rule.optional and rule.name not in values]
    if missing:
        flags = " ".join(f"-i {name}=VALUE" for name in missing)
        raise FlagsError(f"give {flags}; model '{signature.name}' has {signature.inputs_text}")
    request = model.request(
        values,
        shapes=dict(shape_of(text) for text in options.shape),
        outputs=outputs,
        classes=options.top or 0,
        parameters=parameters,
        request_id=options.id,
        timeout_s=options.timeout,
    )
    streams = options.stream or signature.decoupled
    if options.text is not None:
        return _print_text(_responses(model, request, streams), outputs[0], options.json)
    return _print_responses(_responses(model, request, streams), streams, options)


def _responses(model: RemoteModel, request: InferRequest, streams: bool) -> Iterator[InferResponse]:
    if streams:
        yield from model.stream(request)
    else:
        yield model.infer(request)


def _values(signature: ModelSignature, options: argparse.Namespace) -> dict[str, Any]:
    from conch_tools.infer.input_values import InputError

    rules = {rule.name: rule for rule in signature.inputs}
    found: dict[str, Any] = {}
    for text in options.input:
        name, equals, value = text.partition("=")
        if not equals:
            raise FlagsError(f"-i takes NAME=VALUE, not '{text}'; the model has {signature.inputs_text}")
        if name not in rules:
            raise InputError(
                f"model '{signature.name}' has no input '{name}'; it has {signature.inputs_text}"
            )
        if name in found:
            raise FlagsError(f"-i: input '{name}' is given twice")
        found[name] = _read(signature, rules[name], value, options)
    return found


def _read(signature: ModelSignature, rule: TensorRule, text: str, options: argparse.Namespace) -> Any:
    from conch_tools.infer.input_values import read_value

    return read_value(signature, rule, text, options.image_scaling or "none", _standard_input)


@cache
def _standard_input() -> bytes:
    return sys.stdin.buffer.read()


def _text_tensor(kind: str, model: str, rules: Sequence[TensorRule], usual: str) -> TensorRule:
    """The tensor of texts that --text means."""
    texts = [rule for rule in rules if rule.datatype == "BYTES"]
    found = [rule for rule in texts if rule.name == usual] or texts
    required = [rule for rule in found if not rule.optional] or found
    if len(required) != 1:
        names = ", ".join(str(rule) for rule in rules)
        other = "give it with -i" if kind == "input" else "name it with --output"
        raise FlagsError(f"--text: model '{model}' has not one {kind} of text but {names}; {other}")
    return required[0]


def _print_responses(responses: Iterator[InferResponse], streams: bool, options: argparse.Namespace) -> int:
    from conch.observability.tracing.waterfall import printable
    from conch_tools.infer.display import as_json, as_text, save

    began = time.monotonic()
    number = 0
    for number, response in enumerate(responses, 1):
        spent_ms = 1000 * (time.monotonic() - began)
        if options.json:
            print(json.dumps(as_json(response), ensure_ascii=False), flush=True)
        else:
            head = f"model {response.model}, version {response.version}"
            head = f"response {number}, {spent_ms:.1f} ms" if streams else f"{head}, {spent_ms:.1f} ms"
            head = f"{head}, id {response.id}" if response.id else head
            print(printable(head), as_text(response, options.top or 0), sep="\n", flush=True)
        if options.save is not None:
            for path in save(response, options.save, number if streams else None):
                print(path, file=sys.stderr)
    if not number and not options.json:
        print("no response")
    return DONE


def _print_text(responses: Iterator[InferResponse], output: str, as_json: bool) -> int:
    """Prints the text of responses as it comes, which may be cut within a character."""
    began = time.monotonic()
    first_s = None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces: list[str] = []
    count = 0
    terminal = sys.stdout.isatty()
    for response in responses:
        count += 1
        first_s = first_s or time.monotonic() - began
        for tensor in response.outputs:
            for value in tensor.numpy().ravel() if tensor.name == output else ():
                piece = decoder.decode(value)
                pieces.append(piece)
                if not as_json:
                    print(_safe(piece) if terminal else piece, end="", flush=True)
    pieces.append(decoder.decode(b"", final=True))
    seconds = time.monotonic() - began
    if as_json:
        found = {"text": "".join(pieces), "responses": count, "first_s": first_s, "seconds": seconds}
        print(json.dumps(found, ensure_ascii=False))
        return DONE
    print(pieces[-1])
    if terminal and count > 1:
        print(f"{count} responses in {seconds:.2f} s, the first after {first_s:.2f} s", file=sys.stderr)
    return DONE


def _safe(text: str) -> str:
    """A text without characters that control terminals."""
    return "".join(each if each.isprintable() or each in "\n\t" else "?" for each in text)


def _bulk(model: RemoteModel, parameters: Mapping[str, Any], options: argparse.Namespace) -> int:
    from conch_tools.infer.bulk import BulkInterrupted, run_bulk

    source, target = options.jsonl, options.out or "-"
    lines, out = sys.stdin, sys.stdout
    interrupted = False
    with ExitStack() as files:
        try:
            if "-" not in (source, target) and Path(target).exists() and Path(target).samefile(source):
                raise FlagsError(f"-o {target} is the file of the requests")
            if source != "-":
                lines = files.enter_context(open(source, encoding="utf-8"))
            if target != "-":
                out = files.enter_context(open(target, "w", encoding="utf-8"))
        except OSError as error:
            raise FlagsError(f"{error.filename}: {error.strerror}") from None

        def write(line: str) -> None:
            out.write(line)
            out.flush()

        try:
            result = run_bulk(
                model,
                lines,
                write,
                workers=options.workers or 10,
                retries=3 if options.retries is None else options.retries,
                parameters=parameters,
                timeout_s=options.timeout,
            )
        except BulkInterrupted as stopped:
            result, interrupted = stopped.result, True
        except (OSError, UnicodeDecodeError) as error:
            return _failed(error, REFUSED)
    print(f"{result.requests} requests, {result.failed} failed, {result.seconds:.1f} s", file=sys.stderr)
    return INTERRUPTED if interrupted else REFUSED if result.failed else DONE


def _rows(model: RemoteModel, parameters: Mapping[str, Any], options: argparse.Namespace) -> int:
    from conch_tools.infer.row_files import RowFileError, RowReader, columns_of, format_of, open_writer
    from conch_tools.infer.row_run import RowRunError, check_model, run_rows

    check_model(model, options.output, parameters)
    source, target, start_row = options.rows, options.out or "-", options.start_row or 0
    with ExitStack() as files:
        try:
            kind = options.format or format_of(source)
            out_kind = options.out_format or format_of(target, kind)
            if source == "-" and kind == "parquet":
                raise FlagsError("Parquet is read from its end on: give a file instead of standard input")
            lines, size = sys.stdin.buffer, 0
            if source != "-":
                lines = files.enter_context(open(source, "rb"))
                size = Path(source).stat().st_size
            begins = _begins(source, target, out_kind, start_row)
            names = [] if begins or target == "-" else columns_of(Path(target), out_kind)
            out = sys.stdout.buffer
            if target != "-":
                out = files.enter_context(open(target, "wb" if begins else "ab"))
            writer = open_writer(out, out_kind, begins, names)
        except OSError as error:
            raise FlagsError(f"{error.filename}: {error.strerror}") from None
        except RowFileError as error:
            raise FlagsError(str(error)) from None
        reader = RowReader(lines, kind, size)
        bar = ProgressBar(sys.stderr, start_row)
        try:
            result = run_rows(
                model,
                reader,
                writer,
                start_row=start_row,
                outputs=options.output,
                workers=options.workers or 4,
                retries=3 if options.retries is None else options.retries,
                parameters=parameters,
                timeout_s=options.timeout,
                progress=lambda rows: bar.show(rows, reader.fraction),
            )
        except RowRunError as error:
            bar.clear()
            with suppress(OSError):
                writer.close()
            with suppress(OSError):
                files.close()  # what could not be written fails once more
            code = INTERRUPTED if error.interrupted else REFUSED if error.reached else UNREACHED
            other = " and another -o" if out_kind == "parquet" else ""
            go_on = f"go on with --start-row {error.next_row}{other}"
            return _failed(f"{error}\n{error.next_row} rows are written; {go_on}", code)
        bar.clear()
        try:
            writer.close()
        except OSError as error:
            return _failed(f"{target} can't be completed: {error.strerror or error}", REFUSED)
    rate = result.rows / max(result.seconds, 1e-9)
    print(f"{result.rows} rows, {result.seconds:.1f} s, {rate:,.0f} rows/s", file=sys.stderr)
    return DONE


def _begins(source: str, target: str, out_kind: str, start_row: int) -> bool:
    """True if the outputs are the first of their file. Raises FlagsError: rows would be lost or doubled."""
    from conch_tools.infer.row_files import rows_of

    if target == "-" or not Path(target).exists():
        return start_row == 0 or target != "-"
    if source != "-" and Path(target).samefile(source):
        raise FlagsError(f"-o {target} is the file of the rows")
    if not start_row or not Path(target).is_file():
        return True
    found = rows_of(Path(target), out_kind)
    if found != start_row:
        raise FlagsError(f"{target} has {found} rows: go on with --start-row {found}, or give another file")
    return False


def _count(text: str) -> int:
    if not (text.isdecimal() and text.isascii() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got '{text}'")
    return int(text)


def _number(text: str) -> int:
    if not (text.isdecimal() and text.isascii() and int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got '{text}'")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got '{text}'")
    return value
