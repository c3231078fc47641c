"""The backend `bound`: runs functions bound in a program; one backend per server.

Threads: each instance has one function and runs it on its own thread, one batch at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from conch.backends.gather import gather
from conch.backends.scatter import rows_of, scatter_for
from conch.core.backend import Backend, BackendInstance, BackendModel
from conch.core.clock import monotonic_ns
from conch.core.current_span import enter_span
from conch.core.errors import (
    ConchError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    message_of,
)
from conch.core.execution.placement import Placement
from conch.core.execution.shaping import Shaper
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec
from conch.core.tensor import Array
from conch_api.array_conversion import encoded
from conch_api.coroutines import Coroutines, resolve_awaitable
from conch_api.decorators import Function
from conch_api.frames import answered_columns
from conch_api.function_io import Request
from conch_api.function_repository import FILE, BoundModel
from conch_api.input_readers import InputReader
from conch_api.model_context import ModelContext, use_context

log = logging.getLogger(__name__)

_END = object()


class FunctionBackend(Backend):
    """The backend of bound functions.

    Args:
        find: Finds the functions with a key.
    """

    default_model_file = FILE
    uses_gpus = False  # the server does not manage what functions use

    def __init__(self, find: Callable[[str], BoundModel]) -> None:
        self._find = find

    def load(self, spec: ModelSpec) -> BackendModel:
        """Finds the functions of a model version."""
        for setting, there in (("CONCH_PADDING", spec.padding), ("batch_input", spec.batch_inputs)):
            if there:
                raise InvalidArgumentError(
                    f"model '{spec.name}': {setting} has no effect on bound functions, which get each "
                    f"request as it is; take it out of the model's config"
                )
        key = (spec.version_directory / spec.model_file).read_text()
        return BoundFunctions(spec, self._find(key))


class BoundFunctions(BackendModel):
    """The functions of one version."""

    def __init__(self, spec: ModelSpec, model: BoundModel) -> None:
        self._spec = spec
        self._model = model  # keeps the key alive
        self._lock = threading.Lock()
        self._free = list(model.functions)

    def create_instance(self, placement: Placement) -> BackendInstance:
        """Takes one of the functions."""
        with self._lock:
            if not self._free:
                count = len(self._model.functions)
                raise InvalidArgumentError(
                    f"model '{self._spec.name}' was bound with {count} function{'s' * (count > 1)}, which is "
                    f"how many instances it can have; bind a list with one for each instance"
                )
            function = self._free.pop(0)
        return FunctionInstance(self._spec, placement.name, function, self, self._model.readers)

    def give_back(self, function: Function) -> None:
        """Takes the function of an instance that closes."""
        with self._lock:
            self._free.append(function)


class FunctionInstance(BackendInstance):
    """Runs one function.

    Args:
        spec: The model version.
        name: The instance's name.
        function: Takes requests and returns results.
        functions: Gets the function back when the instance closes.
        readers: Readers of inputs by name.
    """

    allows_inline: ClassVar[bool] = False  # functions may take any time

    def __init__(
        self,
        spec: ModelSpec,
        name: str,
        function: Function,
        functions: BoundFunctions,
        readers: Mapping[str, InputReader],
    ) -> None:
        self._readers = readers
        self._name = spec.name
        self._function = function
        self._functions = functions
        self._decoupled = spec.decoupled
        self._batches = spec.max_batch_size > 0
        self._outputs = tuple(tensor.name for tensor in spec.model_outputs)
        self._texts = frozenset(tensor.name for tensor in spec.model_outputs if tensor.datatype == "BYTES")
        # Such an output may be one value for each row, without a dim of its own.
        self._columns = frozenset(
            tensor.name for tensor in spec.model_outputs if self._batches and tensor.dims == (1,)
        )
        self._brain_floats = frozenset(each.name for each in spec.model_inputs if each.datatype == "BF16")
        states = () if spec.sequence is None else spec.sequence.states
        self._states = frozenset(state.output_name for state in states)
        self._scatterer = scatter_for(spec)
        self._coroutines = Coroutines(name)
        self._shaper = Shaper(spec)
        self._context = ModelContext(
            name=spec.name,
            version=spec.version,
            instance=name,
            inputs=tuple(tensor.name for tensor in spec.inputs),
            outputs=tuple(tensor.name for tensor in spec.outputs),
            max_batch_size=spec.max_batch_size,
            preferred_batch_sizes=() if spec.batching is None else tuple(spec.batching.preferred_sizes),
            parameters=tuple(spec.parameters.items()),
            input_datatypes=tuple(tensor.datatype for tensor in spec.inputs),
            input_dims=tuple(tensor.dims for tensor in spec.inputs),
        )

    def execute(self, batch: Batch) -> Sequence[InferenceResponse | None] | None:
        """Runs a batch."""
        found = [self._read(batch, core) for core in batch.requests]
        batch.compute_input_end_ns = monotonic_ns()
        requests = [each for each in found if isinstance(each, Request)]
        if len(requests) < len(found):
            return self._execute_readable(batch, found)
        return self._run(batch, batch.requests, requests)

    def _execute_readable(
        self, batch: Batch, found: Sequence[Request | InvalidArgumentError]
    ) -> Sequence[InferenceResponse | None] | None:
        """Runs the requests of a batch that can be read; the others fail alone."""
        pairs = list(zip(batch.requests, found, strict=True))
        cores = [core for core, each in pairs if isinstance(each, Request)]
        requests = [each for each in found if isinstance(each, Request)]
        if self._decoupled:
            for core, each in pairs:
                if not isinstance(each, Request):
                    core.fail(each)
            return self._run(batch, cores, requests) if cores else None
        answers = iter((self._run(batch, cores, requests) or ()) if cores else ())
        return [next(answers) if isinstance(each, Request) else InferenceResponse([], each) for each in found]

    def _run(
        self, batch: Batch, cores: Sequence[InferenceRequest], requests: Sequence[Request]
    ) -> Sequence[InferenceResponse | None] | None:
        span = enter_span(cores)
        try:
            with use_context(self._context), self._coroutines.current():
                returned = resolve_awaitable(self._function(requests))
            batch.compute_output_start_ns = monotonic_ns()
            if self._decoupled:
                self._send(cores, returned if isinstance(returned, Iterator) else iter((returned,)))
                return None
            return [
                self._response(core, answer)
                for core, answer in zip(cores, self._checked(cores, returned), strict=True)
            ]
        except BaseException as error:  # of user code: the thread must survive
            raise self._shown(error) from error
        finally:
            if span is not None:
                span.leave()

    def close(self) -> None:
        """Returns the function."""
        self._coroutines.close()
        self._functions.give_back(self._function)

    def _read(self, batch: Batch, core: InferenceRequest) -> Request | InvalidArgumentError:
        """A request as the function gets it, or its error, which is of no other request."""
        request = self._seen(batch, core)
        if not self._readers:
            return request
        try:
            return request.with_more(
                {name: read(request.shared(name)) for name, read in self._readers.items() if name in request}
            )
        except InvalidArgumentError as error:
            return error

    def _seen(self, batch: Batch, core: InferenceRequest) -> Request:
        rows = rows_of(core) if self._batches else None
        arrays = gather(batch, [core])
        for name in self._brain_floats.intersection(arrays):
            arrays[name] = arrays[name].view("bfloat16")  # of ml_dtypes, as the function was bound
        for name, tensor in core.inputs.items():
            if tensor.shared:  # the client may let others write to its memory
                arrays[name] = arrays[name].view()
                arrays[name].flags.writeable = False

        def count(nbytes: int) -> None:
            batch.bytes_copied += nbytes

        return Request(arrays, core.parameters, core.id, rows, count)

    def _send(self, cores: Sequence[InferenceRequest], stream: Iterator[Any]) -> None:
        """Sends the items that a function yields; stops when all requests are abandoned."""
        while True:
            with use_context(self._context), self._coroutines.current():
                returned = next(stream, _END)
            if returned is _END:
                break
            for core, answer in zip(cores, self._checked(cores, returned), strict=True):
                if answer is None or core.completed or core.is_abandoned(monotonic_ns()):
                    continue
                response = self._response(core, answer)
                if response.error is None and core.classes is not None:
                    self._shaper.shape_response(core, response)
                core.respond(response, response.error is not None)
                core.wait_until_writable()
            if all(core.completed or core.is_abandoned(monotonic_ns()) for core in cores):
                close = getattr(stream, "close", None)
                if close is not None:
                    with use_context(self._context), self._coroutines.current():
                        close()
                break
        now = monotonic_ns()
        for core in cores:
            if not core.cancelled and core.is_abandoned(now):
                core.fail(DeadlineExceededError("Deadline Exceeded"))  # the response stream is incomplete
            else:
                core.respond(None, True)

    def _checked(self, cores: Sequence[InferenceRequest], returned: Any) -> Sequence[Any]:
        if isinstance(returned, Iterator):
            raise TypeError(
                "the function yields its answers, which models do that are bound with "
                "ModelConfig(decoupled=True)"
            )
        if not isinstance(returned, list | tuple) or len(returned) != len(cores):
            found = len(returned) if isinstance(returned, list | tuple) else type(returned).__name__
            raise TypeError(
                f"the function must return a list with an answer for each of {len(cores)} requests, not "
                f"{found}; functions of arrays need @conch.batch or @conch.sample"
            )
        return returned

    def _response(self, core: InferenceRequest, answer: Any) -> InferenceResponse:
        """The response to one request; its errors affect no other request."""
        try:
            if isinstance(answer, BaseException):
                raise answer
            named = self._named(answered_columns(answer))
            if core.responses_wait:
                named = {name: array.copy() for name, array in named.items()}
            return self._scatterer.split([core], self._wanted(core), named)[0]
        except BaseException as error:  # of user code
            return InferenceResponse([], self._shown(error))

    def _named(self, answer: Any) -> dict[str, Array]:
        if isinstance(answer, Mapping):
            unknown = [str(name) for name in answer if name not in self._outputs]
            if unknown:
                raise InternalError(
                    f"model '{self._name}' returned output '{unknown[0]}', which it was not bound with; its "
                    f"outputs are {', '.join(self._outputs)}"
                )
            return {name: self._array(name, value) for name, value in answer.items()}
        if answer is None:
            raise InternalError(f"model '{self._name}' returned no outputs for a request")
        values = answer if isinstance(answer, list | tuple) else (answer,)
        if len(values) != len(self._outputs):
            raise InternalError(
                f"model '{self._name}' returned {len(values)} outputs, and was bound with "
                f"{len(self._outputs)}: {', '.join(self._outputs)}"
            )
        return {name: self._array(name, value) for name, value in zip(self._outputs, values, strict=True)}

    def _array(self, name: str, value: Any) -> Array:
        array = self._converted(name, value)
        return array[:, np.newaxis] if array.ndim == 1 and name in self._columns else array

    def _converted(self, name: str, value: Any) -> Array:
        if name in self._texts:
            try:
                return encoded(value if isinstance(value, np.ndarray) else np.asarray(value, object))
            except ValueError as error:
                raise InternalError(f"output '{name}' of model '{self._name}': {message_of(error)}") from None
        array = np.asarray(value)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))

    def _wanted(self, core: InferenceRequest) -> tuple[str, ...]:
        requested = core.requested
        if requested is None:
            return self._outputs
        return tuple(name for name in self._outputs if name in requested or name in self._states)

    def _shown(self, error: BaseException) -> ConchError:
        if isinstance(error, ConchError):
            return error
        log.error("the function of model '%s' failed", self._name, exc_info=error)
        what = f"{type(error).__name__}: {message_of(error)}"
        return InternalError(f"the function of model '{self._name}' failed: {what}")
