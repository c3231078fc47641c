from __future__ import annotations

from pathlib import Path

import pytest

from conch.cli.settings.settings_reader import read_flags
from conch.server_settings import build_options
from conch.settings.option import FlagError
from conch_control.remote_api.connection_options import ControlPortOptions


def options(*arguments: str) -> ControlPortOptions | None:
    return build_options(read_flags(arguments, {})).control_port


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("key", "cert", "root", "token"):
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "spaces").write_text("a b")
    (tmp_path / "empty").touch()
    return tmp_path


def test_there_is_none_unless_asked_for() -> None:
    assert options() is None
    assert options("--control-port=0", "--control-address=localhost") is None


def test_it_is_for_this_machine() -> None:
    found = options("--control-port=8003")
    assert found is not None
    assert (found.target, found.tls, found.token, found.security) == (
        "127.0.0.1:8003",
        None,
        None,
        "plain text",
    )


def test_a_unix_socket_needs_no_port() -> None:
    found = options("--control-address=unix:/run/control.sock")
    assert found is not None
    assert found.target == "unix:/run/control.sock"


def test_all_of_it(files: Path) -> None:
    found = options(
        "--control-port=1",
        "--control-address=::",
        "--control-use-ssl",
        f"--control-server-key={files}/key",
        f"--control-server-cert={files}/cert",
        f"--control-root-cert={files}/root",
        f"--control-token-file={files}/token",
    )
    assert found is not None and found.tls is not None
    assert (found.target, found.token, found.security) == ("[::]:1", "token", "mutual TLS, token")
    assert (found.tls.private_key, found.tls.certificate, found.tls.client_root) == (
        b"key\n",
        b"cert\n",
        b"root\n",
    )
    assert "token'" not in repr(found) and "key\\n" not in repr(found)


@pytest.mark.parametrize("more", [[], ["--model-control-mode=explicit", "--allow-model-control=false"]])
def test_uploads_need_clients_that_load(more: list[str]) -> None:
    with pytest.raises(FlagError, match=r"--allow-model-upload .* needs --model-control-mode=explicit"):
        build_options(read_flags(["--allow-model-upload", *more], {}))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--control-token-file={}/token", "--control-token-file needs --control-port"),
        ("--control-use-ssl", "--control-use-ssl needs --control-port"),
        ("--control-port=1 --control-root-cert={}/root", "--control-root-cert needs --control-use-ssl"),
        ("--control-port=1 --control-use-ssl", "--control-server-cert must be specified"),
        ("--control-port=1 --control-use-ssl --control-server-cert={}/cert", "--control-server-key must be"),
        ("--control-port=1 --control-token-file={}/none", "--control-token-file: .*none can't be read"),
        ("--control-port=1 --control-token-file={}/empty", "the token is empty"),
        ("--control-port=1 --control-token-file={}/spaces", "without spaces"),
        ("--control-port=1 --control-address=0.0.0.0", "would let anyone who reaches 0.0.0.0"),
        (
            "--control-port=1 --control-address=0.0.0.0 --control-use-ssl --control-server-cert={}/cert "
            "--control-server-key={}/key",
            "would let anyone",
        ),
    ],
)
def test_what_can_not_work(files: Path, flags: str, text: str) -> None:
    with pytest.raises(FlagError, match=text):
        options(*flags.replace("{}", str(files)).split())
