"""One instance of a Python model: its object, and how batches go through its `execute`."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from threading import get_ident
from typing import Any, ClassVar

from conch.backends.gather import Padder
from conch.backends.python.api.pb_errors import CallsEndedError, TritonModelException
from conch.backends.python.api.pb_request import ReceivedRequest
from conch.backends.python.api.pb_response import Converter, InferenceResponse
from conch.backends.python.api.response_sender import SenderContext
from conch.backends.python.calls.call_context import CallContext
from conch.backends.python.runtime.concurrency_limit import ConcurrencyLimit, max_concurrency
from conch.backends.python.runtime.event_loop import EventLoop, Outcome
from conch.backends.python.runtime.generator_execution import GeneratorExecution
from conch.backends.python.runtime.module_loading import ModelCode
from conch.backends.python.runtime.readiness_check import ReadinessCheck
from conch.backends.python.runtime.tracebacks import describe, failure_text, model_exc_info
from conch.core.backend import BackendInstance
from conch.core.bls import ServerCalls
from conch.core.clock import monotonic_ns
from conch.core.errors import (
    CancelledError,
    ConchError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
    as_conch_error,
    message_of,
)
from conch.core.execution.placement import Placement
from conch.core.execution.shaping import Shaper
from conch.core.request import InferenceResponse as CoreResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.scheduling.sequence.implicit_state import SequenceStates
from conch.core.spec import ModelSpec

log = logging.getLogger(__name__)

FAILED = "Failed to process the request(s) for model '%s', message: %s: %s"
"""How the log tells of a failed execution; the exception comes with it, in its own words."""

_CPU_ONLY = "FORCE_CPU_ONLY_INPUT_TENSORS"


def load_code(name: str, version_directory: Any, file_name: str, owner: object | None = None) -> ModelCode:
    """Loads a model's file.

    Args:
        name: The model's name.
        version_directory: Where the file is.
        file_name: The name of the file.
        owner: On whose behalf its modules run.

    Raises:
        ConchError: It is missing, fails, or has no `TritonPythonModel` that can execute.
    """
    path = version_directory / file_name
    if not path.is_file():
        raise UnavailableError(
            f"Failed to preinitialize Python stub: Python model file not found in '{path}'"
        )
    try:
        code = ModelCode(name, version_directory, file_name, owner)
    except BaseException as error:
        log.error("model '%s' can't be imported", name, exc_info=model_exc_info(error))
        raise InternalError(describe(error)) from error
    model_class = getattr(code.module, "TritonPythonModel", None)
    if model_class is None:
        code.close()
        module = f"{version_directory.name}.{path.stem}"
        raise InternalError(f"AttributeError: module '{module}' has no attribute 'TritonPythonModel'")
    if not hasattr(model_class, "execute"):
        code.close()
        raise InternalError(f"Python model {path} does not implement `execute` method.")
    return code


def open_instance(
    spec: ModelSpec,
    placement: Placement,
    calls: ServerCalls | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> PythonInstance:
    """Loads a model and makes an instance of it.

    Args:
        spec: The model version.
        placement: Where the instance is.
        calls: The server, for the model's calls; None where it can't make any.
        note: Takes what the model does against its config.

    Raises:
        ConchError: The model can't be loaded, or its `initialize` failed.
    """
    only_cpu_inputs(spec)
    caller = CallContext(calls, placement.name, spec)
    caller.opening = True
    try:
        code = load_code(spec.name, spec.version_directory, spec.model_file, caller)
    except BaseException:
        caller.close()
        raise
    try:
        max_concurrency(spec, _is_concurrent(code.module.TritonPythonModel.execute))
    except BaseException:
        caller.close()
        code.close()
        raise
    try:
        model = code.module.TritonPythonModel()
        if hasattr(model, "initialize"):
            model.initialize(_arguments(spec, placement))
    except BaseException as error:
        log.error("initialize of model '%s' failed", placement.name, exc_info=model_exc_info(error))
        caller.close()
        code.close()
        raise InternalError(describe(error)) from error
    caller.opening = False
    kind = AsyncPythonInstance if _is_concurrent(model.execute) else PythonInstance
    return kind(spec, placement, code, model, caller, note)


def _is_concurrent(execute: Any) -> bool:
    """Whether several calls of a model's `execute` can be under way at the same time."""
    return inspect.iscoroutinefunction(execute) or inspect.isasyncgenfunction(execute)


def only_cpu_inputs(spec: ModelSpec) -> bool:
    """Whether the model wants all inputs in host memory, as those that do not say otherwise do.

    Raises:
        InvalidArgumentError: It says neither.
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
    """Runs batches on a model's object, on the thread that calls."""

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
        self._flights: ConcurrencyLimit | None = None
        self._check: ReadinessCheck | None = None
        if hasattr(model, "is_ready"):
            if inspect.iscoroutinefunction(model.is_ready):
                self._loop = EventLoop(self._name)
            self.readiness = self._check = ReadinessCheck(self._name, model.is_ready, self._loop)

    def execute(self, batch: Batch) -> Sequence[CoreResponse | None] | None:
        """Runs a batch; see `BackendInstance.execute`."""
        context, caller = self._context, self._caller
        caller.running, caller.thread = batch, get_ident()
        requests = [ReceivedRequest(core, batch, context) for core in batch.requests]
        if self._iterative:
            _resume(requests)
        if self._decoupled:
            for request in requests:
                # Made now, so that a request the model forgets altogether is answered too.
                request.get_response_sender()
        if self._padder is not None:
            for request in requests:
                request._pad(self._padder)
        batch.compute_input_end_ns = monotonic_ns()
        try:
            returned = self._execute(requests)
            if type(returned) is not list and returned is not None:
                outcome = self._driven(batch, requests, returned)
                if outcome is None:
                    return None if self._decoupled else [None] * len(requests)
                returned, error = outcome
                if error is not None:
                    raise error
            return self._returned(batch, requests, returned)
        except BaseException as error:  # the thread is the server's, whatever a model raises
            if os.getpid() != self._pid:
                raise  # a process that the model has forked, and that ends
            failure = self._failure(requests, error)
            if self._decoupled or any(request._sender is None for request in requests):
                raise failure from None
            return [None] * len(requests)  # their senders have said so, to those that had no answer yet
        finally:
            caller.running = None

    def leave_shaping(self, spec: ModelSpec) -> None:
        """Leaves what senders send as the model made it: whoever gets it gives it its shape for clients."""
        self._context.leave_shaping(spec)

    def close(self) -> None:
        """Calls the model's `finalize`, whose errors are only logged, and forgets its modules."""
        try:
            if self._check is not None:
                self._check.close()
            if self._flights is not None and not self._decoupled:
                self._flights.wait()
            if self._loop is not None:
                self._loop.close()
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        except BaseException as error:
            log.error("finalize of model '%s' failed", self._name, exc_info=model_exc_info(error))
        finally:
            self.readiness = self._check = None
            self._caller.close()
            del self._model, self._execute
            self._code.close()

    def _driven(self, batch: Batch, requests: list[ReceivedRequest], returned: Any) -> Outcome | None:
        """What an awaitable or a generator comes to; None for a coroutine that goes on."""
        if isinstance(returned, Generator):
            return GeneratorExecution(requests, self._decoupled).run(returned), None
        if isinstance(returned, AsyncGenerator):
            returned = GeneratorExecution(requests, self._decoupled).run_async(returned)
        if not inspect.isawaitable(returned):
            return returned, None
        if self._flights is None:
            self._loop = self._loop or EventLoop(self._name)
            self._flights = ConcurrencyLimit(self._loop, self._limit)
        with self._caller.coroutine(batch):
            outcome = self._flights.run(returned, lambda outcome: self._ended(batch, requests, outcome))
        if outcome is None and self._decoupled:
            batch.compute_output_start_ns = monotonic_ns()
        return outcome

    def _returned(
        self, batch: Batch, requests: list[ReceivedRequest], returned: Any
    ) -> Sequence[CoreResponse | None] | None:
        """What the batch comes to when `execute` has ended."""
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

    def _ended(self, batch: Batch, requests: list[ReceivedRequest], outcome: Outcome) -> None:
        """Answers the requests of a coroutine that went on after its batch was handed back."""
        returned, error = outcome
        responses: Sequence[CoreResponse | None] | None
        try:
            if error is not None:
                raise error
            responses = self._returned(batch, requests, returned)
        except BaseException as raised:
            failure = self._failure(requests, raised)
            responses = [CoreResponse([], failure) for _ in requests]
        for request, response in zip(requests, responses or (), strict=False):
            if response is None:
                continue
            try:
                self._context.finish(request._core, response)
                request._core.respond(response, True)
            except Exception as raised:  # outputs whose shapes do not hold what they say
                log.exception("a response of model '%s' could not be handed over", self._name)
                request._core.fail(as_conch_error(raised))

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
        convert, other = self._converter.convert, self._other
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

    def _other(self, request: ReceivedRequest, response: Any) -> CoreResponse | None:
        """An entry of the returned list that is not simply a response, or whose request has a sender."""
        sender = request._sender
        if response is None and (sender is not None or request._core.rescheduled or request._core.filler):
            return None  # it is answered through the sender, now or later, or when it has run again
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
        """Logs a failed execution, ends what senders hold, and gives the error for all other requests."""
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
    """Keeps the senders of requests that run again: the model may go on using them."""
    for request in requests:
        if request._core.rescheduled:
            request._core.kept = request._sender


def _resume(requests: list[ReceivedRequest]) -> None:
    """Gives requests that run again the senders that they had."""
    for request in requests:
        request._sender = getattr(request._core, "kept", None)
        request._core.kept = None


class AsyncPythonInstance(PythonInstance):
    """An instance whose `execute` is a coroutine: the calling thread only waits, so it does not lead."""

    allows_inline: ClassVar[bool] = False
