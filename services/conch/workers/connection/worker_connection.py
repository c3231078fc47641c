"""The server's connection to one worker process: load, batches, calls, loss, close.

Owns: the channel, the in-flight table, responses under way, readiness checks, calls of the model.
Threads: the reader thread `conch-NAME-reader` starts with `load`; a thread that starts a short batch may read
in its place (see socket_reader). Used by: supervision.worker_process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from conch.core.backend import PENDING, ConfigNotes, Done, Pending
from conch.core.bls import ServerCalls
from conch.core.clock import monotonic_ns
from conch.core.custom_metrics import FAMILIES, CustomFamilies
from conch.core.errors import ConchError
from conch.core.execution.placement import Placement
from conch.core.request import InferenceRequest
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import Readiness
from conch.core.spec import ModelSpec
from conch.memory.cuda import CudaDevices, cuda_devices
from conch.workers.connection.batch_sender import BatchSender
from conch.workers.connection.bls_server import BlsServer
from conch.workers.connection.in_flight import InFlight, InFlightTable
from conch.workers.connection.message_stream import MessageStream
from conch.workers.connection.model_readiness import ReadinessChecks, WorkerReadiness
from conch.workers.connection.outcome_handler import OutcomeHandler
from conch.workers.connection.packet_channel import ChannelClosedError, PacketChannel
from conch.workers.connection.socket_reader import AwaitedBatch, SocketReader
from conch.workers.connection.waiting_calls import WaitingCalls, WorkerWaiter
from conch.workers.connection.worker_metrics import WorkerMetrics
from conch.workers.connection.worker_responses import (
    OpenRequest,
    ResponseDelivery,
    ResponseDispatcher,
    ResponseQueue,
)
from conch.workers.protocol import wire
from conch.workers.protocol.received_message import ReceivedMessage
from conch.workers.protocol.spec_json import placement_to_json, spec_to_json
from conch.workers.protocol.tensor_transport import unmapped_error
from conch.workers.protocol.wire import Kind, WireError
from conch.workers.protocol.worker_log import WorkerLog
from conch.workers.supervision.crash_report import CrashRecord

log = logging.getLogger(__name__)

_END_S = 5.0
"""Timeout of the reader thread's end once the channel is shut down."""


_Handler = Callable[[int, ReceivedMessage], None]
"""Handles a message about a subject."""


class WorkerConnection:
    """The server's side of a living worker; the process itself belongs to the supervision.

    Args:
        channel: The socket, made with ``blocking=False``; the connection closes it.
        name: The instance's name.
        spec: The model version.
        calls: The server, for calls of the model.
        on_lost: Called once, on the reader thread, with the reason, when the worker is lost and all it had is
            completed; not after `close`, and not when the load failed.
        explain: Called once before that, with the reason (empty if the socket just ended); returns the error
            for everything that the worker had. May block; `in_flight` tells what the worker had.
        families: Registry of custom metrics.
        waiter: The instance in deadlock detection; None without detection across restarts.
        gpus: The GPUs of this process.
        notes: Collects deviations of the model from its config.

    Attributes:
        readiness: The model's `is_ready`; None without one, and before the load.
        channel, stream, socket_reader, table, sender, checks: Its parts.
        concurrent: True if `execute` is a coroutine, which may continue when its batch is done.
    """

    readiness: Readiness | None = None
    concurrent = False

    def __init__(
        self,
        channel: PacketChannel,
        name: str,
        spec: ModelSpec,
        calls: ServerCalls,
        on_lost: Callable[[str], None],
        explain: Callable[[str], ConchError] | None = None,
        families: CustomFamilies = FAMILIES,
        waiter: WorkerWaiter | None = None,
        gpus: CudaDevices | None = None,
        notes: ConfigNotes | None = None,
    ) -> None:
        self.channel = channel
        self._name = name
        self._spec = spec
        self.on_lost = on_lost
        self.explain = explain
        self._lock = threading.Lock()
        self._notes = ConfigNotes() if notes is None else notes
        self._load_done: Callable[[ConchError | None], None] | None = None
        self._expected_end = False  # closed or failed to load
        self.stream = MessageStream(channel, in_worker=False)
        self.socket_reader = SocketReader(channel, self.stream)
        self._loss = CrashRecord(name)
        self.table = InFlightTable(self._opened, self._cancel, self._loss.refuse)
        self._results = OutcomeHandler(self.table, spec, self._abandon)
        self._log = WorkerLog(spec.name)
        gpus = cuda_devices() if gpus is None else gpus
        self.sender = BatchSender(self.stream, spec, self.table, self._log, gpus, self._results.fail)
        self._delivery = ResponseDelivery(spec)
        self._response_dispatcher = ResponseDispatcher(name)
        # By sequence; a queue lives while its sequence has open requests or queued responses.
        self._sequence_queues: WeakValueDictionary[int | str, ResponseQueue] = WeakValueDictionary()
        self.checks = ReadinessChecks(partial(self.sender.notify, Kind.READY))
        waiting_calls = WaitingCalls(WorkerWaiter(calls, name, spec) if waiter is None else waiter)
        metrics = WorkerMetrics(families)
        self._caller = BlsServer(
            self.stream, calls, metrics, self._response_dispatcher, waiting_calls, self.table.request
        )
        self._dispatcher = _MessageDispatcher(
            {
                Kind.DONE: self._results.done,
                Kind.RESPONSE: self._results.response,
                Kind.UNREACHABLE: self.sender.unreachable,
                Kind.CALL: self._caller.call,
                Kind.CALL_CANCEL: lambda number, received: self._caller.cancel(number),
                Kind.QUERY: _json_fields(self._caller.query),
                Kind.LOG: _json_fields(lambda subject, fields: self._log.handle(fields)),
                Kind.METRIC: _json_fields(metrics.change),
                Kind.NOTE: _json_fields(self._on_note),
                Kind.READY: _json_fields(self.checks.completed),
                Kind.LOADED: _json_fields(self._on_loaded),
                Kind.FAILED: self._on_failed,
                Kind.LOST: self._on_message_lost,
            }
        )
        self._reader = threading.Thread(target=self._read, name=f"conch-{name}-reader", daemon=True)

    # --- to the worker -------------------------------------------------------------------------------------

    def load(self, placement: Placement, on_loaded: Callable[[ConchError | None], None]) -> None:
        """Loads the model in the worker.

        Args:
            placement: Device of the instance.
            on_loaded: Called once, on the reader or the calling thread: with None when the model is ready,
                with the error if the load failed or the worker is lost.
        """
        with self._lock:
            lost = self.lost
            if not lost:
                self._load_done = on_loaded
        if lost:
            on_loaded(self._loss.error())
            return
        self._reader.start()
        fields = {
            "spec": spec_to_json(self._spec),
            "placement": placement_to_json(placement),
            "level": self._log.level,
        }
        self.sender.notify(Kind.HELLO, 0, wire.encode_hello(0))
        self.sender.notify(Kind.LOAD, 0, wire.encode_json(fields))

    def start(self, batch: Batch, done: Done) -> Pending:
        """Sends a batch, see `BackendInstance.start`; on a lost connection it fails at once."""
        wait = batch.wait
        if wait is not None and self.socket_reader.claim():
            wait.reader = AwaitedBatch(self, batch)
        try:
            sent = self.table.add(batch, done)
            if sent is not None:
                self.sender.send(sent)
        except BaseException:
            if wait is not None and wait.reader is not None:
                wait.reader = None
                self.socket_reader.release()
            raise
        return PENDING

    def wait_for(self, batch: Batch, timeout_ns: int) -> None:
        """Reads until the batch is done or time is up; releases the socket."""
        try:
            end_ns = monotonic_ns() + timeout_ns
            self.socket_reader.read_until(lambda: batch.settled, self._dispatcher.handle, end_ns)
        finally:
            self.socket_reader.release()

    def release_socket(self) -> None:
        """Lets the reader thread read again."""
        self.socket_reader.release()

    def in_flight(self) -> list[InFlight]:
        """What the worker has, oldest first; after its loss, what it had."""
        return self.table.in_flight()

    def kept(self, batch: Batch) -> list[OpenRequest]:
        """The open requests of a batch that is done."""
        return self.table.kept(batch)

    def tidy(self) -> None:
        """Returns idle memory on both sides; called periodically, never blocks."""
        self.stream.tidy()

    def _opened(self, request: InferenceRequest, number: int) -> OpenRequest:
        return OpenRequest(request, number, self._delivery, self._queue_for(request), self.sender.credit)

    def _queue_for(self, request: InferenceRequest) -> ResponseQueue | None:
        """The queue of a request's responses: shared within a sequence, None if delivery can't block."""
        if not self._spec.decoupled:
            return None  # delivery does not block
        queue = ResponseQueue(self._response_dispatcher)
        if self._spec.sequence is None:
            return queue
        with self._lock:
            return self._sequence_queues.setdefault(request.correlation_id, queue)

    def _cancel(self, number: int) -> None:
        self.sender.cancel(number)

    def _abandon(self, number: int) -> None:
        self.sender.abandon(number)

    # --- from the worker -----------------------------------------------------------------------------------

    def _read(self) -> None:
        reason = ""
        try:
            self.socket_reader.read(self._dispatcher.handle)
        except ChannelClosedError:
            reason = self.channel.close_reason
        except WireError as error:
            reason = f"it has sent something that can't be understood: {error}"
            log.error("worker of '%s': %s", self._name, error)
        except BaseException as error:
            reason = "the server failed with what it had sent"
            log.exception("worker of '%s'", self._name, exc_info=error)
        self.lose(reason)
        self._end()
        if not self._expected_end:
            self.on_lost(self._loss.reason or reason)

    def _on_loaded(self, subject: int, facts: dict[str, Any]) -> None:
        if facts.get("readiness") is True:
            self.readiness = WorkerReadiness(self.checks.ask)
        self.concurrent = facts.get("concurrent") is True
        self._loaded(None)

    def _on_note(self, subject: int, fields: dict[str, Any]) -> None:
        text = fields.get("text")
        if not isinstance(text, str):
            raise WireError("a note is a text")
        self._notes.add(text)

    def _on_message_lost(self, subject: int, received: ReceivedMessage) -> None:
        """Fails what a message that could not be read was about; the worker stays."""
        kind = wire.lost_kind(received.message.fields)
        error = unmapped_error()
        if kind is Kind.DONE:
            self._results.done_lost(subject, error)
        elif kind is Kind.RESPONSE:
            self._results.response_lost(subject, error)
        elif kind is Kind.CALL or kind is Kind.QUERY:
            self._caller.lost(subject, kind, error)
        elif kind not in (Kind.LOG, Kind.METRIC, Kind.NOTE):
            raise WireError("a message was lost that can't be done without")

    def _on_failed(self, subject: int, received: ReceivedMessage) -> None:
        self._expected_end = True
        self._loaded(wire.decode_error(received.message.fields))

    def _loaded(self, error: ConchError | None) -> None:
        with self._lock:
            on_loaded, self._load_done = self._load_done, None
        if on_loaded is None:
            raise WireError("it has said before what came of its load")
        on_loaded(error)

    # --- the end -------------------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """True once the worker counts as lost."""
        return self._loss.reason is not None

    def close(self, timeout_s: float) -> bool:
        """Asks the worker to finalize its model and exit, and waits; the connection is closed either way.

        Returns:
            True if it did so in time; otherwise its process must be killed.
        """
        self._expected_end = True
        self.sender.notify(Kind.CLOSE, 0)
        ended = self._wait(timeout_s)
        self.lose("it is closed")
        if not ended:
            self._wait(_END_S)
        return ended

    def lose(self, reason: str) -> None:
        """Declares the worker lost: everything it has fails. May be called twice."""
        if not self._loss.begin(reason or "its process has ended"):
            return
        batches, opened = self.table.close()
        checks = self.checks.close()
        with self._lock:
            on_loaded, self._load_done = self._load_done, None
        self.channel.shut_down()
        explain = None if self._expected_end else self.explain
        batches += self._loss.explained(None if explain is None else explain(reason))
        for check in checks:
            check.complete(False)
        if on_loaded is not None:
            on_loaded(self._loss.error())
        for sent in batches:
            self._results.fail(sent, self._loss.error(), opened)
        for entry in opened.values():  # their batches are done, the model responds later
            error = self._loss.error()
            entry.fail(error if entry.watched is None else entry.watched.lost(entry, error))
        self._caller.close()
        if self._reader.ident is None:
            self._end()

    def _end(self) -> None:
        """Frees everything once reading has ended."""
        self.socket_reader.close()
        self._response_dispatcher.close()
        self.channel.close()
        self.stream.close()

    def _wait(self, timeout_s: float) -> bool:
        """Waits for the end of the reader thread."""
        reader = self._reader
        if reader.ident is None or reader is threading.current_thread():
            return reader.ident is None
        reader.join(timeout_s)
        return not reader.is_alive()


class _MessageDispatcher:
    """Passes each message of a worker to the handler of its kind; HELLO must come first."""

    def __init__(self, handlers: Mapping[Kind, _Handler]) -> None:
        self._handlers = dict(handlers)
        self._greeted = False

    def handle(self, received: ReceivedMessage) -> None:
        """Handles a message.

        Raises:
            WireError: The kind is not allowed now.
        """
        kind = received.message.kind
        if not self._greeted:
            if kind is not Kind.HELLO:
                raise WireError("it does not begin with HELLO")
            wire.check_hello(received.message.fields, "worker")
            self._greeted = True
            return
        handler = self._handlers.get(kind)
        if handler is None:
            raise WireError(f"a message {kind.name} was not expected")
        handler(received.message.subject, received)


def _json_fields(handle: Callable[[int, dict[str, Any]], None]) -> _Handler:
    """Wraps a handler of messages whose fields are JSON."""

    def handler(subject: int, received: ReceivedMessage) -> None:
        handle(subject, wire.decode_json(received.message.fields))

    return handler
