"""Serves the calls of a model in a worker: BLS requests, model control, readiness, custom metrics.

Owns: open calls by number. Threads: calls arrive on the I/O loop; what blocks runs on threads of its own.
"""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from conch.backends.python.calls.bls_call import not_ready
from conch.backends.python.calls.deadlock_detection import DEADLOCK
from conch.core.bls import ServerCalls
from conch.core.clock import monotonic_ns
from conch.core.cold_models import ColdModelError
from conch.core.errors import ConchError, UnavailableError, as_conch_error
from conch.core.execution.runner import bypassing_claims
from conch.core.model_control import LoadParameter
from conch.core.reader import Reader
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.spec import ModelSpec
from conch.ipc import codec
from conch.ipc.channel import ChannelClosedError, Kind, PacketChannel, WireError
from conch.ipc.codec import (
    EMPTY_FINAL,
    EXPECTS_DECOUPLED,
    EXPECTS_SINGLE,
    NO_DEADLINE,
    SEQUENCE_END,
    SEQUENCE_START,
    decode_requests,
    encode_responses,
    flags_of,
    text_of,
)
from conch.ipc.tensors import MessageStream, ReceivedMessage
from conch.workers.connection.threads import run_on_thread
from conch.workers.connection.waiting_calls import WaitingCalls
from conch.workers.connection.worker_metrics import WorkerMetrics

log = logging.getLogger(__name__)

Query = dict[str, Any]


class _CallingWorker(Reader):
    """The worker, as a reader of the responses to its calls: behind while much waits to be sent to it."""

    def __init__(self, channel: PacketChannel) -> None:
        self._channel = channel

    @property
    def backpressure(self) -> bool:
        return self._channel.backpressure

    def when_writable(self, work: Callable[[], object]) -> None:
        self._channel.when_room(work)

    def wait_until_writable(self) -> None:
        self._channel.wait_for_room()


class BlsServer:
    """Serves one worker. `executing` finds an open request of the worker by number."""

    def __init__(
        self,
        name: str,
        stream: MessageStream,
        calls: ServerCalls,
        metrics: WorkerMetrics,
        waiting_calls: WaitingCalls,
        executing: Callable[[int], InferenceRequest | None],
    ) -> None:
        self._name = name
        self._stream = stream
        self._reader = _CallingWorker(stream.channel)
        self._calls = calls
        self.metrics = metrics
        self._waiting_calls = waiting_calls
        self._executing = executing
        self._lock = threading.Lock()
        self._open: dict[int, InferenceRequest] = {}
        self._closed = False
        self._quick_queries: dict[str, Callable[[Query], dict[str, object]]] = {
            "find": self._find,
            "properties": self._properties,
            "config": self._config,
            "family": metrics.family,
            "metric": metrics.metric,
            "value": metrics.value,
            "waits": self._report_wait,
        }
        self._blocking_queries: dict[str, Callable[[Query], dict[str, object]]] = {
            "ready": self._ready,
            "fact": self._fact,
            "load": self._load,
            "unload": self._unload,
        }

    def call(self, number: int, received: ReceivedMessage) -> None:
        """Submits a request of the model.

        Raises:
            WireError: The message is malformed.
        """
        columns = decode_requests(received)
        if len(columns.rows) != 1:
            raise WireError("a call is one request")
        ((_, _, deadline, _, flags),) = columns.rows
        (request_id,), (options,) = columns.ids, columns.options
        (tensors,) = received.lists(1)
        parent = self._executing(columns.numbers[0]) if columns.numbers else None
        if len(options.model) != 2:
            raise WireError("a call names a model and its version")
        request = InferenceRequest(
            *options.model,
            {tensor.name: tensor for tensor in tensors},
            partial(self._respond, number),
            monotonic_ns(),
            request_id,
            options.requested,
            None if options.parameters is None else dict(options.parameters),
        )
        request.priority = options.priority
        request.timeout_us = options.timeout_us
        request.correlation_id = options.correlation_id
        request.sequence_start = flags & SEQUENCE_START != 0
        request.sequence_end = flags & SEQUENCE_END != 0
        request.empty_final = flags & EMPTY_FINAL != 0
        request.reader = self._reader
        request.context = parent
        request.deadline_ns = None if deadline == NO_DEADLINE else deadline
        with self._lock:
            if self._closed:
                return
            if number in self._open:
                raise WireError(f"call {number} is there already")
            self._open[number] = request
        if received.unreachable is not None:
            error = InferenceResponse([], as_conch_error(received.unreachable[0]))
            self._respond(number, request, error, True, True)
            return
        self._submit(number, request, flags, parent)

    def _submit(
        self, number: int, request: InferenceRequest, flags: int, parent: InferenceRequest | None
    ) -> None:
        try:
            try:
                model = self._calls.find(request)
            except ColdModelError:
                raise
            except ConchError as error:
                raise not_ready(request.model_name, error) from None
            decoupled = model.spec.decoupled
            if flags & (EXPECTS_SINGLE if decoupled else EXPECTS_DECOUPLED):
                raise UnavailableError(
                    f"model '{request.model_name}' has become {'' if decoupled else 'not '}decoupled since "
                    f"it was called before; send the request again"
                )
            with bypassing_claims():  # a claimant may wait for the model that calls
                self._calls.submit(request, False, model, parent=parent)
        except ColdModelError as cold:
            self._wait(
                cold,
                request,
                lambda: self._submit(number, request, flags, parent),
                lambda error: self._respond(number, request, InferenceResponse([], error), True, True),
            )
        except Exception as error:  # the called model's, for the model that calls
            self._respond(number, request, InferenceResponse([], as_conch_error(error)), True, True)

    @staticmethod
    def _wait(
        cold: ColdModelError,
        request: InferenceRequest | None,
        again: Callable[[], None],
        refuse: Callable[[ConchError], None],
    ) -> None:
        """Calls `again` once a model is in memory, else `refuse`."""

        def then(error: ConchError | None) -> None:
            if error is None:
                again()
            else:
                refuse(error)

        deadline_ns, priority = (None, 0) if request is None else (request.deadline_ns, request.priority)
        try:
            cold.wait(then, 0, deadline_ns, priority).start()
        except ConchError as error:
            refuse(error)

    def cancel(self, number: int) -> None:
        """Cancels a call."""
        request = self._open.get(number)
        if request is not None:
            self._waiting_calls.finish(number)
            self._calls.cancel(request)

    def query(self, number: int, query: Query) -> None:
        """Replies to a query, on this thread or, if it may block, on another.

        Raises:
            WireError: The message is malformed.
        """
        what = query.get("query")
        quick = self._quick_queries.get(what) if isinstance(what, str) else None
        if quick is not None:
            self._run_query(number, quick, query)
            return
        slow = self._blocking_queries.get(what) if isinstance(what, str) else None
        if slow is None:
            raise WireError(f"there is no query '{what}'")
        if not run_on_thread(self._name, partial(self._run_query, number, slow, query)):
            error = UnavailableError("the server can't start a thread to answer with: there are too many")
            self._send_result(number, codec.encode_error(error))

    def lost(self, number: int, kind: Kind, error: ConchError) -> None:
        """Fails a call or query that could not be read."""
        if kind is Kind.QUERY:
            self._send_result(number, codec.encode_error(error))
            return
        try:
            self._send_reply(number, InferenceResponse([], error), True, True)
        except ChannelClosedError:
            pass  # the I/O loop notices

    def close(self) -> None:
        """Cancels all calls, as the worker has ended."""
        with self._lock:
            self._closed = True
            requests = list(self._open.values())
            self._open.clear()
        for request in requests:
            self._calls.cancel(request)
        self._waiting_calls.close()
        self.metrics.close()

    def _respond(
        self,
        number: int,
        request: InferenceRequest,
        response: InferenceResponse | None,
        final: bool,
        refused: bool = False,
    ) -> None:
        if self._open.get(number) is not request:
            return
        if final:
            with self._lock:
                self._open.pop(number, None)
        try:
            try:
                self._send_reply(number, response, final, refused)
            except ChannelClosedError:
                raise
            except Exception as error:  # no memory, or tensors that do not match their shapes
                self._send_reply(number, InferenceResponse([], as_conch_error(error)), final, refused)
        except ChannelClosedError:
            pass  # the I/O loop notices, and cancels open calls
        if self._waiting_calls:
            self._waiting_calls.finish(number)

    def _send_reply(
        self, number: int, response: InferenceResponse | None, final: bool, refused: bool
    ) -> None:
        lists = [response.outputs] if response is not None and response.error is None else []
        text = text_of(response)
        payload = self._stream.pack(lists)
        flags = flags_of(response, final, refused)
        fields = encode_responses(1, [flags], text != b"")
        self._stream.send(Kind.REPLY, number, fields, payload, [text] if text else ())

    def _run_query(self, number: int, run: Callable[[Query], dict[str, object]], query: Query) -> None:
        try:
            fields = codec.encode_json(run(query))
        except ColdModelError as cold:
            self._wait(
                cold,
                None,
                lambda: self._run_query(number, run, query),
                lambda error: self._send_result(number, codec.encode_error(error)),
            )
            return
        except Exception as error:  # the control plane's, for the model that asks
            if not isinstance(error, ConchError | WireError):  # malformed ones are reported to the model
                log.exception("a query of a worker could not be answered")
            fields = codec.encode_error(as_conch_error(error))
        self._send_result(number, fields)

    def _send_result(self, number: int, fields: bytes) -> None:
        try:
            self._stream.send(Kind.RESULT, number, fields)
        except ChannelClosedError:
            pass  # the I/O loop notices

    def _find(self, query: Query) -> dict[str, object]:
        request = InferenceRequest(_text(query, "name"), _text(query, "version"), {}, _ignore, 0)
        correlation = query.get("correlation", 0)
        request.correlation_id = correlation if isinstance(correlation, int | str) else 0
        request.sequence_start = bool(query.get("start"))
        spec = self._calls.find(request).spec
        return {"name": spec.name, "version": spec.version, "decoupled": spec.decoupled}

    def _properties(self, query: Query) -> dict[str, object]:
        spec = self._spec(query)
        return {"decoupled": spec.decoupled, "batches": spec.max_batch_size > 0}

    def _config(self, query: Query) -> dict[str, object]:
        return {"config": dict(self._spec(query).config)}

    def _spec(self, query: Query) -> ModelSpec:
        request = InferenceRequest(_text(query, "name"), _text(query, "version"), {}, _ignore, 0)
        return self._calls.find(request).spec

    def _report_wait(self, query: Query) -> dict[str, object]:
        number, executed = query.get("call"), query.get("requests")
        if not isinstance(number, int) or not isinstance(executed, list):
            raise WireError("'call' or 'requests' of a query is not what it may be")
        request = self._open.get(number)
        if request is None:  # its response is under way
            return {"known": True, "found": False}
        parents = [parent for each in executed if (parent := self._executing(each)) is not None]
        known = self._waiting_calls.report(number, request, parents)
        if self._open.get(number) is not request:  # its response was sent meanwhile
            self._waiting_calls.finish(number)
            return {"known": True, "found": False}
        if not known:
            return {"known": False, "found": False}
        found, deadlocked = self._waiting_calls.check(number)
        if deadlocked:
            error = UnavailableError(DEADLOCK.format(model=request.model_name))
            self._respond(number, request, InferenceResponse([], error), True)
            self._calls.cancel(request)
        return {"known": True, "found": found}

    def _ready(self, query: Query) -> dict[str, object]:
        return {"ready": self._calls.model_ready(_text(query, "name"), _text(query, "version"))}

    def _fact(self, query: Query) -> dict[str, object]:
        names = _text(query, "kind"), _text(query, "name"), _text(query, "version")
        return {"fact": self._calls.fact(*names)}

    def _load(self, query: Query) -> dict[str, object]:
        parameters = query.get("parameters")
        if not isinstance(parameters, dict):
            raise WireError("'parameters' of a query is not an object")
        name = _text(query, "name")
        with self._waiting_calls.loading(name):
            self._calls.load(name, {key: _parameter(value) for key, value in parameters.items()})
        return {}

    def _unload(self, query: Query) -> dict[str, object]:
        self._calls.unload(_text(query, "name"), bool(query.get("dependents")))
        return {}


def _text(query: Query, key: str) -> str:
    value = query.get(key)
    if not isinstance(value, str):
        raise WireError(f"'{key}' of a query is not a text")
    return value


def _parameter(value: object) -> LoadParameter:
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict) and isinstance(value.get("file"), str):
        try:
            return base64.b64decode(value["file"], validate=True)
        except ValueError as error:
            raise WireError(f"a file can't be read: {error}") from None
    raise WireError("a parameter of a load is not what it may be")


def _ignore(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """Ignores responses; the request is never submitted."""
