"""Models behind links, and a server that they call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tests.support.workers import NoCalls, model_spec

from conch.core.errors import NotFoundError, UnavailableError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Tensor

SOURCE = """
import json, os, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.one(request)]) for request in requests]

    def one(self, request):
        return pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())
"""


def source_of(body: str, class_body: str = "") -> str:
    """A model whose `execute` is the given lines."""
    lines = "\n".join(f"        {line}" for line in body.strip("\n").splitlines())
    return SOURCE.split("class TritonPythonModel", maxsplit=1)[0] + (
        f"class TritonPythonModel:\n    def execute(self, requests):\n{lines}\n{class_body}\n"
    )


def spec_of(directory: Path, source: str = SOURCE, dims: tuple[int, ...] = (-1,), **more: Any) -> ModelSpec:
    more.setdefault("inputs", (TensorSpec("IN", "FP32", dims),))
    more.setdefault("outputs", (TensorSpec("OUT", "FP32", dims),))
    return model_spec(directory, source, **more)


def floats(count: int = 4) -> Any:
    return np.arange(count, dtype=np.float32)


class CalledServer(NoCalls):
    """A server with one other model, which adds one and answers twice."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.cancelled: list[InferenceRequest] = []
        self.requests: list[InferenceRequest] = []

    def find(self, request: InferenceRequest) -> Any:
        if request.model_name != "other":
            raise NotFoundError("no such model")
        return type(
            "Found", (), {"spec": type("Spec", (), {"name": "other", "version": 3, "decoupled": True})}
        )

    def submit(
        self, request: InferenceRequest, may_claim: bool = False, model: Any = None, parent: Any = None
    ) -> None:
        self.requests.append(request)
        if request.model_name != "other":
            raise NotFoundError("no such model")
        for final in (False, True):
            output = Tensor.from_array("OUT", request.inputs["IN"].numpy() + 1)
            request.respond(InferenceResponse([output], None, {"final": final}), final)

    def cancel(self, request: InferenceRequest) -> None:
        self.cancelled.append(request)

    def model_ready(self, name: str, version: str) -> bool:
        return name == "other"

    def load(self, name: str, parameters: Any) -> None:
        self.asked.append((name, dict(parameters)))

    def unload(self, name: str, unload_dependents: bool) -> None:
        raise UnavailableError("not now")
