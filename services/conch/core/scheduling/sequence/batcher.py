"""The sequence batcher: queues requests by sequence, forms batches, starts and ends sequences.

`SequenceTable` assigns seats on instances, the strategies (`Seats`) choose which ready requests form a batch,
and this module moves requests between them. Of each sequence at most one request, the first of its queue, is
ready or runs.

    =====================================  =======================================================
    event of a live sequence               next
    =====================================  =======================================================
    it starts                              seated on an instance, or in the backlog
    seated, a request is queued            ready
    a batch takes the request              running
    its batch completes: more is queued    ready
    its batch completes: none is queued    ended, if END was sent; else idle
    idle for `max_sequence_idle`           ended
    it is ended without a request          ended, after what is queued
    ended                                  the seat goes to the oldest sequence of the backlog
    =====================================  =======================================================
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest, RequestState
from conch.core.scheduling.queue import NEVER, bound_of, queue_full
from conch.core.scheduling.scheduler import IDLE, Batch, Decision, Scheduler, WaitUntil
from conch.core.scheduling.sequence.controls import Controls
from conch.core.scheduling.sequence.implicit_state import SequenceStates
from conch.core.scheduling.sequence.strategies import DirectSeats, OldestSeats
from conch.core.scheduling.sequence.table import LiveSequence, Seats, SequenceTable, SequenceTimers
from conch.core.spec import ModelSpec

log = logging.getLogger(__name__)

# Looked up once: enum members are slow to access.
_NEW, _QUEUED, _RUNNING = RequestState.NEW, RequestState.QUEUED, RequestState.RUNNING
_DONE = RequestState.DONE

_FIRST_OWN_ID = 1 << 63
"""Generated sequence ids begin above it, far from those that clients choose."""


class _KeyWithStates(NamedTuple):
    """The batch key of a request whose states have variable shapes."""

    own: object
    shapes: tuple[tuple[int, ...], ...]


class SequenceBatcher(Scheduler):
    """Queue of a model with sequence batching.

    Args:
        spec: The model version.
        instances: Number of instances.

    Attributes:
        expiries: Expiry times of requests and idle sequences.
    """

    expiries: SequenceTimers

    def __init__(self, spec: ModelSpec, instances: int) -> None:
        settings = spec.sequence
        assert settings is not None, "a model with sequences"
        most = spec.max_batch_size
        self._name = spec.name
        self._controls = Controls(settings.controls, most > 0)
        self._initial = SequenceStates(spec).initial
        self._adds = bool(settings.controls or settings.states)
        # Only variable states separate requests with equal keys.
        self._keyed = any(-1 in state.dims for state in settings.states)
        self._iterative = settings.iterative
        self._last_id = _FIRST_OWN_ID  # of generated ids
        self._seats: list[Seats] = [
            DirectSeats(number, most, settings, self._controls)
            if settings.strategy == "DIRECT"
            else OldestSeats(number, most, settings)
            for number in range(instances)
        ]
        self._table = SequenceTable(self._seats)
        self._by_id = self._table.by_id
        self.expiries = SequenceTimers(settings.max_idle_ns)
        self._tracks = False  # until the first request that may expire
        self._bound = bound_of(spec.max_queue_size)
        self.pending = 0
        self.eager = False
        self._now_ns = 0  # time of the last submit, completion or expiry

    @property
    def free_seats(self) -> list[int]:
        """Number of free seats of each instance."""
        return [seats.free for seats in self._seats]

    @property
    def live_sequences(self) -> int:
        """Number of live sequences."""
        return self._table.live

    def submit(self, request: InferenceRequest, now_ns: int) -> None:
        """Queues a request behind the others of its sequence.

        Raises:
            InvalidArgumentError: It belongs to no sequence; the texts are Triton's.
            ResourceExhaustedError: The queue is full.
        """
        if request.batch_size != 1:
            raise InvalidArgumentError(
                f"inference request to model '{self._name}' must specify batch-size 1 due to requirements "
                f"of sequence batcher"
            )
        correlation_id = request.correlation_id
        if not correlation_id and not self._iterative:
            raise InvalidArgumentError(
                f"inference request to model '{self._name}' must specify a non-zero or non-empty "
                f"correlation ID"
            )
        begins = request.sequence_start or not correlation_id
        sequence = None if begins else self._by_id.get(correlation_id)
        if sequence is not None and sequence.ended:
            sequence = self._successor(correlation_id)
        if sequence is None and not begins:
            raise InvalidArgumentError(
                f"inference request for sequence {correlation_id} to model '{self._name}' must specify the "
                f"START flag on the first request of the sequence"
            )
        pending = self.pending
        if pending >= self._bound:
            raise queue_full(request, self._bound)
        if sequence is None:
            sequence = self._begin(request, now_ns)
        request.queued_ns = self._now_ns = now_ns
        request.state = _QUEUED
        request.sequence = sequence
        self.pending = pending + 1
        queue = sequence.queue
        queue.append(request)
        if request.sequence_end:
            sequence.ended = True
        seats = sequence.seats
        if len(queue) == 1 and not sequence.running:
            self.expiries.wake(sequence)
            if seats is not None:
                self._ready(request, sequence, seats)
        if request.deadline_ns is not None or request.timeout_us:
            self._watch(request, sequence)

    def due_ns(self, now_ns: int) -> int | None:
        """Earliest time at which an idle instance has a batch; None if none has."""
        due = [seats.due_ns(now_ns) for seats in self._seats if not seats.busy]
        return min((each for each in due if each is not None), default=None)

    def next_batch(self, now_ns: int) -> Decision:
        """The batch of the idle instance whose batch has been due for the longest time."""
        chosen: Seats | None = None
        soonest_ns = NEVER
        for seats in self._seats:
            if not seats.busy:
                due_ns = seats.due_ns(now_ns)
                if due_ns is not None and due_ns < soonest_ns:
                    chosen, soonest_ns = seats, due_ns
        if chosen is None:
            return IDLE
        if soonest_ns > now_ns:
            return WaitUntil(soonest_ns)
        decision = self.next_batch_of(chosen.number, now_ns)
        # All requests of that batch were completed meanwhile; another one may be due.
        return self.next_batch(now_ns) if decision is IDLE else decision

    def instance_dues(self, now_ns: int) -> Mapping[int, int]:
        """Time at which each idle instance with ready requests runs them, by its number."""
        dues = {seats.number: seats.due_ns(now_ns) for seats in self._seats if not seats.busy}
        return {number: due_ns for number, due_ns in dues.items() if due_ns is not None}

    def next_batch_of(self, number: int, now_ns: int) -> Decision:
        """The due batch of one idle instance."""
        seats = self._seats[number]
        batch = seats.next_batch(now_ns)
        if type(batch) is not Batch:
            return batch
        if self._iterative:
            self._drop_completed(batch, seats, now_ns)
            if not batch.requests:
                return IDLE
        seats.busy = True
        batch.instance = number
        self._start(batch.requests)
        seats.fill(batch)
        return batch

    def complete(self, batch: Batch, now_ns: int) -> None:
        """Continues, idles or ends the sequences of a batch."""
        assert batch.instance is not None
        seats = self._seats[batch.instance]
        seats.busy = False
        self._now_ns = now_ns
        for request in batch.requests:
            sequence = request.sequence
            if not isinstance(sequence, LiveSequence):
                continue  # a filler
            sequence.running = False
            if self._iterative:
                self._iterated(request, sequence, now_ns)
            self._run_next_or_idle(sequence, seats, now_ns)

    def cancel(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Takes a queued request out with all others of its sequence that are queued.

        A sequence lives on if any of its requests has run or runs, and ends if none has.
        """
        if request.state is not _QUEUED:
            return ()
        sequence = request.sequence
        assert isinstance(sequence, LiveSequence)
        queue = sequence.queue
        if sequence.seats is not None and not sequence.running:
            sequence.seats.withdraw(queue[0])
        taken = [request, *(other for other in queue if other is not request)]
        queue.clear()
        self.pending -= len(taken)
        for each in taken:
            each.state = _NEW
            if self._tracks:
                self.expiries.unwatch(each)
        # The END request may be among them.
        sequence.ended = sequence.final
        if not sequence.running:
            if sequence.ended or not sequence.begun:
                self._release(sequence)
            else:
                self.expiries.rest(sequence, self._now_ns)
        return taken

    def expired(self, now_ns: int) -> list[InferenceRequest]:
        """Takes out expired requests, with all of their sequences; ends idle sequences."""
        self._now_ns = now_ns
        expiries = self.expiries
        taken: list[InferenceRequest] = []
        for request in expiries.take_requests(now_ns):
            taken += self.cancel(request)
        for sequence in expiries.take_idle(now_ns):
            self._release(sequence)
        expiries.reset(now_ns, self._table.live)
        return taken

    def expiry_text(self, request: InferenceRequest) -> str:
        """The text is Triton's."""
        return "timeout of the corresponding sequence has been expired"

    def drain(self) -> list[InferenceRequest]:
        """Takes out everything queued and ends all sequences, running ones after their batch."""
        taken: list[InferenceRequest] = []
        for sequence in list(self._table):
            if sequence.queue:
                taken += self.cancel(sequence.queue[0])
            if sequence.running:
                sequence.ended = sequence.final = True
            elif sequence.live:
                self.expiries.wake(sequence)
                self._release(sequence)
        return taken

    def continues(self, request: InferenceRequest) -> bool:
        """True if a request belongs to a live sequence that takes more requests."""
        if request.sequence_start:
            return False
        return self._successor(request.correlation_id) is not None

    def end_sequence(self, correlation_id: int | str) -> None:
        """Ends a live sequence, if there is one: at once if it is idle, else after what is queued of it."""
        sequence = self._successor(correlation_id)
        if sequence is None:
            return
        sequence.ended = sequence.final = True
        if sequence.live and not (sequence.running or sequence.queue):
            self.expiries.wake(sequence)
            self._release(sequence)

    def _successor(self, correlation_id: int | str) -> LiveSequence | None:
        """The sequence that takes requests with this id, if any."""
        newest = self._table.newest(correlation_id)
        return None if newest is None or newest.ended else newest

    def _begin(self, request: InferenceRequest, now_ns: int) -> LiveSequence:
        """Creates the sequence that a request starts."""
        own = not request.correlation_id
        if own:
            request.correlation_id = self._unused_id()
            request.sequence_start = True
        correlation_id = request.correlation_id
        previous = self._table.newest(correlation_id)
        if previous is not None:
            if not previous.ended:
                log.warning(
                    "sequence %s of model '%s' was started again before it had ended; "
                    "what is queued of it still runs",
                    correlation_id,
                    self._name,
                )
            self.expiries.wake(previous)
        sequence = LiveSequence(
            correlation_id, self._controls.identity(correlation_id), dict(self._initial), own
        )
        self._make_ready(self._table.add_sequence(sequence))
        self.expiries.began(now_ns)
        return sequence

    def _unused_id(self) -> int:
        self._last_id += 1
        while self._last_id in self._by_id:
            self._last_id += 1
        return self._last_id

    def _release(self, sequence: LiveSequence) -> None:
        self._make_ready(self._table.release_sequence(sequence))

    def _make_ready(self, sequence: LiveSequence | None) -> None:
        """Makes the queue of a newly seated sequence ready."""
        if sequence is None or not sequence.queue:
            return
        assert sequence.seats is not None
        self._ready(sequence.queue[0], sequence, sequence.seats)
        if self._tracks:
            for request in sequence.queue:
                self.expiries.unwatch(request)
                self._watch(request, sequence)

    def _ready(self, request: InferenceRequest, sequence: LiveSequence, seats: Seats) -> None:
        """Makes a request ready; it is batched with those whose inputs and states have equal shapes."""
        if self._keyed:
            key = request.batch_key
            own = key.own if isinstance(key, _KeyWithStates) else key
            shapes = tuple(tensor.shape for tensor in sequence.states.values())
            request.batch_key = _KeyWithStates(own, shapes)
        seats.ready(request)

    def _watch(self, request: InferenceRequest, sequence: LiveSequence) -> None:
        """Sets when a request expires; its timeout counts in the backlog only."""
        end_ns = NEVER if request.deadline_ns is None else request.deadline_ns
        if request.timeout_us and sequence.seats is None:
            end_ns = min(end_ns, request.queued_ns + request.timeout_us * 1000)
        if end_ns < NEVER:
            self._tracks = True
            self.expiries.watch(request, end_ns)

    def _start(self, requests: list[InferenceRequest]) -> None:
        """Moves ready requests from their sequences into a batch, and adds control inputs and states."""
        self.pending -= len(requests)
        flags = self._controls.flags
        for request in requests:
            sequence = request.sequence
            assert isinstance(sequence, LiveSequence)
            sequence.queue.popleft()
            sequence.running = sequence.begun = True
            request.state = _RUNNING
            if self._adds:
                if self._iterative:
                    sequence.inputs = request.inputs
                request.inputs = {
                    **request.inputs,
                    **flags[request.sequence_start + 2 * request.sequence_end],
                    **sequence.identity,
                    **sequence.states,
                }
            if self._tracks and not self._iterative:
                self.expiries.unwatch(request)  # those that may run again keep their expiry

    def _run_next_or_idle(self, sequence: LiveSequence, seats: Seats, now_ns: int) -> None:
        """Continues a sequence that does not run with its next request, or idles or ends it."""
        queue = sequence.queue
        if queue:
            self._ready(queue[0], sequence, seats)
        elif sequence.ended:
            self._release(sequence)
        else:
            self.expiries.rest(sequence, now_ns)

    def _drop_completed(self, batch: Batch, seats: Seats, now_ns: int) -> None:
        """Drops requests from a batch that were completed while they waited to run again."""
        completed = [request for request in batch.requests if request.completed]
        if not completed:
            return
        batch.requests = [request for request in batch.requests if not request.completed]
        batch.size = len(batch.requests)
        self._now_ns = now_ns
        self.pending -= len(completed)
        for request in completed:
            request.state = _DONE
            if self._tracks:
                self.expiries.unwatch(request)
            sequence = request.sequence
            assert isinstance(sequence, LiveSequence)
            sequence.inputs = None
            sequence.queue.popleft()
            self._run_next_or_idle(sequence, seats, now_ns)

    def _iterated(self, request: InferenceRequest, sequence: LiveSequence, now_ns: int) -> None:
        """Queues a rescheduled request before the others of its sequence."""
        if self._tracks:
            self.expiries.unwatch(request)
        inputs, sequence.inputs = sequence.inputs, None
        if not request.rescheduled:
            return
        request.rescheduled = False
        if request.completed:
            return
        request.sequence_start = False
        request.state = _QUEUED
        request.queued_ns = now_ns
        if inputs is not None:
            request.inputs = inputs
        sequence.queue.appendleft(request)
        self.pending += 1
        if request.deadline_ns is not None:
            self._watch(request, sequence)
