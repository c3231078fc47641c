"""`conch.testing.load` and the loaded model.

A client's error holds only a text; the log record of the failure holds the exception, found by that text.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Unpack

from conch.backends.python.runtime.tracebacks import describe, failure_text, model_exc_info
from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError, DeadlineExceededError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.servable import Servable
from conch_testing.conversion import Outputs, Request, as_model_error, make_request, outputs_of, tensors_of
from conch_testing.mock_models import Function
from conch_testing.model_repository import Placement, Repository

Inputs = Mapping[str, Any]
"""Arrays by name, with the batch dimension where the model has one."""

Stand = Function | str | Path
"""Replacement of another model: a function or a model directory."""


def run(
    directory: str | Path,
    inputs: Inputs,
    *,
    models: Mapping[str, Stand] | None = None,
    config: Mapping[str, Any] | None = None,
    version: int | None = None,
    placement: Placement = "in_process",
    backend_directory: str | Path | None = None,
    **request: Unpack[Request],
) -> Any:
    """Loads a model, runs one request and unloads it; see `load`, `LoadedModel.run` and `Request`."""
    with load(
        directory,
        models=models,
        config=config,
        version=version,
        placement=placement,
        backend_directory=backend_directory,
    ) as model:
        return model.run(inputs, **request)


def load(
    directory: str | Path,
    *,
    models: Mapping[str, Stand] | None = None,
    config: Mapping[str, Any] | None = None,
    version: int | None = None,
    placement: Placement = "in_process",
    backend_directory: str | Path | None = None,
) -> LoadedModel:
    """Loads a model as a server would; unload it with `LoadedModel.close`, or by leaving its ``with`` block.

    Args:
        directory: The model's directory with its versions and optional config.
        models: Replacements, by name, of the models that it calls: functions of arrays, generator functions
            for decoupled models, or model directories.
        config: Config fields to replace, in JSON form: ``{"max_batch_size": 4}``.
        version: Its version; the newest if None.
        placement: In process, where it can be debugged, or in a worker process, where backends that are
            compiled for Triton always run.
        backend_directory: Directory of backends that are not installed, such as compiled ones, besides those
            that lie beside the model; None for Triton's.

    Raises:
        Exception: An exception of its module or its `initialize`.
        ModelError: It cannot be loaded for another reason.
        FileNotFoundError: The directory or version does not exist.
    """
    stack = ExitStack()
    with stack:
        failures = stack.enter_context(ExceptionCapture())
        backends = None if backend_directory is None else Path(backend_directory)
        repository = Repository(placement, backends)
        stack.callback(repository.close)
        try:
            for name, other in (models or {}).items():
                repository.add(name, other)
            model = repository.load(Path(directory), version, config)
        except ConchError as error:
            raise failures.exception_for(error) or as_model_error(error) from None
        return LoadedModel(model, repository, failures, stack.pop_all())
    raise AssertionError("it has returned or raised")


class LoadedModel:
    """A model that takes requests; created by `load`.

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
        """True if a request may have any number of responses."""
        return self._model.spec.decoupled

    def run(self, inputs: Inputs, **request: Unpack[Request]) -> Any:
        """Runs a request.

        Args:
            inputs: Its inputs.
            **request: Its other options, see `Request`.

        Returns:
            `Outputs`; for a decoupled model a list of them, one per response.

        Raises:
            Exception: An exception of the model, with its traceback.
            ModelError: Any other error that a client would receive, including a missed deadline.
        """
        call = self._submit(inputs, **request)
        return call.all() if self.decoupled else call.one()

    def run_all(self, many: Iterable[Inputs], **request: Unpack[Request]) -> list[Any]:
        """Runs requests concurrently, so that they may share batches.

        Args:
            many: The inputs of each request.
            **request: Options of all requests, see `Request`.

        Returns:
            Per request the result of `run`, or the exception that it would raise.
        """
        calls = [self._submit(inputs, may_claim=False, **request) for inputs in many]
        results: list[Any] = []
        for call in calls:
            try:
                results.append(call.all() if self.decoupled else call.one())
            except Exception as error:  # of user code
                results.append(error)
        return results

    def stream(self, inputs: Inputs, **request: Unpack[Request]) -> Iterator[Outputs]:
        """Runs a request and yields its responses as they arrive; closing the iterator cancels it.

        Args:
            inputs: Its inputs.
            **request: Its other options, see `Request`.

        Raises:
            Exception: As in `run`, in the order of the responses.
        """
        call = self._submit(inputs, may_claim=False, **request)
        try:
            yield from call
        finally:
            call.cancel()

    def close(self) -> None:
        """Waits for running requests, then unloads the model and its mocks.

        Takes some seconds if an abandoned request is still running; if it does not end, the model stays
        loaded and is not finalized, unless it is closed again once the request has ended.

        Raises:
            Exception: An exception of its `finalize`.
        """
        self._stack.close()
        if self._repository.is_left:
            self._stack.callback(self._repository.close)
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
            self._stack.close()  # the first error matters

    def _submit(self, inputs: Inputs, may_claim: bool = True, **given: Unpack[Request]) -> _Call:
        call = _Call(self._repository, self._failures)
        tensors = tensors_of(inputs, self._model.spec.inputs)
        call.request = make_request(self.name, str(self.version), tensors, call.take, given)
        # Inline execution cannot be abandoned at a deadline.
        may_claim = may_claim and call.request.deadline_ns is None
        try:
            led = self._repository.calls.submit(call.request, may_claim, self._model)
        except ConchError as error:
            raise as_model_error(error) from None
        if led is not None:
            led.run_inline()  # on this thread, where debuggers and profilers work best
        return call


class _Call:
    """One request in flight."""

    request: InferenceRequest

    def __init__(self, repository: Repository, failures: ExceptionCapture) -> None:
        self._repository = repository
        self._failures = failures
        self._queue: SimpleQueue[InferenceResponse | None] = SimpleQueue()
        self._ended = threading.Event()

    def take(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Responder of the request."""
        if final:
            self._ended.set()
        if request.deadline_ns is not None and monotonic_ns() >= request.deadline_ns:
            return  # otherwise an endless stream would ignore its deadline
        if response is not None:
            self._queue.put(response)
        if final:
            self._queue.put(None)

    def __iter__(self) -> Iterator[Outputs]:
        while (response := self._next()) is not None:
            if response.error is not None:
                raise self._failures.exception_for(response.error) or as_model_error(response.error)
            yield outputs_of(response)

    def all(self) -> list[Outputs]:
        """All responses."""
        responses: list[Outputs] = []
        try:
            responses.extend(self)  # one by one, to keep those before an error
        except Exception as error:  # of user code
            if hasattr(error, "responses"):
                error.responses = responses
            raise
        return responses

    def one(self) -> Outputs:
        """The one response."""
        (response,) = self.all()
        return response

    def cancel(self) -> None:
        """Cancels the request unless it has completed."""
        if not self._ended.is_set():
            self._repository.calls.cancel(self.request)

    def _next(self) -> InferenceResponse | None:
        """The next response; None after the last, an error at the deadline."""
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


LOGGER = "conch.backends.python"
"""Parent of the loggers that record exceptions of models."""

_MOST = 100


class ExceptionCapture(logging.Handler):
    """Keeps the latest logged exceptions of models while entered.

    Attributes:
        finalize: The latest exception of a `finalize`.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._found = threading.Lock()
        # By the client's error text; of equal texts the newest.
        self._exceptions: dict[str, tuple[BaseException, TracebackType | None]] = {}
        self.finalize: BaseException | None = None
        self._logger = logging.getLogger(LOGGER)

    def __enter__(self) -> ExceptionCapture:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Stores the exception of a record."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not isinstance(record.args, tuple) or not record.args:
            return
        if record.getMessage().startswith("finalize of"):
            self.finalize = error
        trace = model_exc_info(error)[2]
        with self._found:
            for text in (failure_text(str(record.args[0]), error), describe(error)):
                self._exceptions.pop(text, None)
                self._exceptions[text] = error, trace
            while len(self._exceptions) > _MOST:
                del self._exceptions[next(iter(self._exceptions))]

    def exception_for(self, shown: ConchError) -> BaseException | None:
        """The exception behind an error, with its model frames; None if unknown."""
        with self._found:
            error, trace = self._exceptions.get(shown.message, (None, None))
        return None if error is None else error.with_traceback(trace)
