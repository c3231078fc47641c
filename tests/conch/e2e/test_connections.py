"""Ways of clients to a server: TLS, sockets, limits, secrets, headers."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from tests.support.certificates import Authority
from tests.support.grpc_transports import each_transport
from tests.support.servers import (
    WAIT_S,
    RawClient,
    check_simple,
    client_of,
    probe,
    serving_process,
    simple_inputs,
    simple_request,
    started,
    tensor,
    write_model,
)
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

IDENTITY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())]
            )
            for request in requests
        ]
"""
IDENTITY_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_UINT8 dims: [ -1 ] }
    output { name: "OUT" data_type: TYPE_UINT8 dims: [ -1 ] }
"""

grpc_transport = each_transport()
pytestmark = pytest.mark.usefixtures("grpc_transport")


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "theirs")


def unavailable(port: int, **settings: Any) -> None:
    """Checks that a client with these TLS settings does not get through."""
    with closing(triton.InferenceServerClient(f"localhost:{port}", **settings)) as client:
        with pytest.raises(InferenceServerException) as raised:
            client.is_server_live(client_timeout=WAIT_S)
        assert raised.value.status() == "StatusCode.UNAVAILABLE"


def test_tls(repository: Path, ours: Authority, theirs: Authority) -> None:
    key, certificate = ours.issue("server")
    flags = ["--grpc-use-ssl", f"--grpc-server-key={key}", f"--grpc-server-cert={certificate}"]
    with serving_process(repository, flags=flags) as server:
        (line,) = (line for line in server.output.splitlines() if line.startswith("| gRPC "))
        assert line.split("|")[4].strip() == "TLS"
        settings = {"ssl": True, "root_certificates": str(ours.root)}
        with closing(triton.InferenceServerClient(f"localhost:{server.port}", **settings)) as client:
            check_simple(client.infer("simple", simple_inputs()))
        unavailable(server.port, ssl=True, root_certificates=str(theirs.root))
        unavailable(server.port)


def test_mutual_tls(repository: Path, ours: Authority, theirs: Authority) -> None:
    key, certificate = ours.issue("server")
    flags = [
        "--grpc-use-ssl-mutual",
        f"--grpc-server-key={key}",
        f"--grpc-server-cert={certificate}",
        f"--grpc-root-cert={ours.root}",
    ]
    with serving_process(repository, flags=flags) as server:
        settings = {"ssl": True, "root_certificates": str(ours.root)}

        def own(authority: Authority) -> dict[str, str]:
            key, chain = authority.issue("client")
            return {"private_key": str(key), "certificate_chain": str(chain)}

        with closing(
            triton.InferenceServerClient(f"localhost:{server.port}", **settings, **own(ours))
        ) as client:
            check_simple(client.infer("simple", simple_inputs()))
        unavailable(server.port, **settings)
        unavailable(server.port, **settings, **own(theirs))


def test_broken_certificate(repository: Path, tmp_path: Path, ours: Authority) -> None:
    key, _ = ours.issue("server")
    broken = tmp_path / "broken.pem"
    broken.write_text("this is no certificate")
    flags = ["--grpc-use-ssl", f"--grpc-server-key={key}", f"--grpc-server-cert={broken}"]
    with started(f"--model-repository={repository}", "--grpc-port=0", *flags) as server:
        assert server.wait() == 1
        assert "error: creating server:" in server.errors
        assert "Traceback" not in server.errors


def test_unix_socket(repository: Path, tmp_path: Path) -> None:
    path = tmp_path / "conch.sock"
    with serving_process(repository, flags=[f"--grpc-address=unix:{path}"]) as server:
        assert server.address == f"unix:{path}"
        assert path.is_socket()
        with client_of(server) as client:
            check_simple(client.infer("simple", simple_inputs()))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    repository = tmp_path / "large"
    write_model(repository, "identity", IDENTITY_CONFIG, {"model.py": IDENTITY})
    return repository


def round_trip(repository: Path, size: int) -> None:
    data = np.arange(size, dtype=np.uint8) if size < 2**28 else np.zeros(size, np.uint8)
    data[-1] = 77
    with serving_process(repository) as server, client_of(server) as client:
        answer = client.infer("identity", [tensor("IN", data, "UINT8")]).as_numpy("OUT")
        assert answer.nbytes == size
        assert np.array_equal(answer, data)


def test_large_tensors(large: Path) -> None:
    round_trip(large, 64 * 1024 * 1024)


@pytest.mark.slow
def test_very_large_tensors(large: Path) -> None:
    if psutil.virtual_memory().available < 6 * 1024**3:
        pytest.skip("needs 6 GiB of free memory")
    round_trip(large, 600 * 1024 * 1024)


def test_message_limit_to_the_byte(repository: Path) -> None:
    request = simple_request()
    limit = request.ByteSize()
    with (
        serving_process(repository, flags=[f"--grpc-max-message-bytes={limit}"]) as server,
        closing(RawClient(server.address)) as raw,
    ):
        check_simple(triton.InferResult(raw.infer(request)))
        with pytest.raises(grpc.RpcError) as raised:
            raw.infer(simple_request(id="x"))
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert raised.value.details().endswith(f"({limit + 3} vs. {limit})")
        check_simple(triton.InferResult(raw.infer(request)))


def test_keep_alive_flags(repository: Path) -> None:
    flags = [
        "--grpc-keepalive-time=1000",
        "--grpc-keepalive-timeout=120000",
        "--grpc-keepalive-permit-without-calls=true",
        "--grpc-http2-max-pings-without-data=0",
        "--grpc-http2-min-recv-ping-interval-without-data=10",
        "--grpc-http2-max-ping-strikes=5",
    ]
    options = triton.KeepAliveOptions(
        keepalive_time_ms=1000,
        keepalive_timeout_ms=120_000,
        keepalive_permit_without_calls=True,
        http2_max_pings_without_data=0,
    )
    with (
        serving_process(repository, flags=flags) as server,
        closing(triton.InferenceServerClient(server.address, keepalive_options=options)) as client,
    ):
        check_simple(client.infer("simple", simple_inputs()))


def test_connection_age(repository: Path) -> None:
    """Connections are closed as they age; their clients open new ones and lose nothing."""
    ports: set[int] = set()  # of clients: one for each connection
    with (
        serving_process(repository, flags=["--grpc-max-connection-age=300"]) as server,
        closing(RawClient(server.address)) as raw,
    ):
        deadline = time.monotonic() + WAIT_S
        answered = 0
        while len(ports) < 3 or answered <= 10:
            check_simple(triton.InferResult(raw.infer(simple_request())))
            answered += 1
            process = psutil.Process(server.process.pid)
            for one in (process, *process.children()):
                with suppress(psutil.NoSuchProcess):  # children of the start come and go
                    ports |= {each.raddr.port for each in one.net_connections("tcp") if each.raddr}
            assert time.monotonic() < deadline, ports


def test_restricted_protocols(repository: Path) -> None:
    flags = [
        "--grpc-restricted-protocol=inference,model-repository:secret=pearl",
        "--grpc-restricted-protocol=health:Key=k",
    ]
    with serving_process(repository, flags=flags) as server, client_of(server) as client:
        text = "This protocol is restricted, expecting header 'triton-grpc-protocol-secret'"
        for headers in (None, {"triton-grpc-protocol-secret": "wrong"}, {"secret": "pearl"}):
            with pytest.raises(InferenceServerException) as raised:
                client.infer("simple", simple_inputs(), headers=headers)
            assert (raised.value.status(), raised.value.message()) == ("StatusCode.UNAVAILABLE", text)
        with pytest.raises(InferenceServerException, match="expecting header"):
            client.get_model_repository_index()
        with pytest.raises(InferenceServerException, match="'triton-grpc-protocol-key'"):
            client.is_server_live()
        assert client.is_server_live(headers={"triton-grpc-protocol-key": "k"})
        assert client.get_server_metadata().name == "triton"  # not restricted
        right = {"triton-grpc-protocol-secret": "pearl"}
        check_simple(client.infer("simple", simple_inputs(), headers=right))
        with closing(RawClient(server.address)) as raw:
            method = raw.channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=service_pb2.ModelInferRequest.SerializeToString,
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )
            call = method(iter([simple_request()]), timeout=WAIT_S)
            with pytest.raises(grpc.RpcError):
                next(call)
            assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, text)
            (answer,) = method(iter([simple_request()]), timeout=WAIT_S, metadata=tuple(right.items()))
            assert answer.error_message == ""


def test_header_forwarding(repository: Path) -> None:
    with (
        serving_process(repository, flags=["--grpc-header-forward-pattern=^(x-|priority)"]) as server,
        client_of(server) as client,
    ):
        headers = {"x-team": "shells", "x-upper": "U", "other": "o"}
        assert probe(client, headers=headers, parameters={"a": 1})["parameters"] == {
            "a": 1,
            "x-team": "shells",
            "x-upper": "U",
        }
        with pytest.raises(InferenceServerException) as raised:
            client.infer("simple", simple_inputs(), headers={"priority": "1"})
        assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
        text = "Header 'priority' is reserved for Triton usage and cannot be forwarded."
        assert raised.value.message() == text


def test_header_forwarding_on_a_stream(repository: Path) -> None:
    request = service_pb2.ModelInferRequest(model_name="probe", raw_input_contents=[b"\0" * 4])
    request.inputs.add(name="IN", datatype="FP32", shape=[1, 1])
    with (
        serving_process(repository, flags=["--grpc-header-forward-pattern=x-.*"]) as server,
        closing(RawClient(server.address)) as raw,
    ):
        method = raw.channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        answers = list(method(iter([request] * 2), timeout=WAIT_S, metadata=[("x-team", "shells")]))
    assert len(answers) == 2
    for answer in answers:
        seen = triton.InferResult(answer.infer_response).as_numpy("SEEN")[0, 0]
        assert b'"x-team": "shells"' in seen


@contextmanager
def counting_relay(port: int) -> Iterator[tuple[int, list[int]]]:
    """Passes one connection on to a port; gives its own port, and the sizes of what came back."""
    received: list[int] = []

    def pump(source: socket.socket, target: socket.socket, sizes: list[int]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sizes.append(len(data))
                target.sendall(data)
        for side in (source, target):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def relay() -> None:
        client, _ = listener.accept()
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            back = threading.Thread(target=pump, args=(server, client, received))
            back.start()
            pump(client, server, [])
            back.join(WAIT_S)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        thread = threading.Thread(target=relay)
        thread.start()
        yield listener.getsockname()[1], received
        thread.join(WAIT_S)


@pytest.mark.parametrize("level", ["none", "low", "high"])
def test_compressed_responses(large: Path, level: str) -> None:
    zeros = np.zeros(1_000_000, np.uint8)
    with (
        serving_process(large, flags=[f"--grpc-infer-response-compression-level={level}"]) as server,
        counting_relay(server.port) as (port, received),
        closing(triton.InferenceServerClient(f"127.0.0.1:{port}")) as client,
    ):
        result = client.infer("identity", [tensor("IN", zeros, "UINT8")])
        assert np.array_equal(result.as_numpy("OUT"), zeros)
    assert (sum(received) > zeros.nbytes) == (level == "none"), sum(received)


@pytest.mark.parametrize("level", ["none", "medium"])
def test_compressed_responses_on_streams(large: Path, level: str) -> None:
    zeros = np.zeros(1_000_000, np.uint8)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with (
        serving_process(large, flags=[f"--grpc-infer-response-compression-level={level}"]) as server,
        counting_relay(server.port) as (port, received),
        closing(triton.InferenceServerClient(f"127.0.0.1:{port}")) as client,
    ):
        client.start_stream(lambda result, error: answers.put((result, error)))
        for _ in range(2):
            client.async_stream_infer("identity", [tensor("IN", zeros, "UINT8")])
            result, error = answers.get(timeout=WAIT_S)
            assert error is None
            assert np.array_equal(result.as_numpy("OUT"), zeros)
        client.stop_stream()
    assert (sum(received) > 2 * zeros.nbytes) == (level == "none"), sum(received)


def test_two_servers_on_one_port(repository: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(serving_process(repository, flags=["--reuse-grpc-port", "--id=a"]))
        flags = ["--reuse-grpc-port=true", "--id=b", f"--grpc-port={first.port}"]
        second = stack.enter_context(serving_process(repository, flags=flags))
        assert first.port == second.port
        seen: set[str] = set()
        deadline = time.monotonic() + WAIT_S
        while seen != {"a", "b"}:
            with client_of(first) as client:
                seen.add(client.get_server_metadata().name)
            assert time.monotonic() < deadline, seen
        assert second.stop() == 0
        with client_of(first) as client:
            check_simple(client.infer("simple", simple_inputs()))


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """gRPC must not look for localhost behind a proxy."""
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    yield
