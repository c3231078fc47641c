"""The clients in other languages, built as their READMEs say, against started servers: all behave alike."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
import tritonclient.grpc as triton
from tests.support.certificates import Authority
from tests.support.client_builds import LANGUAGES, SOURCES, NotBuildable, build_client
from tests.support.servers import EXAMPLES, ROOT, WAIT_S, ServerProcess, client_of, serving_process

pytestmark = [pytest.mark.slow, pytest.mark.process]

USAGE = (
    "usage: client [--address HOST:PORT] [--root-cert FILE] "
    "unary | stream | load MODEL | unload MODEL | shared-memory\n"
)
SUMS = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"
WORDS = ("client", "reads", "while", "the", "model")


@pytest.fixture(scope="module", params=LANGUAGES)
def command(request: pytest.FixtureRequest) -> list[str]:
    """The command that runs a client."""
    try:
        return build_client(request.param)
    except NotBuildable as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server with two of the example models, in explicit mode."""
    models = [f"--load-model={name}" for name in ("simple", "word_chain")]
    with serving_process(EXAMPLES, flags=["--model-control-mode=explicit", *models]) as server:
        yield server


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def tls_server(authority: Authority) -> Iterator[ServerProcess]:
    """A server with one model, over TLS, without shared memory."""
    key, certificate = authority.issue("server")
    flags = [
        *("--model-control-mode=explicit", "--load-model=simple", "--allow-client-shm=false"),
        *("--grpc-use-ssl=true", f"--grpc-server-key={key}", f"--grpc-server-cert={certificate}"),
    ]
    with serving_process(EXAMPLES, flags=flags) as server:
        yield server


def run(command: Sequence[str], *arguments: object) -> tuple[int, str, str]:
    """End of a client: its status, output and errors."""
    # The tests' process has variables for its own gRPC, which older libraries complain about.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        ("unary", (0, f"unary: {SUMS}\n", "")),
        ("stream", (0, "".join(f"stream: {word}\n" for word in WORDS), "")),
        ("shared-memory", (0, f"shared-memory: {SUMS}\n", "")),
        (
            "load nothing",
            (1, "", "error: failed to load 'nothing', failed to poll from model repository\n"),
        ),
        ("load", (2, "", USAGE)),
        ("unary more", (2, "", USAGE)),
        ("sum", (2, "", USAGE)),
        ("", (2, "", USAGE)),
    ],
)
def test_commands(
    command: list[str], server: ServerProcess, arguments: str, outcome: tuple[int, str, str]
) -> None:
    assert run(command, "--address", server.address, *arguments.split()) == outcome
    with client_of(server) as client:
        assert not client.get_system_shared_memory_status().regions


def test_load_and_unload(command: list[str], server: ServerProcess) -> None:
    model = "autocomplete_onnx"
    with client_of(server) as client:
        loaded = run(command, "--address", server.address, "load", model)
        assert (loaded, client.is_model_ready(model)) == ((0, f"load: {model} is ready\n", ""), True)
        unloaded = run(command, "--address", server.address, "unload", model)
        assert (unloaded, client.is_model_ready(model)) == ((0, f"unload: {model} is not ready\n", ""), False)


def test_tls(command: list[str], tls_server: ServerProcess, authority: Authority) -> None:
    secure = [*command, "--root-cert", str(authority.root), "--address", f"localhost:{tls_server.port}"]
    assert run(secure, "unary") == (0, f"unary: {SUMS}\n", "")
    # Errors come as the server words them: in a stream's message, and from the call that needs a region.
    status, words, error = run(secure, "stream")
    assert (status, words) == (1, "")
    assert error.startswith("error: Request for unknown model: 'word_chain'")
    with (
        closing(
            triton.InferenceServerClient(tls_server.address, ssl=True, root_certificates=str(authority.root))
        ) as client,
        pytest.raises(triton.InferenceServerException) as raised,
    ):
        client.register_system_shared_memory("name", "/key", 1)
    assert run(secure, "shared-memory") == (1, "", f"error: {raised.value.message()}\n")


def test_a_server_of_another_authority_is_not_trusted(
    command: list[str], tls_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    theirs = Authority(tmp_path_factory.mktemp("tls") / "theirs")
    address = f"localhost:{tls_server.port}"
    status, output, errors = run(command, "--root-cert", theirs.root, "--address", address, "unary")
    # gRPC's C++ library logs before; the reason in Java has several lines.
    assert (status, output) == (1, "")
    assert [line for line in errors.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("name", LANGUAGES)
def test_pages_have_the_commands_of_the_builds(name: str) -> None:
    language = LANGUAGES[name]
    for page in (ROOT / SOURCES / name / "README.md", ROOT / "docs" / "clients.md"):
        missing = [line for line in (*language.build, language.run) if line not in page.read_text()]
        assert missing == [], page
