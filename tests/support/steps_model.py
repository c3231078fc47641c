"""A decoupled model that takes the steps its requests list in their parameter ``steps``, apart by spaces.

| step | meaning |
|---|---|
| ``ok``, ``okfinal`` | send a response, its number in OUT, with response parameters |
| ``err``, ``errfinal`` | send an error |
| ``empty`` | send a response without outputs |
| ``final`` | send the final flag alone |
| ``touch:PATH`` | create a file |
| ``wait:PATH`` | go on when the file exists |
| ``cancelled:PATH`` | wait until the request is cancelled, then create the file |
| ``generate:PATH`` | send responses until the request is cancelled, then create the file |
| ``is_cancelled`` | send a response with 1 or 0 in OUT |
| ``later`` | take the steps after this one on a thread, and return |
"""

from __future__ import annotations

import json
import threading
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
        """Learns where to say that it is finalized."""
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self._finalized = parameters.get("finalized", {}).get("string_value")

    def finalize(self) -> None:
        """Says so."""
        if self._finalized:
            Path(self._finalized).touch()

    def execute(self, requests: list[Any]) -> None:
        """Takes the steps of each request."""
        for request in requests:
            steps = json.loads(request.parameters())["steps"].split()
            take(request, request.get_response_sender(), steps)


def take(request: Any, sender: Any, steps: list[str]) -> None:
    """Takes steps, the rest of them on another thread if one says so."""
    for number, step in enumerate(steps):
        kind, _, path = step.partition(":")
        match kind:
            case "ok" | "okfinal":
                sender.send(response(number), flags=int(kind == "okfinal"))
            case "err" | "errfinal":
                error = pb_utils.TritonError("told to", pb_utils.TritonError.NOT_FOUND)
                sender.send(pb_utils.InferenceResponse(error=error), flags=int(kind == "errfinal"))
            case "empty":
                sender.send(pb_utils.InferenceResponse([]))
            case "final":
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            case "touch":
                Path(path).touch()
            case "wait":
                until(Path(path).exists)
            case "cancelled":
                until(sender.is_cancelled)
                assert request.is_cancelled()
                Path(path).touch()
            case "generate":
                while not sender.is_cancelled():
                    sender.send(response(number))
                    time.sleep(_LOOK_S)
                Path(path).touch()
            case "is_cancelled":
                sender.send(response(int(sender.is_cancelled())))
            case "later":
                threading.Thread(target=take, args=(request, sender, steps[number + 1 :])).start()
                return
            case _:
                raise ValueError(f"no such step: {step}")


def response(number: int) -> Any:
    """A response with a number, and with parameters of every type."""
    out = pb_utils.Tensor("OUT", np.array([number], np.int32))
    return pb_utils.InferenceResponse([out], parameters={"n": number, "text": "ä", "yes": True})


def until(condition: Any) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + _LONGEST_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it never came")
        time.sleep(_LOOK_S)
