"""Models written to a temporary directory and run through `conch.core.model_version.Model`; no server."""

from __future__ import annotations

import dataclasses
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.waiting import PATIENCE_S

from conch.core.backend import Backend
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.spec import DynamicBatching, InstanceGroup, ModelSpec, TensorSpec, WarmupSample
from conch.core.tensor import Array, Tensor

WAIT_S = PATIENCE_S

opened: list[Any] = []
"""Model objects of this process that put themselves here, of the current test."""


def tensor_specs(**tensors: tuple[str, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, datatype, dims) for name, (datatype, dims) in tensors.items())


class HarnessAnswer:
    """Answer to one request."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.finals = 0
        self._done = threading.Event()
        self.request: InferenceRequest | None = None

    def respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        if response is not None:
            self.responses.append(response)
        if final:
            self.finals += 1
            self._done.set()

    def wait(self, timeout_s: float = WAIT_S) -> list[InferenceResponse]:
        assert self._done.wait(timeout_s), "the request was not answered"
        assert self.finals == 1
        return self.responses

    @property
    def one(self) -> InferenceResponse:
        (response,) = self.wait()
        return response

    def array(self, name: str) -> Array:
        response = self.one
        assert response.error is None, response.error
        return {tensor.name: tensor for tensor in response.outputs}[name].numpy()

    @property
    def error(self) -> str:
        response = self.one
        assert response.error is not None, "the request succeeded"
        return response.error.message


class Harness:
    """Makes models and requests; closes the models it made.

    Args:
        root: Directory of model directories.
        placement: Place in which Python models run: ``in_process`` or ``worker``.
    """

    def __init__(self, root: Path, placement: str = "in_process") -> None:
        self.root = root
        self.placement = placement
        self._models: list[Model] = []
        opened.clear()

    def directory(self, name: str, files: Mapping[str, str | bytes]) -> Path:
        """Writes a model directory; the paths are relative to it."""
        directory = self.root / name
        (directory / "1").mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(textwrap.dedent(content).encode() if isinstance(content, str) else content)
        return directory

    def spec(
        self,
        name: str = "m",
        inputs: tuple[TensorSpec, ...] = (),
        outputs: tuple[TensorSpec, ...] = (),
        model_file: str = "model.py",
        **changes: Any,
    ) -> ModelSpec:
        directory = self.root / name
        spec = ModelSpec(
            name=name,
            version=1,
            platform="",
            backend="python",
            max_batch_size=8,
            inputs=inputs,
            outputs=outputs,
            directory=directory,
            version_directory=directory / "1",
            model_file=model_file,
            instance_groups=(InstanceGroup(f"{name}_0"),),
            config={"name": name, "max_batch_size": 8},
            backend_options={"placement": self.placement},
        )
        return dataclasses.replace(spec, **changes)

    def load(self, backend: Backend, spec: ModelSpec, warmup: Sequence[WarmupSample] = ()) -> Model:
        model = Model.create(spec, backend.load(spec), warmup=warmup)
        self._models.append(model)
        return model

    def close(self) -> None:
        while self._models:
            assert self._models.pop().close(WAIT_S)

    @staticmethod
    def request(inputs: Mapping[str, Array], **attributes: Any) -> tuple[InferenceRequest, HarnessAnswer]:
        """A request in wire form, as one that came over a socket."""
        answer = HarnessAnswer()
        tensors = {}
        for name, array in inputs.items():
            made = Tensor.from_array(name, array)
            tensors[name] = Tensor(name, made.datatype, made.shape, bytes(made.data))
        request = InferenceRequest("m", "", tensors, answer.respond, time.monotonic_ns())
        for key, value in attributes.items():
            setattr(request, key, value)
        answer.request = request
        return request, answer

    def infer(self, model: Model, inputs: Mapping[str, Array], **attributes: Any) -> HarnessAnswer:
        request, answer = self.request(inputs, **attributes)
        model.submit(request)
        return answer

    def batch(self, model: Model, inputs: list[dict[str, Array]], **attributes: Any) -> list[HarnessAnswer]:
        """Submits requests that run as one batch where the model was made with `one_batch`."""
        return [self.infer(model, item, **attributes) for item in inputs]


def one_batch(rows: int) -> DynamicBatching:
    """Waits until there are so many rows, so that a test knows what runs together."""
    return DynamicBatching((rows,), int(WAIT_S * 1e9))


def rows(*values: float, width: int = 2) -> Array:
    """An FP32 array with a row for each value."""
    return np.repeat(np.array(values, np.float32)[:, None], width, axis=1)


def strings(*values: bytes) -> Array:
    """A batch of rows of one BYTES element."""
    array = np.empty((len(values), 1), dtype=object)
    array[:, 0] = values
    return array
