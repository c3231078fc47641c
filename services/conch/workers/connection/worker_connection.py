"""The server's side of one living worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from conch.core.backend import AwaitableOutcome, ConfigNotes, Outcome
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
from conch.workers.connection.bls_server import WorkerCaller
from conch.workers.connection.in_flight import InFlight, InFlightTable
from conch.workers.connection.message_dispatch import Dispatcher, json_fields
from conch.workers.connection.message_stream import Exchange
from conch.workers.connection.model_readiness import Checks, LinkReadiness
from conch.workers.connection.outcome_handler import Results
from conch.workers.connection.packet_channel import Channel, ChannelClosedError
from conch.workers.connection.socket_reader import Turn, Turns
from conch.workers.connection.waiting_calls import Waits, WorkerWaiter
from conch.workers.connection.worker_metrics import WorkerMetrics
from conch.workers.connection.worker_responses import Handing, Hands, OpenRequest, ResponseQueue
from conch.workers.protocol import message_records, wire
from conch.workers.protocol.received_message import ReceivedMessage
from conch.workers.protocol.spec_json import placement_to_json, spec_to_json
from conch.workers.protocol.tensor_transport import unmapped_error
from conch.workers.protocol.wire import Kind, WireError
from conch.workers.protocol.worker_log import WorkerLog
from conch.workers.supervision.loss import Loss

log = logging.getLogger(__name__)

_END_S = 5.0
"""How long the link's thread may take to end when nobody is on the other side any more."""


class Link:
    """A worker process, as the server talks to it; its process is somebody else's.

    Args:
        channel: The socket to it, made with ``patient=False``; the link closes it.
        name: The instance's name.
        spec: The model version.
        calls: What the model may ask of the server.
        on_lost: Called once, on the link's own thread, with the reason, when the worker can't be used any
            more and everything it had has been answered; not where it was asked to close, and not where it
            could not load its model.
        explain: Called once, before that and before anything is answered, with the reason, which is empty if
            the socket has simply ended; gives the error for everything that the worker had. It may take its
            time; `in_flight` says what the worker had.
        families: The metrics that models make.
        waiter: The instance, as one that waits for calls; None where nobody looks for those that wait for
            ever.
        gpus: The GPUs of this process.
        notes: Takes what the model does against its config.

    Attributes:
        readiness: Asks the model's `is_ready`; None where it has none, and before it is loaded.
        concurrent: Whether its `execute` is a coroutine, which may go on when its batch is done.
    """

    readiness: Readiness | None = None
    concurrent = False

    def __init__(
        self,
        channel: Channel,
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
        self._channel = channel
        self._name = name
        self._spec = spec
        self._on_lost = on_lost
        self._explain = explain
        self._lock = threading.Lock()
        self._notes = ConfigNotes() if notes is None else notes
        self._load_done: Callable[[ConchError | None], None] | None = None
        self._quiet = False  # its end is no loss
        self._exchange = Exchange(channel, in_worker=False)
        self._turns = Turns(channel, self._exchange)
        self._loss = Loss(name)
        self._table = InFlightTable(self._opened, self._cancel, self._loss.refuse)
        self._results = Results(self._table, spec, self._abandon)
        self._log = WorkerLog(spec.name)
        gpus = cuda_devices() if gpus is None else gpus
        self._sender = BatchSender(self._exchange, spec, self._table, self._log, gpus, self._results.fail)
        self._handing = Handing(spec)
        self._hands = Hands(name)
        # By sequence; each lives as long as its sequence has open requests or responses on their way.
        self._sequence_queues: WeakValueDictionary[int | str, ResponseQueue] = WeakValueDictionary()
        self._checks = Checks(partial(self._sender.tell, Kind.READY))
        waits = Waits(WorkerWaiter(calls, name, spec) if waiter is None else waiter)
        metrics = WorkerMetrics(families)
        self._caller = WorkerCaller(self._exchange, calls, metrics, self._hands, waits, self._table.request)
        self._dispatcher = Dispatcher(
            {
                Kind.DONE: self._results.done,
                Kind.RESPONSE: self._results.response,
                Kind.UNREACHABLE: self._sender.unreachable,
                Kind.CALL: self._caller.call,
                Kind.CALL_CANCEL: lambda number, received: self._caller.cancel(number),
                Kind.ASK: json_fields(self._caller.ask),
                Kind.LOG: json_fields(lambda subject, fields: self._log.handle(fields)),
                Kind.METRIC: json_fields(metrics.change),
                Kind.NOTE: json_fields(self._on_note),
                Kind.READY: json_fields(self._checks.completed),
                Kind.LOADED: json_fields(self._on_loaded),
                Kind.FAILED: self._on_failed,
                Kind.LOST: self._on_message_lost,
            }
        )
        self._reader = threading.Thread(target=self._read, name=f"conch-{name}-link", daemon=True)

    # --- what goes there -----------------------------------------------------------------------------------

    def load(self, placement: Placement, on_loaded: Callable[[ConchError | None], None]) -> None:
        """Has the worker load the model.

        Args:
            placement: Where the instance lives.
            on_loaded: Called once, on the link's thread or on the one that calls: with None when the model
                is ready, with the error if it can't be loaded or the worker is lost meanwhile.
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
        self._sender.tell(Kind.HELLO, 0, wire.encode_hello(0))
        self._sender.tell(Kind.LOAD, 0, wire.encode_json(fields))

    def start(self, batch: Batch, done: Callable[[Outcome], None]) -> None:
        """Sends a batch; see `BackendInstance.begin`. On a lost link it is done at once, with an error."""
        sent = self._table.enter(batch, done)
        if sent is not None:
            self._sender.send(sent)

    def start_awaitable(self, batch: Batch, done: Callable[[Outcome], None]) -> AwaitableOutcome | None:
        """Sends a batch whose outcome the caller may receive; see `BackendInstance.start_awaitable`."""
        if not self._turns.take():
            self.start(batch, done)
            return None
        turn = Turn(self, done)
        try:
            self.start(batch, turn)
        except BaseException:
            turn.detach()
            raise
        if turn.ended:
            turn.detach()
            return None
        return turn

    def wait_for(self, turn: Turn, timeout_ns: int) -> None:
        """Receives until a batch is done; for who has the turn, which is given back."""
        try:
            end_ns = monotonic_ns() + timeout_ns
            self._turns.read_until(lambda: turn.ended, self._dispatcher.handle, end_ns)
        finally:
            self._turns.give_back()

    def give_back(self) -> None:
        """Has the link's thread receive again."""
        self._turns.give_back()

    def in_flight(self) -> list[InFlight]:
        """What the worker has, the oldest first; as it was when it was lost, afterwards."""
        return self._table.in_flight()

    def kept(self, batch: Batch) -> list[OpenRequest]:
        """The requests of a batch that is done which the worker has and has not answered."""
        return self._table.kept(batch)

    def tidy(self) -> None:
        """Gives back memory that is idle, on both sides; to be called now and then, and never waits."""
        self._exchange.tidy()

    def _opened(self, request: InferenceRequest, number: int) -> OpenRequest:
        return OpenRequest(request, number, self._handing, self._queue_for(request), self._sender.credit)

    def _queue_for(self, request: InferenceRequest) -> ResponseQueue | None:
        """Where the responses of a request wait: with those of the requests before it in its sequence."""
        if not self._spec.decoupled:
            return None  # nothing blocks
        queue = ResponseQueue(self._hands)
        if self._spec.sequence is None:
            return queue
        with self._lock:
            return self._sequence_queues.setdefault(request.correlation_id, queue)

    def _cancel(self, number: int) -> None:
        self._sender.cancel(number)

    def _abandon(self, number: int) -> None:
        self._sender.abandon(number)

    # --- what comes from there -----------------------------------------------------------------------------

    def _read(self) -> None:
        reason = ""
        try:
            self._turns.read(self._dispatcher.handle)
        except ChannelClosedError:
            reason = self._channel.why
        except WireError as error:
            reason = f"it has sent something that can't be understood: {error}"
            log.error("worker of '%s': %s", self._name, error)
        except BaseException as error:
            reason = "the server failed with what it had sent"
            log.exception("worker of '%s'", self._name, exc_info=error)
        self.lose(reason)
        self._end()
        if not self._quiet:
            self._on_lost(self._loss.reason or reason)

    def _on_loaded(self, subject: int, facts: dict[str, Any]) -> None:
        if facts.get("readiness") is True:
            self.readiness = LinkReadiness(self._checks.ask)
        self.concurrent = facts.get("concurrent") is True
        self._loaded(None)

    def _on_note(self, subject: int, fields: dict[str, Any]) -> None:
        text = fields.get("text")
        if not isinstance(text, str):
            raise WireError("a note is a text")
        self._notes.add(text)

    def _on_message_lost(self, subject: int, received: ReceivedMessage) -> None:
        """Ends what a message was about that could not be read: the worker goes on."""
        kind = wire.lost_kind(received.message.fields)
        error = unmapped_error()
        if kind is Kind.DONE:
            self._results.done_lost(subject, error)
        elif kind is Kind.RESPONSE:
            self._results.response_lost(subject, error)
        elif kind is Kind.CALL or kind is Kind.ASK:
            self._caller.lost(subject, kind, error)
        elif kind not in (Kind.LOG, Kind.METRIC, Kind.NOTE):
            raise WireError("a message was lost that can't be done without")

    def _on_failed(self, subject: int, received: ReceivedMessage) -> None:
        self._quiet = True
        self._loaded(message_records.decode_error(received.message.fields))

    def _loaded(self, error: ConchError | None) -> None:
        with self._lock:
            on_loaded, self._load_done = self._load_done, None
        if on_loaded is None:
            raise WireError("it has said before what came of its load")
        on_loaded(error)

    # --- the end -------------------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """Whether the worker has been given up."""
        return self._loss.reason is not None

    def close(self, timeout_s: float) -> bool:
        """Asks the worker to finalize its model and to end, and waits for that.

        Returns:
            Whether it did so in time; if not, its process has to be killed. The link is closed either way.
        """
        self._quiet = True
        self._sender.tell(Kind.CLOSE, 0)
        ended = self._wait(timeout_s)
        self.lose("it is closed")
        if not ended:
            self._wait(_END_S)
        return ended

    def lose(self, reason: str) -> None:
        """Gives the worker up: everything that it has is answered with an error. May be called twice."""
        if not self._loss.begin(reason or "its process has ended"):
            return
        batches, opened = self._table.close()
        checks = self._checks.close()
        with self._lock:
            on_loaded, self._load_done = self._load_done, None
        self._channel.shut()
        explain = None if self._quiet else self._explain
        batches += self._loss.explained(None if explain is None else explain(reason))
        for check in checks:
            check.answer(False)
        if on_loaded is not None:
            on_loaded(self._loss.error())
        for sent in batches:
            self._results.fail(sent, self._loss.error(), opened)
        for entry in opened.values():  # of batches that were done, by models that answer later
            error = self._loss.error()
            entry.fail(error if entry.watched is None else entry.watched.lost(entry, error))
        self._caller.close()
        if self._reader.ident is None:
            self._end()

    def _end(self) -> None:
        """Frees everything, when nobody receives any more."""
        self._turns.close()
        self._hands.close()
        self._channel.close()
        self._exchange.close()

    def _wait(self, timeout_s: float) -> bool:
        """Waits for the end of the link's thread."""
        reader = self._reader
        if reader.ident is None or reader is threading.current_thread():
            return reader.ident is None
        reader.join(timeout_s)
        return not reader.is_alive()
