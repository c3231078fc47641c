"""A server inside another program's process."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tests.support.calling import write_callers, write_until_cancelled
from tests.support.grpc_transports import TRANSPORTS
from tests.support.leaks import local_server, no_leaks
from tests.support.metrics import of_model, scrape
from tests.support.servers import (
    NUMBER_CONFIG,
    ROOT,
    WAIT_S,
    RawClient,
    check_simple,
    copy_example,
    eventually,
    simple_inputs,
    write_model,
    write_probe,
)
from tests.support.waiting_models import WAITING
from tritonclient.grpc import service_pb2

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.request import InferenceRequest
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.frontends.grpc.stream_infer_rpc import InferStream
from conch.frontends.grpc.transport.calls import StreamCall
from conch.observability.metrics.metrics_options import MetricsOptions
from conch.server import InferenceServer
from conch.server_options import PartOptions
from conch_control.control_options import ControlOptions
from conch_grpcio.asyncio_calls import StreamCall as AsyncioStreamCall

SCRIPT = """
{first}
{second}
import sys, threading
from pathlib import Path
import numpy as np
import tritonclient.grpc as triton
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.server_options import PartOptions, ServerOptions
from conch.server import InferenceServer
from conch_control.control_options import ControlOptions

control = ControlOptions(repositories=(Path({repository!r}),))
server = InferenceServer(PartOptions(control=control, grpc=GrpcOptions(address="127.0.0.1", port=0)))
thread = threading.Thread(target=server.start)
thread.start()
thread.join()
client = triton.InferenceServerClient(f"127.0.0.1:{{server.port('gRPC')}}")
numbers = np.arange(16, dtype=np.int32).reshape(1, 16)
inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
for tensor in inputs:
    tensor.set_data_from_numpy(numbers)
for _ in range(100):
    assert (client.infer("simple", inputs).as_numpy("OUTPUT0") == 2 * numbers).all()
client.close()
assert server.stop()
print("ok")
"""


LATE = """
import sys, threading, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.support.servers import RawClient, eventually
from tests.support.calls import INFER, STREAM, probe_request
from tritonclient.grpc import service_pb2
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch_control.control_options import backend_options
from conch.server_options import PartOptions, ServerOptions
from conch.server import InferenceServer
from conch_control.control_options import ControlOptions

running, go = Path({running!r}), Path({go!r})
control = ControlOptions(
    repositories=(Path({repository!r}),),
    mode="explicit",
    startup_models=("probe",),
    load_threads=2,
    backend_options=backend_options(["python,placement=in_process"]),
)
grpc = GrpcOptions(address="127.0.0.1", port=0, transport={transport!r})
server = InferenceServer(PartOptions(ServerOptions(exit_timeout_s=1), control, grpc=grpc))
server.start()
raw = RawClient(f"127.0.0.1:{{server.port('gRPC')}}")
request = probe_request(started=str(running), wait_for=str(go))
if {what!r} == "unary":
    call = raw.channel.unary_unary(INFER).future(request, timeout=120)
elif {what!r} == "stream":
    call = raw.channel.stream_stream(STREAM)(iter([request]), timeout=120)
else:
    load = service_pb2.RepositoryModelLoadRequest(model_name="slow")
    call = raw.channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad").future(
        load.SerializeToString(), timeout=120
    )
eventually(running.exists, "it is under way")
assert server.stop() is False
go.touch()  # and now comes the answer
def over():
    names = [thread.name for thread in threading.enumerate()]
    loading = any(name.startswith(("conch-probe", "conch-grpc-load", "conch-unload")) for name in names)
    return server.registry.entries["probe"].states[1].reason == "unloaded" and not loading
eventually(over, "all is answered")
# A stream has ended with its connection, but a thread of grpcio's may still have been in the model.
assert server.stop() is {again!r}, "what has been given up stays so"
raw.close()
print("alive")
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A repository with `simple` and `add_sub_python`."""
    repository = tmp_path / "models"
    for name in ("simple", "add_sub_python"):
        copy_example(repository, name)
    return repository


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Has gRPC and ONNX Runtime open what they keep for the life of the process."""
    repository = tmp_path_factory.mktemp("warm")
    copy_example(repository, "simple")
    with running(repository) as server:
        ask(server)


@contextmanager
def running(repository: Path, port: int = 0) -> Iterator[InferenceServer]:
    """A server in this process."""
    control = ControlOptions(repositories=(repository,))
    server = InferenceServer(PartOptions(control=control, grpc=GrpcOptions(address="127.0.0.1", port=port)))
    server.start()
    try:
        yield server
    finally:
        assert server.stop()


def ask(server: InferenceServer, start: int = 0) -> None:
    """Sends a request to a server in this process."""
    with closing(triton.InferenceServerClient(f"127.0.0.1:{server.port('gRPC')}")) as client:
        check_simple(client.infer("simple", simple_inputs(start), client_timeout=WAIT_S), start)


def check_program(code: str, says: str) -> None:
    """Runs a program, which must end well."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, f"{says}\n"), result.stderr


@pytest.mark.parametrize("conch_first", [True, False])
def test_beside_tritonclient(models: Path, conch_first: bool) -> None:
    ours, theirs = "import conch.server", "import tritonclient.grpc"
    first, second = (ours, theirs) if conch_first else (theirs, ours)
    code = SCRIPT.format(first=first, second=second, repository=str(models))
    check_program(code, "ok")


def test_start_and_stop_again_and_again(models: Path) -> None:
    for round_number in range(2):
        with no_leaks(), running(models) as server:
            ask(server, round_number)


def test_a_drained_server_is_not_ready_and_serves(models: Path) -> None:
    with no_leaks(), running(models) as server:
        with closing(triton.InferenceServerClient(f"127.0.0.1:{server.port('gRPC')}")) as client:
            assert client.is_server_ready()
            server.drain()
            server.drain()
            assert (client.is_server_live(), client.is_server_ready()) == (True, False)
            assert not client.is_model_ready("simple")
        ask(server)


def test_a_server_that_is_stopped_before_it_starts_does_not(models: Path) -> None:
    with no_leaks():
        control = ControlOptions((models,))
        server = InferenceServer(PartOptions(control=control, grpc=GrpcOptions(address="127.0.0.1", port=0)))
        assert server.stop()
        with pytest.raises(UnavailableError, match="Server exiting"):
            server.start()


def test_two_servers_side_by_side(models: Path) -> None:
    with running(models) as one, running(models) as two:
        assert one.port("gRPC") != two.port("gRPC")
        for start in range(10):
            ask(one, start)
            ask(two, start)


def test_a_taken_port(models: Path) -> None:
    with running(models) as server:
        port = server.port("gRPC")
        assert port
        with (
            pytest.raises(UnavailableError, match=r"Socket '127\.0\.0\.1:\d+' already in use "),
            running(models, port),
        ):
            pass
        ask(server)


def test_a_failed_start_leaves_nothing(tmp_path: Path) -> None:
    with no_leaks(), pytest.raises(InvalidArgumentError), running(tmp_path / "nope"):
        pass


def test_stop_twice(models: Path) -> None:
    with running(models) as server:
        assert server.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("what", ["unary", "stream", "load"])
def test_an_answer_after_a_stop_that_could_not_wait(tmp_path: Path, what: str, transport: str) -> None:
    """The program lives on: the C core ends the process if anything is started on a queue that is shut."""
    repository = tmp_path / "models"
    running, go = str(tmp_path / "started"), str(tmp_path / "go")
    write_probe(repository)
    write_model(repository, "slow", NUMBER_CONFIG, {"model.py": WAITING.format(running=running, go=go)})
    code = LATE.format(
        root=str(ROOT),
        running=running,
        go=go,
        repository=str(repository),
        what=what,
        transport=transport,
        again=what == "stream",
    )
    check_program(code, "alive")


def test_its_metrics_are_those_of_any_other(tmp_path: Path) -> None:
    write_probe(tmp_path)
    control = ControlOptions(repositories=(tmp_path,))
    server = InferenceServer(
        PartOptions(control=control, metrics=MetricsOptions(address="127.0.0.1", port=0))
    )
    server.start()
    try:
        found = scrape(f"http://127.0.0.1:{server.port('Metrics')}/metrics")
        assert of_model(found, "probe", "nv_inference_count") == 0
        assert of_model(found, "probe", "conch_request_duration_seconds_count") == 0
    finally:
        assert server.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
@local_server()
def test_what_a_stream_has_held_goes_with_it(tmp_path: Path, transport: str) -> None:
    write_callers(tmp_path)
    write_until_cancelled(tmp_path)
    control = ControlOptions(repositories=(tmp_path,))
    grpc = GrpcOptions(address="127.0.0.1", port=0, transport=transport)
    server = InferenceServer(PartOptions(control=control, grpc=grpc))
    server.start()

    def held() -> list[object]:
        kinds = (StreamCall, AsyncioStreamCall, InferStream, InferenceRequest)
        return [each for each in gc.get_objects() if isinstance(each, kinds)]

    def left() -> list[str]:
        return [type(each).__name__ for each in held() if id(each) not in of_others]

    def request(model: str) -> service_pb2.ModelInferRequest:
        made = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[bytes(4)])
        made.inputs.add(name="IN", datatype="FP32", shape=[1])
        return made

    gc.collect()
    others = held()  # of tests before this one
    of_others = set(map(id, others))
    gc.disable()  # or it could hide that something has to be collected
    try:
        with closing(RawClient(f"127.0.0.1:{server.port('gRPC')}")) as raw:
            open_stream = raw.channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=service_pb2.ModelInferRequest.SerializeToString,
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )
            assert len(list(open_stream(iter([request("echo"), request("nope")])))) == 2
            call = open_stream(iter([request("endless")]))
            next(call)
            call.cancel()
            eventually(lambda: not left(), "nothing is left")
    finally:
        gc.enable()
        assert server.stop()
