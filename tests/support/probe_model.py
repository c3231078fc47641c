"""A model for `conch serve` that does what its requests tell it to, by their parameters.

It answers IN with OUT, and in SEEN says what it saw: the ids of the batch, the parameters of the request.

| parameter | meaning |
|---|---|
| ``started`` | path of a file to create when execution begins |
| ``wait_for`` | path of a file; execution goes on when it exists |
| ``until_cancelled`` | path of a file to create once the model sees that the request is cancelled |
| ``then_wait_for`` | path of a file; execution goes on, after the cancellation, when it exists |
| ``do`` | ``raise``, ``exit``, ``too few``, ``no list`` or ``no response``: how `execute` goes wrong |
| ``error`` | name of the TritonError code this one request is answered with |
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_LONGEST_S = 300.0
_LOOK_S = 0.002


class TritonPythonModel:
    """See the module."""

    def initialize(self, args: dict[str, str]) -> None:
        """Fails if the config says so."""
        self._config = json.loads(args["model_config"])
        if "fail" in self._config["parameters"]:
            raise ValueError(self._config["parameters"]["fail"]["string_value"])

    def execute(self, requests: list[Any]) -> Any:
        """Does what the requests say."""
        ids = [request.request_id() for request in requests]
        responses: list[Any] = []
        for request in requests:
            orders = json.loads(request.parameters())
            if path := orders.get("started"):
                Path(path).touch()
            if path := orders.get("wait_for"):
                _until(Path(path).exists)
            if path := orders.get("until_cancelled"):
                _until(request.is_cancelled)
                Path(path).touch()
            if path := orders.get("then_wait_for"):
                _until(Path(path).exists)
            match orders.get("do"):
                case "raise":
                    raise ValueError("told to")
                case "exit":
                    sys.exit("told to")
                case "too few":
                    return []
                case "no list":
                    return None
                case "no response":
                    responses.append("nonsense")
                    continue
            if code := orders.get("error"):
                error = pb_utils.TritonError("told to", getattr(pb_utils.TritonError, code))
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            (tensor,) = request.inputs()
            value = tensor.as_numpy()
            seen = json.dumps({"ids": ids, "parameters": orders, "config": self._config["name"]}).encode()
            seen_array = np.full((value.shape[0], 1), seen, np.object_)
            responses.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("OUT", value), pb_utils.Tensor("SEEN", seen_array)]
                )
            )
        return responses


def _until(condition: Any) -> None:
    deadline = time.monotonic() + _LONGEST_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the test did not let the request go on")
        time.sleep(_LOOK_S)
