"""The server's side of one living worker."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from conch.backends.python.instance import only_cpu_inputs
from conch.core.backend import Awaited, Outcome
from conch.core.calls import ServerCalls
from conch.core.clock import monotonic_ns
from conch.core.custom_metrics import FAMILIES, CustomFamilies
from conch.core.errors import ConchError, UnavailableError, as_conch_error, without_traceback
from conch.core.instances.placement import Placement
from conch.core.readiness import Readiness
from conch.core.request import InferenceRequest, InferenceResponse, Kept
from conch.core.scheduler.base import Batch
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor
from conch.memory.cuda import CudaDevices, cuda_devices
from conch.workers import wire
from conch.workers.answers import Handing, Hands, OpenRequest
from conch.workers.callers import WorkerCaller
from conch.workers.channel import Channel, ChannelClosedError
from conch.workers.devices import ServerDevices, use_on_server
from conch.workers.exchange import Exchange
from conch.workers.gpu_tensors import UnreachableError
from conch.workers.incoming import Incoming
from conch.workers.inflight import InFlight, SentBatch, Turn, flags_of
from conch.workers.metrics import WorkerMetrics
from conch.workers.packing import Payload
from conch.workers.readiness import Check, LinkReadiness
from conch.workers.records import WorkerLog
from conch.workers.specs import placement_to_json, spec_to_json
from conch.workers.tensors import ReturnedTensor
from conch.workers.turns import Turns
from conch.workers.waiting import Waits, WorkerWaiter
from conch.workers.wire import BatchRecord, DoneRecord, Kind, ResponseRecord, WireError

log = logging.getLogger(__name__)

_END_S = 5.0
"""How long the link's thread may take to end when nobody is on the other side any more."""


class _Kept(Kept):
    """Stands for what a worker keeps of a request that is to run again."""

    __slots__ = ("link", "number")

    def __init__(self, link: Link, number: int) -> None:
        self.link = link
        self.number = number

    def end(self, request: InferenceRequest, error: ConchError) -> None:
        """See `Kept.end`."""
        entry = self.link._open.get(self.number)
        if entry is not None:  # else what ends it is on its way to its client
            entry.fail(error)


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
    ) -> None:
        self._channel = channel
        self._name = name
        self._spec = spec
        self._on_lost = on_lost
        self._explain = explain
        self._explanation: ConchError | None = None
        self._lock = threading.Lock()
        self._exchange = Exchange(channel, in_worker=False)
        self._gpus = cuda_devices() if gpus is None else gpus
        self._devices: ServerDevices | None = None  # until the server uses a GPU
        self._handing = Handing(spec)
        self._turns = Turns(channel, self._exchange)
        self._hands = Hands(name)
        waits = Waits(WorkerWaiter(calls, name, spec) if waiter is None else waiter)
        self._caller = WorkerCaller(
            *(self._exchange, calls, WorkerMetrics(families), self._hands, waits, self._executing)
        )
        self._log = WorkerLog(spec.name)
        self._batches: dict[int, SentBatch] = {}
        self._open: dict[int, OpenRequest] = {}
        self._numbers = itertools.count(1)
        self._again: set[int] = set()  # requests that wait to run again
        self._last: list[InFlight] = []
        self._checks: dict[int, Check] = {}
        self._load_done: Callable[[ConchError | None], None] | None = None
        self._greeted = False
        self._lost: str | None = None
        self._late: list[SentBatch] | None = None  # begun while it is being found out how the worker ended
        self._quiet = False  # its end is no loss
        self._handlers: dict[Kind, Callable[[int, Incoming], None]] = {
            Kind.DONE: self._done,
            Kind.RESPONSE: self._response,
            Kind.CALL: self._on_call,
            Kind.CALL_CANCEL: self._on_call_cancel,
            Kind.ASK: self._on_ask,
            Kind.LOG: self._on_log,
            Kind.METRIC: self._on_metric,
            Kind.READY: self._on_ready,
            Kind.LOADED: self._on_loaded,
            Kind.FAILED: self._on_failed,
            Kind.UNREACHABLE: self._on_unreachable,
        }
        self._reader = threading.Thread(target=self._read, name=f"conch-{name}-link", daemon=True)

    def load(self, placement: Placement, on_loaded: Callable[[ConchError | None], None]) -> None:
        """Has the worker load the model.

        Args:
            placement: Where the instance lives.
            on_loaded: Called once, on the link's thread or on the one that calls: with None when the model
                is ready, with the error if it can't be loaded or the worker is lost meanwhile.
        """
        with self._lock:
            if self._lost is None:
                self._load_done = on_loaded
        if self._load_done is None:
            on_loaded(self._error())
            return
        self._reader.start()
        fields = {
            "spec": spec_to_json(self._spec),
            "placement": placement_to_json(placement),
            "level": self._log.level,
        }
        try:
            self._exchange.send(Kind.HELLO, 0, wire.encode_hello(0))
            self._exchange.send(Kind.LOAD, 0, wire.encode_json(fields))
        except ChannelClosedError:
            pass  # the reader notices, and says so

    def begin(self, batch: Batch, done: Callable[[Outcome], None]) -> None:
        """Sends a batch; see `BackendInstance.begin`. On a lost link it is done at once, with an error."""
        requests = batch.requests
        following = self._numbers
        number = next(following)
        if self._again:
            known = [self._number(request) for request in requests]
            again, numbers = [one for one, _ in known], [each for _, each in known]
        else:
            again, numbers = [False] * len(requests), [next(following) for _ in requests]
        begun = SentBatch(batch, again, numbers, done, monotonic_ns())
        with self._lock:
            lost = self._lost is not None
            if self._late is not None:
                self._late.append(begun)
                return
            if not lost:
                self._batches[number] = begun
                for request, each in zip(requests, begun.numbers, strict=True):
                    if not request.filler and not request.answered and each not in self._open:
                        self._open[each] = self._opened(request, each)
        if lost:
            done(self._error())
            return
        self._send_or_fail(number, begun)

    def _send_or_fail(self, number: int, begun: SentBatch) -> None:
        try:
            flags = self._send(number, begun, begun.again)
        except ChannelClosedError:
            return  # the reader notices, and ends the batch
        except BaseException as error:
            if self._take(number) is not None:
                self._leave_to_queues(begun, self._open)
                begun.done(as_conch_error(error))
            return
        for request, each, flag in zip(begun.batch.requests, begun.numbers, flags, strict=True):
            # It may have been cancelled before the worker knew it.
            if request.cancelled and not flag & wire.CANCELLED:
                self._cancel(each)

    def begin_here(self, batch: Batch, done: Callable[[Outcome], None]) -> Awaited | None:
        """Sends a batch whose outcome the caller may receive; see `BackendInstance.begin_here`."""
        if not self._turns.take():
            self.begin(batch, done)
            return None
        turn = Turn(self, done)
        try:
            self.begin(batch, turn)
        except BaseException:
            turn.leave()
            raise
        if turn.ended:
            turn.leave()
            return None
        return turn

    def wait_for(self, turn: Turn, timeout_ns: int) -> None:
        """Receives until a batch is done; for who has the turn, which is given back."""
        try:
            self._turns.read_until(lambda: turn.ended, self._handle, monotonic_ns() + timeout_ns)
        finally:
            self._turns.give_back()

    def give_back(self) -> None:
        """Has the link's thread receive again."""
        self._turns.give_back()

    def in_flight(self) -> list[InFlight]:
        """What the worker has, the oldest first; as it was when it was lost, afterwards."""
        with self._lock:
            return self._last if self._lost is not None else self._in_flight()

    def _in_flight(self) -> list[InFlight]:
        begun = list(self._batches.values())
        numbers = {number for each in begun for number in each.numbers}
        batches = [
            InFlight(each.since_ns, tuple(one.id for one in each.batch.requests if not one.filler))
            for each in begun
        ]
        left = [entry for number, entry in list(self._open.items()) if number not in numbers]
        kept = [InFlight(entry.since_ns, (entry.request.id,)) for entry in left if not entry.request.answered]
        return sorted(kept + batches, key=lambda each: each.since_ns)

    def kept(self, batch: Batch) -> list[OpenRequest]:
        """The requests of a batch that is done which the worker has and has not answered."""
        requests = {id(request) for request in batch.requests if not request.rescheduled}
        return [entry for entry in list(self._open.values()) if id(entry.request) in requests]

    @property
    def lost(self) -> bool:
        """Whether the worker has been given up."""
        return self._lost is not None

    def tidy(self) -> None:
        """Gives back memory that is idle, on both sides; to be called now and then, and never waits."""
        self._exchange.tidy()

    def close(self, timeout_s: float) -> bool:
        """Asks the worker to finalize its model and to end, and waits for that.

        Returns:
            Whether it did so in time; if not, its process has to be killed. The link is closed either way.
        """
        self._quiet = True
        try:
            self._exchange.send(Kind.CLOSE)
        except ChannelClosedError:
            pass
        ended = self._wait(timeout_s)
        self.lose("it is closed")
        if not ended:
            self._wait(_END_S)
        return ended

    def lose(self, reason: str) -> None:
        """Gives the worker up: everything that it has is answered with an error. May be called twice."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason or "its process has ended"
            self._late = []
            self._last = self._in_flight()
            batches, opened = list(self._batches.values()), dict(self._open)
            checks, on_loaded = list(self._checks.values()), self._load_done
            self._batches.clear()
            self._open.clear()
            self._checks.clear()
            self._load_done = None
        self._channel.shut()
        if self._explain is not None and not self._quiet:
            self._explanation = self._explain(reason)
        with self._lock:
            batches += self._late
            self._late = None
        for check in checks:
            check.answer(False)
        if on_loaded is not None:
            on_loaded(self._error())
        for begun in batches:
            self._leave_to_queues(begun, opened)
            begun.done(self._error())
        for entry in opened.values():  # of batches that were done, by models that answer later
            error = self._error()
            entry.fail(error if entry.watched is None else entry.watched.lost(entry, error))
        self._caller.close()
        if self._reader.ident is None:
            self._end()

    # --- sending -------------------------------------------------------------------------------------------

    def _number(self, request: InferenceRequest) -> tuple[bool, int]:
        """Whether the worker knows a request already, and its number there."""
        kept = getattr(request, "kept", None)
        if isinstance(kept, _Kept) and kept.link is self:
            request.kept = None
            self._again.discard(kept.number)
            return True, kept.number
        return False, next(self._numbers)

    def _opened(self, request: InferenceRequest, number: int) -> OpenRequest:
        hands = self._hands if self._spec.decoupled else None
        request.on_cancel = partial(self._cancel, number)
        return OpenRequest(request, number, self._handing, hands, self._credit)

    def _send(self, number: int, begun: SentBatch, again: list[bool]) -> list[int]:
        """Sends a batch; returns the flags of its requests."""
        if self._again:
            self._forget()
        if self._log.changed:
            self._exchange.send(Kind.LEVEL, 0, wire.encode_json({"level": self._log.level}))
        if self._gpus.in_use and self._devices is None:
            lends = not only_cpu_inputs(self._spec)
            tell = partial(self._exchange.send, Kind.DEVICES, 0)
            self._devices = use_on_server(self._exchange, self._gpus, lends, tell)
        batch = begun.batch
        payload = self._exchange.pack([list(request.inputs.values()) for request in batch.requests], True)
        batch.bytes_copied += payload.bytes_copied
        try:
            return self._send_packed(number, begun, again, payload)
        except BaseException:
            self._exchange.discard(payload)
            raise

    def _send_packed(self, number: int, begun: SentBatch, again: list[bool], payload: Payload) -> list[int]:
        batch = begun.batch
        requests = batch.requests
        instance = -1 if batch.instance is None else batch.instance
        begin = len(requests), batch.size, instance, batch.compute_start_ns
        if payload.alike is not None and not any(again):
            rows = wire.encode_alike(requests, begun.numbers)
            if rows is not None:
                fields = b"".join([BatchRecord(*begin, True).encode(), rows, payload.alike])
                self._exchange.send(Kind.EXECUTE, number, fields, payload)
                return [0] * len(requests)
        parts = [BatchRecord(*begin).encode()]
        flags: list[int] = []
        for request, each, known, tensors in zip(requests, begun.numbers, again, payload.lists, strict=True):
            if known:
                request.on_cancel = partial(self._cancel, each)
            flag = flags_of(request, known)
            flags.append(flag)
            parts.append(wire.encode_request(request, each, flag))
            parts.append(tensors)
        self._exchange.send(Kind.EXECUTE, number, b"".join(parts), payload)
        return flags

    def _forget(self) -> None:
        """Tells the worker which of the requests that were to run again have been answered without it."""
        for number in list(self._again):
            entry = self._open.get(number)
            if entry is None or entry.request.answered:
                self._again.discard(number)
                self._open.pop(number, None)
                self._exchange.send(Kind.FORGET, number)

    def _cancel(self, number: int) -> None:
        if number in self._open:
            self._tell(Kind.CANCEL, number)

    def _credit(self, number: int, units: int) -> None:
        self._tell(Kind.CREDIT, number, wire.encode_credit(units))

    def _tell(self, kind: Kind, subject: int, fields: bytes = b"") -> None:
        try:
            self._exchange.send(kind, subject, fields)
        except ChannelClosedError:
            pass  # the reader notices

    # --- receiving -----------------------------------------------------------------------------------------

    def _read(self) -> None:
        reason = ""
        try:
            self._turns.read(self._handle)
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
            self._on_lost(self._lost or reason)

    def _end(self) -> None:
        """Frees everything, when nobody receives any more."""
        self._turns.close()
        self._hands.close()
        self._channel.close()
        self._exchange.close()

    def _handle(self, incoming: Incoming) -> None:
        kind = incoming.message.kind
        if not self._greeted:
            if kind is not Kind.HELLO:
                raise WireError("it does not begin with HELLO")
            wire.check_hello(incoming.message.fields, "worker")
            self._greeted = True
            return
        handler = self._handlers.get(kind)
        if handler is None:
            raise WireError(f"a message {kind.name} was not expected")
        handler(incoming.message.subject, incoming)

    def _executing(self, number: int) -> InferenceRequest | None:
        entry = self._open.get(number)
        return None if entry is None else entry.request

    def _on_call(self, subject: int, incoming: Incoming) -> None:
        self._caller.call(incoming)

    def _on_call_cancel(self, subject: int, incoming: Incoming) -> None:
        self._caller.cancel(subject)

    def _on_ask(self, subject: int, incoming: Incoming) -> None:
        self._caller.ask(subject, wire.decode_json(incoming.message.fields))

    def _on_log(self, subject: int, incoming: Incoming) -> None:
        self._log.handle(wire.decode_json(incoming.message.fields))

    def _on_metric(self, subject: int, incoming: Incoming) -> None:
        self._caller.metrics.change(subject, wire.decode_json(incoming.message.fields))

    def _on_ready(self, subject: int, incoming: Incoming) -> None:
        with self._lock:
            check = self._checks.pop(subject, None)
        if check is not None:
            check.answer(wire.decode_json(incoming.message.fields).get("ready") is True)

    def _on_loaded(self, subject: int, incoming: Incoming) -> None:
        facts = wire.decode_json(incoming.message.fields)
        if facts.get("readiness") is True:
            self.readiness = LinkReadiness(self.ask_ready)
        self.concurrent = facts.get("concurrent") is True
        self._loaded(None)

    def _on_failed(self, subject: int, incoming: Incoming) -> None:
        self._quiet = True
        self._loaded(wire.decode_error(incoming.message.fields))

    def _loaded(self, error: ConchError | None) -> None:
        with self._lock:
            on_loaded, self._load_done = self._load_done, None
        if on_loaded is None:
            raise WireError("it has said before what came of its load")
        on_loaded(error)

    def _on_unreachable(self, number: int, incoming: Incoming) -> None:
        """Sends a batch again, and all others from now on, with its tensors on GPUs in host memory."""
        with self._lock:
            begun = self._batches.get(number)
        if begun is None or self._devices is None or begun.resent:
            raise WireError(f"batch {number} has no tensors on a GPU that could be out of reach")
        begun.resent = True
        self._devices.lends = False
        log.warning("a worker of model '%s' can't open memory on GPUs: it gets copies", self._spec.name)
        self._send_or_fail(number, begun)

    def _done(self, number: int, incoming: Incoming) -> None:
        with self._lock:
            begun = self._batches.get(number)
        if begun is None:
            raise WireError(f"batch {number} is done, but has not begun")
        reader = incoming.reader
        record = DoneRecord.decode(reader)
        outcome: Outcome
        if record.error:
            outcome = wire.decode_error(reader.take(record.error))
        else:
            if record.length != len(begun.batch.requests):
                raise WireError(f"{record.length} responses to {len(begun.batch.requests)} requests")
            outcome = _alike(incoming, record.length) if record.alike else self._responses(begun, incoming)
        reader.end()
        if self._take(number) is None:
            return  # it has been lost meanwhile
        self._settle(begun, outcome)
        batch = begun.batch
        batch.compute_input_end_ns = record.input_end_ns
        batch.compute_output_start_ns = record.output_start_ns
        batch.bytes_copied += record.bytes_copied
        done = begun.done
        # What has come is done's alone now: memory that it lets go of goes at once.
        del begun, batch, incoming, reader
        done(outcome)

    def _responses(self, begun: SentBatch, incoming: Incoming) -> list[InferenceResponse | None]:
        responses: list[InferenceResponse | None] = []
        for request, number in zip(begun.batch.requests, begun.numbers, strict=True):
            record = ResponseRecord.decode(incoming.reader)
            error = record.error
            try:
                outputs = incoming.tensors() if record.has_tensors else []
            except UnreachableError as unreachable:  # the worker sends copies from now on
                outputs, error = [], without_traceback(unreachable)
            if request.responses_wait:
                # The model may write to its inputs, and to what it has on a GPU, before the response is sent.
                try:
                    outputs = [_own(each) for each in outputs]
                except Exception as failure:  # no memory for a copy: that is this request's matter alone
                    outputs, error = [], without_traceback(as_conch_error(failure))
            if record.failed:
                request.failed = True
            if record.present:
                parameters = None if record.parameters is None else dict(record.parameters)
                responses.append(InferenceResponse(outputs, error, parameters))
                continue
            responses.append(None)
            if record.rescheduled and not request.filler:
                request.rescheduled = True
                request.kept = _Kept(self, number)
                self._again.add(number)
        return responses

    def _settle(self, begun: SentBatch, outcome: Outcome) -> None:
        """Forgets the requests of a batch that have got their answers with it."""
        if isinstance(outcome, BaseException):
            self._leave_to_queues(begun, self._open)
            return
        if self._spec.decoupled and any(request.rescheduled for request in begun.batch.requests):
            # Those that must not run again are told so after what they have been sent.
            self._end_in_queues(begun, [self._open.get(number) for number in begun.numbers])
        responses = outcome or itertools.repeat(None)
        for number, response in zip(begun.numbers, responses, strict=False):
            if response is not None:
                self._open.pop(number, None)
            elif (entry := self._open.get(number)) is not None:
                entry.since_ns = begun.since_ns

    def _leave_to_queues(self, begun: SentBatch, opened: dict[int, OpenRequest]) -> None:
        """Forgets the requests of a batch that has failed.

        What those of a decoupled model have been sent before comes first, and to hand that over may block.
        """
        entries = [opened.pop(number, None) for number in begun.numbers]
        if self._spec.decoupled:
            self._end_in_queues(begun, entries)

    @staticmethod
    def _end_in_queues(begun: SentBatch, entries: Sequence[OpenRequest | None]) -> None:
        """Has whoever ends the requests of a batch do so behind the responses that wait for their clients."""
        begun.batch.end = partial(_end_in_queue, dict(zip(begun.batch.requests, entries, strict=True)))

    def _response(self, number: int, incoming: Incoming) -> None:
        record = ResponseRecord.decode(incoming.reader)
        outputs: Sequence[Tensor] = incoming.tensors() if record.has_tensors else []
        incoming.reader.end()
        entry = self._open.get(number)
        if record.final:
            self._open.pop(number, None)
        if entry is None:
            return  # it has been answered with an error meanwhile
        if record.final and entry.watched is not None:
            entry.watched.ended(entry)
        if record.failed:
            entry.request.failed = True
        response: InferenceResponse | None = None
        if record.present:
            parameters = None if record.parameters is None else dict(record.parameters)
            response = InferenceResponse(list(outputs), record.error, parameters)
        entry.hand(response, record.final, wire.units(outputs))

    # --- the rest ------------------------------------------------------------------------------------------

    def _take(self, number: int) -> SentBatch | None:
        with self._lock:
            return self._batches.pop(number, None)

    def _error(self) -> ConchError:
        """What clients are told when the worker can't answer any more; a new one each time."""
        known = self._explanation
        if known is not None:
            error = type(known)(known.message)
            error.retry_after_ms = known.retry_after_ms
            return error
        return UnavailableError(
            f"Failed to process the request(s) for model instance '{self._name}', message: Stub process "
            f"'{self._name}' is not healthy. The worker of the model is gone ({self._lost}); another one "
            f"takes its place, so the request may be sent again."
        )

    def _wait(self, timeout_s: float) -> bool:
        """Waits for the end of the link's thread."""
        reader = self._reader
        if reader.ident is None or reader is threading.current_thread():
            return reader.ident is None
        reader.join(timeout_s)
        return not reader.is_alive()

    def ask_ready(self) -> Check:
        """Asks the model whether it is ready."""
        check = Check()
        number = next(self._numbers)
        with self._lock:
            lost = self._lost is not None
            if not lost:
                self._checks[number] = check
        if lost:
            check.answer(False)
        else:
            self._tell(Kind.READY, number)
        return check


def _end_in_queue(
    queues: dict[InferenceRequest, OpenRequest | None], request: InferenceRequest, response: InferenceResponse
) -> None:
    """Ends a request after what it has been sent, unless that ends it."""
    queue = queues[request]
    if queue is not None:
        queue.hand(response, True, 0)


def _own(tensor: Tensor) -> Tensor:
    """A tensor that stays as it is, whatever the model does."""
    return tensor.detached(tensor.name) if tensor.on_device or isinstance(tensor, ReturnedTensor) else tensor


def _alike(incoming: Incoming, length: int) -> list[InferenceResponse]:
    """Responses that are nothing but tensors, which one list describes."""
    return [InferenceResponse(outputs) for outputs in incoming.tensors_alike(length)]
