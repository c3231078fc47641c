"""perf_analyzer's flags, translated to those of ``conch perf``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from conch_tools.perf.perf_analyzer.windows import JUDGED, Windows

# The longest measurement by count, in seconds.
_LONGEST = 3600
_PORTS = {"grpc": 8001, "http": 8000}

_UNSUPPORTED = {
    "--triton-server-directory": "start the server and give its address with -u",
    "--model-repository": "start the server and give its address with -u",
    "--grpc-method": "conch perf sends ModelInfer and ModelStreamInfer only",
    "--proto": "conch perf sends ModelInfer and ModelStreamInfer only",
    "--model-signature-name": "it is for TensorFlow Serving",
    "--periodic-concurrency-range": "use --concurrency-range",
    "--request-period": "use --concurrency-range",
    "--fixed-schedule": "use --request-intervals FILE",
    "--session-concurrency": "use --concurrency-range",
    "--binary-search": "use conch perf --rate auto --slo p99=20ms",
    "--string-data": "give the text in a file with --input-data FILE.json",
    "--grpc-compression-algorithm": "leave it out; requests are not compressed",
    "--ssl-https-verify-peer": "leave it out; the server's certificate is always verified",
    "--ssl-https-verify-host": "leave it out; use conch perf --server-name for another name",
    "--ssl-https-client-certificate-type": "give PEM files",
    "--ssl-https-private-key-type": "give PEM files",
    "--trace-level": "use conch trace",
    "--trace-rate": "use conch trace",
    "--trace-count": "use conch trace",
    "--log-frequency": "use conch trace",
    "--enable-mpi": "use conch perf --processes",
    "-c": "use --concurrency-range",
    "-d": "use --concurrency-range",
    "-t": "use --concurrency-range",
    "-z": "use --input-data zero",
    "--data-directory": "use --input-data",
}
_WITHOUT_EFFECT = {
    "asynchronous": "-a: all requests are sent asynchronously",
    "synchronous": "--sync: all requests are sent asynchronously",
    "serial_sequences": "--serial-sequences: the requests of a sequence are always sent one after the other",
    "max_threads": "--max-threads: the load is made by processes",
    "verbose": "-v: the report always has all lines",
}


class FlagError(Exception):
    """A flag that can't be translated; the text names it and what to use instead."""


@dataclass(frozen=True, slots=True)
class Translation:
    """Settings that perf_analyzer's flags ask for.

    Attributes:
        arguments: The arguments of ``conch perf``.
        loads: Number of points.
        percentile: The percentile that is listed too.
        windows: Rule that ends a measurement; None with a number of requests.
        request_count: Requests of each measurement; 0 for windows.
        composing: Models that a BLS model calls, with their versions.
        metrics_url: Address of the server's GPU metrics; empty if they are not asked for.
        warm_up_count: Requests before each measurement.
        endpoint: Path of HTTP that takes the payloads; empty for a model's requests.
        without_effect: A sentence for each flag that is accepted and changes nothing.
    """

    arguments: tuple[str, ...]
    loads: int
    csv: Path | None
    verbose_csv: bool
    profile_export: Path | None
    percentile: int | None
    windows: Windows | None
    request_count: int
    composing: Mapping[str, str]
    metrics_url: str
    metrics_interval_s: float
    warm_up_count: int
    endpoint: str
    without_effect: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def translate(arguments: Sequence[str]) -> Translation:
    """Translates a command line of perf_analyzer.

    Raises:
        FlagError: A flag is wrong or has no counterpart.
    """
    values = _parser().parse_args(list(arguments))
    if values.profile_export_file is not None and values.profile_export_file.exists():
        raise FlagError(f"--profile-export-file: {values.profile_export_file} exists; name a new file")
    if values.percentile is not None and not 1 <= values.percentile <= 99:
        raise FlagError("--percentile takes 1 to 99")
    load, loads = _load(values)
    windows = _windows(values)
    by_count = bool(windows.requests or values.request_count)
    duration = _LONGEST if by_count else windows.seconds * windows.most
    found = [values.model, *load, "--duration", str(duration), "-b", str(values.batch)]
    if values.version:
        found += ["-x", values.version]
    if values.request_count and values.latency_threshold:
        raise FlagError("--latency-threshold needs windows: leave out --request-count")
    if values.request_count or values.warmup_request_count:
        found += ["--warmup", "0"]
    if (values.service_kind == "openai") is not bool(values.endpoint):
        raise FlagError("--service-kind openai and --endpoint PATH go together")
    if values.endpoint:
        if not values.input_data:
            raise FlagError("--service-kind openai needs --input-data FILE.json with payloads")
        found += ["--endpoint", values.endpoint]
    found += _sequences(values)
    found += _data(values)
    found += _connection(values)
    if values.streaming and not values.endpoint:
        found.append("--stream")
    return Translation(
        tuple(found),
        loads,
        values.csv,
        values.verbose_csv,
        values.profile_export_file,
        values.percentile,
        None if values.request_count else windows,
        values.request_count,
        _composing(values.bls_composing_models),
        values.metrics_url if values.collect_metrics else "",
        values.metrics_interval / 1000,
        values.warmup_request_count,
        values.endpoint,
        _without_effect(values),
    )


def _without_effect(values: argparse.Namespace) -> tuple[str, ...]:
    found = [text for name, text in _WITHOUT_EFFECT.items() if getattr(values, name)]
    if values.streaming and values.endpoint:
        found.append("--streaming: the payloads say whether the server streams")
    return tuple(found)


def _parser() -> _Parser:
    parser = _Parser(prog="perf_analyzer", allow_abbrev=False)
    add = parser.add_argument
    add("-m", dest="model", required=True)
    add("-x", dest="version", default="")
    add("--service-kind", choices=("triton", "openai"), default="triton")
    add("--endpoint", default="")
    add("-b", dest="batch", type=int, default=1)
    add("--bls-composing-models", default="")
    add("--shape", action="append", default=[])
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--concurrency-range")
    modes.add_argument("--request-rate-range")
    modes.add_argument("--request-intervals", type=Path)
    add("--num-of-sequences", type=int)
    add("--serial-sequences", action="store_true")
    add("--sequence-length", type=int)
    add("--sequence-length-variation", type=float)
    ids = parser.add_mutually_exclusive_group()
    ids.add_argument("--start-sequence-id", dest="sequence_ids")
    ids.add_argument("--sequence-id-range", dest="sequence_ids")
    add("--request-distribution", choices=("constant", "poisson"))
    add("--max-threads")
    add("-a", "--async", dest="asynchronous", action="store_true")
    add("--sync", dest="synchronous", action="store_true")
    add("--streaming", action="store_true")
    add("--measurement-mode", choices=("time_windows", "count_windows"))
    add("-p", "--measurement-interval", type=int, default=5000)
    add("--measurement-request-count", type=int, default=50)
    add("-s", "--stability-percentage", type=float, default=10.0)
    add("--percentile", type=int)
    add("-r", "--max-trials", type=int, default=10)
    add("--request-count", type=int, default=0)
    add("--warmup-request-count", type=int, default=0)
    add("-l", "--latency-threshold", type=float, default=0.0)
    add("--collect-metrics", action="store_true")
    add("--metrics-url", default="http://localhost:8002/metrics")
    add("--metrics-interval", type=int, default=1000)
    add("--input-data", action="append", default=[])
    add("--string-length", type=int)
    for name in ("input", "output"):
        add(f"--{name}-tensor-format", choices=("binary", "json"), default="binary")
    add("--shared-memory", choices=("none", "system", "cuda"), default="none")
    add("--output-shared-memory-size", type=int)
    add("--request-parameter", action="append", default=[])
    _add_connection_flags(parser)
    add("-f", dest="csv", type=Path)
    add("--verbose-csv", action="store_true")
    add("--profile-export-file", type=Path)
    add("-v", "--verbose", dest="verbose", action="store_true")
    for name in _UNSUPPORTED:
        add(name, action=_Refuse, nargs="?", help=argparse.SUPPRESS)
    return parser


def _add_connection_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-i", dest="protocol", type=str.lower, choices=("http", "grpc"), default="http")
    add("-u", dest="url", default="")
    add("-H", dest="header", action="append", default=[])
    add("--ssl-grpc-use-ssl", action="store_true")
    for name, dest in (
        ("root-certifications", "root"),
        ("private-key", "key"),
        ("certificate-chain", "cert"),
    ):
        add(f"--ssl-grpc-{name}-file", dest=f"grpc_{dest}")
    for name, dest in (("ca-certificates", "root"), ("private-key", "key"), ("client-certificate", "cert")):
        add(f"--ssl-https-{name}-file", dest=f"http_{dest}")


class _Refuse(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        name = option_string or self.option_strings[0]
        raise FlagError(f"{name} isn't supported: {_UNSUPPORTED[name]}")


def _load(values: argparse.Namespace) -> tuple[list[str], int]:
    if values.request_intervals is not None:
        return ["--distribution", f"trace:{values.request_intervals}"], 1
    if values.request_rate_range is not None:
        rates = _range("--request-rate-range", values.request_rate_range)
        distribution = ["--distribution", values.request_distribution or "constant"]
        return ["--rate", ",".join(f"{rate:.10g}" for rate in rates), *distribution], len(rates)
    if values.request_distribution is not None:
        raise FlagError("--request-distribution needs --request-rate-range")
    counts = _range("--concurrency-range", values.concurrency_range or "1")
    if any(count != int(count) for count in counts):
        raise FlagError("--concurrency-range takes integers")
    return ["-c", ",".join(str(int(count)) for count in counts)], len(counts)


def _sequences(values: argparse.Namespace) -> list[str]:
    rate = values.request_rate_range is not None or values.request_intervals is not None
    if values.num_of_sequences is not None and not rate:
        raise FlagError("--num-of-sequences needs --request-rate-range or --request-intervals")
    flags = {
        "--sequences": values.num_of_sequences,
        "--sequence-length": values.sequence_length,
        "--sequence-length-variation": values.sequence_length_variation,
        "--sequence-ids": values.sequence_ids,
    }
    return [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]


def _composing(text: str) -> dict[str, str]:
    found = {}
    for each in filter(None, text.split(",")):
        name, _, version = each.strip().partition(":")
        if not name:
            raise FlagError(f"--bls-composing-models takes NAME:VERSION,NAME, not '{text}'")
        found[name] = version
    return found


def _windows(values: argparse.Namespace) -> Windows:
    for flag, value, least in (
        ("--measurement-interval", values.measurement_interval, 1),
        ("--measurement-request-count", values.measurement_request_count, 1),
        ("--request-count", values.request_count, 0),
        ("--warmup-request-count", values.warmup_request_count, 0),
        ("--metrics-interval", values.metrics_interval, 1),
        ("--max-trials", values.max_trials, JUDGED),
        ("--latency-threshold", values.latency_threshold, 0),
    ):
        if value < least:
            raise FlagError(f"{flag} is at least {least}, not {value}")
    if not values.stability_percentage > 0:
        raise FlagError("--stability-percentage is above 0")
    by_count = values.measurement_mode == "count_windows"
    return Windows(
        values.measurement_interval,
        values.measurement_request_count if by_count else 0,
        values.stability_percentage / 100,
        values.max_trials,
        values.percentile,
        values.latency_threshold,
    )


def _range(flag: str, text: str) -> list[float]:
    try:
        start, *rest = [float(part) for part in text.split(":")]
    except ValueError:
        raise FlagError(f"{flag} takes START, START:END or START:END:STEP, not '{text}'") from None
    if len(rest) > 2:
        raise FlagError(f"{flag} takes START, START:END or START:END:STEP, not '{text}'")
    last, step = (rest[0] if rest else start), (rest[1] if len(rest) > 1 else 1.0)
    if not all(map(math.isfinite, (start, last, step))) or start <= 0 or step <= 0:
        raise FlagError(f"{flag}: start and step must be above 0, not '{text}'")
    if last < start:
        raise FlagError(
            f"{flag}: the end must be at least the start; without an end use conch perf --rate auto"
        )
    return [start + index * step for index in range(int((last - start) / step + 1e-9) + 1)]


def _data(values: argparse.Namespace) -> list[str]:
    found = [part for shape in values.shape for part in ("--shape", shape)]
    found += [part for data in values.input_data for part in ("--data", data)]
    if not values.input_data or values.input_data == ["random"]:
        # perf_analyzer makes random data once.
        found.append("--reuse-data")
    if values.string_length is not None:
        found += ["--string-length", str(values.string_length)]
    if values.input_tensor_format != values.output_tensor_format:
        raise FlagError("--input-tensor-format and --output-tensor-format must be the same")
    if values.input_tensor_format == "json":
        if values.protocol != "http":
            raise FlagError("--input-tensor-format json needs -i http")
        found += ["--tensors", "json"]
    if values.shared_memory == "cuda":
        raise FlagError("--shared-memory=cuda isn't supported: use --shared-memory=system")
    if values.shared_memory == "system":
        found += ["--shm", "system"]
        if values.output_shared_memory_size is not None:
            found += ["--shm-output-size", str(values.output_shared_memory_size)]
    for text in values.request_parameter:
        found += ["--parameter", _parameter(text)]
    return found


def _parameter(text: str) -> str:
    name, _, rest = text.partition(":")
    value, _, kind = rest.rpartition(":")
    try:
        if kind == "int":
            return f"{name}={int(value)}"
        if kind == "bool" and value.lower() in {"true", "false"}:
            return f"{name}={value.lower()}"
    except ValueError:
        kind = ""
    if kind != "string" or not name:
        raise FlagError(f"--request-parameter takes NAME:VALUE:bool|int|string, not '{text}'")
    return f"{name}={json.dumps(value)}"


def _connection(values: argparse.Namespace) -> list[str]:
    protocol: str = values.protocol
    other = "http" if protocol == "grpc" else "grpc"
    if any(getattr(values, f"{other}_{part}") for part in ("root", "key", "cert")):
        raise FlagError(f"--ssl-{'https' if other == 'http' else 'grpc'}-* needs -i {other}")
    if values.endpoint and protocol != "http":
        raise FlagError("--service-kind openai needs -i http")
    if values.streaming and protocol != "grpc" and not values.endpoint:
        raise FlagError("--streaming needs -i grpc")
    if values.header and protocol != "http":
        raise FlagError("-H needs -i http")
    url: str = values.url or f"localhost:{_PORTS[protocol]}"
    scheme, _, address = url.rpartition("://")
    secure = values.ssl_grpc_use_ssl if protocol == "grpc" else scheme == "https"
    found = ["-u", f"{protocol}{'s' if secure else ''}://{address}"]
    for part, flag in (("root", "--root-cert"), ("cert", "--client-cert"), ("key", "--client-key")):
        value = getattr(values, f"{protocol}_{part}")
        found += [flag, value] if value else []
    return found + [part for header in values.header for part in ("-H", header)]
