"""One instance of a Python model: runs batches through its `execute`.

Threads: `execute` runs on the instance's thread; a coroutine `execute` on the instance's event loop.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import ExitStack
from threading import get_ident
from typing import Any, ClassVar

from conch.backends.gather import Padder
from conch.backends.python.api.pb_errors import CallsEndedError, TritonModelException
from conch.backends.python.api.pb_request import ReceivedRequest
from conch.backends.python.api.pb_response import Converter, InferenceResponse
from conch.backends.python.api.response_sender import SenderContext
from conch.backends.python.calls.call_context import CallContext
from conch.backends.python.runtime.concurrency_limit import ConcurrencyLimit, max_concurrency
from conch.backends.python.runtime.event_loop import EventLoop, TaskEnd
from conch.backends.python.runtime.generator_execution import GeneratorExecution
from conch.backends.python.runtime.model_adapters import adapted
from conch.backends.python.runtime.module_loading import ModelCode
from conch.backends.python.runtime.readiness_check import ReadinessCheck
from conch.backends.python.runtime.tracebacks import describe, failure_text, model_exc_info
from conch.core.backend import BackendInstance
from conch.core.bls import ServerCalls
from conch.core.clock import monotonic_ns
from conch.core.current_span import enter_span
from conch.core.errors import (
    CancelledError,
    ConchError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
    message_of,
)
from conch.core.execution.placement import Placement
from conch.core.execution.shaping import Shaper
from conch.core.request import InferenceResponse as CoreResponse
from conch.core.response_errors import unsendable
from conch.core.scheduling.scheduler import Batch
from conch.core.scheduling.sequence.implicit_state import SequenceStates
from conch.core.spec import ModelSpec

log = logging.getLogger(__name__)

FAILED = "Failed to process the request(s) for model '%s', message: %s: %s"
"""Log format of a failed execution; the exception is attached."""

_CPU_ONLY = "FORCE_CPU_ONLY_INPUT_TENSORS"


def load_code(
    name: str, version_directory: Any, file_name: str, owner: object | None = None
) -> tuple[ModelCode, type[Any]]:
    """Loads a model's file; returns its code, and the class that runs it: its own, or an add-on's.

    Raises:
        ConchError: It is missing, fails, or has no `TritonPythonModel` with `execute` or methods that an
            add-on knows.
    """
    path = version_directory / file_name
    if not path.is_file():
        raise UnavailableError(
            f"Failed to preinitialize Python stub: Python model file not found in '{path}'"
        )
    try:
        code = ModelCode(name, version_directory, file_name, owner)
    except BaseException as error:  # boundary: the model's code, which may raise anything
        log.error("model '%s' can't be imported", name, exc_info=model_exc_info(error))
        raise InternalError(describe(error)) from error
    model_class = getattr(code.module, "TritonPythonModel", None)
    if model_class is None:
        code.close()
        module = f"{version_directory.name}.{path.stem}"
        raise InternalError(f"AttributeError: module '{module}' has no attribute 'TritonPythonModel'")
    try:
        runs = model_class if hasattr(model_class, "execute") else adapted(model_class)
    except BaseException as error:  # boundary: an add-on's code
        code.close()
        log.error("class of model '%s' can't be adapted", name, exc_info=error)
        raise InternalError(describe(error)) from error
    if runs is None:
        code.close()
        raise InternalError(f"Python model {path} does not implement `execute` method.")
    return code, runs


def open_instance(
    spec: ModelSpec,
    placement: Placement,
    calls: ServerCalls | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> PythonInstance:
    """Loads a model and initializes an instance.

    Args:
        spec: The model version.
        placement: Device of the instance.
        calls: The server for BLS; None if the model cannot call it.
        note: Receives contradictions between the model and its config.

    Raises:
        ConchError: The model cannot be loaded, or `initialize` failed.
    """
    only_cpu_inputs(spec)
    caller = CallContext(calls, placement.name, spec)
    caller.opening = True
    with ExitStack() as undo:
        undo.callback(caller.close)
        code, model_class = load_code(spec.name, spec.version_directory, spec.model_file, caller)
        undo.pop_all()
        undo.callback(code.close)
        undo.callback(caller.close)  # first: threads of the model may use its modules
        max_concurrency(spec, _is_concurrent(model_class.execute))
        try:
            model = model_class()
            if hasattr(model, "initialize"):
                model.initialize(_arguments(spec, placement))
        except BaseException as error:  # boundary: the model's code, which may raise anything
            log.error("initialize of model '%s' failed", placement.name, exc_info=model_exc_info(error))
            raise InternalError(describe(error)) from error
        undo.pop_all()
    caller.opening = False
    kind = AsyncPythonInstance if _is_concurrent(model.execute) else PythonInstance
    return kind(spec, placement, code, model, caller, note)


def _is_concurrent(execute: Any) -> bool:
    """True if several calls of `execute` can run at once."""
    return inspect.iscoroutinefunction(execute) or inspect.isasyncgenfunction(execute)


def only_cpu_inputs(spec: ModelSpec) -> bool:
    """True (the default) if the model wants all inputs in host memory.

    Raises:
        InvalidArgumentError: The parameter is neither 'yes' nor 'no'.
    """
    value = spec.parameters.get(_CPU_ONLY, "yes")
    if value not in ("yes", "no"):
        raise InvalidArgumentError(
            f"model '{spec.name}': the value of parameter '{_CPU_ONLY}' must be 'yes' or 'no', not '{value}'"
        )
    return value == "yes"


def _arguments(spec: ModelSpec, placement: Placement) -> dict[str, str]:
    return {
        "model_config": json.dumps(dict(spec.config)),
        "model_instance_kind": placement.kind,
        "model_instance_name": placement.name,
        "model_instance_device_id": str(placement.device_id),
        "model_repository": str(spec.directory),
        "model_version": str(spec.version),
        "model_name": spec.name,
    }


class PythonInstance(BackendInstance):
    """Runs batches on a model object, on the calling thread.

    Attributes:
        starts_requests: True if `execute` only starts requests, which are answered later: its coroutines are
            not limited, or the model says so by its own attribute ``answers_later``.
    """

    def __init__(
        self,
        spec: ModelSpec,
        placement: Placement,
        code: ModelCode,
        model: Any,
        caller: CallContext,
        note: Callable[[str], None],
    ) -> None:
        self._name = placement.name
        self._pid = os.getpid()
        self._caller = caller
        self._code = code
        self._model = model
        self._execute = model.execute
        self._decoupled = spec.decoupled
        self._converter = Converter(spec, note)
        sequence = spec.sequence
        self._iterative = sequence is not None and sequence.iterative
        concurrent = _is_concurrent(model.execute)
        self._limit = max_concurrency(spec, concurrent)
        later = concurrent and self._limit is None
        self.starts_requests = spec.decoupled and (later or getattr(model, "answers_later", False))
        self._context = SenderContext(
            self._converter,
            Shaper(spec),
            spec.decoupled,
            placement.name,
            tuple(tensor.name for tensor in spec.outputs),
            SequenceStates(spec) if sequence is not None and sequence.states else None,
            reschedules=self._limit == 1 or not concurrent,
            takes_gpu_tensors=not only_cpu_inputs(spec),
        )
        self._padder = None if spec.padding is None else Padder(spec.padding)
        self._loop: EventLoop | None = None
        self._concurrency: ConcurrencyLimit | None = None
        self._check: ReadinessCheck | None = None
        if hasattr(model, "is_ready"):
            if inspect.iscoroutinefunction(model.is_ready):
                self._loop = EventLoop(self._name)
            self.readiness = self._check = ReadinessCheck(self._name, model.is_ready, self._loop)

    def execute(self, batch: Batch) -> Sequence[CoreResponse | None] | None:
        """Runs a batch."""
        context, caller = self._context, self._caller
        caller.running, caller.thread = batch, get_ident()
        requests = [ReceivedRequest(core, batch, context) for core in batch.requests]
        if self._iterative:
            _resume(requests)
        if self._decoupled:
            for request in requests:
                # Created now, so that a request that the model forgets is completed too.
                request.get_response_sender()
        if self._padder is not None:
            for request in requests:
                request._pad(self._padder)
        batch.compute_input_end_ns = monotonic_ns()
        span = enter_span(batch.requests)
        try:
            returned = self._execute(requests)
            if type(returned) is not list and returned is not None:
                outcome = self._run_returned(batch, requests, returned)
                if outcome is None:
                    return None if self._decoupled else [None] * len(requests)
                returned, error = outcome
                if error is not None:
                    raise error
            return self._finish_batch(batch, requests, returned)
        except BaseException as error:  # a model may raise anything; the thread must survive
            if os.getpid() != self._pid:
                raise  # a child process that the model forked
            failure = self._failure(requests, error)
            if self._decoupled or any(request._sender is None for request in requests):
                raise failure from None
            return [None] * len(requests)  # their senders have failed those without a response
        finally:
            caller.running = None
            if span is not None:
                span.leave()

    def leave_shaping(self, spec: ModelSpec) -> None:
        """Leaves responses of senders unshaped; the receiver shapes them for clients."""
        self._context.leave_shaping(spec)

    def when_alive(self, answer: Callable[[], None]) -> None:
        """Calls `answer` from the loop of the model's coroutines, or at once if it has none."""
        loop = self._loop
        if loop is None:
            answer()
        else:
            loop.call(answer)

    def close(self) -> None:
        """Calls the model's `finalize`, whose errors are only logged, and unloads its modules."""
        try:
            if self._check is not None:
                self._check.close()
            if self._concurrency is not None and not self._decoupled:
                self._concurrency.wait()
            if self._loop is not None:
                self._loop.close()
            self._caller.finalizing = True
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        except BaseException as error:  # boundary: the model's code
            log.error("finalize of model '%s' failed", self._name, exc_info=model_exc_info(error))
        finally:
            self.readiness = self._check = None
            self._caller.close()
            del self._model, self._execute
            self._code.close()

    def _run_returned(self, batch: Batch, requests: list[ReceivedRequest], returned: Any) -> TaskEnd | None:
        """Runs a returned awaitable or generator; None for a coroutine that is still running."""
        if isinstance(returned, Generator):
            return GeneratorExecution(requests, self._decoupled).run(returned), None
        if isinstance(returned, AsyncGenerator):
            returned = GeneratorExecution(requests, self._decoupled).run_async(returned)
        if not inspect.isawaitable(returned):
            return returned, None
        if self._concurrency is None:
            self._loop = self._loop or EventLoop(self._name)
            self._concurrency = ConcurrencyLimit(self._loop, self._limit)
        with self._caller.coroutine(batch):
            outcome = self._concurrency.run(
                returned, lambda outcome: self._coroutine_ended(batch, requests, outcome)
            )
        if outcome is None and self._decoupled:
            batch.compute_output_start_ns = monotonic_ns()
        return outcome

    def _finish_batch(
        self, batch: Batch, requests: list[ReceivedRequest], returned: Any
    ) -> Sequence[CoreResponse | None] | None:
        """The batch's result from the return value of `execute`."""
        batch.compute_output_start_ns = monotonic_ns()
        if self._decoupled:
            self._check_decoupled(returned)
            responses = None
        else:
            responses = self._responses(requests, returned)
        if self._context.rescheduled:
            self._context.rescheduled = False
            _pause(requests)
        return responses

    def _coroutine_ended(self, batch: Batch, requests: list[ReceivedRequest], outcome: TaskEnd) -> None:
        """Completes the requests of a coroutine that outlived `execute`."""
        returned, error = outcome
        responses: Sequence[CoreResponse | None] | None
        try:
            if error is not None:
                raise error
            responses = self._finish_batch(batch, requests, returned)
        except BaseException as raised:  # boundary: the model's coroutine
            failure = self._failure(requests, raised)
            responses = [CoreResponse([], failure) for _ in requests]
        for request, response in zip(requests, responses or (), strict=False):
            if response is None:
                continue
            try:
                self._context.finish(request._core, response)
                request._core.respond(response, True)
            except Exception as raised:  # boundary: outputs of models, which may not match their shapes
                request._core.fail(unsendable(self._name, response, raised))

    def _responses(self, requests: list[ReceivedRequest], returned: Any) -> list[CoreResponse | None]:
        if type(returned) is not list:
            returned = self._as_list(requests, returned)
        if len(returned) != len(requests):
            raise TritonModelException(
                f"Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:"
                f"{len(returned)}\n"
            )
        if self._context.rescheduled:
            _check_rescheduled(requests, returned)
        convert, other = self._converter.convert, self._convert_other
        return [
            convert(request._core, response)
            if type(response) is InferenceResponse and request._sender is None
            else other(request, response)
            for request, response in zip(requests, returned, strict=True)
        ]

    def _as_list(self, requests: list[ReceivedRequest], returned: Any) -> list[Any]:
        if isinstance(returned, list):
            return returned
        if returned is None and all(
            request._sender is not None or request._core.rescheduled for request in requests
        ):
            return [None] * len(requests)
        raise TritonModelException(f"Expected a list in the execute return, found type '{type(returned)}'.")

    def _convert_other(self, request: ReceivedRequest, response: Any) -> CoreResponse | None:
        """Converts a list entry that is not a plain response, or whose request has a sender."""
        sender = request._sender
        if response is None and (sender is not None or request._core.rescheduled or request._core.filler):
            return None  # its sender completes it, now, later or after another run
        if not isinstance(response, InferenceResponse):
            raise TritonModelException(
                f"Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(response)}'."
            )
        if sender is None:
            return self._converter.convert(request._core, response)
        sender.send(response, 1)
        return None

    def _check_decoupled(self, returned: Any) -> None:
        if returned is not None:
            raise TritonModelException(
                f"Python model '{self._name}' is using the decoupled mode and the execute function must "
                f"return None."
            )

    def _failure(self, requests: list[ReceivedRequest], error: BaseException) -> ConchError:
        """Logs a failed execution, fails requests that have senders, returns the error for the rest."""
        message = failure_text(self._name, error)
        ended = isinstance(error, CallsEndedError)
        failure: ConchError = CancelledError(message_of(error)) if ended else InternalError(message)
        if not ended:
            log.error(
                FAILED, self._name, type(error).__name__, message_of(error), exc_info=model_exc_info(error)
            )
        self._context.rescheduled = False
        for request in requests:
            if request._sender is not None:
                request._sender._end(failure)
        return failure


def _check_rescheduled(requests: list[ReceivedRequest], returned: list[Any]) -> None:
    for request, response in zip(requests, returned, strict=True):
        if request._core.rescheduled and response is not None:
            raise TritonModelException(
                f"Expected a None object in the execute function return list for reschduled request, found "
                f"type '{type(response)}'."
            )


def _pause(requests: list[ReceivedRequest]) -> None:
    """Keeps the senders of rescheduled requests, which the model may go on using."""
    for request in requests:
        if request._core.rescheduled:
            request._core.backend_state = request._sender


def _resume(requests: list[ReceivedRequest]) -> None:
    """Restores the senders of rescheduled requests."""
    for request in requests:
        request._sender = getattr(request._core, "backend_state", None)
        request._core.backend_state = None


class AsyncPythonInstance(PythonInstance):
    """An instance whose `execute` is a coroutine: the calling thread only waits, so nothing runs inline."""

    allows_inline: ClassVar[bool] = False
