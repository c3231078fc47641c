"""Warm-up: runs the samples of a config on an instance before clients' requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod

import numpy as np
from numpy.random import Generator, default_rng  # imported here, not while several models load

from conch.core.backend import BackendInstance
from conch.core.clock import Clock
from conch.core.errors import InvalidArgumentError
from conch.core.execution.executor import Executor
from conch.core.model_control import check_load_cancelled
from conch.core.model_statistics import ModelStatistics
from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.scheduling.queue import NEVER
from conch.core.scheduling.scheduler import Batch
from conch.core.scheduling.sequence.controls import Controls
from conch.core.scheduling.sequence.implicit_state import SequenceStates
from conch.core.spec import ModelSpec, WarmupInput, WarmupSample
from conch.core.tensor import ELEMENT_SIZES, Tensor
from conch.core.validation import RequestValidator, shape_text

log = logging.getLogger(__name__)

_LOOK_S = 0.1
"""Interval in which a load that waits for a model checks for its cancellation."""

_PROGRESS_NS = 2 * 10**9
"""Time between lines about a warm-up that takes long."""

_SEED = 0
_EMPTY_STRING = 4
"""Bytes of an empty BYTES element: its length, which is zero."""


class Warmup:
    """The samples of one model version; instances may be warmed up at the same time.

    Samples bypass the queue, and have statistics of their own that are not read.

    Args:
        spec: The model version.
        samples: The samples, in order.
        clock: Monotonic time in nanoseconds.
        on_start: Called once, before the first sample of all runs.

    Raises:
        InvalidArgumentError: A sample does not fit the model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        samples: Iterable[WarmupSample],
        clock: Clock,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._spec = spec
        self._clock = clock
        self._on_start: Callable[[], None] | None = on_start
        self._lock = threading.Lock()
        self._executor = Executor(_without_idle_limit(spec), ModelStatistics(), clock)
        random = default_rng(_SEED)  # seeded, so that a load fails every time or never
        validate = RequestValidator(spec)
        self._samples: list[tuple[WarmupSample, dict[str, Tensor]]] = []
        for sample in samples:
            try:
                self._samples.append((sample, _tensors(spec, sample, random, validate)))
            except InvalidArgumentError as error:
                if not sample.optional:
                    raise
                log.warning("model '%s': %s", spec.name, error.message)

    def __bool__(self) -> bool:
        """True if there are samples."""
        return bool(self._samples)

    def run(self, instance: BackendInstance, name: str) -> None:
        """Runs all samples on an idle instance, and returns when every request is complete.

        Raises:
            InvalidArgumentError: A response was an error; the text is Triton's.
        """
        with self._lock:
            if self._samples and self._on_start is not None:
                self._on_start()
                self._on_start = None
        progress = _Progress(
            f"model '{self._spec.name}' instance {name}",
            sum(max(sample.count, instance.warmup_runs) for sample, _ in self._samples),
            self._clock,
        )
        for sample, tensors in self._samples:
            for iteration in range(max(sample.count, instance.warmup_runs)):
                check_load_cancelled()
                progress.step()
                log.debug(
                    "model '%s' instance %s is running warmup sample '%s' for iteration %d",
                    self._spec.name,
                    name,
                    sample.name,
                    iteration + 1,
                )
                outcome = _Outcome(sample.batch_size)
                requests = self._requests(sample, tensors, outcome)
                while requests:
                    check_load_cancelled()
                    self._executor.run(instance, Batch(requests, len(requests)))
                    requests = [request for request in requests if request.rescheduled]
                    for request in requests:
                        request.rescheduled = request.sequence_start = False
                errors = outcome.wait()
                if errors:
                    details = "".join(f"{error}; " for error in errors)
                    text = f"failed to run warmup sample '{sample.name}': {details}"
                    if not sample.optional:
                        raise InvalidArgumentError(text)
                    log.warning("model '%s': %s", self._spec.name, text)

    def _requests(
        self, sample: WarmupSample, tensors: dict[str, Tensor], responder: Responder
    ) -> list[InferenceRequest]:
        requests = []
        for number in range(sample.batch_size):
            now = self._clock()
            # A dict for each: the executor may put reshaped tensors into it.
            request = InferenceRequest(
                self._spec.name, str(self._spec.version), dict(tensors), responder, now
            )
            request.queued_ns = now
            if self._spec.sequence is not None:
                request.inputs = {**_as_sequence(request, self._spec, number + 1), **tensors}
            requests.append(request)
        return requests


class _Progress:
    """Logs how far a warm-up is, if it takes long."""

    def __init__(self, what: str, runs: int, clock: Clock) -> None:
        self._what = what
        self._runs = runs
        self._done = 0
        self._clock = clock
        self._started = self._logged = clock()

    def step(self) -> None:
        """Called before each run."""
        now = self._clock()
        if now - self._logged >= _PROGRESS_NS:
            self._logged = now
            log.info(
                "%s: warm-up run %d of %d, after %.0f s",
                self._what,
                self._done + 1,
                self._runs,
                (now - self._started) / 1e9,
            )
        self._done += 1


class _Outcome:
    """A responder that keeps the errors of responses; usable from any thread."""

    def __init__(self, requests: int) -> None:
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._unfinished = requests
        self._errors: list[str] = []

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        with self._lock:
            if response is not None and response.error is not None:
                self._errors.append(response.error.message)
            if final:
                self._unfinished -= 1
                if not self._unfinished:
                    self._finished.set()

    def wait(self) -> list[str]:
        """Waits until every request is complete; returns the errors, in order.

        Without a time limit, like the load: only the model knows how long its first run takes.

        Raises:
            UnavailableError: The load was stopped.
        """
        while not self._finished.wait(_LOOK_S):
            check_load_cancelled()
        return self._errors


def _without_idle_limit(spec: ModelSpec) -> ModelSpec:
    """A spec without idle limit for sequences: first runs may take long."""
    if spec.sequence is None:
        return spec
    return replace(spec, sequence=replace(spec.sequence, max_idle_ns=NEVER))


def _tensors(
    spec: ModelSpec, sample: WarmupSample, random: Generator, validate: RequestValidator
) -> dict[str, Tensor]:
    """The inputs of one request of a sample, validated like those of clients."""
    try:
        # Backends rely on it; Triton's text.
        if sample.batch_size > max(spec.max_batch_size, 1):
            raise InvalidArgumentError(
                f"batch size {sample.batch_size} for '{spec.name}', max allowed is {spec.max_batch_size}"
            )
        lead = (1,) if spec.max_batch_size > 0 else ()
        shapes = {tensor.name for tensor in spec.inputs if tensor.is_shape}
        tensors = {
            given.name: Tensor(
                given.name,
                given.datatype,
                given.dims if given.name in shapes else lead + given.dims,
                _data(given, random),
            )
            for given in sample.inputs
        }
        request = InferenceRequest(spec.name, str(spec.version), tensors, _Outcome(1), 0)
        if spec.sequence is not None:
            usual = _as_sequence(request, spec, 1)
            _check_own(usual, tensors)
            request.inputs = {name: tensor for name, tensor in tensors.items() if name not in usual}
        try:
            validate(request)
        except InvalidArgumentError as error:
            # The prefix would name the request to its client.
            raise InvalidArgumentError(error.message.removeprefix(request.log_prefix)) from error
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"warmup sample '{sample.name}': {error.message}") from error
    return tensors


def _as_sequence(request: InferenceRequest, spec: ModelSpec, number: int) -> dict[str, Tensor]:
    """Makes a request a sequence of its own; returns its control inputs and states."""
    settings = spec.sequence
    assert settings is not None, "a model with sequences"
    named = any(control.datatype == "BYTES" for control in settings.controls)
    request.correlation_id = str(number) if named else number
    request.sequence_start = True
    request.sequence_end = not settings.iterative
    controls = Controls(settings.controls, spec.max_batch_size > 0)
    flags = controls.flags[request.sequence_start + 2 * request.sequence_end]
    return {**flags, **controls.identity(request.correlation_id), **SequenceStates(spec).initial}


def _check_own(usual: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Checks a sample's control inputs and states."""
    for name, tensor in usual.items():
        given = tensors.get(name, tensor)
        if (given.datatype, len(given.shape)) != (tensor.datatype, len(tensor.shape)):
            raise InvalidArgumentError(
                f"input '{name}' is {given.datatype} with shape {shape_text(given.shape)}, but the model "
                f"configuration specifies {tensor.datatype} with shape {shape_text(tensor.shape)}"
            )


def _data(given: WarmupInput, random: Generator) -> bytes:
    """The bytes of one input; read-only, as all requests share them."""
    if given.source == "FILE":
        return given.data
    count = prod(given.dims)
    try:
        if given.source == "ZERO" or given.datatype == "BYTES":
            return bytes(count * ELEMENT_SIZES.get(given.datatype, _EMPTY_STRING))
        return _random(given.datatype, count, random)
    except (MemoryError, OverflowError, ValueError) as error:
        raise InvalidArgumentError(
            f"input '{given.name}' with dims {list(given.dims)} does not fit into memory"
        ) from error


def _random(datatype: str, count: int, random: Generator) -> bytes:
    # Arbitrary bytes may be NaNs or invalid booleans.
    if datatype == "BOOL":
        return random.integers(0, 2, count, np.uint8).tobytes()
    if datatype == "BF16":
        return (random.random(count, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    if datatype.startswith("FP"):
        return random.random(count, np.float32).astype(f"<f{ELEMENT_SIZES[datatype]}").tobytes()
    return random.bytes(count * ELEMENT_SIZES[datatype])
