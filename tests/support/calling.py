"""Python models that call other models, as their requests tell them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tests.support.servers import WAIT_S, tensor, write_model

_TEXT_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
SCRIPT = '''
import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import triton_python_backend_utils as pb_utils


def call(model, *values, outputs=("OUT",), **more):
    """A request to a model."""
    inputs = [pb_utils.Tensor("IN", np.array(values, np.float32))]
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=list(outputs), inputs=inputs, **more
    )


def texts(model, code, **more):
    """A request to a model that runs some code."""
    inputs = [pb_utils.Tensor("IN", np.array([code.encode()], object))]
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["OUT"], inputs=inputs, **more
    )


def shown(response):
    """A response as text, or its error."""
    if response.has_error():
        return response.error().message()
    return [tensor.as_numpy().tolist() for tensor in response.output_tensors()]


def raised(function):
    """The error of a function, as text."""
    try:
        return f"returned {function()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            code = request.inputs()[0].as_numpy()[0].decode()
            names = dict(globals(), request=request)
            try:
                exec(code, names)
                result = names["result"]
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
            out = pb_utils.Tensor("OUT", np.array([str(result).encode()], object))
            responses.append(pb_utils.InferenceResponse([out]))
        return responses
'''
_ASYNC = (
    SCRIPT.replace("    def execute", "    async def execute")
    .replace("                exec(code, names)\n", "")
    .replace(
        'result = names["result"]',
        'exec("async def run():\\n " + code.replace("\\n", "\\n "), names)\n'
        '                result = await names["run"]()',
    )
)
_ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""
_SEEN = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            seen = [
                request.request_id(), request.correlation_id(), request.flags(), request.timeout(),
                json.loads(request.parameters()), sorted(request.requested_output_names()),
            ]
            out = pb_utils.Tensor("OUT", np.array([json.dumps(seen).encode()], object))
            rest = pb_utils.Tensor("REST", np.array([len(requests)], np.float32))
            responses.append(pb_utils.InferenceResponse([out, rest]))
        return responses
"""
_SEEN_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
    output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "REST" data_type: TYPE_FP32 dims: [ 1 ] }
"""
_FAILS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        error = pb_utils.TritonError("no luck", pb_utils.TritonError.NOT_FOUND)
        return [pb_utils.InferenceResponse(error=error) for request in requests]
"""
_STREAM = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            values = request.inputs()[0].as_numpy()
            count, flagged = int(values[0]), len(values) > 1
            for number in range(count):
                response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values + number)])
                sender.send(response, flags=1 if flagged and number == count - 1 else 0)
            if not (flagged and count):
                sender.send(flags=1)
"""
_UNTIL_CANCELLED = """
import threading
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.directory = Path(args["model_repository"])

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())]))
            (self.directory / f"{request.request_id()}.runs").touch()
            while not request.is_cancelled():
                threading.Event().wait(0.002)
            (self.directory / f"{request.request_id()}.cancelled").touch()
            sender.send(flags=1)
"""


def write_script(repository: Path, name: str = "script", extra: str = "") -> Path:
    """Writes a model that runs the code in its requests."""
    return write_model(repository, name, _TEXT_CONFIG + extra, {"model.py": SCRIPT})


def write_callers(repository: Path) -> None:
    """Writes models that run the code in their requests, and models for them to call."""
    write_script(repository)
    write_model(repository, "coroutine", _TEXT_CONFIG, {"model.py": _ASYNC})
    write_model(repository, "echo", _CONFIG, {"model.py": _ECHO})
    write_model(repository, "fails", _CONFIG, {"model.py": _FAILS})
    write_model(repository, "seen", _SEEN_CONFIG, {"model.py": _SEEN})
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(repository, "stream", _CONFIG + decoupled, {"model.py": _STREAM})


def write_until_cancelled(repository: Path) -> Path:
    """Writes a decoupled model that answers, and then runs until it is cancelled, with a file for each."""
    decoupled = "model_transaction_policy { decoupled: true }"
    return write_model(repository, "endless", _CONFIG + decoupled, {"model.py": _UNTIL_CANCELLED})


def run(client: triton.InferenceServerClient, code: str, model: str = "script", **more: Any) -> str:
    """Output of a model that runs some code."""
    inputs = [tensor("IN", np.array([code.encode()], object), "BYTES")]
    options = {"client_timeout": WAIT_S, **more}
    text: bytes = client.infer(model, inputs, **options).as_numpy("OUT")[0]
    return text.decode()
