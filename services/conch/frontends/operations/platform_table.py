"""The calls of hosting platforms, as entries like those of the table of operations.

Pings and predictions are aliases of REST paths; the entries say what they count as for access rules. Used by:
the routes of the platforms, access rules.
"""

from __future__ import annotations

from dataclasses import dataclass

from conch.access.principals import CONTROLS, INFERS, OPEN, READS
from conch.core.errors import UnavailableError
from conch.core.server_state import ServerState
from conch.frontends.operations.operation_handlers import Services
from conch.frontends.operations.operation_table import Endpoint, Operation, RunsOn
from conch_platforms.sagemaker_models import ModelPage, RegisteredModel, SageMakerModels


@dataclass(frozen=True, slots=True)
class RegisterRequest:
    """SageMaker's name for a model, and its directory."""

    name: str
    url: str


def _models(services: Services) -> SageMakerModels:
    if services.sagemaker_models is None:
        raise UnavailableError("this is no multi-model endpoint: --sagemaker-multi-model makes it one")
    return services.sagemaker_models


def list_models(core: ServerState, services: Services, token: str) -> ModelPage:
    """Returns a page of the loaded models."""
    return _models(services).page(token)


def get_model(core: ServerState, services: Services, name: str) -> RegisteredModel:
    """Returns a loaded model."""
    return _models(services).get(name)


def load_model(core: ServerState, services: Services, request: RegisterRequest) -> None:
    """Loads a model, and returns when it is ready."""
    services.check_changes()
    _models(services).load(request.name, request.url)


def unload_model(core: ServerState, services: Services, name: str) -> None:
    """Unloads a model, and returns when it has left memory."""
    services.check_changes()
    _models(services).unload(name)


_MODEL = "/models/{model}"

SAGEMAKER_PING = Endpoint(
    "sagemaker_ping", "health", "Whether the server is ready or live", paths=("/ping",), roles=OPEN
)
SAGEMAKER_INVOCATIONS = Endpoint(
    "sagemaker_invocations",
    "inference",
    "Run the default model",
    http_method="POST",
    paths=("/invocations",),
    roles=INFERS,
)
SAGEMAKER_INVOKE = Endpoint(
    "sagemaker_invoke",
    "inference",
    "Run a model",
    http_method="POST",
    paths=(_MODEL + "/invoke",),
    roles=INFERS,
)
SAGEMAKER_LIST_MODELS = Operation(
    "sagemaker_list_models",
    "model-repository",
    "Loaded models",
    paths=("/models",),
    roles=READS,
    handler=list_models,
)
SAGEMAKER_GET_MODEL = Operation(
    "sagemaker_get_model",
    "model-repository",
    "A loaded model",
    paths=(_MODEL,),
    roles=READS,
    handler=get_model,
)
SAGEMAKER_LOAD_MODEL = Operation(
    "sagemaker_load_model",
    "model-repository",
    "Load a model",
    http_method="POST",
    paths=("/models",),
    roles=CONTROLS,
    handler=load_model,
    runs_on=RunsOn.LOAD,
    mutates=True,
)
SAGEMAKER_UNLOAD_MODEL = Operation(
    "sagemaker_unload_model",
    "model-repository",
    "Unload a model",
    http_method="DELETE",
    paths=(_MODEL,),
    roles=CONTROLS,
    handler=unload_model,
    runs_on=RunsOn.LOAD,  # it waits for requests in flight
    mutates=True,
)

PLATFORM_ENDPOINTS: tuple[Endpoint, ...] = (
    SAGEMAKER_PING,
    SAGEMAKER_INVOCATIONS,
    SAGEMAKER_INVOKE,
    SAGEMAKER_LIST_MODELS,
    SAGEMAKER_GET_MODEL,
    SAGEMAKER_LOAD_MODEL,
    SAGEMAKER_UNLOAD_MODEL,
)
"""The endpoints with paths of their own; those of Vertex AI and Azure ML are settings."""
