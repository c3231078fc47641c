"""Finds out which platform conch runs on, and the defaults that follow, each with its reason.

One pure function of the environment, the settings that are given and what is on the disk. Variables that only
a serving platform sets decide alone. Directories, and variables that other programs set too (a notebook has
``SAGEMAKER_*`` as well), count only where nothing names a model repository.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from conch.settings.option import FlagError
from conch_platforms.platform_defaults import Disk, PlatformDefault, PlatformDefaults, is_model
from conch_platforms.sagemaker_defaults import (
    SAGEMAKER_MODEL,
    is_serving_variable,
    sagemaker_defaults,
    unused_variables,
)

KSERVE, SAGEMAKER, VERTEX_AI, AZUREML, SELDON = "kserve", "sagemaker", "vertex-ai", "azureml", "seldon"

MOUNTED_MODELS = "/mnt/models"
"""Directory into which KServe and Seldon Core put models."""
_AZUREML_ROOT = "/var/azureml-app"
_TITLES = {
    KSERVE: "KServe",
    SAGEMAKER: "SageMaker",
    VERTEX_AI: "Vertex AI",
    AZUREML: "Azure ML",
    SELDON: "Seldon Core",
}
_SWITCHES = {SAGEMAKER: "allow_sagemaker", VERTEX_AI: "allow_vertex_ai"}
"""Settings that open a platform's port: without it there is nothing that its defaults are for."""
_LATE_SECS = "3600"


@dataclass(frozen=True, slots=True)
class DetectedPlatform:
    """The platform and what follows from it.

    Attributes:
        platform: A choice of ``--platform``; empty for none.
        title: The platform's name.
        reason: Setting, variable or directory that selected it.
        defaults: Defaults by key of the setting.
        warnings: Variables without effect.
    """

    platform: str = ""
    title: str = ""
    reason: str = ""
    defaults: Mapping[str, PlatformDefault] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def detect_platform(environment: Mapping[str, str], given: Mapping[str, Any], disk: Disk) -> DetectedPlatform:
    """Detects the platform.

    Args:
        environment: The environment variables.
        given: Values of the settings that flags, variables of conch or a file give, by key.
        disk: Lists files and directories.

    Raises:
        FlagError: The platform's model directory can't be served; the text says why.
    """
    defaults = PlatformDefaults(environment, given, disk)
    platform, reason = _chosen(defaults)
    if not platform or given.get(_SWITCHES.get(platform, "")) is False:
        if platform == VERTEX_AI:  # as in Triton, its mode closes them also without its port
            defaults.close("http", "grpc", reason=reason)
        if given.get("allow_vertex_ai"):
            _vertex_variables(defaults)
        return DetectedPlatform(defaults=defaults.found, title=_TITLES[VERTEX_AI])
    _SETTINGS_OF[platform](defaults, reason)
    defaults.set("platform", platform, reason)
    warnings = tuple(unused_variables(environment)) if platform == SAGEMAKER else ()
    return DetectedPlatform(platform, _TITLES[platform], reason, defaults.found, warnings)


def _chosen(defaults: PlatformDefaults) -> tuple[str, str]:
    """The platform, and the setting, variable or directory that selected it; empty for none."""
    asked = defaults.given.get("platform", "auto")
    if asked != "auto":
        return ("", "") if asked == "none" else (asked, "--platform")
    environment, disk = defaults.environment, defaults.disk
    if environment.get("AIP_MODE") == "PREDICTION":
        return VERTEX_AI, "AIP_MODE=PREDICTION"
    sagemaker = sorted(name for name in environment if name.startswith("SAGEMAKER_"))
    for name in sagemaker:
        if is_serving_variable(name):
            return SAGEMAKER, name
    for platform, name in (
        (SELDON, "PREDICTIVE_UNIT_HTTP_SERVICE_PORT"),
        (SELDON, "PREDICTIVE_UNIT_ID"),
        (AZUREML, "AZUREML_MODEL_DIR"),
        (KSERVE, "MODEL_INIT_MODE"),
    ):
        if environment.get(name):
            return platform, name
    if defaults.repositories:
        return "", ""
    if disk.exists(SAGEMAKER_MODEL):
        return SAGEMAKER, sagemaker[0] if sagemaker else SAGEMAKER_MODEL
    return (KSERVE, MOUNTED_MODELS) if disk.exists(MOUNTED_MODELS) else ("", "")


def _kserve(defaults: PlatformDefaults, reason: str) -> None:
    defaults.set("http_port", "8080", "its port of REST")
    defaults.set("grpc_port", "9000", "its port of gRPC")
    defaults.set("model_repository", MOUNTED_MODELS, "its mount")
    late = defaults.environment.get("MODEL_INIT_MODE", "").lower() == "async"
    if late or defaults.disk.leads_nowhere(MOUNTED_MODELS):
        why = "MODEL_INIT_MODE" if late else f"{MOUNTED_MODELS} is a link to what is not there yet"
        defaults.set("repository_wait_secs", _LATE_SECS, why)
    if defaults.environment.get("MULTI_MODEL_SERVER", "").lower() == "true":
        defaults.set("model_control_mode", "explicit", "MULTI_MODEL_SERVER")
    elif not defaults.variable("model_name", "INFERENCE_SERVICE_NAME"):
        defaults.set("model_name", "model", "its mount may be one model")


def _seldon(defaults: PlatformDefaults, reason: str) -> None:
    if not defaults.variable("http_port", "PREDICTIVE_UNIT_HTTP_SERVICE_PORT"):
        defaults.set("http_port", "9000", "its port of REST")
    if not defaults.variable("grpc_port", "PREDICTIVE_UNIT_GRPC_SERVICE_PORT"):
        defaults.set("grpc_port", "9500", "its port of gRPC")
    defaults.variable("metrics_port", "PREDICTIVE_UNIT_METRICS_SERVICE_PORT")
    parameters = "PREDICTIVE_UNIT_PARAMETERS"
    uri = _parameter(defaults.environment.get(parameters, ""), "model_uri")
    defaults.set("model_repository", uri or MOUNTED_MODELS, parameters if uri else "its mount")
    if not defaults.variable("model_name", "PREDICTIVE_UNIT_ID"):
        defaults.set("model_name", "model", "its mount may be one model")


def _parameter(text: str, name: str) -> str:
    """The value of one of a graph unit's parameters, which are JSON; empty without it."""
    try:
        found = json.loads(text or "[]")
    except ValueError as error:
        raise FlagError(f"environment variable PREDICTIVE_UNIT_PARAMETERS: it is no JSON: {error}") from None
    if not isinstance(found, list):
        return ""
    named = (each for each in found if isinstance(each, dict) and each.get("name") == name)
    return str(next((each.get("value", "") for each in named), ""))


def _azureml(defaults: PlatformDefaults, reason: str) -> None:
    defaults.set("http_port", "5001", "its port")
    defaults.set("azureml_scoring_route", "/score", "its route")
    defaults.set("azureml_liveness_route", "/", "its route")
    variable = "AZUREML_MODEL_DIR"
    given = defaults.environment.get(variable, "")
    if given:
        path = PurePosixPath(_AZUREML_ROOT, given)  # an absolute one replaces the root
        defaults.set("model_repository", _registered_folder(str(path), defaults.disk), variable)
        name = path.parts[-2] if path.name.isdigit() and len(path.parts) > 2 else path.name
        defaults.set("model_name", name, variable)


def _registered_folder(path: str, disk: Disk) -> str:
    """The repository in a registered model, which has the registered folder itself in its directory."""
    entries = disk.entries(path)
    if len(entries) == 1 and all(entries.values()) and not is_model(path, disk):
        (folder,) = (f"{path}/{name}" for name in entries)
        if not is_model(folder, disk) and any(
            is_model(f"{folder}/{name}", disk) for name in disk.entries(folder)
        ):
            return folder
    return path


def _vertex_ai(defaults: PlatformDefaults, reason: str) -> None:
    defaults.set("allow_vertex_ai", "true", reason)
    defaults.close("http", "grpc")
    _vertex_variables(defaults)


def _vertex_variables(defaults: PlatformDefaults) -> None:
    defaults.variable("vertex_ai_port", "AIP_HTTP_PORT")
    defaults.variable("vertex_ai_predict_route", "AIP_PREDICT_ROUTE")
    defaults.variable("vertex_ai_health_route", "AIP_HEALTH_ROUTE")
    defaults.variable("model_repository", "AIP_STORAGE_URI")


_SETTINGS_OF: dict[str, Callable[[PlatformDefaults, str], None]] = {
    KSERVE: _kserve,
    SAGEMAKER: sagemaker_defaults,
    VERTEX_AI: _vertex_ai,
    AZUREML: _azureml,
    SELDON: _seldon,
}
