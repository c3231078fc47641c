"""Builds the options of platforms' ports and routes from the resolved settings.

Refuses settings of platforms that are not served, and contradictions. Used by: `server_options`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from conch.cli.settings.all_settings import Settings, settings_of
from conch.cli.settings.platform_settings import SageMakerSettings, VertexAiSettings
from conch.cli.settings.setting import FlagError, SettingGroup
from conch.frontends.http.http_server import HttpOptions
from conch_platforms.azureml_routes import AzureMlPlatform
from conch_platforms.sagemaker_routes import SageMakerPlatform
from conch_platforms.sagemaker_sessions import SageMakerSessions
from conch_platforms.vertex_ai_routes import VertexAiPlatform


def with_azureml(settings: Settings, http: HttpOptions | None) -> HttpOptions | None:
    """The options of the REST port, with Azure ML's paths if there are any."""
    routes = (
        settings.azureml_scoring_route,
        settings.azureml_liveness_route,
        settings.azureml_readiness_route,
    )
    if not any(routes):
        if settings.azureml_default_model:
            raise FlagError("--azureml-default-model needs --azureml-scoring-route")
        return http
    if http is None:
        raise FlagError("Azure ML's routes are further paths of REST: they need --allow-http")
    given = [each for each in routes if each]
    if len(set(given)) < len(given):
        raise FlagError("the routes of Azure ML must differ from each other")
    scoring, liveness, readiness = (each or "" for each in routes)
    platform = AzureMlPlatform(scoring, liveness, readiness, settings.azureml_default_model or "")
    return replace(http, platform=platform)


def platform_ports(settings: Settings, rest: HttpOptions) -> tuple[HttpOptions, ...]:
    """The options of the ports of SageMaker and Vertex AI, which share limits and access rules with REST.

    Args:
        settings: The settings.
        rest: Options of the REST port, whether it is open or not.

    Raises:
        FlagError: Settings contradict each other.
    """
    ports = []
    if settings.allow_sagemaker:
        ports.append(replace(rest, port=settings.sagemaker_port, platform=_sagemaker(settings)))
    else:
        _refuse_unused(settings, SageMakerSettings, "allow-sagemaker")
    if settings.allow_vertex_ai:
        ports.append(replace(rest, port=settings.vertex_ai_port, platform=_vertex_ai(settings)))
    else:
        _refuse_unused(settings, VertexAiSettings, "allow-vertex-ai")
    return tuple(replace(each, tls=None, reuse_port=False, cors_origins=frozenset()) for each in ports)


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """Directories that SageMaker loads into a multi-model endpoint.

    Attributes:
        root: Where they are.
        main: Directory of the model in one of them, where several could be meant.
    """

    root: Path
    main: str = ""


def archive_options(settings: Settings) -> ArchiveOptions | None:
    """The options of a SageMaker multi-model endpoint; None if this is none.

    Raises:
        FlagError: Settings contradict each other.
    """
    if not (settings.allow_sagemaker and settings.sagemaker_multi_model):
        return None
    if settings.model_control_mode != "explicit":
        raise FlagError("--sagemaker-multi-model needs --model-control-mode=explicit")
    return ArchiveOptions(settings.sagemaker_models_root, settings.sagemaker_default_model or "")


def _sagemaker(settings: Settings) -> SageMakerPlatform:
    kind = settings.sagemaker_inference_type
    if settings.sagemaker_multi_model and kind != "infer":
        raise FlagError(f"--sagemaker-multi-model serves infer only, not --sagemaker-inference-type={kind}")
    return SageMakerPlatform(
        SageMakerSessions(settings.sagemaker_session_secs),
        settings.sagemaker_default_model or "",
        settings.sagemaker_ping_mode,
        kind,
        settings.sagemaker_models_root if settings.sagemaker_multi_model else None,
    )


def _vertex_ai(settings: Settings) -> VertexAiPlatform:
    # The first text is Triton's, "API_" and all.
    if settings.vertex_ai_predict_route is None:
        raise FlagError("API_PREDICT_ROUTE is not defined for Vertex AI endpoint: set AIP_PREDICT_ROUTE")
    if settings.vertex_ai_health_route is None:
        raise FlagError("AIP_HEALTH_ROUTE is not defined for Vertex AI endpoint")
    return VertexAiPlatform(
        settings.vertex_ai_predict_route,
        settings.vertex_ai_health_route,
        settings.vertex_ai_default_model or "",
    )


def _refuse_unused(settings: Settings, group: type[SettingGroup], switch: str) -> None:
    """Refuses settings of a platform that is not served; Triton's defaults are accepted."""
    for each in settings_of(group):
        if each.name != switch and settings[each.key] != each.default:
            raise FlagError(f"--{each.name} needs --{switch}")
