"""The systemd unit: systemd accepts it, and its command line serves with its environment file's flags."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from tests.support.servers import CONCH, EXAMPLES, ROOT, WAIT_S, client_of, started

UNIT = ROOT / "deploy" / "systemd" / "conch.service"
MODELS = "/var/lib/conch/models"


def directive(name: str) -> str:
    """The value of a directive that the unit has once."""
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(value)


def test_systemd_accepts_it(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: tests/setup_deploy.sh installs it")
    program = directive("ExecStart").split()[0]
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(program, str(CONCH)))  # it must exist
    result = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_its_comment_leads_to_a_server_with_an_engine_and_its_flags() -> None:
    text = UNIT.read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (extra,) = re.findall(r"conch\[(\w+)\]", text)
    assert any(each.startswith("onnxruntime") for each in extras[extra])
    read = directive("EnvironmentFile").removeprefix("-")
    assert set(re.findall(r"/etc/conch/[\w.]+", text)) == {read}, "flags go where nothing reads them"


def test_its_command_line_serves_until_it_is_stopped(tmp_path: Path) -> None:
    program, command, *flags = shlex.split(directive("ExecStart").replace(MODELS, str(EXAMPLES)))
    assert (Path(program).name, command) == ("conch", "serve")
    assert f"--model-repository={EXAMPLES}" in flags
    name, home = directive("Environment").split("=")
    assert name == "HOME" and home == f"/var/cache/{directive('CacheDirectory')}"
    read = re.findall(r"^#   (CONCH_\w+)=", UNIT.read_text(), re.MULTILINE)
    variables = {**dict.fromkeys(read, "0"), "CONCH_ID": "by systemd", name: str(tmp_path)}
    with started(*flags, environment=variables) as server:
        server.wait_ready()
        with client_of(server) as client:
            assert client.is_server_ready() and client.get_server_metadata().name == "by systemd"
        assert server.stop() == 0
