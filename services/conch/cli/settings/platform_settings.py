"""Settings of the platform that conch runs on, and of the routes that platforms call."""

from __future__ import annotations

from pathlib import Path

from conch.cli.settings.setting import SettingGroup, optional, setting
from conch.cli.settings.value_types import (
    ANY_PORT,
    BOOL,
    DIRECTORY,
    HTTP_THREADS,
    PORT_RANGE,
    POSITIVE,
    ROUTE,
    TEXT,
)

KSERVE, SAGEMAKER, VERTEX_AI, AZUREML, SELDON = "kserve", "sagemaker", "vertex-ai", "azureml", "seldon"


class PlatformSettings(SettingGroup):
    """Where conch runs."""

    title = "platform"
    platform = setting(
        TEXT,
        "auto",
        "where conch runs, which decides defaults of other settings; auto: as variables and mounted "
        "directories tell, see docs/platforms.md",
        choices=("auto", "none", KSERVE, SAGEMAKER, VERTEX_AI, AZUREML, SELDON),
        scope="process",
    )


class SageMakerSettings(SettingGroup):
    """The port that SageMaker calls."""

    title = "SageMaker"
    allow_sagemaker = setting(BOOL, False, "serve SageMaker's routes")
    sagemaker_port = setting(ANY_PORT, 8080, "port for SageMaker; 0 for any free one")
    sagemaker_safe_port_range = optional(
        PORT_RANGE, "<first>-<last>: in which the ports of all other protocols must lie"
    )
    sagemaker_thread_count = setting(
        HTTP_THREADS, 8, "1, or Triton's default 8, which is taken for it: one thread serves all connections"
    )
    sagemaker_default_model = optional(TEXT, "model of /invocations")
    sagemaker_ping_mode = setting(
        TEXT, "ready", "what /ping tells: whether the server is ready, or live", choices=("ready", "live")
    )
    sagemaker_inference_type = setting(
        TEXT,
        "infer",
        "protocol of inference requests",
        choices=("infer", "generate", "generate_stream"),
    )
    sagemaker_multi_model = setting(
        BOOL, False, "let SageMaker load and unload models (multi-model endpoint)"
    )
    sagemaker_session_secs = setting(
        POSITIVE, 1200, "time after which a stateful session ends", unit="seconds"
    )
    # Where a multi-model endpoint gets its models; SageMaker's own path, so that only tests change it.
    sagemaker_models_root = setting(DIRECTORY, Path("/opt/ml/models"), "", listed=False)


class VertexAiSettings(SettingGroup):
    """The port that Vertex AI calls."""

    title = "Vertex AI"
    allow_vertex_ai = setting(BOOL, False, "serve Vertex AI's routes")
    vertex_ai_port = setting(ANY_PORT, 8080, "port for Vertex AI; 0 for any free one")
    vertex_ai_thread_count = setting(
        HTTP_THREADS, 8, "1, or Triton's default 8, which is taken for it: one thread serves all connections"
    )
    vertex_ai_default_model = optional(
        TEXT, "model of the predict route; without it the only model of the repository"
    )
    vertex_ai_predict_route = optional(ROUTE, "path of predictions")
    vertex_ai_health_route = optional(ROUTE, "path of health checks")


class AzureMlSettings(SettingGroup):
    """Paths of an online endpoint, on the REST port."""

    title = "Azure ML"
    azureml_scoring_route = optional(ROUTE, "further path of inference with the default model")
    azureml_liveness_route = optional(ROUTE, "further path of /v2/health/live")
    azureml_readiness_route = optional(ROUTE, "further path of /v2/health/ready")
    azureml_default_model = optional(
        TEXT, "model of the scoring route; without it the only model of the repository"
    )
