"""A loaded model version: validates requests and passes them to its runner.

Owns: the instance pool, runner, executor and statistics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from conch.core.backend import BackendModel
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import CancelledError, ConchError, UnavailableError
from conch.core.execution.executor import Executor
from conch.core.execution.instance_pool import InstancePool, Resize
from conch.core.execution.rate_limiter import RateLimiter
from conch.core.execution.resource_limits import ResourceLimits
from conch.core.execution.response_order import ResponseOrder, keeps_order
from conch.core.execution.runner import Runner
from conch.core.execution.warmup import Warmup
from conch.core.model_statistics import QUEUED, ModelStatistics
from conch.core.request import InferenceRequest, RequestState
from conch.core.request_log import REQUESTS
from conch.core.scheduling.default import DefaultScheduler
from conch.core.scheduling.dynamic import DynamicBatcher
from conch.core.scheduling.priority import BudgetBatcher, BudgetPriorityBatcher, PriorityBatcher
from conch.core.scheduling.scheduler import Scheduler
from conch.core.scheduling.sequence.batcher import SequenceBatcher
from conch.core.servable import Readiness, WorkerStatus
from conch.core.spec import ModelSpec, WarmupSample
from conch.core.statistics_snapshot import Gauges
from conch.core.validation import RequestValidator

log = logging.getLogger(__name__)


def scheduler_for(spec: ModelSpec, instances: int = 1) -> Scheduler:
    """Creates the scheduler that a model's config selects."""
    if spec.sequence is not None:
        return SequenceBatcher(spec, instances)
    batching = spec.batching
    if batching is None:
        return DefaultScheduler(spec.max_queue_size)
    settings = (
        spec.max_batch_size,
        batching.preferred_sizes,
        batching.max_queue_delay_ns,
        spec.max_queue_size,
    )
    budget = spec.padding is not None and spec.padding.max_batch_elements > 0
    if batching.policies:
        kind = BudgetPriorityBatcher if budget else PriorityBatcher
        return kind(*settings, batching.policies, batching.default_level)
    return BudgetBatcher(*settings) if budget else DynamicBatcher(*settings)


class Model:
    """A loaded model version with its instances, queue and statistics.

    Attributes:
        spec: The model version; replaced by a resize.
        statistics: Counters; each load starts at zero.
        version_text: Version number as the protocol carries it.
    """

    __slots__ = (
        "_clock",
        "_executor",
        "_pool",
        "_runner",
        "_validate",
        "spec",
        "statistics",
        "version_text",
    )

    def __init__(self, spec: ModelSpec, pool: InstancePool, clock: Clock = monotonic_ns) -> None:
        self.spec = spec
        self.statistics = ModelStatistics(self._gauges)
        self.version_text = str(spec.version)
        self._clock = clock
        self._pool = pool
        active = pool.active
        self._validate: Callable[[InferenceRequest], None] = (
            RequestValidator(spec) if active else self._refuse
        )
        executor = self._executor = Executor(spec, self.statistics, clock)
        scheduler = scheduler_for(spec, len(active))
        order = ResponseOrder() if keeps_order(spec) else None
        limits = (
            ResourceLimits(pool.limiter, pool.grants) if pool.limiter is not None and pool.grants else None
        )
        named = spec.sequence is not None
        self._runner = Runner(spec.name, scheduler, active, executor, clock, named, order, limits)

    @classmethod
    def create(
        cls,
        spec: ModelSpec,
        backend_model: BackendModel,
        clock: Clock = monotonic_ns,
        warmup: Sequence[WarmupSample] = (),
        limiter: RateLimiter | None = None,
        on_warmup: Callable[[], None] = lambda: None,
    ) -> Model:
        """Creates and warms up all instances of a backend model; closes them if one fails.

        Args:
            spec: The model version.
            backend_model: The backend's model; the new object takes ownership.
            clock: Monotonic time in nanoseconds.
            warmup: Samples to run on each new instance; they need no resources.
            limiter: Grants resources to instances; None without rate limits.
            on_warmup: Called before the first sample, if there is one.

        Raises:
            ConchError: An instance can't be created, a sample fails, or an instance's resources can never be
                granted.
        """
        pool = InstancePool(spec, backend_model, limiter)
        with ExitStack() as undo:
            undo.callback(pool.close)
            pool.create(Warmup(spec, warmup, clock, on_warmup))
            made = cls(spec, pool, clock)
            undo.pop_all()
        return made

    def prepare_resize(self, spec: ModelSpec, warmup: Sequence[WarmupSample] = ()) -> Resize:
        """Creates the instances for new counts; the caller commits or abandons the resize.

        Args:
            spec: The same version with other instance counts; takes effect with the commit.
            warmup: Samples that run on each new instance.

        Raises:
            ConchError: An instance can't be created; nothing has changed.
        """

        def show() -> None:
            self.spec = spec

        warm_up = Warmup(spec, warmup, self._clock)
        return self._pool.prepare(spec.instance_groups, warm_up, self._runner, show)

    @property
    def pending(self) -> int:
        """Number of accepted requests that are not yet executing."""
        return self._runner.pending

    @property
    def live_sequences(self) -> int:
        """Number of active sequences."""
        return self._runner.live_sequences

    @property
    def readiness(self) -> Sequence[Readiness]:
        """Readiness checks of the instances."""
        return [check for instance in self._pool.active if (check := instance.readiness) is not None]

    @property
    def workers(self) -> Sequence[WorkerStatus]:
        """Status of the instances' worker processes."""
        return [status for instance in self._pool.all if (status := instance.worker()) is not None]

    @property
    def notes(self) -> Sequence[str]:
        """Ways in which the model deviates from its config."""
        return self._pool.notes

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> Runner | None:
        """Validates and queues a request; `Runner.submit` explains `may_claim` and closing.

        Raises:
            InvalidArgumentError: The request does not fit the model.
            UnavailableError: The queue of its priority level is full.
            ResourceExhaustedError: The queue is full.
            ClosedError: The version is closed.
        """
        self._validate(request)
        request.model = self
        if REQUESTS.on:
            REQUESTS.begin(request, self)
        return self._runner if self._runner.submit(request, may_claim) else None

    def cancel(self, request: InferenceRequest) -> bool:
        """Cancels a request: fails it if queued, otherwise marks it for the model.

        Returns:
            True if it was queued.
        """
        request.cancelled = True
        cancelled = self._runner.cancel(request)
        if request.state is RequestState.RUNNING:
            self._executor.cancels = True
            self._executor.notify_cancelled(request)
        for each in cancelled:
            if not each.completed:
                self.statistics.record_cancellation(self._clock() - each.received_ns, QUEUED)
                self._executor.tracker.fail(each, CancelledError(""))
        return bool(cancelled)

    def continues(self, request: InferenceRequest) -> bool:
        """True if a request belongs to an active sequence of this version, which may be closing."""
        return self._runner.continues(request)

    def end_sequence(self, correlation_id: int | str) -> None:
        """Ends an active sequence without a further request, if there is one."""
        self._runner.end_sequence(correlation_id)

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests, waits for accepted ones, and frees the model.

        Returns:
            False on timeout. Nothing is freed then: a thread may still run the model.
        """
        closing, grace_s = self._runner.closing, self._pool.unload_grace_s
        if grace_s is not None and (timeout_s is None or timeout_s > grace_s):
            if not closing.close(grace_s):
                log.warning(
                    "model '%s' version %d: its running requests are cancelled after %g s of unloading",
                    *(self.spec.identifier, self.spec.version, grace_s),
                )
                for instance in self._pool.all:
                    instance.cancel_running()
            timeout_s = None if timeout_s is None else timeout_s - grace_s
        if not closing.close(timeout_s):
            return False
        self._pool.close()
        return True

    def _gauges(self) -> Gauges:
        return self._runner.instances.gauges()

    def fail_queued(self, error: ConchError) -> int:
        """Fails all queued requests; returns their number."""
        failed = self._runner.take_queued()
        for request in failed:
            if not request.completed:
                self.statistics.record_failure(self._clock() - request.received_ns)
                self._executor.tracker.fail(request, error)
        return len(failed)

    def _refuse(self, request: InferenceRequest) -> None:
        raise UnavailableError(
            f"{request.log_prefix}model '{self.spec.name}' has passive instances only, which take no requests"
        )
