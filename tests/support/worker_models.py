"""Models for workers whose source is a few lines of a class, and what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.hazards import workers_of
from tests.support.servers import ServerProcess, client_of, eventually
from tests.support.workers import Running, model_spec
from tritonclient.grpc import InferenceServerClient as Client

from conch.core.spec import ModelSpec, TensorSpec

HEAD = """
import atexit, gc, json, logging, os, resource, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

def answer(value=1.0):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.float32))])

def says(value):
    text = json.dumps(value).encode()
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([text], np.object_))])

def squeeze():
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + 3 * 2**20, resource.RLIM_INFINITY))
"""
ONE = np.ones(1, np.float32)


def spec_of(directory: Path, model: str, **more: Any) -> ModelSpec:
    """The spec of a model whose class has this body; it may call what is in `HEAD`."""
    more.setdefault("inputs", (TensorSpec("IN", "FP32", (-1,)),))
    more.setdefault("outputs", (TensorSpec("OUT", "FP32", (-1,)),))
    return model_spec(directory, f"{HEAD}\n\nclass TritonPythonModel:\n{model}", **more)


def said(running: Running) -> Any:
    """Text of a model's answer, as JSON."""
    return json.loads(running.infer(IN=ONE)["OUT"][0])


@contextmanager
def loaded(server: ServerProcess, model: str) -> Iterator[Client]:
    """A client, and a model that has never lost a worker; afterwards no process of it is left."""
    with client_of(server) as client:
        client.load_model(model)
        try:
            yield client
        finally:
            client.unload_model(model)
        eventually(lambda: not workers_of(server), "all workers have ended")
