"""Texts made of the definitions of settings: options, help, `conch config`, docs/settings.md."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conch.cli import config_command
from conch.cli.settings.settings_reader import read_flags, read_keywords
from conch.cli.settings.settings_reference import docs_text, help_parser, keywords_text
from conch.core import process_setup
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.frontends.http.http_options import HttpOptions
from conch.observability.logging.log_settings import LogOptions
from conch.observability.metrics.metrics_options import MetricsOptions
from conch.server_options import ServerOptions
from conch.server_settings import SETTINGS, build_options
from conch.settings.option import FlagError, Source

ROOT = Path(__file__).resolve().parents[4]


def test_generated_files_are_current() -> None:
    assert (ROOT / "docs/settings.md").read_text() == docs_text(), "run scripts/generate_settings.py"
    assert (ROOT / "services/conch_api/server_keywords.py").read_text() == keywords_text(), "run it"


def test_defaults_of_settings_are_those_of_the_options() -> None:
    options = build_options(read_flags([], {}))
    assert options.server == ServerOptions()
    assert options.grpc == GrpcOptions()
    assert options.http is not None and options.http.further is not None  # of an add-on
    assert replace(options.http, further=()) == HttpOptions()
    assert options.metrics == MetricsOptions()
    assert options.log == LogOptions()
    assert (options.planner, options.control_port, options.access_log) == (None, None, None)


NO_PORTS = ["--allow-grpc=false", "--allow-http=false"]


@pytest.mark.parametrize("flag", ["--grpc-min-client-rate", "--front-ends"])
def test_settings_of_the_own_transport_are_refused_elsewhere(flag: str) -> None:
    build_options(read_flags([f"{flag}=50"], {}))
    with pytest.raises(FlagError, match=f"^{flag} needs --grpc-transport=own$"):
        build_options(read_flags([f"{flag}=50", "--grpc-transport=grpcio"], {}))


@pytest.mark.parametrize("given", ["-1", "65", "many", "٢"])
def test_numbers_of_front_processes_are_checked(given: str) -> None:
    with pytest.raises(FlagError, match=r"^--front-ends must be 'auto' or from 0 to 64, got "):
        build_options(read_flags([f"--front-ends={given}"], {}))


@pytest.mark.parametrize(("cores", "fronts"), [(1, 0), (3, 0), (4, 1), (15, 3), (32, 8), (192, 8)])
def test_automatic_front_processes_follow_the_cores(
    cores: int, fronts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_setup, "usable_cores", lambda: cores)
    for flags, expected in (
        (["--grpc-transport=own"], fronts),
        (["--grpc-transport=grpcio"], 0),
        (["--grpc-transport=grpcio", "--allow-grpc=false"], fronts),
        (["--allow-http=false"], fronts),
        (NO_PORTS, 0),
        ([*NO_PORTS, "--openai-port=1"], fronts),
    ):
        assert build_options(read_flags(["--front-ends=auto", *flags], {})).server.front_ends == expected


def test_front_processes_without_ports_are_refused() -> None:
    with pytest.raises(FlagError, match=r"^--front-ends needs a port for clients, such as --allow-grpc"):
        build_options(read_flags(["--front-ends=2", *NO_PORTS], {}))


@pytest.mark.process
def test_settings_are_shown_without_importing_what_they_configure() -> None:
    heavy = ("numpy", "grpc", "ssl", "tomllib", "conch.access.", "conch.core.execution", "conch.core.spec")
    script = (
        "import sys; from conch.cli import main; main(['config', '--grpc-port=1']); "
        f"print([m for m in sys.modules if m.startswith({heavy})])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.endswith("\n[]\n") and "--grpc-port" in found.stdout


def test_each_value_has_a_source(tmp_path: Path) -> None:
    file = tmp_path / "conch.toml"
    file.write_text('id = "f"\ngrpc_port = 1\nhttp-port = 2\n')
    arguments = ["--http-po=5", f"--config-file={file}"]
    settings = read_flags(arguments, {"CONCH_GRPC_PORT": "3"})
    assert settings.source("id") == Source("file", f"{file}:id")
    assert settings.source("grpc_port") == Source("environment", "CONCH_GRPC_PORT")
    assert settings.source("http_port") == Source("flag", "--http-port")
    assert settings.source("metrics_port") == Source("default")
    assert read_keywords({"id": "x"}).source("id") == Source("keyword", "id")
    assert (settings["id"], settings["grpc_port"], settings["http_port"], settings["metrics_port"]) == (
        "f",
        3,
        5,
        8002,
    )


def test_the_help_is_grouped_with_types_choices_units_and_defaults() -> None:
    text = " ".join(help_parser("conch serve").format_help().split())
    for part in (
        "gRPC TLS: --grpc-use-ssl [BOOL] serve gRPC over TLS (default: false)",
        "--model-control-mode {none,explicit,poll,watch,on-demand} none: load all",
        "--exit-timeout-secs SECONDS time that open requests may take after that (default: 30)",
        "--grpc-server-key FILE PEM file of the server's key --grpc-root-cert",
        "--model-store LOCATION deprecated: use --model-repository",
    ):
        assert part in text
    assert "None" not in text and "[]" not in text and "(default: )" not in text
    assert "model-load-gpu-limit" not in text and "--sagemaker-models-root" not in text


def test_every_listed_setting_is_described() -> None:
    for each in SETTINGS:
        assert bool(each.help or each.replaced_by) == each.listed, each.name
        assert (each.scope == "process") == each.name.startswith(("log-", "otlp-logs-", "platform"))


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for each in SETTINGS:
        monkeypatch.delenv(each.variable, raising=False)
    return monkeypatch


FLAGS = [
    "--cache-config=redis,password=hush",
    "--cache-config=redis,host=h",
    "--http-restricted-api=inference:key=hush",
    "--grpc-restricted-protocol=inference:key=hush",
    "--backend-config=python,api-token=hush",
    "--model-repository=/m",
    "--model-repository=s3://user:hush@host/m",
]


def test_config_prints_values_with_sources(
    clean: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean.setenv("CONCH_GRPC_PORT", "9")
    assert config_command.run(FLAGS) == 0
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()
    ]
    assert ["grpc-port", "9", "CONCH_GRPC_PORT"] in lines
    assert ["http-port", "8000", "default"] in lines
    assert ["cache-config", "redis,password=***;redis,host=h", "--cache-config"] in lines


def test_config_prints_json_without_secrets(
    clean: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config_command.run([*FLAGS, "--json"]) == 0
    output = capsys.readouterr().out
    assert "hush" not in output
    found = json.loads(output)
    assert found["grpc-port"] == {"value": 8001, "source": "default", "from": ""}
    assert found["model-repository"] == {
        "value": ["/m", "s3://user:***"],
        "source": "flag",
        "from": "--model-repository",
    }
    assert found["http-restricted-api"]["value"] == ["inference:key=***"]
    assert "model-store" not in found and "model-load-gpu-limit" not in found


def test_config_refuses_what_serve_refuses(
    clean: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config_command.run(["--grpc-prt=1"]) == 1
    assert "did you mean '--grpc-port'?" in capsys.readouterr().err
