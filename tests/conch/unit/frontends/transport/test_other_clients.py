"""conch's own transport with clients that share no code: grpc-go, grpcio's windows, hyper, curl, h2load."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pyqwest
import pytest
from tests.support.servers import ROOT, WAIT_S, free_port

from conch.frontends.grpc.rpc_calls import UnaryRpc
from conch.frontends.grpc.transport.port_state import PortOptions
from conch.frontends.grpc.transport.transport_server import TransportServer

GO_CLIENT = ROOT / "tests" / "support" / "clients" / "many_calls.go"
GO_LIBRARIES = Path("/usr/share/gocode")
AGE_NS = 300_000_000
MESSAGE = b"a message of curl and h2load"
FRAMED = struct.pack(">BI", 0, len(MESSAGE)) + MESSAGE
FIELDS = {"content-type": "application/grpc", "te": "trailers"}


class Site:
    """A server whose connections age."""

    def __init__(self, age_ns: int = 0) -> None:
        self.clients: set[str] = set()
        self.server = TransportServer(PortOptions(age_ns=age_ns))
        self.server.serve(
            {
                "/t.T/Echo": self.echo,
                "/t.T/Sleep": self.sleep,
                "/t.T/Fail": lambda call, message: call.abort(5, "nothing"),
            },
            {},
            {},
        )
        self.port = self.server.add_port("127.0.0.1:0")
        self.server.start()

    def echo(self, call: UnaryRpc, message: Any) -> None:
        self.clients.add(call.client)
        call.reply(bytes(message))

    def sleep(self, call: UnaryRpc, message: Any) -> None:
        call.watch(lambda late: late.abort(1, "it is cancelled"), call)

    def close(self) -> None:
        assert self.server.stop(WAIT_S)


@pytest.fixture
def site() -> Iterator[Site]:
    with closing(Site()) as site:
        yield site


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; run tests/setup_proxies.sh")
    return found


def run(*arguments: object, env: Mapping[str, str] | None = None) -> bytes:
    """Output of a program."""
    done = subprocess.run(
        [str(argument) for argument in arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=4 * WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def go_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("go") is None or not (GO_LIBRARIES / "src/google.golang.org/grpc").exists():
        pytest.skip("Go or gRPC for Go is not installed; run tests/setup_clients.sh")
    built = tmp_path_factory.mktemp("go") / "client"
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": str(GO_LIBRARIES)}
    run("go", "build", "-o", built, GO_CLIENT, env=environment)
    return built


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("window", [0, 65_536], ids=["pings", "small windows"])
def test_go_loses_no_call_while_connections_age(go_client: Path, window: int) -> None:
    """Deadlines that all differ, some of which pass, and long messages among short ones."""
    with closing(Site(AGE_NS)) as site:
        said = run(
            go_client,
            *("-address", f"127.0.0.1:{site.port}", "-window", window),
            *("-echo", "/t.T/Echo", "-sleep", "/t.T/Sleep"),
        )
        assert said.decode().splitlines()[-1] == "good: 4000 bad: 0", said
        assert len(site.clients) > 1
        assert not any(site.server.client_counts.closed.values())


@pytest.mark.parametrize("probes", [0, 1])
def test_grpcio_loses_no_call_while_connections_age(probes: int) -> None:
    """With windows of 64 KB, frames of 16 KB, and with and without pings that measure the bandwidth."""
    options = [
        ("grpc.http2.lookahead_bytes", 65_536),
        ("grpc.http2.max_frame_size", 16_384),
        ("grpc.http2.bdp_probe", probes),
        ("grpc.max_receive_message_length", -1),
    ]

    def calls(first: int) -> None:
        for number in range(first, first + 100):
            message = bytes([number % 256]) * (1_000_000 if number % 25 == 24 else number)
            assert echo(message, timeout=WAIT_S + number / 1000) == message

    with (
        closing(Site(AGE_NS)) as site,
        closing(grpc.insecure_channel(f"127.0.0.1:{site.port}", options)) as channel,
        ThreadPoolExecutor(4) as threads,
    ):
        echo = channel.unary_unary("/t.T/Echo")
        while len(site.clients) < 4:
            list(threads.map(calls, range(0, 400, 100)))
        assert not any(site.server.client_counts.closed.values())


def hyper() -> pyqwest.SyncHTTPTransport:
    return pyqwest.SyncHTTPTransport(http_version=pyqwest.HTTPVersion.HTTP2, enable_otel=False)


@pytest.fixture(scope="module")
def hyper_runs() -> None:
    """Starts hyper's threads, which stay, before descriptors are counted."""
    with closing(hyper()) as transport, pytest.raises(ConnectionError):
        pyqwest.SyncClient(transport).get(f"http://127.0.0.1:{free_port()}/")


@pytest.mark.usefixtures("hyper_runs")
@pytest.mark.parametrize("size", [0, 100, 5_000_000])
def test_hyper(site: Site, size: int) -> None:
    content = struct.pack(">BI", 0, size) + bytes(size)
    with (
        closing(hyper()) as transport,
        pyqwest.SyncClient(transport).stream(
            "POST", f"http://127.0.0.1:{site.port}/t.T/Echo", FIELDS, content
        ) as response,
    ):
        assert response.status == 200
        assert b"".join(response.content) == content
        assert response.trailers["grpc-status"] == "0"


@pytest.mark.process
def test_curl(site: Site, tmp_path: Path) -> None:
    """HTTP/2 by prior knowledge: an answer with trailers, an error without a message, and a GET."""
    body, answer = tmp_path / "body", tmp_path / "answer"
    body.write_bytes(FRAMED)
    curl = [program("curl"), "--silent", "--show-error", "--noproxy", "*", "--http2-prior-knowledge"]
    curl += ["--dump-header", "-", "--output", str(answer)]
    post = ["--header", "content-type: application/grpc", "--header", "te: trailers"]
    post += ["--data-binary", f"@{body}"]
    url = f"http://127.0.0.1:{site.port}/t.T/"
    said = run(*curl, *post, f"{url}Echo").decode().splitlines()
    assert said[0] == "HTTP/2 200 "
    assert "grpc-status: 0" in said
    assert answer.read_bytes() == FRAMED
    assert "grpc-status: 5" in run(*curl, *post, f"{url}Fail").decode()
    assert run(*curl, f"{url}Echo").startswith(b"HTTP/2 405 ")


@pytest.mark.process
@pytest.mark.parametrize("window_bits", [14, 30])
def test_h2load(site: Site, tmp_path: Path, window_bits: int) -> None:
    body = tmp_path / "body"
    body.write_bytes(FRAMED)
    said = run(
        program("h2load"),
        *("--requests", 3000, "--clients", 4, "--max-concurrent-streams", 16),
        *("--window-bits", window_bits, "--connection-window-bits", window_bits),
        *("--header", "content-type: application/grpc", "--header", "te: trailers", "--data", body),
        f"http://127.0.0.1:{site.port}/t.T/Echo",
    ).decode()
    assert "3000 total, 3000 started, 3000 done, 3000 succeeded, 0 failed, 0 errored, 0 timeout" in said
    assert f"({3000 * len(FRAMED)}) data" in said
