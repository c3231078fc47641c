"""conch top against conch: what it counts, and what it does with a terminal."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.certificates import Authority
from tests.support.servers import (
    CONCH,
    LocalServer,
    ServerProcess,
    client_of,
    copy_example,
    free_port,
    probe,
    serving,
    serving_process,
    simple_inputs,
    write_probe,
)
from tests.support.terminals import Terminal, terminal

from conch_tools import top_command
from conch_tools.api import top

pytestmark = pytest.mark.process

CTRL_C, CTRL_Z, CTRL_BACKSLASH = "\x03", "\x1a", "\x1c"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server with two models."""
    repository = tmp_path_factory.mktemp("repository")
    copy_example(repository, "simple")
    write_probe(repository)
    with serving(repository) as local:
        yield local


def test_counts_what_clients_do(server: LocalServer) -> None:
    views = top(server.metrics_url.removesuffix("/metrics"), 0.1)
    first = next(views)
    assert first.seconds is None
    with client_of(server) as client:
        for _ in range(20):
            client.infer("simple", simple_inputs())
        probe(client)
    second = next(views)
    assert second.seconds is not None
    found = {model.model: model for model in second.models}
    rates = {name: round((model.requests_s or 0) * second.seconds, 6) for name, model in found.items()}
    assert rates == {"simple": 20, "probe": 1}
    simple = found["simple"]
    assert simple.p50_ms is not None
    assert simple.p99_ms is not None
    assert simple.queue_ms is not None
    assert simple.mean_ms is not None
    assert 0 < simple.p50_ms <= simple.p99_ms
    assert 0 < simple.queue_ms < simple.mean_ms
    assert (simple.batch, simple.pending) == (1, 0)
    assert second.server is not None
    assert second.server.ready


def test_output_for_scripts(server: LocalServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-u", server.metrics_url, "--interval", "0.1", "--once"]
    assert top_command.run([*flags, "--json"]) == top_command.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] > 0
    assert [(model["model"], model["requests_s"]) for model in found["models"]] == [
        ("probe", 0),
        ("simple", 0),
    ]
    assert top_command.run([*flags, "--sort", "model"]) == top_command.DONE
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["model*", "probe", "simple"]


def test_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority(tmp_path / "authority")
    key, certificate = authority.issue("server")
    repository = tmp_path / "repository"
    repository.mkdir()
    write_probe(repository)
    flags = [
        "--metrics-use-ssl",
        "--http-use-ssl",
        f"--http-server-key={key}",
        f"--http-server-cert={certificate}",
    ]
    with serving(repository, flags=flags) as server:
        ours = ["-u", server.metrics_url, "--interval", "0.1", "--once"]
        assert top_command.run([*ours, "--root-cert", str(authority.root)]) == top_command.DONE
        assert "probe" in capsys.readouterr().out
        assert top_command.run(ours) == top_command.UNREACHED
        assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--once"], ["--json"]])
def test_no_server(flags: list[str], server: LocalServer, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert top_command.run(["-u", url, *flags]) == top_command.UNREACHED
    errors = capsys.readouterr().err
    assert errors.startswith(f"conch top: {url}: ")
    assert errors.endswith("; --url or CONCH_METRICS_URL names the metrics port\n")
    assert top_command.run(["-u", server.http_address, *flags]) == top_command.REFUSED
    assert "/metrics: HTTP 404; --url or" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-u", "grpc://localhost:8001"], "reads the metrics port, over http:// or https://"),
        (["-u", "http://localhost"], "'http://localhost' has no port, such as 8002"),
        ([], "this is no terminal: --once prints one table"),
    ],
)
def test_wrong_usage(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert top_command.run(flags) == top_command.USAGE
    assert message in capsys.readouterr().err


def has_table(frame: list[str]) -> bool:
    """True if a frame has the whole table with rates."""
    return any(line.startswith("probe") for line in frame) and "q quit" in frame[-1] and "req/s," in frame[1]


def watching(server: LocalServer | ServerProcess) -> list[str]:
    """The command line that watches a server."""
    return [str(CONCH), "top", "-u", server.metrics_url, "--interval", "0.2"]


def test_keys_and_sizes(server: LocalServer) -> None:
    with terminal(*watching(server)) as shown:
        frame = shown.wait_for(has_table, "the table is shown")
        heading = next(line for line in frame if line.startswith("model"))
        assert heading.split()[2:4] == ["req/s*", "fail/s"]
        shown.press("s")
        shown.wait_for(lambda frame: "s sort (fail/s)" in frame[-1], "it sorts by the next column")
        shown.resize(40, 6)
        frame = shown.wait_for(lambda frame: len(frame) == 6, "it fits the smaller terminal")
        assert max(map(len, frame)) <= 40
        assert frame[3].split() == ["model", "ver", "req/s", "p99", "ms"]
        assert frame[4] == "... 2 more"
        shown.resize(9, 2)
        frame = shown.wait_for(lambda frame: len(frame) == 2, "it fits the smallest terminal")
        assert max(map(len, frame)) <= 9
        shown.press("q")
        assert shown.wait() == top_command.DONE
        assert shown.is_restored()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda shown: shown.press(CTRL_C), top_command.INTERRUPTED),
        (lambda shown: shown.press(CTRL_BACKSLASH), 128 + signal.SIGQUIT),
        (lambda shown: shown.signal(signal.SIGTERM), 128 + signal.SIGTERM),
        (lambda shown: shown.signal(signal.SIGHUP), 128 + signal.SIGHUP),
    ],
    ids=["ctrl-c", "ctrl-backslash", "sigterm", "sighup"],
)
def test_each_end_restores_the_terminal(
    end: Callable[[Terminal], object], code: int, server: LocalServer
) -> None:
    with terminal(*watching(server)) as shown:
        shown.wait_for(has_table, "the table is shown")
        end(shown)
        assert shown.wait() == code
        assert shown.is_restored()
        assert "Traceback" not in shown.output


def test_a_stopped_process_gives_the_terminal_back(server: LocalServer) -> None:
    with terminal(*watching(server)) as shown:
        shown.wait_for(has_table, "the table is shown")
        shown.press(CTRL_Z)
        shown.wait_until_stopped()
        assert shown.is_restored()
        stopped = len(shown.output)
        shown.signal(signal.SIGCONT)
        shown.wait_for(lambda frame: len(shown.output) > stopped and has_table(frame), "it goes on")
        assert not shown.is_restored()
        shown.press("q")
        assert shown.wait() == top_command.DONE


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    write_probe(tmp_path)
    port = f"--metrics-port={free_port()}"
    with serving_process(tmp_path, flags=[port]) as server, terminal(*watching(server)) as shown:
        shown.wait_for(has_table, "the table is shown")
        server.process.kill()  # a stop unloads the model while its metrics can still be read
        server.process.wait()
        frame = shown.wait_for(lambda frame: frame[1].startswith("no answer, last seen"), "it is away")
        assert any(line.startswith("probe") for line in frame), "the last table is still there"
        with serving_process(tmp_path, flags=[port]):
            shown.wait_for(has_table, "it is back")
            shown.press("q")
            assert shown.wait() == top_command.DONE
            assert shown.is_restored()
