"""`conch serve` as a process, models for it, and what clients send to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tests.support.grpc_transports import TRANSPORTS, default_transport
from tests.support.leaks import local_server
from tests.support.waiting import PATIENCE_S
from tritonclient.grpc import service_pb2

import conch
from conch.observability.logging.log_handler import ANNOUNCEMENTS
from conch.process.banner import table

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "models" / "basic"
PYTHON_EXAMPLES = ROOT / "examples" / "models" / "python"
CONCH = Path(sys.executable).with_name("conch")
PEERS = Path(os.environ.get("CONCH_PEERS", Path.home() / ".cache" / "conch-peers"))
"""Directory of a real Triton and its load generator, if they are installed; see bench/setup_peers.sh."""
FRONT_ENDS = os.environ.get("CONCH_TEST_FRONT_ENDS", "0")
"""Front processes of these servers, unless a flag says how many; none with flags that need none."""

WAIT_S = PATIENCE_S
IN_PROCESS = "--backend-config=python,placement=in_process"

START_S = 2 * WAIT_S
"""For a server with many models, each of which may have a process of its own to start."""

T = TypeVar("T")

_LOOK_S = 0.005
_SERVICE = "/inference.GRPCInferenceService/"
_PROBE = Path(__file__).with_name("probe_model.py")
_STEPS = Path(__file__).with_name("steps_model.py")
_STEPS_CONFIG = """
    backend: "python"
    input {{ name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }}
    output {{ name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }}
    model_transaction_policy {{ decoupled: true }}
    {extra}
"""
_PROBE_CONFIG = """
    backend: "python"
    max_batch_size: 8
    input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }}
    output {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}
    output {{ name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] }}
    {extra}
"""


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Waits until a condition holds and returns its value; AssertionError if it never does."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(_LOOK_S)
    return value


def past_deadline(call: Callable[[float], T], reached: Callable[[], Any], first_s: float = 0.3) -> T:
    """Result of a call whose deadline passes when something has been reached.

    A machine may be too busy to get there before the first deadline; then the call is made again with a
    longer one.

    Args:
        call: Makes the call with a deadline in seconds, and catches its error.
        reached: True once the call is at the point where its deadline is to pass.
        first_s: The first deadline.
    """
    while True:
        answer = call(first_s)
        try:
            eventually(reached, "it is reached before the deadline", max(2.0, first_s))
        except AssertionError:
            first_s *= 4
            assert first_s < WAIT_S, "it is never reached"
        else:
            return answer


_ports = count(os.getpid() * 101)  # processes of one run begin far apart


def free_port() -> int:
    """A port without a listener, below the range that the kernel takes ports from."""
    for number in _ports:
        port = 10_240 + number % 22_528
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("count has no end")


def _front_ends(flags: Sequence[str]) -> str:
    (grpcio,) = TRANSPORTS["grpcio"]
    return "0" if default_transport() == "grpcio" or grpcio in flags else FRONT_ENDS


class ServerProcess:
    """A `conch serve` that was started.

    Args:
        arguments: Its command line, without the command.
        directory: Directory of its output.
        environment: Variables it gets besides ours, without those of conch; None for one that it does not
            get.
        descriptors: Its limit of file descriptors; None for ours.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        directory: Path,
        environment: Mapping[str, str | None] | None = None,
        descriptors: int | None = None,
    ) -> None:
        # The shell lowers the limit in the child alone; this process could not raise its own again.
        limited = [] if descriptors is None else ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh"]
        self._output = directory / "stdout"
        self._errors = directory / "stderr"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("CONCH_")}
        # Any port, unless a flag says which: others may have the usual one. Time to stop on a busy machine.
        ours: dict[str, str | None] = {
            "CONCH_HTTP_PORT": "0",
            "CONCH_METRICS_PORT": "0",
            "CONCH_GRPC_TRANSPORT": default_transport(),
            "CONCH_FRONT_ENDS": _front_ends(arguments),
            "CONCH_EXIT_TIMEOUT_SECS": f"{WAIT_S:g}",
        }
        variables = {**inherited, **ours, **(environment or {})}
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*limited, str(CONCH), "serve", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env={name: value for name, value in variables.items() if value is not None},
            )

    @property
    def output(self) -> str:
        """Printed text: its tables, which come with the logs, and standard output."""
        return _announced(self.errors) + self.standard_output

    @property
    def standard_output(self) -> str:
        """Text of standard output: the access log, if it is to go there."""
        return self._output.read_text()

    @property
    def errors(self) -> str:
        """Text of standard error: logs, and the reason for not starting."""
        return self._errors.read_text()

    @property
    def address(self) -> str:
        """Address of its gRPC port, as in its table."""
        found = re.search(r"\| gRPC +\| (\S+)", self.output)
        assert found, self.output
        return found[1]

    @property
    def http_address(self) -> str:
        """Address of its HTTP port."""
        found = re.search(r"\| HTTP +\| https?://(\S+)", self.output)
        assert found, self.output
        return found[1]

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.address.rpartition(":")[2])

    @property
    def metrics_url(self) -> str:
        """URL of its metrics, as in its table."""
        found = re.search(r"\| Metrics +\| (\S+)", self.output)
        assert found, self.output
        return found[1]

    @property
    def console_url(self) -> str:
        """URL of its console, as in its table."""
        found = re.search(r"\| Console +\| (\S+)", self.output)
        assert found, self.output
        return found[1]

    def logs(self) -> list[dict[str, Any]]:
        """Its log lines; every line must be JSON."""
        return [json.loads(line) for line in self.errors.splitlines()]

    def wait_ready(self) -> None:
        """Waits for the tables, which are printed once it listens."""

        def printed() -> bool:
            assert self.process.poll() is None, f"exit code {self.process.returncode}: {self.errors}"
            return self.output.count("Security") == 1 and self.output.endswith("+\n")

        eventually(printed, "conch listens", START_S)

    def signal(self, number: int) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """The exit code, once it has ended."""
        return self.process.wait(timeout_s)

    def stop(self) -> int:
        """Asks it to end; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Ends it in any case."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)


def _announced(errors: str) -> str:
    """The tables and the line on what is open in what a server has logged, also if it logged them as JSON."""
    lines = errors.splitlines(keepends=True)
    announced = [
        json.loads(line)
        for line in lines
        if line.startswith("{") and f'"logger": "{ANNOUNCEMENTS}"' in line and line.endswith("\n")
    ]
    if not announced:
        return "".join(line for line in lines if line.startswith(("|", "+", "open: ")))
    models = [
        [each["model"], each.get("version", "-"), each.get("state", "not loaded"), each.get("reason", "")]
        for each in announced
        if "model" in each
    ]
    found = [table(["Model", "Version", "Status", "Reason"], models)]
    found += [each["message"] for each in announced if not {"model", "service"} & each.keys()]
    if found[-1].startswith("open: "):  # the last of a start
        endpoints = [
            [each["service"], each["url"], each["address"], each["security"]]
            for each in announced
            if "service" in each
        ]
        found.append(table(["Service", "URL", "Listens on", "Security"], endpoints))
    return "\n".join(found) + "\n"


class LocalServer:
    """A server in the test's own process, on free ports.

    Args:
        repositories: Its model repositories.
        flags: Flags as on the command line, but for those of logs, which belong to a process. Python models
            run in the test's process, which is quicker, unless a flag or their config places them.
    """

    def __init__(self, repositories: Sequence[Path], flags: Sequence[str]) -> None:
        if not any(flag.startswith("--backend-config=python,placement=") for flag in flags):
            flags = [*flags, IN_PROCESS]
        self.server = conch.Server(*repositories, **_keywords(flags))

    @property
    def address(self) -> str:
        """Host and port of gRPC."""
        return f"127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        """The port of gRPC."""
        port = self.server.grpc_port
        assert port is not None
        return port

    @property
    def http_address(self) -> str:
        """Host and port of HTTP."""
        return f"127.0.0.1:{self.server.http_port}"

    @property
    def metrics_url(self) -> str:
        """URL of the metrics."""
        url = self.server.metrics_url
        assert url is not None
        return url

    @property
    def console_url(self) -> str:
        """URL of the console."""
        url = self.server.console_url
        assert url is not None
        return url


AnyServer = LocalServer | ServerProcess
"""Servers that clients can be made for."""


def _keywords(flags: Sequence[str]) -> dict[str, Any]:
    """Command line flags as keywords of `conch.Server`."""
    keywords: dict[str, Any] = {
        "grpc_port": 0,
        "http_port": 0,
        "metrics_port": 0,
        "grpc_transport": default_transport(),
        "front_ends": _front_ends(flags),
        "exit_timeout_secs": int(WAIT_S),
    }
    given: dict[str, list[str]] = {}
    for flag in flags:
        name, _, value = flag.removeprefix("--").partition("=")
        given.setdefault(name.replace("-", "_"), []).append(value if "=" in flag else "true")
    return keywords | {name: values if len(values) > 1 else values[0] for name, values in given.items()}


_MODELS = re.compile(r'"logger": "conch\.(backends\.python|python_model)[."]')
"""Records of a model, in process or in a worker, and not of the server or of a worker's own code."""


@contextmanager
def started(
    *arguments: str, environment: Mapping[str, str | None] | None = None, descriptors: int | None = None
) -> Iterator[ServerProcess]:
    """A `conch serve` with these arguments; it may fail to start."""
    with tempfile.TemporaryDirectory(prefix="conch-test-") as directory:
        server = ServerProcess(arguments, Path(directory), environment, descriptors)
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def serving(*repositories: Path, flags: Sequence[str] = ()) -> Iterator[LocalServer]:
    """A server in this process, until the end of the block; it must leave nothing behind."""
    with local_server():
        local = LocalServer(repositories, flags)
        with local.server:
            yield local


@contextmanager
def serving_process(
    *repositories: Path,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    descriptors: int | None = None,
) -> Iterator[ServerProcess]:
    """A `conch serve` that listens on a port of its own; after the block it must end well."""
    arguments = [f"--model-repository={repository}" for repository in repositories]
    with started(
        *arguments, "--grpc-port=0", *flags, environment=environment, descriptors=descriptors
    ) as server:
        server.wait_ready()
        yield server
        if server.process.poll() is None:
            assert server.stop() == 0, server.errors
        assert "Traceback" not in without_models(server.errors), server.errors


def without_models(errors: str) -> str:
    """Log of a server, without the lines about exceptions in Python models."""
    return "\n".join(line for line in errors.splitlines() if not _MODELS.search(line))


@contextmanager
def client_of(server: AnyServer, **settings: Any) -> Iterator[triton.InferenceServerClient]:
    """A client of a server with a connection of its own."""
    most = 2**31 - 1
    channel = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", most),
        ("grpc.max_receive_message_length", most),
    ]
    client = triton.InferenceServerClient(server.address, channel_args=channel, **settings)
    with closing(client):
        yield client


def write_model(
    repository: Path,
    name: str,
    config: str | None = None,
    files: Mapping[str, str | bytes] | None = None,
    versions: Sequence[int] = (1,),
) -> Path:
    """Writes a model: a config.pbtxt and, in each version, some files. Returns its directory."""
    directory = repository / name
    for version in versions:
        (directory / str(version)).mkdir(parents=True, exist_ok=True)
        for file, content in (files or {}).items():
            data = content.encode() if isinstance(content, str) else content
            (directory / str(version) / file).write_bytes(data)
    if config is not None:
        (directory / "config.pbtxt").write_text(config)
    return directory


def write_probe(
    repository: Path, name: str = "probe", extra: str = "dynamic_batching { }", versions: Sequence[int] = (1,)
) -> Path:
    """Writes a model that does what its requests tell it; see `probe_model`."""
    config = _PROBE_CONFIG.format(extra=extra)
    return write_model(repository, name, config, {"model.py": _PROBE.read_text()}, versions)


def write_steps(repository: Path, name: str = "steps", finalized: Path | None = None) -> Path:
    """Writes a decoupled model that does what its requests tell it; see `steps_model`.

    Args:
        repository: The repository.
        name: Its name.
        finalized: A file that it creates in `finalize`, or None.
    """
    extra = ""
    if finalized is not None:
        extra = f'parameters {{ key: "finalized" value {{ string_value: "{finalized}" }} }}'
    config = _STEPS_CONFIG.format(extra=extra)
    return write_model(repository, name, config, {"model.py": _STEPS.read_text()})


def put_in_place(source: Path, target: Path) -> None:
    """Moves a directory to its place, or the files that differ; each comes whole, on a busy machine too."""
    if not target.exists():
        source.rename(target)
    elif source.is_dir():
        for each in source.iterdir():
            put_in_place(each, target / each.name)
    elif source.read_bytes() != target.read_bytes():
        source.replace(target)


def copy_example(repository: Path, name: str, to: str | None = None) -> Path:
    """Copies one of the examples' models, under another name if need be."""
    directory = Path(shutil.copytree(EXAMPLES / name, repository / (to or name)))
    if to is not None:
        config = directory / "config.pbtxt"
        config.write_text(config.read_text().replace(f'name: "{name}"', f'name: "{to}"'))
    return directory


def tensor(name: str, array: NDArray[Any], datatype: str = "FP32") -> triton.InferInput:
    """An input with its data."""
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def probe_inputs(value: float = 0.0, shape: tuple[int, ...] = (1, 4)) -> list[triton.InferInput]:
    """Inputs for the probe model."""
    return [tensor("IN", np.full(shape, value, np.float32))]


def probe(client: triton.InferenceServerClient, value: float = 1.0, model: str = "probe", **more: Any) -> Any:
    """Sends a request to a probe model, checks OUT and returns what SEEN says."""
    result = client.infer(model, probe_inputs(value), client_timeout=WAIT_S, **more)
    assert result.as_numpy("OUT").tolist() == [[value] * 4]
    return json.loads(result.as_numpy("SEEN")[0, 0])


def simple_inputs(start: int = 0) -> list[triton.InferInput]:
    """Inputs for the example model `simple`: numbers from `start` on, twice."""
    numbers = np.arange(start, start + 16, dtype=np.int32).reshape(1, 16)
    return [tensor(name, numbers, "INT32") for name in ("INPUT0", "INPUT1")]


def check_simple(result: triton.InferResult, start: int = 0) -> None:
    """Checks what `simple` answers to `simple_inputs`."""
    assert result.as_numpy("OUTPUT0").tolist() == [[2 * number for number in range(start, start + 16)]]
    assert result.as_numpy("OUTPUT1").tolist() == [[0] * 16]


def simple_request(**changes: Any) -> Any:
    """A ModelInferRequest for `simple`, some of its fields replaced."""
    fields: dict[str, Any] = {
        "model_name": "simple",
        "inputs": [
            service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype="INT32", shape=[1, 16])
            for name in ("INPUT0", "INPUT1")
        ],
        "raw_input_contents": [np.arange(16, dtype=np.int32).tobytes()] * 2,
    }
    return service_pb2.ModelInferRequest(**{**fields, **changes})


class RawClient:
    """Calls by method name, with messages or bytes.

    Args:
        address: The server's.
        options: More options of the channel.
    """

    def __init__(self, address: str, *options: tuple[str, int]) -> None:
        self.channel = grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1), *options])

    def __call__(self, method: str, message: Any, metadata: Sequence[tuple[str, str]] = ()) -> Any:
        """Makes a unary call; bytes are sent as they are and answered with bytes."""
        if isinstance(message, bytes):
            call = self.channel.unary_unary(method)
        else:
            response = getattr(service_pb2, type(message).__name__.removesuffix("Request") + "Response")
            call = self.channel.unary_unary(
                method if method.startswith("/") else _SERVICE + method,
                request_serializer=type(message).SerializeToString,
                response_deserializer=response.FromString,
            )
        return call(message, timeout=WAIT_S, metadata=metadata)

    def unary(self, message: Any) -> Any:
        """Makes the unary call that a message is for."""
        return self(type(message).__name__.removesuffix("Request"), message)

    def infer(self, message: Any, metadata: Sequence[tuple[str, str]] = ()) -> Any:
        """Makes a ModelInfer call with a message or with bytes."""
        return self(_SERVICE + "ModelInfer", message, metadata)

    def stream(
        self,
        requests: Iterable[Any],
        timeout_s: float | None = WAIT_S,
        metadata: Sequence[tuple[str, str]] | None = None,
    ) -> Any:
        """Opens a stream that sends these messages, or bytes; the call gives the responses.

        `timeout_s` is for the stream as a whole.
        """
        method = self.channel.stream_stream(
            _SERVICE + "ModelStreamInfer",
            request_serializer=lambda each: each if isinstance(each, bytes) else each.SerializeToString(),
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        return method(iter(requests), timeout=timeout_s, metadata=metadata)

    def close(self) -> None:
        """Closes the connection."""
        self.channel.close()


NUMBER_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""


NUMBERS_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
