"""Mirrors requests to a candidate version, within bounds, and keeps what their comparison finds.

One life of a pair, a client's request and its copy:

1. `begin`, before the stable version has the request: whether it is copied, and by which inputs.
2. The client's request is submitted, and its responses go to the client; the pair keeps them.
3. `answered`, after the last response: the pair is queued for the thread that submits copies, and never for
   the thread that answers. So the copy of a request that stable has not run is never made, and no copy
   competes with its own request.
4. `submit`, on that thread. The candidate's responses go to the pair.
5. `ended`, after the last one: the pair leaves its place, and is queued for the thread that compares.
6. `compare`.

Copies are submitted to the version itself, so they have no principal, no line in the access log and no
route. They count in the candidate's statistics, as its instances run them.

Sequences are mirrored from their start, in the order of their requests, or not at all: once a copy can't be
made, the sequence of the copies ends.

Bounds: `ShadowPolicy.inflight` pairs from 1 to 5, `MOST_HELD_BYTES` of their inputs, and as many of answers.
Requests that would exceed the first two are not copied, and counted as dropped; pairs that would exceed the
last one are not compared.

Threads and locks: any thread; one lock.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Protocol

from conch.core.clock import Clock, wall_seconds
from conch.core.errors import ConchError, ResourceExhaustedError, UnavailableError, as_conch_error
from conch.core.latencies import PLACES
from conch.core.request import InferenceRequest
from conch.core.responder_layers import ResponderLayer
from conch.core.route import WHOLE
from conch.core.servable import ClosedError, InlineClaim, Servable
from conch.core.servable_wrapper import ServableWrapper
from conch.core.tensor import Tensor
from conch_rollout.shadows.comparison import CompareRules, compare_answers
from conch_rollout.shadows.pair_files import PairFiles
from conch_rollout.shadows.shadow_pair import MirroredSequence, ShadowPair, ShadowRequest
from conch_rollout.shadows.shadow_report import ShadowReport

log = logging.getLogger(__name__)

MOST_HELD_BYTES = 64 << 20
"""Bytes of inputs that the pairs of one shadow hold, and bytes of answers."""
MOST_SATURATION = 0.8
"""Saturation of another version than the candidate above which nothing is copied."""

_MOST_SEQUENCES = 10_000
_IDLE_NS = 600 * 10**9  # of a sequence of an ensemble
_SUMMARY_NS = 60 * 10**9
# Codes of errors that are no failures of the server.
_OF_CLIENTS = frozenset(("INVALID_ARG", "NOT_FOUND", "CANCELLED", "RESOURCE_EXHAUSTED"))


@dataclass(frozen=True, slots=True)
class ShadowPolicy:
    """Settings of a rollout's shadow.

    Attributes:
        share: Share of stable's requests that are copied, of `WHOLE`.
        inflight: Most pairs at once.
        copy_regions: True if inputs in clients' shared memory are copied; else such requests are left out.
        rules: Rules by which outputs are compared.
    """

    share: int = WHOLE
    inflight: int = 16
    copy_regions: bool = False
    rules: CompareRules = field(default_factory=CompareRules)


@dataclass(frozen=True, slots=True)
class ShadowCounts:
    """A snapshot of a shadow's counters.

    Attributes:
        requests: Copies that the candidate took.
        ended: Those of them that have had their last response.
        failures: Those of them that the server or the model failed.
        latencies: Times of the others; bucket n counts from 2**(n-1) to below 2**n nanoseconds.
        dropped: Requests that were to be copied and were not, by reason.
        compared: Pairs that were compared.
        mismatches: Those of them that differ.
    """

    requests: int
    ended: int
    failures: int
    latencies: tuple[int, ...]
    dropped: Mapping[str, int]
    compared: int
    mismatches: int


class ShadowThreads(Protocol):
    """The threads of shadows; each runs what it gets in order."""

    def submit_soon(self, work: Callable[[], None]) -> None:
        """Has a copy submitted."""

    def compare_soon(self, work: Callable[[], None]) -> None:
        """Has a pair compared."""

    @property
    def compares(self) -> bool:
        """True if there is time for another comparison."""


class Shadow:
    """The shadow of one rollout.

    Args:
        model: Identifier of the model.
        version: The candidate.
        policy: The rollout's settings.
        threads: Submit and compare.
        clock: Monotonic time in nanoseconds.
        files: Keeps the tensors of the worst pairs; None for none.

    Attributes:
        active: True if requests are copied; False once it is closed.
        policy: As given; may be replaced.
        suspended: True if other versions are too busy.
        report: Results of the comparisons.
    """

    def __init__(
        self,
        model: str,
        version: int,
        policy: ShadowPolicy,
        threads: ShadowThreads,
        clock: Clock,
        files: PairFiles | None = None,
    ) -> None:
        self.model = model
        self.version = version
        self.policy = policy
        self.active = True
        self.suspended = False
        self.report = ShadowReport(files)
        self._threads = threads
        self._clock = clock
        self._captures = files is not None
        self._identity: object = None  # of the candidate's statistics
        self._random = Random().random  # its own, as models may seed the generator of `random`
        self._told = (0, 0, 0, 0)
        self._told_ns = clock()
        self._lock = threading.Lock()
        self._sequences: dict[int | str, MirroredSequence] = {}
        self._pairs = self._input_bytes = self._answer_bytes = 0
        self._requests = self._ended = self._failures = 0
        self._latencies = [0] * PLACES
        self._dropped: Counter[str] = Counter()

    # --- any thread

    def before(self, stable: Servable, ready: Mapping[int, Servable]) -> Servable:
        """The stable version for a request: mirrored, if the candidate is ready."""
        candidate = ready.get(self.version)
        if candidate is None or not self.active:
            return stable
        self._identity = candidate.statistics.identity
        return MirroredModel(stable, candidate, self)

    def mirrors(self, correlation_id: int | str) -> bool:
        """True if a sequence of the candidate is a copy."""
        return correlation_id in self._sequences

    def counts(self) -> ShadowCounts:
        """The counters."""
        report = self.report
        with self._lock:
            return ShadowCounts(
                self._requests,
                self._ended,
                self._failures,
                tuple(self._latencies),
                dict(self._dropped),
                report.compared,
                report.mismatches,
            )

    def as_json(self) -> dict[str, Any]:
        """Counters and comparisons for operators."""
        counts = self.counts()
        return {
            "version": self.version,
            "active": self.active,
            "suspended": self.suspended,
            "requests": counts.requests,
            "failures": counts.failures,
            "dropped": counts.dropped,
            **self.report.as_json(),
        }

    def close(self) -> None:
        """Copies nothing from now on, and ends the sequences of copies."""
        with self._lock:
            self.active = False
            for key, sequence in self._sequences.items():
                self._break(key, sequence)
        self._log_summary()

    # --- threads with clients' requests

    def begin(self, request: InferenceRequest, stable: Servable, candidate: Servable) -> ShadowPair | None:
        """A pair for a request that is about to be submitted; None if it is not copied."""
        if isinstance(request.outermost, ShadowRequest):
            return None
        spec = candidate.spec
        key = request.correlation_id if spec.sequence is not None or spec.ensemble is not None else 0
        sequence = self._sequences.get(key) if key else None
        if key and not request.sequence_start:
            if sequence is None or sequence.broken:
                return None
        elif sequence is not None:  # its id is used again
            with self._lock:
                self._break(key, sequence)
            sequence = None
        if sequence is None and self._random() * WHOLE >= self.policy.share:
            return None
        try:
            return self._begin(request, stable, candidate, key, sequence)
        except Exception:  # boundary: the client's request goes on, whatever its inputs are
            log.exception("a request of model '%s' could not be copied", request.model_name)
            with self._lock:
                self._drop("failed", key, sequence)
            return None

    def _begin(
        self,
        request: InferenceRequest,
        stable: Servable,
        candidate: Servable,
        key: int | str,
        sequence: MirroredSequence | None,
    ) -> ShadowPair | None:
        policy = self.policy
        given = request.inputs
        nbytes = sum(tensor.nbytes for tensor in given.values())
        regions = request.region_bindings is not None
        foreign = any(tensor.on_device or (regions and tensor.shared) for tensor in given.values())
        with self._lock:
            if not self.active:
                return None
            if self.suspended:
                reason = "saturated"
            elif foreign and not policy.copy_regions:
                reason = "regions"
            elif self._pairs >= policy.inflight:
                reason = "inflight"
            elif self._input_bytes + nbytes > MOST_HELD_BYTES:
                reason = "bytes"
            elif key and sequence is None and len(self._sequences) >= _MOST_SEQUENCES:
                reason = "sequences"
            else:
                reason = ""
                self._pairs += 1
                self._input_bytes += nbytes
            if reason:
                self._drop(reason, key, sequence)
                return None
        try:
            inputs = {name: kept_input(tensor) for name, tensor in given.items()}
            compares = request.classes is None and self._threads.compares
            pair = ShadowPair(self, request, inputs, stable, candidate, policy.rules.ignore, compares)
        except BaseException:
            with self._lock:
                self._pairs -= 1
                self._input_bytes -= nbytes
            raise
        pair.input_bytes = nbytes
        if key:
            with self._lock:
                if sequence is None:
                    sequence = self._sequences[key] = MirroredSequence(candidate)
                sequence.used_ns = self._clock()
                sequence.waiting.append(pair)
                pair.sequence = sequence
        return pair

    def withdraw(self, pair: ShadowPair) -> None:
        """Ends a pair whose request was not submitted."""
        pair.refused = True
        self.answered(pair)

    def hold(self, pair: ShadowPair, nbytes: int) -> bool:
        """Reserves more bytes of answers for a pair; False if the shadow's pairs hold too many."""
        with self._lock:
            if self._answer_bytes + nbytes > MOST_HELD_BYTES:
                return False
            self._answer_bytes += nbytes
            pair.answer_bytes += nbytes
            return True

    def answered(self, pair: ShadowPair) -> None:
        """Has a copy submitted, as its request is answered; of a sequence, after those before it."""
        with self._lock:
            pair.answered = True
            sequence = pair.sequence
            if sequence is None:
                self._submit_pair(pair)
                return
            while sequence.waiting and sequence.waiting[0].answered:
                self._submit_pair(sequence.waiting.popleft())

    # --- with the lock held

    def _submit_pair(self, pair: ShadowPair) -> None:
        sequence = pair.sequence
        if pair.refused and sequence is not None:
            self._break(pair.copy.correlation_id, sequence)
        if pair.refused or not self.active or (sequence is not None and sequence.broken):
            self._pairs -= 1
            self._free(pair)
        else:
            self._threads.submit_soon(partial(self._submit, pair))

    def _drop(self, reason: str, key: int | str, sequence: MirroredSequence | None) -> None:
        self._dropped[reason] += 1
        if sequence is not None:
            self._break(key, sequence)

    def _break(self, key: int | str, sequence: MirroredSequence) -> None:
        if not sequence.broken:
            sequence.broken = True
            self._threads.submit_soon(partial(self._end_sequence, key, sequence))

    def _free(self, pair: ShadowPair) -> None:
        self._free_inputs(pair)
        self._answer_bytes -= pair.answer_bytes
        pair.answer_bytes = 0

    def _free_inputs(self, pair: ShadowPair) -> None:
        self._input_bytes -= pair.input_bytes
        pair.input_bytes = 0

    # --- the thread that submits

    def _submit(self, pair: ShadowPair) -> None:
        copy, sequence = pair.copy, pair.sequence
        copy.received_ns = self._clock()
        refused = not self.active or (sequence is not None and sequence.broken)
        if not refused:
            try:
                if pair.trace_copy is not None:
                    pair.trace_copy(copy, pair.candidate)
                pair.candidate.submit(copy)
            except (ClosedError, ResourceExhaustedError, UnavailableError):
                refused = True
            except Exception as error:  # boundary: models and caches of add-ons
                if not isinstance(error, ConchError):
                    log.exception("a copy for model '%s' could not be submitted", copy.model_name)
                pair.theirs.error = as_conch_error(error)
                self.ended(pair)
        with self._lock:
            if not refused:
                self._requests += 1
                return
            if self.active:
                self._drop("refused", copy.correlation_id, sequence)
            self._pairs -= 1
            self._free(pair)

    def _end_sequence(self, key: int | str, sequence: MirroredSequence) -> None:
        sequence.candidate.end_sequence(key)
        self._forget(key, sequence)

    def _forget(self, key: int | str, sequence: MirroredSequence) -> None:
        with self._lock:
            if self._sequences.get(key) is sequence:
                del self._sequences[key]

    def update(self, now_ns: int, saturation: Mapping[object, float]) -> None:
        """Follows the load of other versions, forgets idle sequences, and logs a summary every minute."""
        others = (share for identity, share in saturation.items() if identity is not self._identity)
        self.suspended = max(others, default=0.0) > MOST_SATURATION
        with self._lock:
            sequences = list(self._sequences.items())
        for key, sequence in sequences:
            spec = sequence.candidate.spec.sequence
            most_ns = _IDLE_NS if spec is None else spec.max_idle_ns
            if now_ns - sequence.used_ns > most_ns and not sequence.waiting:
                self._forget(key, sequence)  # so has the candidate
        if now_ns - self._told_ns >= _SUMMARY_NS:
            self._log_summary()

    def _log_summary(self) -> None:
        counts = self.counts()
        now = (counts.requests, sum(counts.dropped.values()), counts.compared, counts.mismatches)
        new = [each - before for each, before in zip(now, self._told, strict=True)]
        self._told, self._told_ns = now, self._clock()
        if any(new):
            log.info(
                "shadow of '%s' version %d: %d copies, %d dropped, %d compared, %d of them differ",
                *(self.model, self.version, *new),
            )

    # --- threads of the candidate

    def ended(self, pair: ShadowPair) -> None:
        """Counts a copy that has had its last response, and has the pair compared."""
        copy, answer = pair.copy, pair.theirs
        if answer.cut:
            answer.error = None  # it was cancelled
        compares = pair.comparable
        with self._lock:
            self._ended += 1
            if answer.error is None:
                self._latencies[(self._clock() - copy.received_ns).bit_length()] += 1
            else:
                self._failures += answer.error.code not in _OF_CLIENTS
            self._pairs -= 1
            if not self._captures:
                copy.inputs = {}
                self._free_inputs(pair)
            if compares and self.active:
                self._threads.compare_soon(partial(self._compare, pair))
            else:
                self._free(pair)
        if pair.sequence is not None and copy.sequence_end:
            self._forget(copy.correlation_id, pair.sequence)

    # --- the thread that compares

    def _compare(self, pair: ShadowPair) -> None:
        try:
            if self.active:
                figures = compare_answers(self.policy.rules, pair.ours, pair.theirs)
                tensors = pair.tensors() if self._captures else {}
                self.report.add(pair.request_id or pair.copy.id, wall_seconds(), figures, tensors)
        finally:
            with self._lock:
                self._free(pair)


def kept_input(tensor: Tensor) -> Tensor:
    """An input of a copy: the same bytes, or a copy if others may write to them, as to an array's."""
    if tensor.has_data and not tensor.shared and (tensor.datatype == "BYTES" or not tensor.has_array):
        return Tensor(tensor.name, tensor.datatype, tensor.shape, tensor.data)
    return tensor.detached(tensor.name)


class MirroredModel(ServableWrapper):
    """The stable version for one request of a route with a shadow.

    Args:
        model: The stable version.
        candidate: The version that gets the copy.
        shadow: Decides whether the request is copied.
    """

    def __init__(self, model: Servable, candidate: Servable, shadow: Shadow) -> None:
        super().__init__(model)
        self._candidate = candidate
        self._shadow = shadow

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> InlineClaim | None:
        """Serves a request by the stable version, and has it copied; see `Servable.submit`."""
        pair = self._shadow.begin(request, self.model, self._candidate)
        if pair is None:
            return self.model.submit(request, may_claim)
        request.wrap_responder(pair.before, ResponderLayer.SHADOW)
        try:
            return self.model.submit(request, may_claim)
        except BaseException:
            # `Admission` may submit the request to a successor.
            request.wrap_responder(lambda _: pair.responder, ResponderLayer.SHADOW)
            self._shadow.withdraw(pair)
            raise
