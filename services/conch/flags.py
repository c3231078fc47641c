"""The flags of ``conch serve``: Triton's spellings and defaults, and conch's own.

Every flag can also be given as an environment variable (``--grpc-port`` as ``CONCH_GRPC_PORT``) or in a
TOML file (``grpc-port = 8001``, named by ``--config-file``); a flag wins over the environment, and that
over the file. Several values of one variable are separated by semicolons.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_LONGEST_S = 1e9


class FlagError(Exception):
    """The command line, the environment or the file is wrong; the text says where and how."""


def parse_bool(text: str) -> bool:
    """A boolean as Triton writes it.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    value = text.strip().lower()
    if value in ("true", "on", "1"):
        return True
    if value in ("false", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"invalid value for bool option: {text}")


def _number(least: int, most: int | None = None) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
        if value < least or (most is not None and value > most):
            limits = f"at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"must be {limits}, got {value}")
        return value

    return number


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds") from None
    if not 0 <= value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"must be from 0 to {_LONGEST_S:.0f} seconds, got {text}")
    return value


def _interval(text: str) -> float:
    value = _duration(text)
    if not value:
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds, got {text}")
    return value


def _capability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a compute capability, such as 6.0")
    return value


def _repository(text: str) -> str | Path:
    return text if "://" in text else Path(text)  # a path would make one slash of two


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        name: Without the dashes.
        kind: Reads a value.
        default: Value where it is not given.
        help: One line for ``--help``.
        many: Whether it may be repeated.
        effect: Whether it does anything yet; one that does not is accepted with a warning.
        choices: Values allowed, or None.
    """

    name: str
    kind: Callable[[str], Any]
    default: Any
    help: str
    many: bool = False
    effect: bool = True
    choices: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        """The attribute the value is found under."""
        return self.name.replace("-", "_")


_port = _number(0, 65535)
_natural = _number(0)
_positive = _number(1)

FLAGS: tuple[Flag, ...] = (
    Flag("id", str, "triton", "name of this server in its metadata"),
    Flag(
        "model-repository",
        _repository,
        [],
        "directory of models, or s3://, gs:// or as:// URL of one; may be repeated",
        many=True,
    ),
    Flag("model-store", _repository, [], "the same as --model-repository", many=True),
    Flag(
        "model-cache-directory",
        Path,
        None,
        "directory for models fetched from object stores; by default ~/.cache/conch/models",
    ),
    Flag("model-cache-byte-size", _natural, 0, "most bytes kept there, 0 for any number"),
    Flag("storage-timeout-secs", _positive, 30, "seconds after which an object store has failed to answer"),
    Flag(
        "model-control-mode",
        str,
        "none",
        "none: load all models at the start; explicit: load what is asked for; poll: load all models and "
        "look for changes now and then; watch: load all models and be told of changes",
        choices=("none", "explicit", "poll", "watch"),
    ),
    Flag(
        "reload",
        parse_bool,
        False,
        "for development: load a model again soon after a file of it is saved; what served before goes on if "
        "it can't be loaded",
    ),
    Flag("repository-poll-secs", _interval, 15.0, "seconds between looks at model repositories"),
    Flag(
        "repository-settle-secs",
        _interval,
        1.0,
        "seconds that nothing must have changed of a model in a repository before it is loaded",
    ),
    Flag(
        "allow-model-control",
        parse_bool,
        True,
        "let clients of the inference ports load and unload models in explicit mode",
    ),
    Flag(
        "allow-client-shm",
        parse_bool,
        True,
        "let clients register system and CUDA shared memory; see docs/shared-memory.md",
    ),
    Flag(
        "model-namespacing",
        parse_bool,
        False,
        "let several repositories have models of one name, for ensembles of the same repository",
    ),
    Flag("load-model", str, [], "model to load at the start in explicit mode, or '*'", many=True),
    Flag("model-load-thread-count", _positive, 4, "models loaded at the same time"),
    Flag("model-load-retry-count", _natural, 0, "how often a version that failed to load is tried again"),
    Flag(
        "max-queue-size",
        _natural,
        16384,
        "requests that may wait for a model version, 0 for any number; a model's parameter "
        "CONCH_MAX_QUEUE_SIZE wins",
    ),
    Flag("model-config-name", str, "", "use configs/<name>.pbtxt of a model where it exists"),
    Flag("disable-auto-complete-config", parse_bool, False, "do not complete model configs"),
    Flag("strict-model-config", parse_bool, None, "deprecated: the same as --disable-auto-complete-config"),
    Flag(
        "backend-directory",
        Path,
        None,
        "directory with Python-based backends: <name>/model.py runs all models whose backend is <name>",
    ),
    Flag("backend-config", str, [], "<backend>,<key>=<value>; may be repeated", many=True),
    Flag("cache-config", str, [], "<cache>,<setting>=<value>; may be repeated", many=True),
    Flag(
        "response-cache-byte-size", _natural, None, "deprecated: the same as --cache-config=local,size=VALUE"
    ),
    Flag(
        "rate-limit",
        str.lower,
        "off",
        "execution_count: instances run while the resources that their config names are free, those first "
        "that have run least by their priority; off: resources are ignored",
        choices=("off", "execution_count"),
    ),
    Flag(
        "rate-limit-resource",
        str,
        [],
        "<name>:<count>[:<device>], how much there is of a resource; may be repeated; with none, as much of "
        "each as the neediest instance needs",
        many=True,
    ),
    Flag("min-supported-compute-capability", _capability, 6.0, "least CUDA compute capability of a GPU used"),
    Flag("exit-on-error", parse_bool, True, "exit if a model fails to load at the start"),
    Flag("strict-readiness", parse_bool, True, "ready only if all models are"),
    Flag(
        "drain-delay",
        _duration,
        0.0,
        "seconds for which a server that was asked to stop is not ready but goes on serving",
    ),
    Flag("exit-timeout-secs", _natural, 30, "seconds that requests may take after that"),
    Flag(
        "listen-while-loading",
        parse_bool,
        False,
        "answer probes (live, not ready) and requests for what is loaded before all startup models are",
    ),
    Flag("allow-grpc", parse_bool, True, "serve gRPC"),
    Flag("grpc-address", str, "0.0.0.0", "address for gRPC, or unix:PATH"),
    Flag("grpc-port", _port, 8001, "port for gRPC"),
    Flag("reuse-grpc-port", parse_bool, False, "let other processes listen on the gRPC port too"),
    Flag("grpc-infer-thread-count", _number(1, 128), 2, "threads that poll for gRPC requests"),
    Flag("grpc-max-message-bytes", _number(1, 2**31 - 1), 2**31 - 1, "largest gRPC message taken"),
    Flag(
        "grpc-max-connections",
        _natural,
        0,
        "connections that the gRPC port holds; further ones are closed at once; 0 for three eighths of the "
        "process's file descriptors (ulimit -n)",
    ),
    Flag(
        "grpc-max-concurrent-streams",
        _number(1, 2**31 - 1),
        1024,
        "calls open at once on a gRPC connection; further ones wait at the client",
    ),
    Flag(
        "grpc-max-metadata-bytes",
        _number(1024, 2**24),
        16 * 1024,
        "metadata of a gRPC call, 32 bytes for each entry included; calls with more are refused",
    ),
    Flag("grpc-use-ssl", parse_bool, False, "serve gRPC over TLS"),
    Flag("grpc-use-ssl-mutual", parse_bool, False, "ask gRPC clients for a certificate too"),
    Flag("grpc-server-cert", Path, None, "PEM file of the server's certificate"),
    Flag("grpc-server-key", Path, None, "PEM file of the server's key"),
    Flag("grpc-root-cert", Path, None, "PEM file of the root certificates for clients"),
    Flag(
        "grpc-infer-response-compression-level",
        str,
        "none",
        "compression of inference responses",
        choices=("none", "low", "medium", "high"),
    ),
    Flag("grpc-keepalive-time", _positive, 7_200_000, "milliseconds between keep-alive pings"),
    Flag("grpc-keepalive-timeout", _positive, 20_000, "milliseconds to wait for a ping's answer"),
    Flag("grpc-keepalive-permit-without-calls", parse_bool, False, "ping idle connections too"),
    Flag("grpc-http2-max-pings-without-data", _natural, 2, "pings without data in between"),
    Flag(
        "grpc-http2-min-recv-ping-interval-without-data",
        _natural,
        300_000,
        "milliseconds a client waits between pings without data",
    ),
    Flag("grpc-http2-max-ping-strikes", _natural, 2, "bad pings before a connection is closed"),
    Flag("grpc-max-connection-age", _natural, 0, "milliseconds after which a connection is closed; 0 never"),
    Flag("grpc-max-connection-age-grace", _natural, 0, "milliseconds calls may go on after that; 0 for ever"),
    Flag("grpc-restricted-protocol", str, [], "<protocol,…>:<key>=<value>; may be repeated", many=True),
    Flag("grpc-header-forward-pattern", str, "", "metadata keys forwarded as request parameters"),
    Flag("allow-http", parse_bool, True, "serve REST"),
    Flag("http-address", str, "0.0.0.0", "address for REST"),
    Flag("http-port", _port, 8000, "port for REST"),
    Flag("reuse-http-port", parse_bool, False, "let other processes listen on the REST port too"),
    Flag(
        "http-thread-count",
        _number(1, 1024),
        8,
        "accepted as Triton's; one thread serves all connections, whatever it says",
    ),
    Flag(
        "http-max-input-size",
        _natural,
        64 << 20,
        "bytes of the largest JSON, raw or decompressed body; binary tensors behind JSON do not count",
    ),
    Flag("http-header-forward-pattern", str, "", "request headers forwarded as request parameters"),
    Flag("http-restricted-api", str, [], "<API,…>:<key>=<value>; may be repeated", many=True),
    Flag("http-use-ssl", parse_bool, False, "serve REST over TLS"),
    Flag("http-server-cert", Path, None, "PEM file of the REST port's certificate"),
    Flag("http-server-key", Path, None, "PEM file of the REST port's key"),
    Flag(
        "http-root-cert", Path, None, "PEM file of the root certificates that REST clients must have one from"
    ),
    Flag("control-port", _port, 0, "port for conch models and conch control; 0 for none"),
    Flag(
        "control-address",
        str,
        "127.0.0.1",
        "address for the control port, or unix:PATH; whoever reaches it decides what code the server runs, "
        "so others than this machine's own need --control-token-file or --control-root-cert",
    ),
    Flag("control-token-file", Path, None, "file with the token that callers of the control port must show"),
    Flag("control-use-ssl", parse_bool, False, "serve the control port over TLS"),
    Flag("control-server-cert", Path, None, "PEM file of the control port's certificate"),
    Flag("control-server-key", Path, None, "PEM file of the control port's key"),
    Flag(
        "control-root-cert", Path, None, "PEM file of the root certificates that callers must have one from"
    ),
    Flag("log-verbose", _natural, 0, "level of verbose logging"),
    Flag("log-info", parse_bool, True, "log information"),
    Flag("log-warning", parse_bool, True, "log warnings"),
    Flag("log-error", parse_bool, True, "log errors"),
    Flag("log-format", str, "default", "time format of text logs", choices=("default", "ISO8601")),
    Flag("log-file", Path, None, "file to log to instead of standard error; SIGHUP has it opened anew"),
    Flag("log-json", parse_bool, None, "log JSON; by default unless on a terminal"),
    Flag(
        "log-rate-limit",
        _natural,
        100,
        "how many warnings or errors of one place in the code, or messages of one place in a Python model, "
        "are logged in a second; the others are counted, and the count is logged; 0 for no limit",
    ),
    Flag("access-log", str, None, "file to log each request to, or - for standard output"),
    Flag("access-log-format", str, "json", "format of the access log", choices=("json", "text")),
    Flag("allow-metrics", parse_bool, True, "serve metrics"),
    Flag("allow-gpu-metrics", parse_bool, True, "have those of GPUs among them, where pynvml is installed"),
    Flag(
        "allow-cpu-metrics", parse_bool, True, "have those of the machine's processors and memory among them"
    ),
    Flag("metrics-port", _port, 8002, "port for metrics; 0 for any free one"),
    Flag("metrics-address", str, None, "address for metrics; by default that of --http-address"),
    Flag(
        "metrics-interval-ms",
        _positive,
        2000,
        "how often processors, memory and GPUs are looked at, at most, in milliseconds",
    ),
    Flag(
        "metrics-config",
        str,
        [],
        "<setting>=<value>: counter_latencies=false stops Triton's counters, summary_latencies=true adds "
        "summaries; may be repeated",
        many=True,
    ),
    Flag("config-file", Path, None, "TOML file with values for these flags"),
)

_NO_EFFECT: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(
        (
            "allow-sagemaker",
            "allow-vertex-ai",
            "enable-peer-access",
        ),
        parse_bool,
    ),
    **dict.fromkeys(
        (
            "grpc-infer-allocation-pool-size",
            "grpc-max-response-pool-size",
            "model-load-gpu-limit",
            "trace-config",
            "trace-file",
            "trace-level",
            "trace-rate",
            "trace-count",
            "trace-log-frequency",
            "cache-directory",
            "repoagent-directory",
            "pinned-memory-pool-byte-size",
            "cuda-memory-pool-byte-size",
            "cuda-virtual-address-size",
            "host-policy",
            "buffer-manager-thread-count",
            "sagemaker-port",
            "sagemaker-safe-port-range",
            "sagemaker-thread-count",
            "vertex-ai-port",
            "vertex-ai-thread-count",
            "vertex-ai-default-model",
        ),
        str,
    ),
}
"""Triton's flags that have no effect in this version."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds all flags to a parser; none has a default there, so that what was given can be told."""
    hidden = (Flag(name, kind, None, "", many=True, effect=False) for name, kind in _NO_EFFECT.items())
    for flag in (*FLAGS, *hidden):
        settings: dict[str, Any] = {
            "dest": flag.key,
            "type": flag.kind,
            "default": argparse.SUPPRESS,
            "help": f"{flag.help} (default: {flag.default})" if flag.effect else argparse.SUPPRESS,
            "metavar": "VALUE",
        }
        if flag.choices:
            settings["choices"] = flag.choices
        if flag.many:
            settings["action"] = "append"
        if flag.kind is parse_bool:
            settings |= {"nargs": "?", "const": True}
        parser.add_argument(f"--{flag.name}", **settings)


@dataclass(frozen=True, slots=True)
class FlagValues:
    """The values of all flags.

    Attributes:
        values: By attribute name, such as ``grpc_port``.
        without_effect: Flags that were given and do nothing in this version.
    """

    values: Mapping[str, Any]
    without_effect: tuple[str, ...]

    def __getitem__(self, name: str) -> Any:
        return self.values[name.replace("-", "_")]


def read_flags(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> FlagValues:
    """Reads flags from a command line, the environment and the file one of them names.

    Raises:
        FlagError: Something given is unknown or has a wrong value.
    """
    parser = _Parser(prog="conch serve", allow_abbrev=False, add_help=False)
    add_flags(parser)
    given = vars(parser.parse_args(list(arguments)))
    from_environment = _from_environment(environment)
    path = given.get("config_file") or from_environment.get("config_file")
    from_file = _from_file(path) if path is not None else {}
    values = {flag.key: flag.default for flag in FLAGS} | from_file | from_environment | given
    unused = [f"--{name}" for name in _NO_EFFECT if name.replace("-", "_") in {**from_file, **given}]
    return FlagValues(values, tuple(unused))


def read_keywords(keywords: Mapping[str, Any]) -> FlagValues:
    """Reads flags that a program gives as keyword arguments, such as ``http_port=0``.

    The environment says nothing here: whoever writes the program decides.

    Args:
        keywords: Values by name; texts as on the command line, or what they stand for. None leaves a flag
            out. Those that may be repeated take one value or a list of them.

    Raises:
        FlagError: One is unknown, or has a wrong value.
    """
    known = {flag.key: flag for flag in FLAGS}
    given: dict[str, Any] = {}
    unused: list[str] = []
    for name, value in keywords.items():
        if name.replace("_", "-") in _NO_EFFECT:
            unused.append(f"{name}=")
            continue
        flag = known.get(name)
        if flag is None:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise FlagError(f"there is no option '{name}'{hint}")
        if value is None:
            continue
        several = isinstance(value, list | tuple)
        if several and not flag.many:
            raise FlagError(f"{name}: takes one value, not {len(value)} of them")
        read = [_read(flag, str(each), name) for each in (value if several else [value])]
        given[name] = read if flag.many else read[0]
    path = given.get("config_file")
    from_file = _from_file(path) if path is not None else {}
    return FlagValues({flag.key: flag.default for flag in FLAGS} | from_file | given, tuple(unused))


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for flag in FLAGS:
        text = environment.get(f"CONCH_{flag.key.upper()}")
        if text is not None:
            parts = text.split(";") if flag.many else [text]
            read = [_read(flag, part, f"environment variable CONCH_{flag.key.upper()}") for part in parts]
            values[flag.key] = read if flag.many else read[0]
    return values


def _from_file(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise FlagError(f"config file {path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FlagError(f"config file {path} is not TOML: {error}") from None
    known = {flag.name: flag for flag in FLAGS}
    values: dict[str, Any] = {}
    for name, value in content.items():
        if name.replace("_", "-") in _NO_EFFECT:
            values[name.replace("-", "_")] = value
            continue
        flag = known.get(name.replace("_", "-"))
        if flag is None:
            raise FlagError(f"config file {path}: unknown option '{name}'")
        parts = value if isinstance(value, list) else [value]
        read = [_read(flag, str(part), f"config file {path}: {name}") for part in parts]
        values[flag.key] = read if flag.many else read[0]
    return values


def _read(flag: Flag, text: str, where: str) -> Any:
    try:
        value = flag.kind(text)
    except argparse.ArgumentTypeError as error:
        raise FlagError(f"{where}: {error}") from None
    if flag.choices and value not in flag.choices:
        raise FlagError(f"{where}: must be one of {', '.join(flag.choices)}, got {text}")
    return value
