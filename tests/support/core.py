"""Models, requests and instances for tests of the core."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.waiting import PATIENCE_S

from conch.core.backend import BackendInstance, BackendModel
from conch.core.clock import Clock, monotonic_ns
from conch.core.execution.placement import Placement
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import DynamicBatching, InstanceGroup, ModelSpec, SequenceBatching, TensorSpec
from conch.core.tensor import Tensor

FP32_16 = (TensorSpec("IN", "FP32", (16,)),)
OUT_16 = (TensorSpec("OUT", "FP32", (16,)),)
WAIT_S = PATIENCE_S


def make_spec(
    max_batch_size: int = 0,
    inputs: tuple[TensorSpec, ...] = FP32_16,
    outputs: tuple[TensorSpec, ...] = OUT_16,
    name: str = "m",
    version: int = 1,
    batching: DynamicBatching | None = None,
    instances: int = 1,
    decoupled: bool = False,
    sequence: SequenceBatching | None = None,
) -> ModelSpec:
    """A spec with everything that tests do not care about filled in."""
    return ModelSpec(
        name=name,
        version=version,
        platform="",
        backend="test",
        max_batch_size=max_batch_size,
        inputs=inputs,
        outputs=outputs,
        directory=Path("/nowhere"),
        version_directory=Path("/nowhere/1"),
        model_file="model",
        instance_groups=(InstanceGroup(name, count=instances),),
        batching=batching,
        sequence=sequence,
        decoupled=decoupled,
    )


class Shifted:
    """A clock that can be put ahead.

    Attributes:
        ahead_ns: Nanoseconds that it is ahead.
        readers: Names of the threads that have read it.
    """

    def __init__(self) -> None:
        self.ahead_ns = 0
        self.readers: list[str] = []

    def __call__(self) -> int:
        self.readers.append(threading.current_thread().name)
        return time.monotonic_ns() + self.ahead_ns


class Answers:
    """A responder that keeps all it is given; usable from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.calls: list[tuple[InferenceRequest, InferenceResponse | None, bool]] = []

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        with self._changed:
            self.calls.append((request, response, final))
            self._changed.notify_all()

    def wait(self, finals: int, timeout_s: float = WAIT_S) -> bool:
        """Waits until so many final responses have come; False if they do not."""
        with self._changed:
            return self._changed.wait_for(lambda: self.finals >= finals, timeout_s)

    @property
    def finals(self) -> int:
        """Final responses so far."""
        return sum(final for _, _, final in self.calls)

    def finals_of(self, request: InferenceRequest) -> int:
        """Final responses so far to one request."""
        return sum(final for answered, _, final in self.calls if answered is request)

    def response(self, request: InferenceRequest) -> InferenceResponse:
        """The one response to a request."""
        (response,) = [response for answered, response, _ in self.calls if answered is request]
        assert response is not None
        return response


def make_request(
    answers: Callable[[InferenceRequest, InferenceResponse | None, bool], None] | None = None,
    rows: int | None = None,
    value: float = 0.0,
    name: str = "m",
    version: str = "",
    **changes: Any,
) -> InferenceRequest:
    """A request that fits `make_spec`; with rows, one that fits a batching model."""
    shape = (16,) if rows is None else (rows, 16)
    tensor = Tensor.from_array("IN", np.full(shape, value, np.float32))
    request = InferenceRequest(name, version, {"IN": tensor}, answers or Answers(), 0)
    for attribute, setting in changes.items():
        setattr(request, attribute, setting)
    return request


Execute = Callable[[Batch], Sequence[InferenceResponse | None] | None]


def echo(batch: Batch) -> list[InferenceResponse | None]:
    """Answers each request with its input."""
    return [
        InferenceResponse([Tensor.from_array("OUT", request.inputs["IN"].numpy())])
        for request in batch.requests
    ]


class Gate:
    """Holds batches back until it is opened.

    Attributes:
        entered: One unit for each batch that has come.
    """

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self._opened = threading.Event()

    def __call__(self, batch: Batch) -> list[InferenceResponse | None]:
        self.entered.release()
        assert self._opened.wait(WAIT_S), "the test never opened the gate"
        return echo(batch)

    def wait_entered(self) -> None:
        """Waits until another batch has come."""
        assert self.entered.acquire(timeout=WAIT_S), "no batch came"

    def open(self) -> None:
        """Lets all batches run."""
        self._opened.set()


class Turnstile:
    """Lets one batch run for each unit of `go`.

    Attributes:
        entered: One unit for each batch that has come.
    """

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def __call__(self, batch: Batch) -> list[InferenceResponse | None]:
        self.entered.release()
        assert self.go.acquire(timeout=WAIT_S), "the test never let the batch run"
        return echo(batch)

    def wait_entered(self, count: int = 1) -> None:
        """Waits until so many more batches have come."""
        for _ in range(count):
            assert self.entered.acquire(timeout=WAIT_S), "no batch came"

    @property
    def running(self) -> bool:
        """True if a batch has come that no call has waited for."""
        return self.entered.acquire(blocking=False)


class Instance(BackendInstance):
    """Runs a function; checks that one batch at a time reaches it and that it is closed once."""

    def __init__(self, execute: Execute = echo) -> None:
        self._execute = execute
        self._busy = threading.Lock()
        self.closed = 0
        self.batches: list[list[InferenceRequest]] = []

    def execute(self, batch: Batch) -> Sequence[InferenceResponse | None] | None:
        assert self._busy.acquire(blocking=False), "two batches at a time on one instance"
        try:
            assert not self.closed, "a batch for a closed instance"
            self.batches.append(batch.requests)
            return self._execute(batch)
        finally:
            self._busy.release()

    def close(self) -> None:
        assert not self._busy.locked(), "closed while it runs"
        self.closed += 1


class FollowingInstance(Instance):
    """An instance that only the model's own threads may run."""

    allows_inline = False


class LoadedModel(BackendModel):
    """Makes instances of one function, and keeps them."""

    def __init__(self, execute: Execute = echo, instance_class: type[Instance] = Instance) -> None:
        self._execute = execute
        self._class = instance_class
        self.instances: list[Instance] = []
        self.placements: list[Placement] = []
        self.closed = 0

    def create_instance(self, placement: Placement) -> BackendInstance:
        instance = self._class(self._execute)
        self.instances.append(instance)
        self.placements.append(placement)
        return instance

    def close(self) -> None:
        assert all(instance.closed == 1 for instance in self.instances)
        self.closed += 1


def make_model(
    spec: ModelSpec, execute: Execute = echo, allows_inline: bool = True, clock: Clock = monotonic_ns
) -> Model:
    """A model that runs a function."""
    return Model.create(spec, LoadedModel(execute, Instance if allows_inline else FollowingInstance), clock)
