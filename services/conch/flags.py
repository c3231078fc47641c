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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_LONGEST_S = 1e9
_VARIABLE_PREFIX = "CONCH_"
_OTHER_VARIABLES = ("CONCH_CONTROL_TARGET", "CONCH_CONTROL_TOKEN_FILE")
"""Variables of other commands than ``serve``."""
_NEAR = 0.8
"""How alike an unknown variable must be to a known one to be taken for a slip, from 0 to 1."""


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


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None


def _number(least: int, most: int | None = None) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = _whole_number(text)
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


def _config_name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("Error: empty argument for --model-config-name")
    return text


def _input_size(text: str) -> int:
    value = _whole_number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("Error: --http-max-input-size must be greater than 0.")
    return value


def _http_threads(text: str) -> int:
    value = _whole_number(text)
    if value not in (1, 8):
        raise argparse.ArgumentTypeError(
            f"one thread serves all connections, so {value} has no effect; leave it out"
        )
    return value


def _pool(text: str) -> str:
    """Bytes, or ``<GPU>:<bytes>``: the most that Triton's pool may take, which a server without one keeps."""
    device, _, size = text.rpartition(":")
    for part in (device or "0", size):
        _natural(part)
    return text


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        name: Without the dashes.
        kind: Reads a value.
        default: Value where it is not given.
        help: One line for ``--help``.
        many: Whether it may be repeated.
        listed: Whether ``--help`` shows it.
        choices: Values allowed, in any case, or None.
        lacks: Of a flag of Triton's that conch has no use for: why. Its choices are what asks for nothing.
    """

    name: str
    kind: Callable[[str], Any]
    default: Any
    help: str
    many: bool = False
    listed: bool = True
    choices: tuple[str, ...] | None = None
    lacks: str = ""

    @property
    def key(self) -> str:
        """The attribute the value is found under."""
        return self.name.replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether it may be given without a value, which means true."""
        return self.kind is parse_bool

    @property
    def variable(self) -> str:
        """The environment variable that gives it."""
        return _VARIABLE_PREFIX + self.key.upper()

    def read(self, text: str) -> Any:
        """The value that a text stands for.

        Raises:
            argparse.ArgumentTypeError: It is not one that the flag takes.
        """
        if self.choices is None:
            return self.kind(text)
        choice = {choice.lower(): choice for choice in self.choices}.get(text.strip().lower())
        if choice is not None:
            return choice
        if self.lacks:
            instead = f" or give {self.choices[0]}" if self.choices else ""
            raise argparse.ArgumentTypeError(f"'{text}' has no effect: {self.lacks}; leave it out{instead}")
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(self.choices)}, got {text}")


_MOST_PORT = 65535
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
        "allow-model-upload",
        parse_bool,
        False,
        "take loads that bring a model's files, and so code, from all clients; else only from those on this "
        "machine, with a client certificate or with the key of a restricted API",
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
    Flag("model-config-name", _config_name, "", "use configs/<name>.pbtxt of a model where it exists"),
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
        str,
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
    Flag("grpc-port", _whole_number, 8001, "port for gRPC"),
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
    Flag("http-port", _whole_number, 8000, "port for REST"),
    Flag("reuse-http-port", parse_bool, False, "let other processes listen on the REST port too"),
    Flag(
        "http-thread-count",
        _http_threads,
        8,
        "1, or Triton's default, which is taken for it: one thread serves all connections",
    ),
    Flag(
        "http-max-input-size",
        _input_size,
        64 << 20,
        "bytes of the largest JSON, raw or decompressed body; binary tensors behind JSON do not count",
    ),
    Flag(
        "http-max-connections",
        _natural,
        0,
        "connections that the HTTP port holds; further ones get 503; 0 for three eighths of the process's "
        "file descriptors (ulimit -n)",
    ),
    Flag("http-idle-timeout-secs", _positive, 300, "seconds after which an unused REST connection is closed"),
    Flag("http-header-forward-pattern", str, "", "request headers forwarded as request parameters"),
    Flag("http-restricted-api", str, [], "<API,…>:<key>=<value>; may be repeated", many=True),
    Flag(
        "http-cors-origin",
        str,
        [],
        "origin whose web pages may run models over REST, such as https://app.example, or * for any; nothing "
        "else is open to them; may be repeated",
        many=True,
    ),
    Flag("http-use-ssl", parse_bool, False, "serve REST over TLS"),
    Flag("http-server-cert", Path, None, "PEM file of the REST port's certificate"),
    Flag("http-server-key", Path, None, "PEM file of the REST port's key"),
    Flag(
        "http-root-cert", Path, None, "PEM file of the root certificates that REST clients must have one from"
    ),
    Flag("control-port", _number(0, _MOST_PORT), 0, "port for conch models and conch control; 0 for none"),
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
    Flag("metrics-port", _whole_number, 8002, "port for metrics; 0 for any free one"),
    Flag("metrics-address", str, None, "address for metrics; by default that of --http-address"),
    Flag(
        "metrics-use-ssl",
        parse_bool,
        False,
        "serve metrics over TLS, with the certificates of the REST port and, with --http-root-cert, for "
        "clients that have one; needs --http-use-ssl",
    ),
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


def _unused(name: str, kind: Callable[[str], Any]) -> Flag:
    return Flag(name, kind, None, "", many=True, listed=False)


def _without(lacks: str, **flags: tuple[str, ...]) -> Iterator[Flag]:
    for name, harmless in flags.items():
        kind = parse_bool if harmless == _OFF else str
        yield Flag(
            name.replace("_", "-"), kind, None, "", many=True, listed=False, choices=harmless, lacks=lacks
        )


_OFF = ("false", "off", "0")

FLAGS += (
    *_without(
        "SageMaker's routes are not served",
        allow_sagemaker=_OFF,
        sagemaker_port=("8080",),
        sagemaker_safe_port_range=(),
        sagemaker_thread_count=("8",),
    ),
    *_without(
        "Vertex AI's routes are not served",
        allow_vertex_ai=_OFF,
        vertex_ai_port=("8080",),
        vertex_ai_thread_count=("8",),
        vertex_ai_default_model=(),
    ),
    *_without(
        "there is no tracing yet",
        trace_config=("level=off", "mode=triton", "rate=1000", "count=-1", "triton,log-frequency=0"),
        trace_level=("off",),
        trace_file=(),
        trace_rate=("1000",),
        trace_count=("-1",),
        trace_log_frequency=("0",),
    ),
    *_without("states of sequences do not grow in place", cuda_virtual_address_size=()),
    *_without("responses have no pool", grpc_max_response_pool_size=(str(2**31 - 1),)),
    *_without("tensors are copied by the threads that need them", buffer_manager_thread_count=("0",)),
    *_without("loads do not look at the memory of GPUs", model_load_gpu_limit=()),
    *_without("instances are not bound to processors", host_policy=()),
    # What these ask for holds whatever they say: where there is no pool no limit is passed, GPUs exchange
    # nothing directly, and caches and repository agents are built in (others are refused by name).
    _unused("pinned-memory-pool-byte-size", _natural),
    _unused("cuda-memory-pool-byte-size", _pool),
    _unused("grpc-infer-allocation-pool-size", _natural),
    _unused("enable-peer-access", parse_bool),
    _unused("cache-directory", str),
    _unused("repoagent-directory", str),
)
"""Triton's flags that conch has no use for come last; a value that would change something is refused."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds all flags to a parser; none has a default there, so that what was given can be told."""
    for flag in FLAGS:
        settings: dict[str, Any] = {
            "dest": flag.key,
            "type": flag.read,
            "default": argparse.SUPPRESS,
            "help": f"{flag.help} (default: {flag.default})" if flag.listed else argparse.SUPPRESS,
            "metavar": "VALUE",
        }
        if flag.many:
            settings["action"] = "append"
        if flag.is_switch:
            settings |= {"nargs": "?", "const": "true"}
        parser.add_argument(f"--{flag.name}", **settings)


@dataclass(frozen=True, slots=True)
class FlagValues:
    """The values of all flags.

    Attributes:
        values: By attribute name, such as ``grpc_port``.
        warnings: What else was found, such as environment variables that look misspelt.
    """

    values: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name.replace("-", "_")]


def read_flags(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> FlagValues:
    """Reads flags from a command line, the environment and the file one of them names.

    A flag may be shortened to what no other begins with.

    Raises:
        FlagError: Something given is unknown or has a wrong value.
    """
    parser = _Parser(prog="conch serve", add_help=False)
    add_flags(parser)
    known, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        names = [f"--{flag.name}" for flag in FLAGS if flag.listed]
        hint = did_you_mean(unknown[0].partition("=")[0], names)
        raise FlagError(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    given = vars(known)
    from_environment = _from_environment(environment)
    path = given.get("config_file") or from_environment.get("config_file")
    from_file = _from_file(path) if path is not None else {}
    values = _DEFAULTS | from_file | from_environment | given
    _check_ports(values)
    return FlagValues(values, tuple(_misspelt(environment)))


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
    for name, value in keywords.items():
        flag = known.get(name)
        if flag is None:
            raise FlagError(f"there is no option '{name}'{did_you_mean(name, known)}")
        if value is None:
            continue
        several = isinstance(value, list | tuple)
        if several and not flag.many:
            raise FlagError(f"{name}: takes one value, not {len(value)} of them")
        read = [_read(flag, str(each), name) for each in (value if several else [value])]
        given[name] = read if flag.many else read[0]
    path = given.get("config_file")
    values = _DEFAULTS | (_from_file(path) if path is not None else {}) | given
    _check_ports(values)
    return FlagValues(values)


_DEFAULTS: dict[str, Any] = {flag.key: flag.default for flag in FLAGS}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a text about an unknown name; empty where no known one is like it."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _misspelt(environment: Mapping[str, str]) -> Iterator[str]:
    """Warnings about variables that look like those of flags and are not.

    They are not refused: Kubernetes makes variables of the names of services, such as CONCH_SERVICE_PORT.
    """
    known = [*(flag.variable for flag in FLAGS), *_OTHER_VARIABLES]
    names = [name.removeprefix(_VARIABLE_PREFIX) for name in known]
    for variable in sorted(environment):
        if not variable.startswith(_VARIABLE_PREFIX) or variable in known:
            continue
        near = difflib.get_close_matches(variable.removeprefix(_VARIABLE_PREFIX), names, n=1, cutoff=_NEAR)
        if near:
            yield (
                f"environment variable {variable} is unknown and has no effect; did you mean "
                f"'{_VARIABLE_PREFIX}{near[0]}'?"
            )


_PROTOCOLS = {"HTTP": "http", "GRPC": "grpc", "metrics": "metrics"}
"""Those with a port, as Triton's texts name them and as the flags do."""


def _check_ports(values: Mapping[str, Any]) -> None:
    """Checks the ports of the protocols that are on; the others are left alone, as in Triton.

    Raises:
        FlagError: A port is out of range, or two protocols have the same one.
    """
    taken: dict[tuple[str, int], str] = {}
    for protocol, name in _PROTOCOLS.items():
        if not values[f"allow_{name}"]:
            continue
        port = values[f"{name}_port"]
        if not 0 <= port <= _MOST_PORT:
            raise FlagError(f"--{name}-port: must be from 0 to {_MOST_PORT}, got {port}")
        address = values[f"{name}_address"] or values["http_address"]
        if address.startswith("unix:") or not port:  # any free port
            continue
        other = taken.setdefault((address, port), protocol)
        if other != protocol:
            raise FlagError(
                f"The server cannot listen to {other} requests and {protocol} requests at the same address "
                f"and port {address}:{port}"
            )


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for flag in FLAGS:
        text = environment.get(flag.variable)
        if text is not None:
            parts = text.split(";") if flag.many else [text]
            read = [_read(flag, part, f"environment variable {flag.variable}") for part in parts]
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
        flag = known.get(name.replace("_", "-"))
        if flag is None:
            raise FlagError(f"config file {path}: unknown option '{name}'{did_you_mean(name, known)}")
        parts = value if isinstance(value, list) else [value]
        read = [_read(flag, str(part), f"config file {path}: {name}") for part in parts]
        values[flag.key] = read if flag.many else read[0]
    return values


def _read(flag: Flag, text: str, where: str) -> Any:
    try:
        return flag.read(text)
    except argparse.ArgumentTypeError as error:
        raise FlagError(f"{where}: {error}") from None
