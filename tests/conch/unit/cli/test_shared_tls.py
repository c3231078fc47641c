"""`--tls-cert`, `--tls-key` and `--tls-client-ca`: what each port serves, beside settings of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.cli.settings.settings_reader import read_flags, read_keywords
from conch.frontends.http.http_options import HttpTls
from conch.server_settings import build_options
from conch.settings.option import FlagError
from conch_console.console_options import ConsoleOptions
from conch_llm.llm_options import LlmOptions

PAIR = "--tls-cert={}/shared --tls-key={}/shared"
CA = "--tls-client-ca={}/ca"
HTTP = "--http-server-cert={}/own --http-server-key={}/own"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("shared", "own", "ca", "roots"):
        (tmp_path / name).write_text(name)
    return tmp_path


def served(files: Path, flags: str) -> str:
    """Certificate and root certificates of gRPC, REST, metrics, OpenAI's port, control port and console."""
    on = ["--control-port=1", "--console-port=2", "--openai-port=3"]
    options = build_options(read_flags([*on, *flags.replace("{}", str(files)).split()], {}))
    assert options.grpc is not None and options.metrics is not None and options.control_port is not None
    llm, console = options.add_ons["llm"], options.add_ons["console"]
    assert isinstance(llm, LlmOptions) and llm.port is not None and isinstance(console, ConsoleOptions)
    metrics = getattr(options.metrics.tls, "__self__", None)  # the context is made of it
    found = []
    for tls in (
        options.grpc.tls,
        None if options.http is None else options.http.tls,
        metrics,
        llm.port.tls,
        options.control_port.tls,
        console.tls,
    ):
        if tls is None:
            found.append("-")
        elif isinstance(tls, HttpTls):
            assert tls.certificate == tls.private_key
            found.append(tls.certificate.name + (f"+{tls.client_root.name}" if tls.client_root else ""))
        else:
            assert tls.certificate == tls.private_key
            found.append((tls.certificate + (b"+" + tls.client_root if tls.client_root else b"")).decode())
    assert options.metrics.mutual is (metrics is not None and metrics.client_root is not None)
    return " ".join(found)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "- - - - - -"),
        (PAIR, "shared shared shared shared shared shared"),
        (f"{PAIR} {CA}", "shared+ca shared+ca shared+ca shared+ca shared+ca shared+ca"),
        (f"{PAIR} --grpc-use-ssl --http-use-ssl", "shared shared shared shared shared shared"),
        (f"{PAIR} --grpc-use-ssl=false", "- shared shared shared shared shared"),
        (f"{PAIR} {CA} --http-use-ssl=false", "shared+ca - shared+ca - shared+ca shared+ca"),
        (f"{PAIR} --metrics-use-ssl=false", "shared shared - shared shared shared"),
        (f"{PAIR} --control-use-ssl=false", "shared shared shared shared - shared"),
        (f"{PAIR} --console-use-ssl=false", "shared shared shared shared shared -"),
        (f"{PAIR} {HTTP}", "shared own own own shared shared"),
        (
            f"{PAIR} {CA} {HTTP} --http-root-cert={{}}/roots",
            "shared+ca own+roots own+roots own+roots shared+ca shared+ca",
        ),
        (f"{PAIR} --control-root-cert={{}}/roots", "shared shared shared shared shared+roots shared"),
        (
            f"{PAIR} {CA} --grpc-use-ssl-mutual=false",
            "shared shared+ca shared+ca shared+ca shared+ca shared+ca",
        ),
        (
            f"{PAIR} --grpc-use-ssl-mutual --grpc-root-cert={{}}/roots",
            "shared+roots shared shared shared shared shared",
        ),
        (
            f"{PAIR} --grpc-server-cert={{}}/own --grpc-server-key={{}}/own",
            "own shared shared shared shared shared",
        ),
        (f"{PAIR} --allow-http=false", "shared - shared shared shared shared"),
        (f"{HTTP} --http-use-ssl", "- own - own - -"),
        (f"{HTTP} --http-use-ssl --allow-http=false", "- - - own - -"),
    ],
)
def test_what_each_port_serves(files: Path, flags: str, expected: str) -> None:
    assert served(files, flags) == expected


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--tls-cert={}/shared", "--tls-cert and --tls-key belong together: --tls-key is missing"),
        ("--tls-key={}/shared", "--tls-cert and --tls-key belong together: --tls-cert is missing"),
        (CA, "--tls-client-ca needs --tls-cert and --tls-key"),
        (f"{PAIR} --tls-client-ca={{}}/none", "--tls-client-ca: .*none can't be read"),
        ("--tls-cert={}/none --tls-key={}/shared", "--tls-cert: .*none can't be read"),
        (f"{PAIR} --http-server-key={{}}/own", "--http-server-cert must be specified"),
        (f"{PAIR} --http-use-ssl=false {HTTP}", "--http-server-cert needs --http-use-ssl"),
    ],
)
def test_what_can_not_work(files: Path, flags: str, text: str) -> None:
    with pytest.raises(FlagError, match=text):
        served(files, flags)


def test_ports_that_are_off_stay_off(files: Path) -> None:
    options = build_options(read_flags(f"{PAIR} {CA}".replace("{}", str(files)).split(), {}))
    assert options.control_port is None and "console" not in options.add_ons


def test_the_source_of_a_value_is_the_flag_that_it_follows_from(files: Path) -> None:
    settings = read_keywords({"tls_cert": files / "shared", "tls_key": files / "shared"})
    assert settings["http-server-cert"] == files / "shared"
    assert str(settings.source("http-server-cert")) == "--tls-cert"
    assert not settings.chosen("http-server-cert")
