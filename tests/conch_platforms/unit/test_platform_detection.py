"""Platform of conch and the defaults that follow, by variables, directories and given options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

import pytest

from conch.cli.settings.settings_reader import read_flags
from conch.server_settings import build_options
from conch.settings.option import FlagError, Settings, Source
from conch_platforms.platform_options import PlatformSettings


class FakeDisk:
    """A disk with these files; directories end with a slash, links that lead nowhere with an @."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = set(paths)

    def exists(self, path: str) -> bool:
        paths = map(PurePosixPath, self._paths)
        return f"{path}@" in self._paths or any(each.is_relative_to(path) for each in paths)

    def leads_nowhere(self, path: str) -> bool:
        return f"{path}@" in self._paths

    def entries(self, path: str) -> Mapping[str, bool]:
        found: dict[str, bool] = {}
        for each in self._paths:
            if each.startswith(f"{path}/") and each != f"{path}/":
                name, slash, _ = each.removeprefix(f"{path}/").partition("/")
                found[name] = bool(slash)
        return found


def read(environment: Mapping[str, str], *flags: str, disk: Iterable[str] = ()) -> Settings:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlatformSettings, "DISK", FakeDisk(disk))
        return read_flags(flags, environment)


ONE_MODEL = ("/opt/ml/model/net/1/model.onnx",)
VERTEX = {
    "AIP_MODE": "PREDICTION",
    "AIP_HTTP_PORT": "8081",
    "AIP_PREDICT_ROUTE": "/p",
    "AIP_HEALTH_ROUTE": "/h",
    "AIP_STORAGE_URI": "gs://b/m",
}


@pytest.mark.parametrize(
    ("environment", "disk", "platform", "reason"),
    [
        ({}, (), "auto", ""),
        ({"HOME": "/root", "SAGEMAKER_SPACE_NAME": "notebook"}, (), "auto", ""),
        ({"AIP_MODE": "TRAINING"}, (), "auto", ""),
        ({"AIP_MODE": "PREDICTION"}, (), "vertex-ai", "AIP_MODE=PREDICTION"),
        ({"SAGEMAKER_BIND_TO_PORT": "1"}, ONE_MODEL, "sagemaker", "SAGEMAKER_BIND_TO_PORT"),
        ({"SAGEMAKER_MULTI_MODEL": "true"}, (), "sagemaker", "SAGEMAKER_MULTI_MODEL"),
        ({"SAGEMAKER_REGION": "x"}, ONE_MODEL, "sagemaker", "SAGEMAKER_REGION"),
        ({}, ONE_MODEL, "sagemaker", "/opt/ml/model"),
        ({}, ("/mnt/models/m/1/model.onnx",), "kserve", "/mnt/models"),
        ({}, ("/mnt/models@",), "kserve", "/mnt/models"),
        ({"MODEL_INIT_MODE": "async"}, (), "kserve", "MODEL_INIT_MODE"),
        ({"PREDICTIVE_UNIT_ID": "x"}, ("/mnt/models/",), "seldon", "PREDICTIVE_UNIT_ID"),
        ({"AZUREML_MODEL_DIR": "azureml-models/m/1"}, (), "azureml", "AZUREML_MODEL_DIR"),
    ],
)
def test_platforms(environment: dict[str, str], disk: tuple[str, ...], platform: str, reason: str) -> None:
    settings = read(environment, disk=disk)
    assert settings["platform"] == platform
    assert settings.source("platform").name.rpartition(": ")[2] == reason
    assert len(settings.notes) == bool(reason)
    plain = read(environment, "--platform=none", disk=disk)
    assert plain["platform"] == "none" and plain.notes == ()
    assert {**plain.values, "platform": "auto"} == read({}).values


@pytest.mark.parametrize("disk", [ONE_MODEL, ("/mnt/models/m/1/model.onnx",)])
def test_directories_do_not_count_where_a_repository_is_given(disk: tuple[str, ...]) -> None:
    for flag in ("--model-repository=/m", "--model-store=/m"):
        assert read({"SAGEMAKER_REGION": "x"}, flag, disk=disk)["platform"] == "auto"
    assert read({"CONCH_MODEL_REPOSITORY": "/m"}, disk=disk)["platform"] == "auto"


def texts(settings: Settings, *keys: str) -> list[str]:
    return [str(settings.values[key]) for key in keys]


def test_kserve() -> None:
    settings = read({"INFERENCE_SERVICE_NAME": "isvc"}, disk=["/mnt/models@"])
    keys = ("http_port", "grpc_port", "model_name", "repository_wait_secs", "model_control_mode")
    assert texts(settings, *keys) == ["8080", "9000", "isvc", "3600.0", "none"]
    assert list(map(str, settings["model_repository"])) == ["/mnt/models"]
    there = read({}, "--http-port=1", disk=["/mnt/models/a/1/model.onnx"])
    assert texts(there, *keys) == ["1", "9000", "model", "0.0", "none"]
    agent = read({"MULTI_MODEL_SERVER": "true"}, disk=["/mnt/models/"])
    assert texts(agent, "model_name", "model_control_mode") == ["None", "explicit"]
    stock = ("--model-store=/mnt/models", "--grpc-port=9000", "--http-port=8080", "--allow-grpc=true")
    late = read({"MODEL_INIT_MODE": "async"}, *stock)
    assert (late["model_repository"], texts(late, "repository_wait_secs")) == ([], ["3600.0"])


def test_vertex_ai() -> None:
    settings = read(VERTEX)
    keys = ("allow_vertex_ai", "allow_http", "allow_grpc", "allow_metrics", "vertex_ai_port")
    assert texts(settings, *keys) == ["True", "False", "False", "True", "8081"]
    assert (settings["vertex_ai_predict_route"], settings["vertex_ai_health_route"]) == ("/p", "/h")
    assert settings["model_repository"] == ["gs://b/m"]
    assert settings.source("vertex_ai_port") == Source("platform", "Vertex AI: AIP_HTTP_PORT")
    overridden = read(VERTEX, "--allow-http", "--vertex-ai-port=7", "--model-repository=/m")
    assert texts(overridden, "allow_http", "vertex_ai_port", "model_repository") == [
        "True",
        "7",
        "[PosixPath('/m')]",
    ]
    asked = read({**VERTEX, "AIP_MODE": ""}, "--allow-vertex-ai")
    assert texts(asked, "allow_http", "vertex_ai_port") == ["True", "8081"], "REST stays"


SAGEMAKER_PORT = {"SAGEMAKER_BIND_TO_PORT": "9090", "SAGEMAKER_TRITON_ALLOW_METRICS": "false"}


@pytest.mark.parametrize(
    ("environment", "flags", "opened"),
    [
        (VERTEX, (), "vertex_ai metrics"),
        (VERTEX, ("--http-port=8000",), "vertex_ai http metrics"),
        ({**VERTEX, "CONCH_GRPC_PORT": "1"}, (), "vertex_ai grpc metrics"),
        (VERTEX, ("--http-port=8000", "--allow-http=false"), "vertex_ai metrics"),
        (VERTEX, ("--allow-vertex-ai=false",), "metrics"),
        (VERTEX, ("--allow-vertex-ai=false", "--allow-http"), "http metrics"),
        ({**VERTEX, "AIP_MODE": ""}, (), "http grpc metrics"),
        (SAGEMAKER_PORT, (), "sagemaker"),
        (SAGEMAKER_PORT, ("--metrics-port=0",), "sagemaker"),  # its variable says no
        (SAGEMAKER_PORT, ("--allow-metrics", "--allow-http"), "sagemaker http metrics"),
        (SAGEMAKER_PORT, ("--grpc-port=1",), "sagemaker grpc"),
        (SAGEMAKER_PORT, ("--allow-sagemaker=false",), "http grpc metrics"),
    ],
)
def test_flags_open_what_a_platform_closes(
    environment: dict[str, str], flags: tuple[str, ...], opened: str
) -> None:
    settings = read(environment, "--model-repository=/m", *flags, disk=["/m/net/1/model.onnx"])
    ports = ("vertex_ai", "sagemaker", "http", "grpc", "metrics")
    assert [each for each in ports if settings.values[f"allow_{each}"]] == opened.split()
    told = [
        each for each in settings.warnings if "has no effect, as SageMaker: SAGEMAKER_TRITON_ALLOW_" in each
    ]
    assert len(told) == (flags == ("--metrics-port=0",))
    build_options(settings)  # nothing that is left of the platform contradicts it


def test_sagemaker() -> None:
    environment = {
        "SAGEMAKER_BIND_TO_PORT": "9090",
        "SAGEMAKER_SAFE_PORT_RANGE": "25000-25010",
        "SAGEMAKER_TRITON_ALLOW_GRPC": "true",
        "SAGEMAKER_TRITON_ALLOW_METRICS": "true",
        "SAGEMAKER_TRITON_METRICS_PORT": "25000",
        "SAGEMAKER_TRITON_LOG_VERBOSE": "true",
        "SAGEMAKER_TRITON_OVERRIDE_PING_MODE": "live",
        "SAGEMAKER_TRITON_THREAD_COUNT": "4",
        "SAGEMAKER_TRITON_XYZ": "4",
        "SAGEMAKER_TRITON_ADDITIONAL_ARGS": "--id 'a b' --log-info=false",
    }
    settings = read(environment, "--log-info=true", disk=ONE_MODEL)
    keys = ("sagemaker_port", "allow_http", "allow_grpc", "grpc_port", "metrics_port", "log_verbose", "id")
    assert texts(settings, *keys) == ["9090", "False", "True", "25001", "25000", "1", "a b"]
    more = ("sagemaker_ping_mode", "sagemaker_default_model", "load_model", "model_control_mode", "log_info")
    assert texts(settings, *more) == ["live", "net", "['net']", "explicit", "True"]
    assert list(map(str, settings["model_repository"])) == ["/opt/ml/model"]
    assert [re.split("[:;]", text)[0] for text in settings.warnings] == [
        "these environment variables have no effect here",
        "environment variable SAGEMAKER_TRITON_XYZ is unknown and has no effect",
    ]
    many = read({"SAGEMAKER_MULTI_MODEL": "true"})
    lists = ("sagemaker_multi_model", "sagemaker_ping_mode", "model_namespacing", "model_repository")
    assert texts(many, *lists) == ["True", "live", "True", "[]"]


@pytest.mark.parametrize(
    ("environment", "disk", "flags", "text"),
    [
        ({}, ("/opt/ml/model/",), (), "No model found in model repository '/opt/ml/model'"),
        ({}, ("/opt/ml/model/a/1/", "/opt/ml/model/b/1/"), (), "More than 1 model directory found"),
        (
            {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "x"},
            ONE_MODEL,
            (),
            "Directory with provided SAGEMAKER_TRITON_DEFAULT_MODEL_NAME x does not exist",
        ),
        (
            {"SAGEMAKER_TRITON_PING_MODE": "x"},
            ONE_MODEL,
            (),
            "SageMaker: SAGEMAKER_TRITON_PING_MODE: must be one of ready, live, got x",
        ),
        (
            {"SAGEMAKER_SAFE_PORT_RANGE": "1-2", "SAGEMAKER_TRITON_ALLOW_GRPC": "1"},
            ONE_MODEL,
            ("--grpc-port=9",),
            "--grpc-port: 9 is not in the safe port range of SageMaker, 1-2",
        ),
        (
            {"SAGEMAKER_TRITON_ADDITIONAL_ARGS": "--nonsense"},
            ONE_MODEL,
            (),
            "environment variable SAGEMAKER_TRITON_ADDITIONAL_ARGS: unrecognized arguments: --nonsense",
        ),
        ({"PREDICTIVE_UNIT_ID": "x", "PREDICTIVE_UNIT_PARAMETERS": "{"}, (), (), "it is no JSON"),
        ({"AIP_MODE": "PREDICTION", "AIP_PREDICT_ROUTE": "p"}, (), (), "must be a path that begins with /"),
    ],
)
def test_what_is_wrong(
    environment: dict[str, str], disk: tuple[str, ...], flags: tuple[str, ...], text: str
) -> None:
    with pytest.raises(FlagError) as caught:
        read(environment, *flags, disk=disk)
    assert text in str(caught.value)


def test_sagemaker_with_one_model_at_the_root() -> None:
    named = {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "net"}
    for file in ("config.pbtxt", "1/model.onnx", "resnet.onnx"):
        settings = read(named, disk=[f"/opt/ml/model/{file}"])
        assert texts(settings, "model_name", "load_model") == ["net", "['net']"], file


def test_seldon_and_azure_ml() -> None:
    environment = {
        "PREDICTIVE_UNIT_ID": "unit",
        "PREDICTIVE_UNIT_HTTP_SERVICE_PORT": "9001",
        "PREDICTIVE_UNIT_PARAMETERS": '[{"name": "model_uri", "value": "/models", "type": "STRING"}]',
    }
    settings = read(environment)
    assert texts(settings, "http_port", "grpc_port", "model_name") == ["9001", "9500", "unit"]
    assert list(map(str, settings["model_repository"])) == ["/models"]
    root = "/var/azureml-app/azureml-models/digits/3"
    for given, files, found in (
        ("azureml-models/digits/3", [f"{root}/models/net/1/model.onnx"], f"{root}/models"),
        (root, [f"{root}/net/config.pbtxt"], root),
        (root, [f"{root}/1/model.onnx"], root),
    ):
        settings = read({"AZUREML_MODEL_DIR": given}, disk=files)
        assert list(map(str, settings["model_repository"])) == [found]
        assert texts(settings, "http_port", "model_name", "azureml_scoring_route") == [
            "5001",
            "digits",
            "/score",
        ]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--sagemaker-ping-mode=live"], "--sagemaker-ping-mode needs --allow-sagemaker"),
        (["--vertex-ai-default-model=m"], "--vertex-ai-default-model needs --allow-vertex-ai"),
        (["--azureml-default-model=m"], "--azureml-default-model needs --azureml-scoring-route"),
        (["--azureml-scoring-route=/a", "--azureml-liveness-route=/a"], "must differ from each other"),
        (["--azureml-scoring-route=/a", "--allow-http=false"], "they need --allow-http"),
        (["--allow-vertex-ai"], "API_PREDICT_ROUTE is not defined for Vertex AI endpoint"),
        (
            ["--allow-vertex-ai", "--vertex-ai-predict-route=/p"],
            "AIP_HEALTH_ROUTE is not defined for Vertex AI endpoint",
        ),
        (["--allow-sagemaker", "--sagemaker-multi-model"], "needs --model-control-mode=explicit"),
        (
            [
                "--allow-sagemaker",
                "--sagemaker-multi-model",
                "--model-control-mode=explicit",
                "--sagemaker-inference-type=generate",
            ],
            "serves infer only",
        ),
    ],
)
def test_settings_without_effect_and_contradictions(flags: list[str], text: str) -> None:
    with pytest.raises(FlagError) as caught:
        build_options(read({}, "--model-repository=/m", *flags))
    assert text in str(caught.value)
