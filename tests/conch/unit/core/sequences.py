"""Specs and requests for tests of the sequence batcher, and a plain model of what it promises.

The model keeps lists, looks at all of them every time, and says what has to come next.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count
from typing import Any

from tests.support.core import Answers, make_request, make_spec

from conch.core.request import InferenceRequest
from conch.core.scheduling.sequence.batcher import SequenceBatcher
from conch.core.spec import ControlTensor, ModelSpec, SequenceBatching, StateSpec

US = 1_000
MS = 1_000_000
IDLE_NS = 40 * MS

CONTROLS = (
    ControlTensor("START", "START", "INT32"),
    ControlTensor("READY", "READY", "FP32", -1.0, 2.0),
    ControlTensor("END", "END", "BOOL"),
    ControlTensor("CORRID", "CORRID", "UINT64"),
)
STATE = StateSpec("STATE_IN", "STATE_OUT", "INT64", (1,), (1,))


def sequence_spec(max_batch_size: int = 4, **settings: Any) -> ModelSpec:
    """A model with sequences; some settings are the spec's, all others those of its sequences."""
    of_spec = {
        name: settings.pop(name) for name in ("decoupled", "max_queue_size", "outputs") if name in settings
    }
    settings.setdefault("max_idle_ns", IDLE_NS)
    return replace(make_spec(max_batch_size), sequence=SequenceBatching(**settings), **of_spec)


def make_batcher(max_batch_size: int = 4, instances: int = 1, **settings: Any) -> SequenceBatcher:
    """A batcher of `sequence_spec`."""
    return SequenceBatcher(sequence_spec(max_batch_size, **settings), instances)


def sequence_request(
    correlation_id: int | str,
    flags: str = "",
    answers: Answers | None = None,
    value: float = 0.0,
    rows: int | None = 1,
    **changes: Any,
) -> InferenceRequest:
    """A request of a sequence; the flags are any of "S", for its start, and "E", for its end."""
    return make_request(
        answers,
        rows,
        value,
        correlation_id=correlation_id,
        sequence_start="S" in flags,
        sequence_end="E" in flags,
        **changes,
    )


def told(request: InferenceRequest, name: str) -> Any:
    """The only element of an input."""
    (value,) = request.inputs[name].numpy().ravel().tolist()
    return value


@dataclass(eq=False)
class Seq:
    """A sequence of the model."""

    id: int
    own: bool = False
    queue: list[InferenceRequest] = field(default_factory=list)
    running: InferenceRequest | None = None
    begun: bool = False
    ended: bool = False
    final: bool = False
    instance: int | None = None
    row: int = 0
    idle_since: tuple[int, int] | None = None  # the time, and a number for those of the same time
    state: int = 0

    @property
    def finished(self) -> bool:
        return not self.queue and self.running is None


class Expected:
    """Decisions of a sequence batcher, from its rules."""

    def __init__(self, spec: ModelSpec, instances: int) -> None:
        settings = spec.sequence
        assert settings is not None
        self.settings = settings
        self.direct = settings.strategy == "DIRECT"
        self.most = max(spec.max_batch_size, 1)
        places = self.most if self.direct else settings.max_candidates
        self.free = [list(range(places)) for _ in range(instances)]
        self.lanes: dict[int, list[Seq]] = {}
        self.backlog: list[Seq] = []
        self.order: list[list[Seq]] = [[] for _ in range(instances)]  # ready sequences, first ready first
        self.busy = [False] * instances
        self.of: dict[InferenceRequest, Seq] = {}
        self.touched = 0
        self.rests = count()

    @property
    def sequences(self) -> list[Seq]:
        return [each for lane in self.lanes.values() for each in lane]

    @property
    def pending(self) -> int:
        return sum(len(each.queue) for each in self.sequences)

    def taking(self, correlation_id: int) -> Seq | None:
        """The sequence that takes requests without a start flag."""
        lane = self.lanes.get(correlation_id)
        return lane[-1] if lane and not lane[-1].ended else None

    def submit(self, request: InferenceRequest, own: bool, now: int) -> None:
        self.touched = now
        correlation_id = request.correlation_id
        assert isinstance(correlation_id, int)
        if request.sequence_start:
            lane = self.lanes.setdefault(correlation_id, [])
            sequence = Seq(correlation_id, own, ended=own, final=own)
            lane.append(sequence)
            if len(lane) == 1:
                self._admit(sequence)
            else:
                lane[-2].ended = lane[-2].final = True
                if lane[0].finished:
                    self._release(lane[0])
        else:
            found = self.taking(correlation_id)
            assert found is not None
            sequence = found
        self.of[request] = sequence
        sequence.idle_since = None
        sequence.queue.append(request)
        sequence.ended |= request.sequence_end
        if len(sequence.queue) == 1:
            self._ready(sequence)

    def cancel(self, request: InferenceRequest) -> set[InferenceRequest]:
        sequence = self.of[request]
        if request not in sequence.queue:
            return set()
        taken = set(sequence.queue)
        sequence.queue.clear()
        if sequence.instance is not None and sequence in self.order[sequence.instance]:
            self.order[sequence.instance].remove(sequence)
        sequence.ended = sequence.final
        if sequence.running is None:
            if sequence.ended or not sequence.begun:
                self._release(sequence)
            else:
                self._rest(sequence)
        return taken

    def end(self, correlation_id: int) -> None:
        sequence = self.taking(correlation_id)
        if sequence is not None:
            sequence.ended = sequence.final = True
            if sequence.finished:
                self._release(sequence)

    def late(self, now: int) -> list[InferenceRequest]:
        """Requests whose own time has passed."""
        return [
            request
            for sequence in self.sequences
            for request in sequence.queue
            if (request.deadline_ns is not None and request.deadline_ns <= now)
            or (
                sequence.instance is None
                and request.timeout_us
                and request.queued_ns + request.timeout_us * US <= now
            )
        ]

    def idle(self, now: int) -> list[Seq]:
        """Sequences that have been idle for too long, the longest first."""
        idle = [(each.idle_since, each) for each in self.sequences if each.idle_since is not None]
        idle.sort(key=lambda pair: pair[0])
        return [each for (since, _), each in idle if since + self.settings.max_idle_ns <= now]

    def release_idle(self, now: int) -> None:
        for sequence in self.idle(now):
            self._release(sequence)

    def due(self, instance: int) -> int | None:
        """Time at which a direct batch is due on an instance; None if none is."""
        ready = self.order[instance]
        if self.busy[instance] or not ready:
            return None
        oldest = min(each.queue[0].queued_ns for each in ready)
        share = Fraction(len(ready), self.most)
        enough = Fraction(self.settings.min_slot_utilization).limit_denominator(1000)
        waits = enough > 0 and share < enough
        return oldest + self.settings.max_queue_delay_ns if waits else oldest

    def start(self, instance: int, requests: list[InferenceRequest]) -> None:
        self.busy[instance] = True
        for request in requests:
            sequence = self.of[request]
            assert sequence.queue.pop(0) is request, "not the first of its sequence"
            assert sequence.running is None, "two requests of a sequence at a time"
            assert sequence.instance == instance, "on another instance than before"
            self.order[instance].remove(sequence)
            sequence.running = request
            sequence.begun = True

    def complete(self, instance: int, requests: list[tuple[InferenceRequest, bool]], now: int) -> None:
        """Ends a batch; each request comes with whether it runs again."""
        self.touched = now
        self.busy[instance] = False
        for request, again in requests:
            sequence = self.of[request]
            sequence.running = None
            if again:
                sequence.queue.insert(0, request)
            if sequence.queue:
                self._ready(sequence)
            elif sequence.ended:
                self._release(sequence)
            else:
                self._rest(sequence)

    def drain(self) -> None:
        for sequence in self.sequences:
            sequence.queue.clear()
            sequence.ended = sequence.final = True
        self.order = [[] for _ in self.order]
        for sequence in self.sequences:
            if sequence.finished:
                self._release(sequence)

    def _rest(self, sequence: Seq) -> None:
        sequence.idle_since = (self.touched, next(self.rests))

    def _ready(self, sequence: Seq) -> None:
        if sequence.instance is not None and sequence.running is None:
            self.order[sequence.instance].append(sequence)

    def _seat(self, sequence: Seq, instance: int) -> None:
        sequence.instance = instance
        sequence.row = min(self.free[instance])
        self.free[instance].remove(sequence.row)
        if sequence.queue:
            self._ready(sequence)

    def _admit(self, sequence: Seq) -> None:
        most = max(len(free) for free in self.free)
        if most:
            self._seat(sequence, next(n for n, free in enumerate(self.free) if len(free) == most))
        else:
            self.backlog.append(sequence)

    def _release(self, sequence: Seq) -> None:
        lane = self.lanes[sequence.id]
        turn = lane[0] is sequence
        lane.remove(sequence)
        if not lane:
            del self.lanes[sequence.id]
        if not turn:
            return
        if sequence.instance is None:
            self.backlog.remove(sequence)
        else:
            self.free[sequence.instance].append(sequence.row)
            if self.backlog:
                self._seat(self.backlog.pop(0), sequence.instance)
        if lane:
            self._admit(lane[0])
