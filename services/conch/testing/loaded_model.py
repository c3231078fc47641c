"""A model that was loaded for a test, and what can be done with it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Unpack

from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError, DeadlineExceededError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.servable import Servable
from conch.testing.conversion import Outputs, Request, as_model_error, make_request, outputs_of, tensors_of
from conch.testing.exception_capture import ExceptionCapture
from conch.testing.mock_models import Function
from conch.testing.model_repository import Placement, Repository

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
    **request: Unpack[Request],
) -> Any:
    """Loads a model, runs one request and unloads it; see `load`, `LoadedModel.run` and `Request`."""
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
        failures = stack.enter_context(ExceptionCapture())
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

    def __init__(
        self, model: Servable, repository: Repository, failures: ExceptionCapture, stack: ExitStack
    ) -> None:
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

    def run(self, inputs: Inputs, **request: Unpack[Request]) -> Any:
        """Runs a request.

        Args:
            inputs: Its inputs.
            **request: What else it has, see `Request`.

        Returns:
            `Outputs`; of a decoupled model a list of them, one for each response.

        Raises:
            Exception: What the model raises, with its own traceback.
            ModelError: What a client would be told for another reason, such as an error in a response, or
                that there is no answer when its deadline passes.
        """
        call = self._submit(inputs, **request)
        return call.all() if self.decoupled else call.one()

    def run_all(self, many: Iterable[Inputs], **request: Unpack[Request]) -> list[Any]:
        """Runs requests at the same time, so that they may share batches.

        Args:
            many: The inputs of each.
            **request: What else all of them have, see `Request`.

        Returns:
            For each what `run` returns, or the exception that it would raise.
        """
        calls = [self._submit(inputs, may_claim=False, **request) for inputs in many]
        results: list[Any] = []
        for call in calls:
            try:
                results.append(call.all() if self.decoupled else call.one())
            except Exception as error:
                results.append(error)
        return results

    def stream(self, inputs: Inputs, **request: Unpack[Request]) -> Iterator[Outputs]:
        """Runs a request, and gives its responses as they come; closing the iterator cancels it.

        Args:
            inputs: Its inputs.
            **request: What else it has, see `Request`.

        Raises:
            Exception: As in `run`, when it is its turn.
        """
        call = self._submit(inputs, may_claim=False, **request)
        try:
            yield from call
        finally:
            call.cancel()

    def close(self) -> None:
        """Waits for requests under way, and unloads the model and its stand-ins.

        Where one was given up at its deadline, and goes on all the same, that takes some seconds; a model
        that goes on even then is left as it is, without its `finalize`.

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

    def _submit(self, inputs: Inputs, may_claim: bool = True, **given: Unpack[Request]) -> _Call:
        call = _Call(self._repository, self._failures)
        tensors = tensors_of(inputs, self._model.spec.inputs)
        call.request = make_request(self.name, str(self.version), tensors, call.take, given)
        # What runs on this thread can't be given up.
        may_claim = may_claim and call.request.deadline_ns is None
        try:
            led = self._repository.calls.submit(call.request, may_claim, self._model)
        except ConchError as error:
            raise as_model_error(error) from None
        if led is not None:
            led.run_inline()  # on this thread: a debugger, or a profiler, is at home here
        return call


class _Call:
    """One request under way."""

    request: InferenceRequest

    def __init__(self, repository: Repository, failures: ExceptionCapture) -> None:
        self._repository = repository
        self._failures = failures
        self._queue: SimpleQueue[InferenceResponse | None] = SimpleQueue()
        self._ended = threading.Event()

    def take(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Takes a response; its responder."""
        if final:
            self._ended.set()
        if request.deadline_ns is not None and monotonic_ns() >= request.deadline_ns:
            return  # or one that never ends would have no deadline
        if response is not None:
            self._queue.put(response)
        if final:
            self._queue.put(None)

    def __iter__(self) -> Iterator[Outputs]:
        while (response := self._next()) is not None:
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

    def _next(self) -> InferenceResponse | None:
        """The next response; None if there is none any more, an error if none comes before the deadline."""
        deadline = self.request.deadline_ns
        if deadline is None:
            return self._queue.get()
        try:
            return self._queue.get(timeout=max(0.0, (deadline - monotonic_ns()) / 1e9))
        except Empty:
            if not self._ended.is_set():
                self._repository.given_up.append(self.request)
                self.cancel()
            return InferenceResponse([], DeadlineExceededError("Deadline Exceeded"))
