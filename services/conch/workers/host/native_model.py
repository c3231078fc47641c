"""A model version run by a library that is compiled for Triton, with all its instances.

A batch is one call of `HostLibrary.execute` on its instance's thread. The requests' tensors are read where
they lie, and outputs where the library has written them.

    ==========================================  ===========================================================
    event                                       is handled on
    ==========================================  ===========================================================
    of a batch, while it executes               the instance's thread, which returns responses as outcomes
    any other; responses of decoupled models    ``conch-native-deliver``, by `InferenceRequest.respond`
    what a slow client is behind with           the thread that reads its next credit
    a question to the server                    a thread of its own
    ==========================================  ===========================================================

Owns: the library, requests that it has, layouts. Threads and locks: see above; one lock for responses that
wait for their client.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import prod
from random import SystemRandom
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from conch.backends.gather import Padder
from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError, InternalError, ResourceExhaustedError
from conch.core.execution.placement import Placement
from conch.core.recognition import Table
from conch.core.request import InferenceRequest, InferenceResponse, SpanRecord
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import Readiness
from conch.core.spec import ModelSpec
from conch.core.tensor import ELEMENT_SIZES, Buffer, Tensor
from conch.ipc.channel import MOST_INLINE, WireError
from conch.ipc.spec_json import Library
from conch.ipc.tensors import Description, Layout, LayoutKey, describe_layout
from conch.workers.host.host_policies import Policy, bind, policy_name
from conch.workers.host.native_calls import NativeCalls
from conch.workers.host.native_instances import open_instances, threads_of
from conch.workers.host.native_library import ExecuteBuffers, HostLibrary, waiting_buffer
from conch.workers.host.native_metrics import NativeMetrics
from conch.workers.host.native_words import (
    Activity,
    CallCancel,
    Event,
    LogText,
    MetricChange,
    ModelCall,
    Note,
    Output,
    Query,
    Released,
    Response,
    SmallResponse,
    State,
    address_of,
    flags_of,
    pack_layout,
    pack_rarities,
    pack_words,
    read_description,
    read_events,
    read_small_responses,
)
from conch.workers.host.response_writer import JoinedResponses

if TYPE_CHECKING:
    from conch.core.custom_metrics import CustomFamilies
    from conch.workers.host.hosted_requests import HostedRequest
    from conch.workers.host.server_client import ServerClient

log = logging.getLogger(__name__)

_WAIT_MS = 1_000
_MOST_LAYOUTS = 256
MOST_WAITING = 256 << 20
"""Bytes of responses that may wait for slow clients."""

LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
"""By ``TRITONSERVER_LogLevel``; VERBOSE is the last."""

_bits = SystemRandom().getrandbits


class NativeModel:
    """See above.

    Args:
        spec: The model version.
        library: The backend.
        calls: The server, for calls of the library.
        families: Registry of its metrics.
        note: Receives deviations from the config.

    Attributes:
        instances: The instances, once it is open.
        threads: For each of them the number of the first one with which it shares its thread.
    """

    def __init__(
        self,
        spec: ModelSpec,
        library: Library,
        calls: ServerClient,
        families: CustomFamilies,
        note: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self.decoupled = spec.decoupled
        self._library = library
        self._note = note
        self._log = logging.getLogger(spec.name)
        self.host = HostLibrary(library.host)
        self._calls = NativeCalls(self.host, calls, spec)
        self._metrics = NativeMetrics(families)
        states = spec.sequence.states if spec.sequence is not None else ()
        self.outputs = tuple(tensor.name for tensor in spec.outputs)
        self._states = tuple(state.output_name for state in states)
        self._names = (*self.outputs, *self._states)
        self._open: dict[int, _OpenRequest] = {}
        self._waiting = threading.Lock()  # guards the responses that wait for their clients
        self._waiting_bytes = 0
        self._closing = False
        self._deliverer: threading.Thread | None = None
        self.instances: list[NativeInstance] = []
        self.threads: list[int] = []
        self._policies: list[tuple[str, Policy]] = []
        self.has_readiness = False

    # --- opening and closing, on the main thread -----------------------------------------------------------

    def open(self, placements: Sequence[Placement]) -> None:
        """Opens the library, the model and its instances.

        Raises:
            ConchError: A call of the library failed.
        """
        host = self.host
        self.follow_log_level()
        host.report_crashes()
        facts = open_library(host, self._library, self._log)
        self.has_readiness = facts.get("ready") is True
        self._deliverer = threading.Thread(target=self._deliver, name="conch-native-deliver", daemon=True)
        self._deliverer.start()
        try:
            self._open_instances(placements, facts)
        except ConchError:
            self._stop_delivery()  # once the log has what the library has logged
            raise

    def _open_instances(self, placements: Sequence[Placement], facts: Mapping[str, Any]) -> None:
        spec, host = self.spec, self.host
        sequence = spec.sequence
        host.open_model(
            spec.name,
            spec.version,
            spec.directory,
            json.dumps(dict(spec.config)),
            False,
            spec.decoupled,
            sequence is not None and sequence.iterative,
            _keep_config,
        )
        host.set_outputs(self._names, len(self._states))
        names = [policy_name(spec, placement) for placement in placements]
        self._policies = [(name, self._library.policies.get(name, {})) for name in names]
        open_instances(host, placements, self._policies, facts)
        self.threads = threads_of(placements, facts, spec.name, sequence is not None)
        self.instances += [NativeInstance(self, index) for index in range(len(placements))]

    def enter_thread(self, number: int) -> None:
        """Has the calling thread run where the host policy of an instance says."""
        bind(*self._policies[number])

    def close(self) -> None:
        """Finalizes everything; events that come meanwhile are handled."""
        self.host.close()
        self._stop_delivery()

    def _stop_delivery(self) -> None:
        self._closing = True
        if self._deliverer is not None:
            self.host.wake()
            self._deliverer.join()

    def follow_log_level(self) -> None:
        """Has the library log what the server logs of it."""
        enabled = self._log.isEnabledFor
        self.host.set_log_levels(sum(enabled(level) << number for number, level in enumerate(LEVELS)))

    # --- requests ------------------------------------------------------------------------------------------

    def begin(self, request: HostedRequest, inputs: object, batch: Batch, index: int) -> None:
        """Registers a request that is about to be executed, and keeps its inputs until it is released."""
        request.on_cancel = self._cancel
        opened = self._open.get(request.number)
        if opened is None:
            self._open[request.number] = _OpenRequest(request, inputs, batch, index)
        else:  # it runs again, and has responses that wait
            opened.inputs, opened.batch, opened.index, opened.released = inputs, batch, index, False

    def forget(self, requests: Sequence[HostedRequest]) -> None:
        """Drops the requests of a batch that failed, or has ended."""
        for request in requests:
            self._open.pop(request.number, None)

    def forget_waiting(self, request: HostedRequest) -> None:
        """Drops a request that does not run again."""
        opened = self._open.get(request.number)
        if opened is not None and opened.released:
            self._open.pop(request.number, None)

    def _cancel(self, request: InferenceRequest) -> None:
        self.host.cancel(cast("HostedRequest", request).number)

    # --- events --------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        buffer = waiting_buffer()
        while True:
            closing = self._closing
            count = self.host.wait(buffer, 0 if closing else _WAIT_MS)
            for event in read_events(buffer.data, count):
                try:
                    self.handle(event)
                except Exception:  # boundary: the thread serves other requests too
                    log.exception("an event of model '%s' could not be handled", self.spec.name)
            if closing and not count:
                return

    def handle(
        self,
        event: Event,
        batch: Batch | None = None,
        responses: list[InferenceResponse | None] | None = None,
    ) -> None:
        """Handles an event; responses to the requests of `batch` go to `responses`."""
        match event:
            case Response():
                self._respond(event, batch, responses)
            case SmallResponse():
                self._respond_small(event, batch, responses)
            case Released():
                self._release(event, batch, responses)
            case State():
                self._keep_state(event, batch, responses)
            case LogText():
                record_log(self._log, event)
            case Note():
                self._note(f"model '{self.spec.name}': {event.text}")
            case Activity():
                self._add_span(event)
            case MetricChange():
                self._metrics.change(event)
            case Query():
                self._calls.query(event)
            case ModelCall():
                opened = self._open.get(event.number)
                self._calls.call(event, None if opened is None else opened.request)
            case CallCancel():
                self._calls.cancel(event.call)

    def _respond(
        self, event: Response, batch: Batch | None, responses: list[InferenceResponse | None] | None
    ) -> None:
        opened = self._open.get(event.number)
        if opened is None:
            if event.result:
                self.host.free_result(event.result)
            return
        request = opened.request
        response: InferenceResponse | None = None
        if event.error is not None:
            response = InferenceResponse([], event.error)
            if event.result:
                self.host.free_result(event.result)
        elif event.result:
            outputs = self._tensors(event.result, event.outputs, request.requested)
            response = InferenceResponse(opened.with_states(outputs), None, event.parameters)
        elif not self.decoupled:
            text = f"model '{self.spec.name}' has ended a request without a response"
            response = InferenceResponse([], InternalError(text))
        self._pass_response(opened, response, event.final, batch, responses)

    def _respond_small(
        self, event: SmallResponse, batch: Batch | None, responses: list[InferenceResponse | None] | None
    ) -> None:
        opened = self._open.get(event.number)
        if opened is None:
            return
        requested, names = opened.request.requested, self._names
        outputs = [
            Tensor(names[place], datatype, shape, data)
            for place, datatype, shape, data in event.outputs
            if requested is None or names[place] in requested
        ]
        response = InferenceResponse(opened.with_states(outputs))
        self._pass_response(opened, response, event.final, batch, responses)

    def _pass_response(
        self,
        opened: _OpenRequest,
        response: InferenceResponse | None,
        final: bool,
        batch: Batch | None,
        responses: list[InferenceResponse | None] | None,
    ) -> None:
        """Adds a response to those of its batch, or sends it."""
        request = opened.request
        if final:
            opened.answered = True
            if opened.released:
                self._open.pop(request.number, None)  # the thread that delivers may have been as fast
        if responses is not None and opened.batch is batch and not self.decoupled:
            responses[opened.index] = response
        elif not request.filler:
            self._send(opened, response, final)

    def _release(
        self, event: Released, batch: Batch | None, responses: list[InferenceResponse | None] | None
    ) -> None:
        opened = self._open.get(event.number)
        if opened is None:
            return
        opened.inputs = opened.request.area = None
        opened.released = True
        if event.runs_again:
            if not self.decoupled or batch is None:  # else its responses may come at any time
                self._open.pop(event.number, None)
            if responses is not None and opened.batch is batch:
                opened.request.rescheduled = True
                if opened.states:
                    responses[opened.index] = InferenceResponse(opened.states)
            else:
                failure = f"model '{self.spec.name}' has rescheduled a request after its execution had ended"
                opened.request.fail(InternalError(failure))
        elif opened.answered:
            self._open.pop(event.number, None)

    def _keep_state(
        self, event: State, batch: Batch | None, responses: list[InferenceResponse | None] | None
    ) -> None:
        """Adds a state to the response that it belongs to; most states come before.

        States of a decoupled model are the response of their batch.
        """
        tensors = self._tensors(event.result, (event.output,), None)
        if self.decoupled and batch is not None and responses is not None:
            requests = cast("Sequence[HostedRequest]", batch.requests)
            index = next(index for index, each in enumerate(requests) if each.number == event.number)
            before = responses[index]
            responses[index] = InferenceResponse([*(before.outputs if before else ()), *tensors])
            return
        opened = self._open.get(event.number)
        if opened is None:
            return
        given = responses[opened.index] if responses is not None and opened.batch is batch else None
        if given is not None and given.error is None:
            given.outputs += tensors
        else:
            opened.states += tensors

    def _tensors(
        self, result: int, outputs: Sequence[Output], requested: tuple[str, ...] | None
    ) -> list[Tensor]:
        """Outputs as tensors; large ones are views on the library's memory, and the others copies."""
        tensors: list[Tensor] = []
        names, memory = self._names, None
        for place, datatype, shape, address, nbytes in outputs:
            name = place if isinstance(place, str) else names[place]
            if requested is not None and name not in requested:
                continue
            data: Buffer = b""
            if nbytes > MOST_INLINE:
                if memory is None:
                    memory = _ResultMemory(self.host, result)
                data = memory.view(address, nbytes)
            elif nbytes:
                data = ctypes.string_at(address, nbytes)
            tensors.append(Tensor(name, datatype, shape, data))
        if memory is None:
            self.host.free_result(result)
        return tensors

    def small_layout(self, described: bytes, requested: tuple[str, ...] | None) -> Description | None:
        """The layout of small responses; None if their tensors do not fit it, or not all are requested."""
        outputs = read_description(described)
        key = tuple([(self._names[place], datatype, shape) for place, datatype, shape, _ in outputs])
        if requested is not None and any(name not in requested for name, _, _ in key):
            return None
        try:
            layout = describe_layout(key)
        except WireError:  # a dim is negative
            return None
        if layout.nbytes < 0:  # the sizes of strings differ
            return None
        fits = all(prod(shape) * ELEMENT_SIZES[datatype] == nbytes for _, datatype, shape, nbytes in outputs)
        return layout if fits else None

    def _add_span(self, event: Activity) -> None:
        opened = self._open.get(event.number)
        watch = None if opened is None else opened.request.watch
        if watch is None:
            return
        _, _, parent, _ = json.loads(watch.trace_context)["traceparent"].split("-")
        time_ns = event.time_ns or monotonic_ns()
        watch.add_span(SpanRecord(event.name, _bits(64) or 1, int(parent, 16), time_ns, time_ns, {}, "", ""))

    # --- responses that do not come with their batch --------------------------------------------------------

    def _send(self, opened: _OpenRequest, response: InferenceResponse | None, final: bool) -> None:
        """Sends a response, or lets it wait until the server grants units; never blocks."""
        request = opened.request
        if not self.decoupled:
            _send_now(request, response, final)
            return
        nbytes = 0 if response is None else sum(tensor.nbytes for tensor in response.outputs)
        with self._waiting:
            if not opened.waiting and not request.backpressure:
                _send_now(request, response, final)
                return
            if self._waiting_bytes + nbytes > MOST_WAITING:
                self._give_up(opened)
                return
            first = not opened.waiting
            opened.waiting.append((response, final, nbytes))
            self._waiting_bytes += nbytes
        if first:
            request.when_writable(opened.send_waiting(self._send_waiting))

    def _send_waiting(self, opened: _OpenRequest) -> None:
        """Sends what has waited, as far as the server has granted units; any thread."""
        request = opened.request
        with self._waiting:
            while opened.waiting and not request.backpressure:
                response, final, nbytes = opened.waiting.popleft()
                self._waiting_bytes -= nbytes
                _send_now(request, response, final)
            left = bool(opened.waiting)
        if left:
            request.when_writable(opened.send_waiting(self._send_waiting))

    def _give_up(self, opened: _OpenRequest) -> None:
        """Ends a request whose client is too slow, with the lock."""
        request = opened.request
        self._waiting_bytes -= sum(nbytes for _, _, nbytes in opened.waiting)
        opened.waiting.clear()
        self.host.cancel(request.number)
        request.granted = request.spent + 1  # the last response may overdraw
        text = (
            f"model '{self.spec.name}' responds faster than its clients read: {MOST_WAITING >> 20} MiB of "
            f"its responses wait"
        )
        _send_now(request, InferenceResponse([], ResourceExhaustedError(text)), True)


class NativeInstance:
    """One instance: runs batches on the thread that calls `execute`."""

    starts_requests: ClassVar[bool] = False
    concurrent: ClassVar[bool] = True

    def __init__(self, model: NativeModel, index: int) -> None:
        self._model = model
        self._index = index
        self._buffers = ExecuteBuffers()
        # By inputs and wanted outputs: the host's layout, and what keeps the identity of a received one.
        self._layouts: Table[tuple[int | LayoutKey, tuple[str, ...]], tuple[object, int]]
        self._layouts = Table(_MOST_LAYOUTS)
        self._dropped: list[int] = []  # freed after the batch that they were dropped for: it may name them
        # By the description of small responses and what is requested; None if they can't be joined.
        self._small_layouts: Table[tuple[bytes, tuple[str, ...] | None], Description | None]
        self._small_layouts = Table(_MOST_LAYOUTS)
        padding = model.spec.padding
        self._padder = None if padding is None else Padder(padding)
        self.readiness: Readiness | None = _Readiness(model) if model.has_readiness else None

    def execute(self, batch: Batch) -> Sequence[InferenceResponse | None] | JoinedResponses | None:
        """Runs a batch."""
        model, buffers = self._model, self._buffers
        requests = cast("Sequence[HostedRequest]", batch.requests)  # made by `HostedRequests`
        try:
            words = self._pack(batch, requests)
            model.host.execute(self._index, len(requests), words, buffers)
        except BaseException:  # raised again
            model.forget(requests)
            raise
        finally:
            for layout in self._dropped:
                model.host.free_layout(layout)
            self._dropped.clear()
        begun_ns, ended_ns = buffers.times
        if begun_ns:
            batch.compute_input_end_ns = begun_ns
        if ended_ns:
            batch.compute_output_start_ns = ended_ns
        joined = None if model.decoupled else self._joined(requests)
        if joined is not None:
            model.forget(requests)
            return joined
        responses: list[InferenceResponse | None] = [None] * len(requests)
        for event in read_events(buffers.out.data, buffers.written):
            model.handle(event, batch, responses)
        return responses if not model.decoupled or any(responses) else None

    def close(self) -> None:
        """Ends the model with its first instance, once none runs a batch."""
        if self._index == 0:
            self._model.close()

    def _joined(self, requests: Sequence[HostedRequest]) -> JoinedResponses | None:
        """The responses, if they are small and alike, and all requests are released; else None.

        `NativeModel.handle` makes the same of the same events, and of all others. This halves a worker's time
        for each request of a batch of 8, and saves a quarter of a single one's.
        """
        buffers, requested = self._buffers, requests[0].requested
        found = read_small_responses(buffers.out.data, buffers.written, requests[0].number, len(requests))
        if found is None or len(found.data) > MOST_INLINE:
            return None
        for request in requests:
            if request.requested != requested:
                return None
        key = found.described, requested
        try:
            layout = self._small_layouts[key]
        except KeyError:
            layout = self._small_layouts.keep(key, self._model.small_layout(*key))
        return None if layout is None else JoinedResponses(layout, found.data)

    def _pack(self, batch: Batch, requests: Sequence[HostedRequest]) -> bytes:
        """Packs requests, and registers them, for `conch_execute`."""
        begin = self._model.begin
        words: list[int] = []
        parts: list[bytes] = []
        for index, request in enumerate(requests):
            area, inputs = request.area, request.inputs
            if area is not None:
                known, places, _ = area
                layout = self._layout(request, known)
            else:
                if self._padder is not None:
                    inputs = self._padded(request, batch)
                tensors = inputs.values()
                places = tuple([word for tensor in tensors for word in _memory_of(tensor, batch)])
                key = tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors])
                layout = self._layout(request, key)
            begin(request, inputs, batch, index)
            rarities = pack_rarities(request)
            correlation = request.correlation_id
            words += (
                request.number,
                layout,
                flags_of(request),
                request.filler,
                correlation if isinstance(correlation, int) else 0,
                request.timeout_us,
                request.cancelled,
                len(rarities) // 8,
            )
            if rarities:
                parts += (pack_words(words), rarities)
                words = []
            words += places
        parts.append(pack_words(words))
        return b"".join(parts)

    def _layout(self, request: HostedRequest, inputs: Layout | LayoutKey) -> int:
        """The host's layout of a request's tensors and wanted outputs."""
        requested = self._model.outputs if request.requested is None else request.requested
        if request.filler:
            requested = ()
        # A received layout is known by itself, without a look at each of its tensors.
        key = id(inputs) if isinstance(inputs, Layout) else inputs, requested
        known = self._layouts.get(key)
        if known is not None:
            return known[1]
        described: LayoutKey
        if isinstance(inputs, Layout):
            described = tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in inputs.tensors])
        else:
            described = inputs
        if len(self._layouts) >= _MOST_LAYOUTS:  # the table empties itself
            self._dropped += [layout for _, layout in self._layouts.values()]
        layout = self._model.host.new_layout(pack_layout(described, requested))
        self._layouts.keep(key, (inputs, layout))
        return layout

    def _padded(self, request: HostedRequest, batch: Batch) -> dict[str, Tensor]:
        """Inputs of variable dims in the padded lengths, and those with the real lengths."""
        padder, one = self._padder, (request,)
        assert padder is not None, "only models with padding"
        inputs = dict(request.inputs)
        arrays = {name: padder.join(one, name) for name in inputs if padder.pads(one, name)}
        arrays.update(padder.made(one))
        for name, array in arrays.items():
            datatype = inputs[name].datatype if name in inputs else None
            inputs[name] = Tensor.from_array(name, np.ascontiguousarray(array), datatype)
            batch.bytes_copied += array.nbytes
        return inputs


def open_library(host: HostLibrary, library: Library, model_log: logging.Logger) -> dict[str, Any]:
    """Opens a backend; returns the properties that it reports.

    Raises:
        ConchError: It can't be loaded, or its Initialize failed.
    """
    facts = host.open(library.file, library.backend, json.dumps({"cmdline": dict(library.options)}))
    missing = facts.get("api_minor_missing")
    if missing:
        model_log.warning(
            "backend '%s' was built for a newer version of Triton: %s", library.backend, missing
        )
    return facts


def record_log(model_log: logging.Logger, event: LogText) -> None:
    """Logs what a library has logged."""
    level = LEVELS[event.level] if event.level < len(LEVELS) else logging.ERROR
    if model_log.isEnabledFor(level):
        name, args = model_log.name, (event.text,)
        model_log.handle(model_log.makeRecord(name, level, event.file, event.line, "%s", args, None))


class _OpenRequest:
    """A request that the library has.

    Attributes:
        inputs: Keeps their memory; None once they are released.
        batch: The batch in which it runs, and `index` its place there.
        states: Wait for the next response.
        waiting: Responses, whether they are final, and their bytes.
    """

    __slots__ = ("answered", "batch", "index", "inputs", "released", "request", "states", "waiting")

    states: list[Tensor]
    waiting: deque[tuple[InferenceResponse | None, bool, int]]

    def __init__(self, request: HostedRequest, inputs: object, batch: Batch, index: int) -> None:
        self.request = request
        self.inputs = inputs
        self.batch = batch
        self.index = index
        self.answered = self.released = False
        self.states = []
        self.waiting = deque()

    def with_states(self, outputs: list[Tensor]) -> list[Tensor]:
        """Outputs and the states that wait for them."""
        if self.states:
            outputs += self.states
            self.states = []
        return outputs

    def send_waiting(self, send: Callable[[_OpenRequest], None]) -> Callable[[], None]:
        """Function that sends waiting responses, to call when the server has granted units."""
        return lambda: send(self)


class _ResultMemory:
    """Memory of a response in the library; freed with the last view of it."""

    __slots__ = ("_host", "_result")

    def __init__(self, host: HostLibrary, result: int) -> None:
        self._host = host
        self._result = result

    def view(self, address: int, nbytes: int) -> memoryview:
        """A view of some of its memory."""
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        memory.owner = self  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")

    def __del__(self) -> None:
        self._host.free_result(self._result)


class _Readiness:
    """Readiness check of a model: all its instances report that they are ready."""

    def __init__(self, model: NativeModel) -> None:
        self._model = model

    def start(self) -> None:
        """The check is short."""

    def result(self) -> bool:
        """Asks the library."""
        return all(self._model.host.ready(index) for index in range(len(self._model.instances)))


def _send_now(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    if response is not None and response.error is not None:
        request.failed = True
    request.respond(response, final)


def _memory_of(tensor: Tensor, batch: Batch) -> tuple[int, int]:
    """Address and size of a tensor's bytes."""
    if tensor.on_device:
        batch.bytes_copied += tensor.fetch()
    if tensor.has_data or tensor.datatype == "BYTES":
        data = tensor.data
        nbytes = len(data)
        if not nbytes:
            return 0, 0
        array = np.frombuffer(data, np.uint8)
    else:
        array = tensor.numpy()
        nbytes = array.nbytes
    return address_of(array), nbytes


def _keep_config(config: str) -> None:
    """The config is complete: what a backend sets in the worker, it has set before."""
