"""Small models that answer with a number, and what clients ask of a repository."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tests.support.cases import outcome
from tests.support.servers import RawClient, eventually, write_model
from tritonclient.grpc import service_pb2

_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answer = pb_utils.Tensor("OUT", np.array([{number}], np.float32))
        return [pb_utils.InferenceResponse([answer]) for _ in requests]
"""
_CONFIG = """
    backend: "python"
    input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }}
    output {{ name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }}
    {extra}
"""
_ENSEMBLE = """
    platform: "ensemble"
    input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }}
    output {{ name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }}
    ensemble_scheduling {{
        step {{
            model_name: "{part}" {more}
            model_version: -1
            input_map {{ key: "IN" value: "IN" }}
            output_map {{ key: "OUT" value: "OUT" }}
        }}
    }}
"""
Parameters = Mapping[str, bool | int | str | bytes | None]

_FIELDS = {bool: "bool_param", int: "int64_param", str: "string_param", bytes: "bytes_param"}
_NOTES = itertools.count()
BROKEN = b"raise ValueError('told to')\n"


def model_text(number: int) -> str:
    """A Python model that answers with a number."""
    return _MODEL.format(number=number)


def write_number(
    repository: Path, name: str, number: int = 1, extra: str = "", versions: tuple[int, ...] = (1,)
) -> Path:
    """Writes such a model."""
    files = {"model.py": model_text(number)}
    return write_model(repository, name, number_config(extra), files, versions)


def number_config(extra: str = "") -> str:
    """The config of such a model."""
    return _CONFIG.format(extra=extra)


def write_ensemble(repository: Path, name: str, part: str, more: str = "") -> Path:
    """Writes an ensemble of one model, with more in its step."""
    return write_model(repository, name, _ENSEMBLE.format(part=part, more=more), {})


def config_json(**more: Any) -> str:
    """The config of such a model, in JSON, with more in it."""
    tensors = [{"data_type": "TYPE_FP32", "dims": [-1]}, {"data_type": "TYPE_FP32", "dims": [1]}]
    config = {
        "backend": "python",
        "input": [{"name": "IN", **tensors[0]}],
        "output": [{"name": "OUT", **tensors[1]}],
    }
    return json.dumps({**config, **more})


def files(**versions: int | bytes) -> dict[str, str | bytes]:
    """Parameters that bring a whole model: ``v1=5`` for a version 1 that answers with 5."""
    contents = {
        f"file:{version[1:]}/model.py": model_text(value).encode() if isinstance(value, int) else value
        for version, value in versions.items()
    }
    # With a config that it knows, Triton 2.51 goes on with the files that it has loaded.
    note = {"note": {"string_value": str(next(_NOTES))}}
    return {"config": config_json(parameters=note), **contents}


def load_request(name: str, parameters: Parameters | None = None) -> Any:
    """A message that loads a model; a parameter may be None, for one without a value."""
    request = service_pb2.RepositoryModelLoadRequest(model_name=name)
    for key, value in (parameters or {}).items():
        if value is None:
            request.parameters[key].SetInParent()
        else:
            setattr(request.parameters[key], _FIELDS[type(value)], value)
    return request


def load(client: RawClient, name: str, parameters: Parameters | None = None) -> Any:
    """Asks for a load; gives the answer as plain data, or the error's code and text."""
    return outcome(lambda: client.unary(load_request(name, parameters)))


def unload(client: RawClient, name: str, dependents: bool = False) -> Any:
    """Asks for an unload, and waits until the model is gone."""
    request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
    request.parameters["unload_dependents"].bool_param = dependents
    answer = outcome(lambda: client("RepositoryModelUnload", request))
    settled(client)
    return answer


def index(client: RawClient) -> list[tuple[str, ...]]:
    """The lines of the repository index, sorted."""
    lines = client("RepositoryIndex", service_pb2.RepositoryIndexRequest()).models
    return sorted((line.name, line.version, line.state, line.reason) for line in lines)


def settled(client: RawClient) -> list[tuple[str, ...]]:
    """The index once nothing is being unloaded any more."""

    def look() -> list[tuple[str, ...]] | None:
        lines = index(client)
        return None if any(state in ("UNLOADING", "LOADING") for _, _, state, _ in lines) else lines

    found: list[tuple[str, ...]] = eventually(look, "nothing is being unloaded")
    return found


def answer(client: RawClient, name: str) -> Any:
    """The number that a model answers with, or the error's code and text."""
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[1])
    request = service_pb2.ModelInferRequest(
        model_name=name, inputs=[tensor], raw_input_contents=[np.zeros(1, np.float32).tobytes()]
    )
    try:
        return float(np.frombuffer(client.infer(request).raw_output_contents[0], np.float32)[0])
    except grpc.RpcError as error:
        return error.code().name, error.details()
