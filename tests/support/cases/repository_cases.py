"""Calls on models and repositories that are no inference, and paths of files that come with a load."""

from __future__ import annotations

from typing import Any

from tests.support.cases import Case, refusal
from tests.support.loading import Parameters, load_request
from tritonclient.grpc import service_pb2

_REPOSITORY = "'repository_name' specification is not supported"
NOT_ALLOWED = (
    "explicit model load / unload is not allowed if polling is enabled; the model control mode is 'none', "
    "and --model-control-mode=explicit allows it"
)
_LOST = "Request for unknown model: '{}' is not found"
_NO_VERSION = (
    "failed to get model version from specified version string 'one' (details: stol), version should be an "
    "integral value > 0"
)
_MODEL_CALLS = (service_pb2.ModelMetadataRequest, service_pb2.ModelConfigRequest)

CALLS: dict[str, Case] = {
    "a live server": Case(service_pb2.ServerLiveRequest(), {"live": True}),
    "a ready server": Case(service_pb2.ServerReadyRequest(), {"ready": True}),
    "a ready model": Case(service_pb2.ModelReadyRequest(name="simple"), {"ready": True}),
    "a ready version": Case(service_pb2.ModelReadyRequest(name="simple", version="1"), {"ready": True}),
    "a version that there is not": Case(service_pb2.ModelReadyRequest(name="simple", version="2"), {}),
    "a model that there is not": Case(service_pb2.ModelReadyRequest(name="nope"), {}),
    "readiness of no version": refusal(
        service_pb2.ModelReadyRequest(name="simple", version="one"), _NO_VERSION
    ),
    "statistics of no model": refusal(
        service_pb2.ModelStatisticsRequest(name="nope"), "requested model 'nope' is not available"
    ),
    "statistics of no version": refusal(
        service_pb2.ModelStatisticsRequest(name="simple", version="9"),
        "requested model version is not available for model 'simple'",
    ),
    "index of a repository": refusal(
        service_pb2.RepositoryIndexRequest(repository_name="x"), _REPOSITORY, "UNIMPLEMENTED"
    ),
}
for _call in _MODEL_CALLS:
    _kind = _call.DESCRIPTOR.name.removesuffix("Request")
    CALLS |= {
        f"{_kind} of no model": refusal(_call(name="nope"), _LOST.format("nope"), "NOT_FOUND"),
        f"{_kind} of no name": refusal(_call(), _LOST.format(""), "NOT_FOUND"),
        f"{_kind} of no version": refusal(
            _call(name="simple", version="99"),
            "Request for unknown model: 'simple' version 99 is not found",
            "NOT_FOUND",
        ),
        f"{_kind} of a version that is no number": refusal(_call(name="simple", version="one"), _NO_VERSION),
    }
for _call in (service_pb2.RepositoryModelLoadRequest, service_pb2.RepositoryModelUnloadRequest):
    _kind = _call.DESCRIPTOR.name.removesuffix("Request")
    CALLS |= {
        _kind: refusal(_call(model_name="simple"), NOT_ALLOWED, "UNAVAILABLE"),
        f"{_kind} from a repository": refusal(
            _call(model_name="simple", repository_name="x"), _REPOSITORY, "UNIMPLEMENTED"
        ),
    }
"""For a server without model control, with a model `simple`."""


def _unload_request(**parameters: Any) -> Any:
    request = service_pb2.RepositoryModelUnloadRequest(model_name="m")
    for key, value in parameters.items():
        setattr(request.parameters[key], "bool_param" if value is True else "string_param", value)
    return request


_UNKNOWN = "unrecognized load parameter '{}'."
_NO_TEXT = "invalid value type for load parameter '{}', expected string_param."
_NO_BYTES = "invalid value type for load parameter '{}', expected bytes_param."
_PARAMETERS: tuple[tuple[str, Any, str], ...] = (
    ("x", 1, _UNKNOWN),
    ("x", "x", _UNKNOWN),
    ("", b"", _UNKNOWN),
    ("", None, _UNKNOWN),
    ("file", b"", _UNKNOWN),
    ("File:1/x", b"", _UNKNOWN),
    ("Config", "{}", _UNKNOWN),
    ("config", 7, _NO_TEXT),
    ("config", True, _NO_TEXT),
    ("config", b"{}", _NO_TEXT),
    ("config", None, _NO_TEXT),
    ("file:1/a", "text", _NO_BYTES),
    ("file:1/a", None, _NO_BYTES),
    ("file:", 1, _NO_BYTES),
)
_TRAVERSAL = "invalid model name '{}', model name must not contain path traversal characters"


def _poll(name: str, parameters: Parameters | None = None) -> Case:
    text = f"failed to load '{name}', failed to poll from model repository"
    return refusal(load_request(name, parameters), text, "INTERNAL")


LOADS: dict[str, Case] = {
    **{
        f"load {name} with {key}={value!r}": refusal(load_request(name, {key: value}), text.format(key))
        for key, value, text in _PARAMETERS
        for name in ("m", "nope")
    },
    **{f"load '{name}'": _poll(name) for name in ("nope", ".", " m", "m ", "M", "m\t")},
    "unload of no model": Case(service_pb2.RepositoryModelUnloadRequest(model_name="nope"), {}),
    "unload with a text": refusal(
        _unload_request(unload_dependents="x"),
        "invalid value type for 'unload_dependents' parameter, expected bool_param.",
    ),
}
"""For a server in explicit mode with a model `m`, which is not loaded."""

OWN_LOADS: dict[str, Case] = {
    **{
        f"load '{name}'": refusal(load_request(name), _TRAVERSAL.format(name))
        for name in ("..", "../m", "a/b", "m/")
    },
    "load without a name": refusal(
        load_request(""), "Model name cannot be empty. Please enter a valid name to deploy."
    ),
    "unload with x": refusal(_unload_request(x=True), "unrecognized unload parameter 'x'."),
}
"""The same, where Triton 2.51 answers otherwise."""

REFUSED_PATHS = ("", "..", "../x", "/../x", "1/../../x", "1/", "1", ".", "1/model.py/x")
"""Paths of files that come with a load of version 1."""

OWN_REFUSED_PATHS = (
    "../../../../tmp/x", "/..", "x\0y", "x" * 256, "é" * 128, "1/" * 5000 + "x", "/".join(["x" * 255] * 20),
    "1/./model.py",
)  # fmt: skip
"""Those that no differential test sends: Triton 2.51 takes the one with a NUL, for example."""
