"""Flags from the command line, the environment and a file."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conch.cli import demo_command, serve_command
from conch.cli.examples import examples_directory
from conch.cli.settings.settings_reader import read_flags, read_keywords
from conch.core.scheduling.resource_scheduler import ResourceLimit
from conch.server_settings import SETTINGS, build_options
from conch.settings.option import DEFAULT, FlagError, Settings
from conch.settings.value_types import integer, parse_bool
from conch_control.control_options import RateLimitOptions
from conch_platforms.sagemaker_defaults import ADDITIONAL_ARGS


def rate_limits(settings: Settings) -> tuple[ResourceLimit, ...] | None:
    return settings.build(RateLimitOptions).limits


def read(*arguments: str, **environment: str) -> Any:
    return read_flags(arguments, environment)


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("id", "triton"),
        ("model-repository", []),
        ("model-control-mode", "none"),
        ("model-load-thread-count", 4),
        ("disable-auto-complete-config", False),
        ("exit-on-error", True),
        ("strict-readiness", True),
        ("exit-timeout-secs", 30),
        ("drain-delay", 0),
        ("listen-while-loading", False),
        ("grpc-port", 8001),
        ("grpc-infer-response-compression-level", "none"),
        ("grpc-keepalive-time", 7_200_000),
        ("grpc-keepalive-timeout", 20_000),
        ("grpc-http2-max-pings-without-data", 2),
        ("grpc-max-connection-age", 0),
        ("log-verbose", 0),
        ("log-error", True),
        ("log-format", "default"),
    ],
)
def test_defaults_are_tritons(name: str, default: object) -> None:
    flags = read()
    assert flags[name] == default
    assert flags[name.replace("-", "_")] == default
    assert flags.warnings == ()


def test_connections_age_in_kubernetes_unless_a_setting_says_otherwise(tmp_path: Path) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    (file := tmp_path / "conch.toml").write_text("grpc-max-connection-age = 7")
    found = read(**pod)
    assert (found["grpc_max_connection_age"], str(found.source("grpc-max-connection-age"))) == (
        1_800_000,
        "Kubernetes: KUBERNETES_SERVICE_HOST",
    )
    assert read("--grpc-max-connection-age=0", **pod)["grpc_max_connection_age"] == 0
    assert read(f"--config-file={file}", **pod)["grpc_max_connection_age"] == 7
    assert read_keywords({}).source("grpc-max-connection-age") == DEFAULT


@pytest.mark.parametrize("arguments", [("--grpc-port=1234",), ("--grpc-port", "1234")])
def test_both_ways_to_write_a_value(arguments: tuple[str, ...]) -> None:
    assert read(*arguments)["grpc-port"] == 1234


def test_the_last_one_wins_and_repeatable_ones_add_up() -> None:
    flags = read("--grpc-port=1", "--model-repository=/a", "--grpc-port=2", "--model-repository=/b")
    assert flags["grpc-port"] == 2
    assert flags["model-repository"] == [Path("/a"), Path("/b")]


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "conch.toml"
    file.write_text('grpc-port = 1\nlog-verbose = 1\nid = "file"\nlog_info = false\n')
    flags = read(
        "--grpc-port=3",
        CONCH_GRPC_PORT="2",
        CONCH_LOG_VERBOSE="2",
        CONCH_CONFIG_FILE=str(file),
        CONCH_OTHER="x",
    )
    assert (flags["grpc-port"], flags["log-verbose"], flags["id"], flags["log-info"]) == (3, 2, "file", False)
    assert flags["grpc-address"] == "0.0.0.0"


def test_the_file_a_flag_names_wins_over_that_of_the_environment(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f'id = "{name}"')
    flags = read(f"--config-file={tmp_path / 'a'}", CONCH_CONFIG_FILE=str(tmp_path / "b"))
    assert flags["id"] == "a"


def test_repeatable_ones_replace_those_of_a_lower_level(tmp_path: Path) -> None:
    file = tmp_path / "conch.toml"
    file.write_text('model-repository = ["/f", "/g"]\nload-model = "m"\n')
    flags = read(f"--config-file={file}")
    assert (flags["model-repository"], flags["load-model"]) == ([Path("/f"), Path("/g")], ["m"])
    flags = read(f"--config-file={file}", CONCH_MODEL_REPOSITORY="/a;/b")
    assert flags["model-repository"] == [Path("/a"), Path("/b")]
    flags = read("--model-repository=/c", f"--config-file={file}", CONCH_MODEL_REPOSITORY="/a;/b")
    assert flags["model-repository"] == [Path("/c")]


@pytest.mark.parametrize(
    ("text", "value"),
    [(text, True) for text in ("true", "TRUE", "on", "1")]
    + [(text, False) for text in ("false", "Off", "0")],
)
def test_booleans(text: str, value: bool, tmp_path: Path) -> None:
    assert parse_bool(text) is value
    assert read(f"--log-info={text}")["log-info"] is value
    assert read(CONCH_LOG_INFO=text)["log-info"] is value
    file = tmp_path / "conch.toml"
    file.write_text(f'log-info = "{text}"')
    assert read(f"--config-file={file}")["log-info"] is value


def test_a_bare_boolean_is_true() -> None:
    flags = read("--grpc-use-ssl", "--log-info=false")
    assert (flags["grpc-use-ssl"], flags["log-info"]) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--qqqqqq=1"], "unrecognized arguments: --qqqqqq=1"),
        (["--grpc-prt=1"], "unrecognized arguments: --grpc-prt=1; did you mean '--grpc-port'?"),
        (
            ["--grpc-ports=1", "--x"],
            "unrecognized arguments: --grpc-ports=1 --x; did you mean '--grpc-port'?",
        ),
        (["--log-f=x"], "ambiguous option: --log-f=x could match --log-format, --log-file"),
        (["stray"], "unrecognized arguments: stray"),
        (["--log-info=maybe"], "argument --log-info: invalid value for bool option: maybe"),
        (["--grpc-port=x"], "argument --grpc-port: 'x' is not a whole number"),
        (["--grpc-port=65536"], "--grpc-port: must be from 0 to 65535, got 65536"),
        (["--http-port=-1"], "--http-port: must be from 0 to 65535, got -1"),
        (["--metrics-port=65536"], "--metrics-port: must be from 0 to 65535, got 65536"),
        (
            ["--http-port=8001"],
            "The server cannot listen to HTTP requests and GRPC requests at the same address and port "
            "0.0.0.0:8001",
        ),
        (
            ["--metrics-port=8000"],
            "The server cannot listen to HTTP requests and metrics requests at the same address and port "
            "0.0.0.0:8000",
        ),
        (
            ["--model-config-name="],
            "argument --model-config-name: Error: empty argument for --model-config-name",
        ),
        *(
            (
                [f"--http-max-input-size={size}"],
                "argument --http-max-input-size: Error: --http-max-input-size must be greater than 0.",
            )
            for size in (0, -1)
        ),
        (
            ["--model-control-mode=x"],
            "argument --model-control-mode: must be one of none, explicit, poll, watch, on-demand, got x",
        ),
        (["--drain-delay=-1"], "argument --drain-delay: must be from 0 to 1000000000 seconds, got -1"),
        (["--drain-delay=nan"], "argument --drain-delay: must be from 0 to 1000000000 seconds, got nan"),
        (["--exit-timeout-secs=-1"], "argument --exit-timeout-secs: must be at least 0, got -1"),
        (["--model-load-thread-count=0"], "argument --model-load-thread-count: must be at least 1, got 0"),
        (["--grpc-port"], "argument --grpc-port: expected one argument"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str) -> None:
    with pytest.raises(FlagError) as caught:
        read(*arguments)
    assert str(caught.value) == text


def test_choices_in_any_case() -> None:
    flags = read("--model-control-mode=EXPLICIT", "--grpc-infer-response-compression-level", "Low")
    assert flags["model-control-mode"] == "explicit"
    assert flags["grpc-infer-response-compression-level"] == "low"
    assert read(CONCH_RATE_LIMIT="Execution_Count")["rate-limit"] == "execution_count"


def test_the_beginning_of_a_flag_that_no_other_has() -> None:
    flags = read("--model-repo=/a", "--grpc-po", "5", "--log-v=1", "--strict-r=off")
    assert (flags["model-repository"], flags["grpc-port"]) == ([Path("/a")], 5)
    assert (flags["log-verbose"], flags["strict-readiness"]) == (1, False)
    assert read("--grpc-max-connection-age=7")["grpc-max-connection-age"] == 7, "others begin with it"


@pytest.mark.parametrize("protocol", ["grpc", "http", "metrics"])
def test_ports_are_checked_where_their_protocol_is_on(protocol: str) -> None:
    for port in (70000, -1, 8000, 8001, 8002):
        flags = read(f"--{protocol}-port={port}", f"--allow-{protocol}=false")
        assert flags[f"{protocol}-port"] == port
    assert read("--metrics-port=8000", "--metrics-address=127.0.0.1")["metrics-port"] == 8000
    assert read("--http-port=0", "--grpc-port=0", "--metrics-port=0")["http-port"] == 0
    assert read("--grpc-address=unix:/x", "--grpc-port=8000")["grpc-port"] == 8000


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("CONCH_GRPC_PORT", "x", "environment variable CONCH_GRPC_PORT: 'x' is not a whole number"),
        ("CONCH_LOG_INFO", "", "environment variable CONCH_LOG_INFO: invalid value for bool option: "),
        (
            "CONCH_LOG_FORMAT",
            "x",
            "environment variable CONCH_LOG_FORMAT: must be one of default, ISO8601, got x",
        ),
    ],
)
def test_wrong_environment(name: str, value: str, text: str) -> None:
    with pytest.raises(FlagError) as caught:
        read(**{name: value})
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"nonsense = 1", "config file {}: unknown option 'nonsense'"),
        (b"grpc_prot = 1", "config file {}: unknown option 'grpc_prot'; did you mean 'grpc-port'?"),
        (b"model-load-gpu-limit = true", "config file {}: model-load-gpu-limit: 'True' has no effect"),
        (b'grpc-port = "x"', "config file {}: grpc-port: 'x' is not a whole number"),
        (b"grpc-port = 1.5", "config file {}: grpc-port: '1.5' is not a whole number"),
        (b"grpc-port = true", "config file {}: grpc-port: 'True' is not a whole number"),
        (b"grpc-port =", "config file {} is not TOML"),
        (b"id = '\xff'", "config file {} is not TOML"),
    ],
)
def test_wrong_files(tmp_path: Path, content: bytes, text: str) -> None:
    file = tmp_path / "conch.toml"
    file.write_bytes(content)
    with pytest.raises(FlagError) as caught:
        read(f"--config-file={file}")
    assert str(caught.value).startswith(text.format(file))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "none"
    with pytest.raises(FlagError) as caught:
        read(f"--config-file={file}")
    assert str(caught.value) == f"config file {file} can't be read: No such file or directory"


@pytest.mark.parametrize(
    ("harmless", "refused"),
    [
        (("--sagemaker-thread-count=8", "--vertex-ai-thread-count=1"), ("--sagemaker-thread-count=4",)),
        (
            ("--pinned-memory-pool-byte-size=0", "--cuda-memory-pool-byte-size=0:67108864"),
            ("--pinned-memory-pool-byte-size=x", "--cuda-memory-pool-byte-size=a:1"),
        ),
        (("--enable-peer-access=true", "--enable-peer-access=false"), ("--enable-peer-access=maybe",)),
        (("--grpc-infer-allocation-pool-size=16",), ("--grpc-max-response-pool-size=3",)),
        (("--grpc-infer-thread-count=1", "--grpc-infer-thread-count=128"), ("--grpc-infer-thread-count=0",)),
        (("--buffer-manager-thread-count=0",), ("--buffer-manager-thread-count=2",)),
        (("--http-thread-count=8", "--http-thread-count=1"), ("--http-thread-count=2",)),
        (
            ("--cache-directory=/x",),
            ("--model-load-gpu-limit=0:0.5", "--cuda-virtual-address-size=0:1"),
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(harmless: tuple[str, ...], refused: tuple[str, ...]) -> None:
    read(*harmless, "--grpc-port=5")
    for argument in refused:
        name, _, value = argument.removeprefix("--").partition("=")
        with pytest.raises(FlagError, match=f"^argument --{name}: "):
            read(*harmless, argument)
        with pytest.raises(FlagError):
            read_keywords({name.replace("-", "_"): value or True})


@pytest.mark.parametrize(
    "flag",
    [
        "--buffer-manager-thread-count=2",
        "--cuda-virtual-address-size=0:1",
        "--grpc-max-response-pool-size=3",
        "--http-thread-count=16",
        "--model-load-gpu-limit=0:0.5",
        "--sagemaker-thread-count=4",
        "--vertex-ai-thread-count=2",
    ],
)
def test_tritonserver_warns_of_flags_without_effect(flag: str) -> None:
    definition, _, value = flag.removeprefix("--").partition("=")
    for settings in (
        read_flags([flag, "--grpc-port=5"], {}, as_triton=True),
        read_flags(["--grpc-port=5", "--platform=none"], {ADDITIONAL_ARGS: flag}, as_triton=True),
    ):
        (warning,) = (each for each in settings.warnings if definition in each)
        assert warning.startswith(f"{flag} has no effect: ")
        assert settings[definition] == read()[definition] and settings["grpc_port"] == 5
    variable = f"CONCH_{definition.upper().replace('-', '_')}"
    with pytest.raises(FlagError, match=f"environment variable {variable}: "):
        read_flags([], {variable: value}, as_triton=True)


@pytest.mark.parametrize(
    ("flags", "variables", "changed"),
    [
        ([], {}, {}),
        ([], {"CONCH_CONSOLE_PORT": "9004"}, {"console_port": 9004}),
        (["--console-port=9004"], {"CONCH_CONSOLE_PORT": "9005"}, {"console_port": 9004}),
        ([], {"CONCH_CONSOLE_ALLOW_CONTROL": "false"}, {"console_allow_control": False}),
        ([], {"CONCH_CONSOLE_PORT": "0"}, {"console_port": 0}),
        (["--model-repository=/a"], {}, {"model_repository": [Path("/a")]}),
        ([], {"CONCH_MODEL_REPOSITORY": "/a", "CONCH_GRPC_PORT": "5"}, {"model_repository": [Path("/a")]}),
        (["--console-token-file={viewers}"], {}, {}),
    ],
)
def test_each_default_of_the_demo_yields_to_a_setting(
    flags: list[str],
    variables: dict[str, str],
    changed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (viewers := tmp_path / "tokens").write_text("viewer: a-long-token-of-viewers\n")
    served: list[Settings] = []

    def serve(settings: Settings, *_: object) -> int:
        served.append(settings)
        return 0

    monkeypatch.setattr(serve_command, "serve", serve)
    monkeypatch.setattr(serve_command, "read_flags", partial(read_flags, environment=variables))
    assert demo_command.run([flag.format(viewers=viewers) for flag in flags]) == 0
    models = examples_directory() / "models"
    expected = {
        "console_port": 8004,
        "console_allow_control": True,
        "console_allow_infer": True,
        "model_repository": [models / "basic", models / "python"],
    }
    assert {name: served[0][name] for name in expected} == {**expected, **changed}
    assert str(served[0].source("console_allow_infer")) == "conch demo"


def test_a_variable_that_looks_misspelt_is_named() -> None:
    of_kubernetes = {"CONCH_SERVICE_HOST": "10.0.0.1", "CONCH_SERVICE_PORT": "8001", "CONCH_PORT": "tcp://x"}
    own = {"CONCH_CONTROL_TARGET": "x", "CONCH_GRPC_PORT": "5", "CONCH_PORT_8001_TCP_PORT": "8001"}
    flags = read(CONCH_GRPC_PROT="1", CONCH_CONTROL_TOKEN_FLE="x", **of_kubernetes, **own)
    assert flags.warnings == (
        "environment variable CONCH_CONTROL_TOKEN_FLE is unknown and has no effect; did you mean "
        "'CONCH_CONTROL_TOKEN_FILE'?",
        "environment variable CONCH_GRPC_PROT is unknown and has no effect; did you mean 'CONCH_GRPC_PORT'?",
    )


def test_no_flag_is_there_twice() -> None:
    names = [each.name for each in SETTINGS]
    assert len(set(names)) == len(names)


def test_the_bound_of_queues() -> None:
    assert read()["max-queue-size"] == 16384
    assert read(CONCH_MAX_QUEUE_SIZE="0")["max-queue-size"] == 0
    with pytest.raises(FlagError, match="must be at least 0"):
        read("--max-queue-size=-1")


def test_rate_limits() -> None:
    assert rate_limits(read()) is None
    assert rate_limits(read("--rate-limit-resource=R:1")) is None
    assert rate_limits(read("--rate-limit=EXECUTION_COUNT")) == ()
    given = ("--rate-limit-resource=R:4", "--rate-limit-resource=R:2:1", "--rate-limit-resource=b c:0")
    assert rate_limits(read("--rate-limit=execution_count", *given)) == (
        ResourceLimit("R", 4),
        ResourceLimit("R", 2, 1),
        ResourceLimit("b c", 0),
    )


def test_deprecated_flags_are_told_in_tritons_words() -> None:
    repository = "--model-repository=/a"
    assert build_options(read(repository)).warnings == ()
    options = build_options(
        read(
            repository,
            "--strict-model-config=false",
            "--disable-auto-complete-config",
            "--response-cache-byte-size=7",
            "--trace-rate=5",
        )
    )
    assert options.control.strict_model_config
    assert options.warnings == (
        "'--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead.",
        "Overriding deprecated '--strict-model-config' from False to True in favor of "
        "'--disable-auto-complete-config'!",
        "'--response-cache-byte-size' has been deprecated! This will default to the 'local' cache "
        "implementation with the provided byte size for its config. Please use '--cache-config' "
        "instead. The equivalent --cache-config CLI args would be: '--cache-config=local,size=7'",
        "'--trace-rate' has been deprecated and will be removed in future releases. Please use "
        "'--trace-config rate=<rate value>' instead.",
    )


@pytest.mark.parametrize("text", ["R", "R:", ":1", "R:-1", "R:x", "R:1:", "R:1:x", "R:1:2:3", "R:1:-1"])
def test_a_resource_that_can_not_be_read(text: str) -> None:
    with pytest.raises(FlagError) as raised:
        rate_limits(read(f"--rate-limit-resource={text}"))
    assert str(raised.value) == (
        f"--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
        f"'<resource_name>:<count>'. Got {text}"
    )


def test_host_policies_are_read() -> None:
    texts = ("cpu,cpu-cores=0-3", "cpu,numa-node=1", "own,color=a,b=c")
    control = build_options(read(*(f"--host-policy={text}" for text in texts))).control
    assert control.host_policies == {"cpu": {"cpu-cores": "0-3", "numa-node": "1"}, "own": {"color": "a,b=c"}}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cpu", "'cpu' is not of the form '<policy>,<setting>=<value>'"),
        (",numa-node=0", "',numa-node=0' is not of the form '<policy>,<setting>=<value>'"),
        ("cpu,cpu-cores=3", "cpu-cores of 'cpu' is '3', expected the first and the last one, such as 0-3"),
        ("cpu,numa-node=x", "numa-node of 'cpu' is 'x', expected a number"),
    ],
)
def test_a_host_policy_that_can_not_be_read(text: str, problem: str) -> None:
    with pytest.raises(FlagError) as raised:
        build_options(read(f"--host-policy={text}"))
    assert str(raised.value) == f"--host-policy: {problem}"


@pytest.mark.parametrize("text", ["x", "-1", "inf", "nan", ""])
def test_a_compute_capability_that_is_none(text: str) -> None:
    assert read()["min-supported-compute-capability"] == 6.0
    assert read("--min-supported-compute-capability=7.5")["min-supported-compute-capability"] == 7.5
    with pytest.raises(FlagError, match="is not a compute capability"):
        read(f"--min-supported-compute-capability={text}")


def test_limits_of_a_number_belong_to_it() -> None:
    number = integer(1, 8)
    assert [number.parse(text) for text in ("1", "8")] == [1, 8]
    for text in ("0", "9"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"must be from 1 to 8, got {text}"):
            number.parse(text)
