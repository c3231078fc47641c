"""Defaults on SageMaker: those of the script that starts Triton there, and the model of the endpoint."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from conch.settings.option import FlagError
from conch_platforms.platform_defaults import PlatformDefaults, is_model

SAGEMAKER_MODEL = "/opt/ml/model"
"""Directory into which SageMaker puts the model of a single-model endpoint."""
ADDITIONAL_ARGS = "SAGEMAKER_TRITON_ADDITIONAL_ARGS"
"""Variable with flags."""
_SERVING = ("SAGEMAKER_BIND_TO_PORT", "SAGEMAKER_SAFE_PORT_RANGE", "SAGEMAKER_MULTI_MODEL")
_TRITON = "SAGEMAKER_TRITON_"
_VARIABLES = {
    "SAGEMAKER_BIND_TO_PORT": "sagemaker_port",
    "SAGEMAKER_SAFE_PORT_RANGE": "sagemaker_safe_port_range",
    "SAGEMAKER_MULTI_MODEL": "sagemaker_multi_model",
    "SAGEMAKER_SESSIONS_EXPIRATION": "sagemaker_session_secs",
    "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "sagemaker_default_model",
    "SAGEMAKER_TRITON_PING_MODE": "sagemaker_ping_mode",
    "SAGEMAKER_TRITON_OVERRIDE_PING_MODE": "sagemaker_ping_mode",
    "SAGEMAKER_TRITON_INFERENCE_TYPE": "sagemaker_inference_type",
    "SAGEMAKER_TRITON_LOG_VERBOSE": "log_verbose",
    "SAGEMAKER_TRITON_LOG_INFO": "log_info",
    "SAGEMAKER_TRITON_LOG_WARNING": "log_warning",
    "SAGEMAKER_TRITON_LOG_ERROR": "log_error",
    "SAGEMAKER_TRITON_ALLOW_METRICS": "allow_metrics",
    "SAGEMAKER_TRITON_METRICS_PORT": "metrics_port",
    "SAGEMAKER_TRITON_ALLOW_GRPC": "allow_grpc",
    "SAGEMAKER_TRITON_GRPC_PORT": "grpc_port",
    # Triton's script passes the value on, whatever the name says.
    "SAGEMAKER_TRITON_DISABLE_MODEL_NAMESPACING": "model_namespacing",
}
"""Setting of each variable; of those for one setting, the last one wins."""
_WITHOUT_EFFECT = frozenset(
    {
        "SAGEMAKER_TRITON_THREAD_COUNT",
        "SAGEMAKER_TRITON_BUFFER_MANAGER_THREAD_COUNT",
        "SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE",
        "SAGEMAKER_TRITON_SHM_GROWTH_BYTE_SIZE",
        "SAGEMAKER_TRITON_TENSORFLOW_VERSION",
        "SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT",
    }
)
_VERBOSE = {"true": "1", "false": "0"}  # Triton's script writes a boolean here


def is_serving_variable(name: str) -> bool:
    """True if only an endpoint has this variable; notebooks and training jobs have others."""
    return name in _SERVING or name.startswith(_TRITON)


def sagemaker_defaults(defaults: PlatformDefaults, reason: str) -> None:
    """Collects the defaults."""
    defaults.set("allow_sagemaker", "true", reason)
    defaults.close("http", "grpc", "metrics")
    defaults.set("model_control_mode", "explicit", "its models are loaded by name")
    for variable, key in _VARIABLES.items():
        text = defaults.environment.get(variable, "")
        if text:
            text = _VERBOSE.get(text.lower(), text) if key == "log_verbose" else text
            defaults.set(key, text, variable)
    _move_into_safe_range(defaults)
    if str(defaults.value("sagemaker_multi_model")).lower() in ("true", "1", "on"):
        for key, text in (("sagemaker_ping_mode", "live"), ("model_namespacing", "true")):
            if key not in defaults.found:
                defaults.set(key, text, "SAGEMAKER_MULTI_MODEL")
        return
    if not defaults.repositories:
        defaults.set("model_repository", SAGEMAKER_MODEL, "its mount")
    _sagemaker_model(defaults)


def _sagemaker_model(defaults: PlatformDefaults) -> None:
    """Finds the default model of a single-model endpoint."""
    locations = defaults.repositories or [SAGEMAKER_MODEL]
    name, reason = defaults.value("sagemaker_default_model"), "sagemaker-default-model"
    if len(locations) == 1 and "://" not in locations[0]:
        path = locations[0]
        entries = defaults.disk.entries(path)
        folders = sorted(each for each, directory in entries.items() if directory)
        if is_model(path, defaults.disk) or (entries and not folders):
            name = name or "model"
            defaults.set("model_name", name, f"'{path}' is one model")
        elif name and name not in folders:
            raise FlagError(
                f"Directory with provided SAGEMAKER_TRITON_DEFAULT_MODEL_NAME {name} does not exist: there "
                f"is no '{path}/{name}'"
            )
        elif not name:
            name, reason = _only(folders, path), f"the only model in {path}"
        if defaults.value("sagemaker_default_model") is None:
            defaults.set("sagemaker_default_model", name, reason)
    if name and defaults.value("model_control_mode") == "explicit":
        defaults.set("load_model", name, reason)


def _only(folders: list[str], path: str) -> str:
    if not folders:
        raise FlagError(f"No model found in model repository '{path}'")
    if len(folders) > 1:
        raise FlagError(
            f"More than 1 model directory found in model repository. Either provide a single directory or "
            f"set SAGEMAKER_TRITON_DEFAULT_MODEL_NAME to run the ensemble backend. Directories found in "
            f"model repository: {' '.join(folders)}"
        )
    return folders[0]


def _move_into_safe_range(defaults: PlatformDefaults) -> None:
    """Gives protocols without a port of their own one of the range, as Triton does."""
    given = str(defaults.value("sagemaker_safe_port_range") or "")
    first, _, last = given.partition("-")
    if not (first.isdigit() and last.isdigit()):
        return  # none, or the parser of the setting reports it
    taken = {str(defaults.value(f"{name}_port")) for name in ("sagemaker", "http", "grpc", "metrics")}
    free = (port for port in range(int(first), int(last) + 1) if str(port) not in taken)
    for protocol in ("http", "grpc", "metrics"):
        key = f"{protocol}_port"
        allowed = str(defaults.value(f"allow_{protocol}")).lower() in ("true", "1", "on", "none")
        if allowed and defaults.value(key) is None:
            port = next(free, None)
            if port is None:
                raise FlagError(f"--sagemaker-safe-port-range: {given} has no port left for {protocol}")
            defaults.set(key, str(port), "sagemaker-safe-port-range")


def unused_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Warnings about variables of Triton's SageMaker script that do nothing here."""
    ours = {name for name in environment if name.startswith(_TRITON) and environment[name]}
    unused = sorted(ours & _WITHOUT_EFFECT)
    if unused:
        yield f"these environment variables have no effect here: {', '.join(unused)}"
    known = [*_VARIABLES, *_WITHOUT_EFFECT, ADDITIONAL_ARGS]
    for name in sorted(ours.difference(known)):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        yield f"environment variable {name} is unknown and has no effect{hint}"
