"""The server's connection to one worker process: load, batches, calls, loss, close.

Owns: the channel, the in-flight table, responses under way, readiness checks, calls of the model.
Threads: the I/O loop reads and handles messages, from `load` on. What a loss needs may block, and runs on a
thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from conch.backends.python.runtime.python_instance import only_cpu_inputs
from conch.core.backend import PENDING, ConfigNotes, Done, Pending
from conch.core.bls import ServerCalls
from conch.core.custom_metrics import FAMILIES, CustomFamilies
from conch.core.errors import ConchError, InvalidArgumentError, as_conch_error
from conch.core.execution.placement import Placement
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import Readiness
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor
from conch.ipc import codec
from conch.ipc.channel import ChannelClosedError, Kind, PacketChannel, WireError, lost_kind
from conch.ipc.codec import MOST_REQUESTS, encode_requests, span_from_json
from conch.ipc.devices import ServerDevices, use_on_server
from conch.ipc.loop import IO_LOOP, SharedLoop
from conch.ipc.response_credit import encode_credit
from conch.ipc.spec_json import Library, library_to_json, placement_to_json, spec_to_json
from conch.ipc.tensors import (
    MessageStream,
    Payload,
    ReceivedMessage,
    StableTensor,
    unmapped_error,
)
from conch.ipc.worker_log import WorkerLog
from conch.memory.cuda import CudaDevices, cuda_devices
from conch.workers.connection.bls_server import BlsServer
from conch.workers.connection.in_flight import InFlight, InFlightTable, SentBatch
from conch.workers.connection.model_readiness import ReadinessChecks, WorkerReadiness
from conch.workers.connection.outcome_handler import OutcomeHandler
from conch.workers.connection.socket_reader import MessageDispatcher, SocketReader, json_fields
from conch.workers.connection.threads import run_on_thread
from conch.workers.connection.waiting_calls import WaitingCalls, WorkerWaiter
from conch.workers.connection.worker_metrics import WorkerMetrics
from conch.workers.connection.worker_responses import OpenRequest, OpenRequests, states_of
from conch.workers.supervision.crash_report import CrashRecord

log = logging.getLogger(__name__)

_END_S = 5.0
"""Timeout of the connection's end once the channel is shut down."""


class WorkerConnection:
    """The server's side of a living worker; the process itself belongs to the supervision.

    Args:
        channel: The socket, made with ``blocking=False``; the connection closes it.
        name: The instance's name.
        spec: The model version.
        calls: The server, for calls of the model.
        on_lost: Called once with the reason, when the worker is lost and all it had is completed; not after
            `close`, and not when the load failed. May block.
        explain: Called once before that, with the reason (empty if the socket just ended); returns the error
            for everything that the worker had. May block; `in_flight` tells what the worker had.
        families: Registry of custom metrics.
        waiter: The instance in deadlock detection; None without detection across restarts.
        gpus: The GPUs of this process.
        notes: Collects deviations of the model from its config.
        shared_loop: Reads the socket.

    Attributes:
        readiness: The model's `is_ready`; None without one, and before the load.
        channel, stream, socket_reader, table, checks: Its parts.
        devices: Transport of tensors on GPUs; None until the server uses one.
        concurrent: True if requests may go on when their batch is done: `execute` is a coroutine, or a
            library's.
        asked, answered: Numbers of the last `ask_alive`, and of the last one that was answered.
        starts_requests: True if `execute` only starts requests, which are answered later.
    """

    readiness: Readiness | None = None
    concurrent = False
    starts_requests = False
    asked = 0
    answered = 0

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
        shared_loop: SharedLoop = IO_LOOP,
    ) -> None:
        self.channel = channel
        self._name = name
        self._spec = spec
        self.on_lost = on_lost
        self.explain = explain
        self._lock = threading.Lock()
        self._notes = ConfigNotes() if notes is None else notes
        self._load_done: Callable[[ConchError | None], None] | None = None  # while the model loads
        self._expected_end = False  # closed or failed to load
        self.stream = MessageStream(channel, in_worker=False, passes_blocks=calls.passes_blocks)
        self._loss = CrashRecord(name)
        opened = OpenRequests(spec, self._grant)
        self.table = InFlightTable(opened.make, self._cancel, self._loss.refuse)
        self._results = OutcomeHandler(
            self.table, self._abandon, self._grant, states_of(spec), spec.decoupled
        )
        self._log = WorkerLog(spec.name)
        self._gpus = cuda_devices() if gpus is None else gpus
        self.devices: ServerDevices | None = None  # until the server uses a GPU
        self._opening_devices = threading.Lock()
        self.checks = ReadinessChecks(partial(self.notify, Kind.READY))
        waiting_calls = WaitingCalls(WorkerWaiter(calls, name, spec) if waiter is None else waiter)
        metrics = WorkerMetrics(families, self._catch_up)
        self._caller = BlsServer(name, self.stream, calls, metrics, waiting_calls, self.table.request)
        dispatcher = MessageDispatcher(
            {
                Kind.DONE: self._results.done,
                Kind.RESPONSES: self._results.responses,
                Kind.UNREACHABLE: self.on_unreachable,
                Kind.CALL: self._caller.call,
                Kind.CALL_CANCEL: lambda number, received: self._caller.cancel(number),
                Kind.QUERY: json_fields(self._caller.query),
                Kind.LOG: json_fields(lambda subject, fields: self._log.handle(fields)),
                Kind.METRIC: json_fields(metrics.change),
                Kind.NOTE: json_fields(self._on_note),
                Kind.SPAN: json_fields(self._on_span),
                Kind.ALIVE: self._on_alive,
                Kind.READY: json_fields(self.checks.completed),
                Kind.LOADED: json_fields(self._on_loaded),
                Kind.FAILED: self._on_failed,
                Kind.LOST: self._on_message_lost,
            }
        )
        self.socket_reader = SocketReader(self.stream, shared_loop, dispatcher.handle, self._on_read_end)
        self._reading = False  # from `load` on
        self._over = threading.Event()  # reading has ended, and `on_lost` has returned
        self._finisher: int | None = None  # the thread that sees to that

    # --- to the worker -------------------------------------------------------------------------------------

    def load(
        self,
        placements: Sequence[Placement],
        done: Callable[[ConchError | None], None],
        library: Library | None = None,
    ) -> None:
        """Loads the model in the worker.

        Args:
            placements: Devices of its instances: one, or any number if a library runs the model.
            done: Called once, with None when the model is ready, with the error if the load failed or
                the worker is lost; on the I/O loop, or the thread that calls `load`, `close` or `lose`.
            library: The backend, if it is compiled for Triton; None for a Python model.

        Raises:
            OSError, RuntimeError: The socket can't be read, see `SocketReader.start`.
        """
        with self._lock:
            lost = self.lost
            if not lost:
                self._load_done = done
                self._reading = True
        if lost:
            done(self._loss.error())
            return
        try:
            self.socket_reader.start()
        except BaseException:
            self._reading = False
            raise
        fields = {
            "spec": spec_to_json(self._spec),
            "placements": [placement_to_json(placement) for placement in placements],
            "library": None if library is None else library_to_json(library),
            "level": self._log.level,
        }
        self.notify(Kind.HELLO, 0, codec.encode_hello(0))
        self.notify(Kind.LOAD, 0, codec.encode_json(fields))

    def start(self, batch: Batch, done: Done, instance: int = 0) -> Pending:
        """Sends a batch for an instance, see `BackendInstance.start`; it fails on a lost connection."""
        sent = self.table.add_batch(batch, done, instance)
        if sent is not None:
            self._send(sent)
        return PENDING

    def in_flight(self) -> list[InFlight]:
        """Batches and open requests in the worker, oldest first; after its loss, those it had."""
        return self.table.in_flight()

    def open_requests_of(self, batch: Batch) -> list[OpenRequest]:
        """The open requests of a batch that is done."""
        return self.table.open_requests_of(batch)

    def tidy(self) -> None:
        """Returns idle memory on both sides; called periodically, never blocks."""
        self.stream.tidy()

    def _send(self, sent: SentBatch) -> None:
        """Sends a batch of the in-flight table; ends it if that fails."""
        batch = sent.batch
        payload: Payload | None = None
        try:
            if self.table.rescheduled:
                for number in self.table.completed():
                    self.stream.send(Kind.FORGET, number)
            if self._log.changed:
                self.stream.send(Kind.LEVEL, 0, codec.encode_json({"level": self._log.level}))
            if self._gpus.in_use and self.devices is None:
                self._open_devices()
            requests = batch.requests
            if len(requests) > MOST_REQUESTS:
                raise InvalidArgumentError(f"a batch for a worker has at most {MOST_REQUESTS} requests")
            lists: list[Collection[Tensor]] = []
            for request in requests:
                lists.append(request.inputs.values())
            payload = self.stream.pack(lists, True, passing=StableTensor)
            batch.bytes_copied += payload.bytes_copied
            again = sent.former_numbers
            fields, texts = encode_requests(
                requests,
                batch.size,
                sent.instance,
                batch.compute_start_ns,
                None if again is None else [again.get(index, 0) for index in range(len(requests))],
            )
            self.stream.send(Kind.EXECUTE, sent.number, fields, payload, texts)
        except BaseException as error:
            if payload is not None:
                self.stream.discard_payload(payload)
            # On a closed channel the loss ends the batch.
            if not isinstance(error, ChannelClosedError):
                self._results.fail(sent, as_conch_error(error))
            return
        for index, request in enumerate(batch.requests):
            # A cancellation before the worker knew the request was lost; a second one does no harm.
            if request.cancelled:
                self._cancel(sent.number_at(index))

    def _open_devices(self) -> None:
        with self._opening_devices:  # batches are sent on several threads
            if self.devices is None:
                lends = not only_cpu_inputs(self._spec)
                tell = partial(self.stream.send, Kind.DEVICES, 0)
                self.devices = use_on_server(self.stream, self._gpus, lends, tell)

    def cancel_open(self) -> None:
        """Cancels all open requests."""
        for number in self.table.open:
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        """Cancels an open request."""
        if self.table.request(number) is not None:
            self.notify(Kind.CANCEL, number)

    def _abandon(self, number: int) -> None:
        """Cancels and forgets a request; later responses of the worker are ignored."""
        self._cancel(number)
        self.notify(Kind.FORGET, number)

    def _grant(self, granted: Sequence[tuple[int, int]]) -> None:
        """Grants further response units to requests by number (flow control)."""
        self.notify(Kind.CREDIT, 0, encode_credit(granted))

    def notify(self, kind: Kind, subject: int, fields: bytes = b"") -> None:
        """Sends a message without tensors; does nothing on a closed channel."""
        try:
            self.stream.send(kind, subject, fields)
        except ChannelClosedError:
            pass  # the I/O loop notices

    def ask_alive(self) -> None:
        """Asks the loop of the model for an answer; `answered` counts it."""
        self.asked += 1
        self.notify(Kind.ALIVE, self.asked)

    # --- from the worker -----------------------------------------------------------------------------------

    def _on_read_end(self, error: BaseException) -> None:
        reason = ""
        if isinstance(error, ChannelClosedError):
            reason = self.channel.close_reason
        elif isinstance(error, WireError):
            reason = f"it has sent something that can't be understood: {error}"
            log.error("worker of '%s': %s", self._name, error)
        else:
            reason = "the server failed with what it had sent"
            log.error("worker of '%s'", self._name, exc_info=error)
        finish = partial(self._finish, reason)
        if not run_on_thread(self._name, finish):
            finish()  # there are too many threads: the loop is held up

    def _finish(self, reason: str) -> None:
        """Completes all batches and open requests and frees everything, once reading has ended; blocks."""
        self._finisher = threading.get_ident()
        try:
            self.lose(reason)
            self._end()
            if not self._expected_end:
                self.on_lost(self._loss.reason or reason)
        finally:
            self._over.set()

    def _catch_up(self, timeout_s: float) -> None:
        """Waits until all is handled that the worker had sent before."""
        self.socket_reader.catch_up(timeout_s)

    def _on_loaded(self, subject: int, facts: dict[str, Any]) -> None:
        if facts.get("readiness") is True:
            self.readiness = WorkerReadiness(self.checks.ask)
        self.concurrent = facts.get("concurrent") is True
        self.starts_requests = facts.get("starts_requests") is True
        self._finish_load(None)

    def on_unreachable(self, number: int, received: ReceivedMessage) -> None:
        """Resends, once, a batch whose tensors the worker could not open.

        If GPU memory was involved, the worker gets copies in host memory from then on.

        Raises:
            WireError: There is no such batch.
        """
        sent = self.table.batches.get(number)
        if sent is None:
            raise WireError(f"batch {number} is out of reach, but has not begun")
        if sent.resent:
            self._results.fail(sent, unmapped_error("the worker can't open further files"))
            for each in sent.numbers:
                self.notify(Kind.FORGET, each)
            return
        sent.resent = True
        if self.devices is not None and self.devices.lends:
            self.devices.lends = False
            log.warning("a worker of model '%s' can't open memory on GPUs: it gets copies", self._spec.name)
        self._send(sent)

    def _on_alive(self, number: int, received: ReceivedMessage) -> None:
        self.answered = number

    def _on_note(self, subject: int, fields: dict[str, Any]) -> None:
        text = fields.get("text")
        if not isinstance(text, str):
            raise WireError("a note is a text")
        self._notes.add(text)

    def _on_span(self, number: int, fields: dict[str, Any]) -> None:
        span = span_from_json(fields)
        request = self.table.request(number)
        if request is not None and request.watch is not None:
            request.watch.add_span(span)

    def _on_message_lost(self, subject: int, received: ReceivedMessage) -> None:
        """Fails what a message that could not be read was about; the worker stays."""
        kind = lost_kind(received.fields)
        error = unmapped_error()
        if kind is Kind.DONE:
            self._results.done_lost(subject, error)
        elif kind is Kind.RESPONSES and subject:
            self._results.response_lost(subject, error)
        elif kind is Kind.CALL or kind is Kind.QUERY:
            self._caller.lost(subject, kind, error)
        elif kind not in (Kind.LOG, Kind.METRIC, Kind.NOTE, Kind.SPAN):
            raise WireError("a message was lost that can't be done without")

    def _on_failed(self, subject: int, received: ReceivedMessage) -> None:
        self._expected_end = True
        self._finish_load(codec.decode_error(received.fields))

    def _finish_load(self, error: ConchError | None) -> None:
        with self._lock:
            load_done, self._load_done = self._load_done, None
        if load_done is None:
            raise WireError("it has said before what came of its load")
        load_done(error)

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
        self.notify(Kind.CLOSE, 0)
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
            load_done, self._load_done = self._load_done, None
        self.channel.shut_down()
        explain = None if self._expected_end else self.explain
        batches += self._loss.explained(None if explain is None else explain(reason))
        for check in checks:
            check.complete(False)
        if load_done is not None:
            load_done(self._loss.error())
        for sent in batches:
            self._results.fail(sent, self._loss.error(), opened)
        for entry in opened.values():  # their batches are done, the model responds later
            error = self._loss.error()
            entry.fail(error if entry.watched is None else entry.watched.lost(entry, error))
        self._caller.close()
        if not self._reading:
            self._end()

    def _end(self) -> None:
        """Frees everything once reading has ended."""
        self.socket_reader.close()
        self.channel.close()
        self.stream.close()

    def _wait(self, timeout_s: float) -> bool:
        """Waits for the end of the connection."""
        if not self._reading:
            return True
        if self.socket_reader.on_thread or self._finisher == threading.get_ident():
            return False  # it would wait for itself
        return self._over.wait(timeout_s)
