"""A model that was loaded for a test, and what can be done with it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError
from conch.core.request import InferenceRequest, InferenceResponse, Parameter
from conch.core.servable import Servable
from conch.testing.failures import Failures
from conch.testing.repository import Placement, Repository
from conch.testing.standins import Function
from conch.testing.tensors import Outputs, as_model_error, outputs_of, tensors_of

Inputs = Mapping[str, Any]
"""Arrays by name, with the batch dimension where the model has one, as clients send them."""

Stand = Function | str | Path
"""What stands in for another model: a function, or a model directory."""


def run(
    directory: str | Path,
    inputs: Inputs,
    *,
    models: Mapping[str, Stand] | None = None,
    config: Mapping[str, Any] | None = None,
    version: int | None = None,
    placement: Placement = "in_process",
    **request: Any,
) -> Any:
    """Loads a model, runs one request and unloads it; see `load` and `LoadedModel.run`."""
    with load(directory, models=models, config=config, version=version, placement=placement) as model:
        return model.run(inputs, **request)


def load(
    directory: str | Path,
    *,
    models: Mapping[str, Stand] | None = None,
    config: Mapping[str, Any] | None = None,
    version: int | None = None,
    placement: Placement = "in_process",
) -> LoadedModel:
    """Loads a model as a server would; unload it with `LoadedModel.close`, or by leaving its ``with`` block.

    Args:
        directory: The model's directory, with its versions and, if it has one, its config.
        models: What stands in for the models that it calls, by name: functions from arrays to arrays,
            generator functions for decoupled ones, or model directories.
        config: Fields that replace those of its config, in JSON form: ``{"max_batch_size": 4}``.
        version: Its version; the newest if None.
        placement: Whether it runs here, where it can be debugged, or in a worker process.

    Raises:
        Exception: What its module or its `initialize` raises.
        ModelError: It can't be loaded for another reason.
        FileNotFoundError: There is no such directory, or no such version.
    """
    stack = ExitStack()
    with stack:
        failures = stack.enter_context(Failures())
        repository = Repository(placement)
        stack.callback(repository.close)
        try:
            for name, other in (models or {}).items():
                repository.add(name, other)
            model = repository.load(Path(directory), version, config)
        except ConchError as error:
            raise failures.behind(error) or as_model_error(error) from None
        return LoadedModel(model, repository, failures, stack.pop_all())
    raise AssertionError("it has returned or raised")


class LoadedModel:
    """A model that takes requests; made by `load`.

    Attributes:
        name: Its name.
        version: Its version.
        config: Its completed config, in JSON form.
    """

    def __init__(self, model: Servable, repository: Repository, failures: Failures, stack: ExitStack) -> None:
        self._model = model
        self._repository = repository
        self._failures = failures
        self._stack = stack
        self.name = model.spec.name
        self.version = model.spec.version
        self.config: Mapping[str, Any] = model.spec.config

    @property
    def decoupled(self) -> bool:
        """Whether a request may have any number of responses."""
        return self._model.spec.decoupled

    def run(self, inputs: Inputs, **request: Any) -> Any:
        """Runs a request.

        Args:
            inputs: Its inputs.
            **request: The same as of `stream`.

        Returns:
            `Outputs`; of a decoupled model a list of them, one for each response.

        Raises:
            Exception: What the model raises, with its own traceback.
            ModelError: What a client would be told for another reason, such as an error in a response.
        """
        call = self._submit(inputs, **request)
        return call.all() if self.decoupled else call.one()

    def run_all(self, many: Iterable[Inputs], **request: Any) -> list[Any]:
        """Runs requests at the same time, so that they may share batches.

        Args:
            many: The inputs of each.
            **request: The same as of `stream`, for all of them.

        Returns:
            For each what `run` returns, or the exception that it would raise.
        """
        calls = [self._submit(inputs, may_lead=False, **request) for inputs in many]
        results: list[Any] = []
        for call in calls:
            try:
                results.append(call.all() if self.decoupled else call.one())
            except Exception as error:
                results.append(error)
        return results

    def stream(self, inputs: Inputs, **request: Any) -> Iterator[Outputs]:
        """Runs a request, and gives its responses as they come; closing the iterator cancels it.

        Args:
            inputs: Its inputs.
            **request: ``outputs``, names of those wanted; ``parameters``; ``request_id``; ``sequence_id``,
                ``sequence_start`` and ``sequence_end``; ``priority``; ``timeout_us``; ``deadline_s``, seconds
                after which nobody waits any more.

        Raises:
            Exception: As in `run`, when it is its turn.
        """
        call = self._submit(inputs, may_lead=False, **request)
        try:
            yield from call
        finally:
            call.cancel()

    def close(self) -> None:
        """Waits for requests under way, and unloads the model and its stand-ins.

        Raises:
            Exception: What its `finalize` raises.
        """
        self._stack.close()
        error, self._failures.finalize = self._failures.finalize, None
        if error is not None:
            raise error

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._stack.close()  # what went wrong first is what matters

    def _submit(
        self,
        inputs: Inputs,
        *,
        outputs: Iterable[str] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        request_id: str = "",
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
        priority: int = 0,
        timeout_us: int = 0,
        deadline_s: float | None = None,
        may_lead: bool = True,
    ) -> _Call:
        call = _Call(self._repository, self._failures)
        now = monotonic_ns()
        request = call.request = InferenceRequest(
            self.name,
            str(self.version),
            tensors_of(inputs, self._model.spec.inputs),
            call.take,
            now,
            request_id,
            None if outputs is None else tuple(outputs),
            dict(parameters) if parameters else None,
        )
        request.correlation_id = sequence_id
        request.sequence_start = sequence_start
        request.sequence_end = sequence_end
        request.priority = priority
        request.timeout_us = timeout_us
        request.responses_wait = True
        if deadline_s is not None:
            request.deadline_ns = now + round(deadline_s * 1e9)
        try:
            led = self._repository.calls.submit(request, may_lead, self._model)
        except ConchError as error:
            raise as_model_error(error) from None
        if led is not None:
            led.lead()  # on this thread: a debugger, or a profiler, is at home here
        return call


class _Call:
    """One request under way."""

    request: InferenceRequest

    def __init__(self, repository: Repository, failures: Failures) -> None:
        self._repository = repository
        self._failures = failures
        self._queue: SimpleQueue[InferenceResponse | None] = SimpleQueue()
        self._ended = threading.Event()

    def take(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Takes a response; its responder."""
        if response is not None:
            self._queue.put(response)
        if final:
            self._ended.set()
            self._queue.put(None)

    def __iter__(self) -> Iterator[Outputs]:
        while (response := self._queue.get()) is not None:
            if response.error is not None:
                raise self._failures.behind(response.error) or as_model_error(response.error)
            yield outputs_of(response)

    def all(self) -> list[Outputs]:
        """All responses."""
        responses: list[Outputs] = []
        try:
            responses.extend(self)  # one by one, so those before an error are there
        except Exception as error:
            if hasattr(error, "responses"):
                error.responses = responses
            raise
        return responses

    def one(self) -> Outputs:
        """The one response."""
        (response,) = self.all()
        return response

    def cancel(self) -> None:
        """Says that nobody waits any more, unless it has ended."""
        if not self._ended.is_set():
            self._repository.calls.cancel(self.request)
