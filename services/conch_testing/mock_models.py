"""Mock models: functions in place of models that the tested one calls."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from conch.core.errors import ConchError
from conch.core.model_statistics import ModelStatistics
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.servable import ClosedError, Readiness
from conch.core.spec import ModelSpec
from conch.core.tensor import Array, Tensor
from conch_testing.conversion import array_of, as_core_error

log = logging.getLogger(__name__)

Function = Callable[[dict[str, Array]], Mapping[str, Any] | Iterable[Mapping[str, Any]]]
"""Takes and returns arrays by name; a generator function mocks a decoupled model."""


class MockModel:
    """A `conch.core.servable.Servable` that runs a function, with any inputs and outputs."""

    version_text = "1"

    def __init__(self, name: str, function: Function) -> None:
        self._function = function
        self._threads = ThreadPoolExecutor(8, f"conch-{name}")
        self._closed = False
        self.statistics = ModelStatistics()
        self.spec = ModelSpec(
            name=name,
            version=1,
            platform="",
            backend="python",
            max_batch_size=0,
            inputs=(),
            outputs=(),
            directory=Path(),
            version_directory=Path(),
            model_file="",
            instance_groups=(),
            decoupled=inspect.isgeneratorfunction(function),
        )

    @property
    def pending(self) -> int:
        """Always 0: requests never queue."""
        return 0

    @property
    def live_sequences(self) -> int:
        """Always 0: it has no sequences."""
        return 0

    @property
    def readiness(self) -> Sequence[Readiness]:
        """Always ready."""
        return ()

    @property
    def workers(self) -> Sequence[Any]:
        """It has no processes."""
        return ()

    @property
    def notes(self) -> Sequence[str]:
        """It has no config to contradict."""
        return ()

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> None:
        """Runs a request on a thread of its pool."""
        if self._closed:
            raise ClosedError
        request.model = self
        self._threads.submit(self._run, request)

    def cancel(self, request: InferenceRequest) -> bool:
        """Marks the request as cancelled; the function does not notice."""
        request.cancelled = True
        return False

    def continues(self, request: InferenceRequest) -> bool:
        """Always false: it has no sequences."""
        return False

    def end_sequence(self, correlation_id: int | str) -> None:
        """Has no sequences to end."""

    def close(self, timeout_s: float | None = None) -> bool:
        """Waits for running requests."""
        self._closed = True
        self._threads.shutdown()
        return True

    def fail_queued(self, error: ConchError) -> int:
        """Always 0: requests never queue."""
        return 0

    def _run(self, request: InferenceRequest) -> None:
        try:
            # Writable copies, as a model has them.
            returned = self._function({name: array_of(each).copy() for name, each in request.inputs.items()})
            if not self.spec.decoupled:
                request.respond(_response(request, returned), True)
                return
            for outputs in returned:
                if request.cancelled:
                    break
                request.respond(_response(request, outputs), False)
                request.wait_until_writable()
            request.respond(None, True)
        except BaseException as error:  # of user code: the pool's thread must survive
            log.debug("the stand-in for model '%s' failed", self.spec.name, exc_info=error)
            request.fail(as_core_error(error))


def _response(request: InferenceRequest, outputs: Any) -> InferenceResponse:
    if not isinstance(outputs, Mapping):
        raise TypeError(
            f"a stand-in must return a dict of arrays by output name, not {type(outputs).__name__}"
        )
    wanted = request.requested
    return InferenceResponse(
        [
            Tensor.from_array(name, np.asarray(value))
            for name, value in outputs.items()
            if wanted is None or name in wanted
        ]
    )
