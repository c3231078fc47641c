"""A model version that is loaded and takes requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from conch.core.backend import BackendInstance, BackendModel
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import CancelledError, ConchError
from conch.core.instances.execution import Executor
from conch.core.instances.placement import place
from conch.core.instances.runner import Runner
from conch.core.instances.warmup import Warmup
from conch.core.readiness import Readiness
from conch.core.request import InferenceRequest, RequestState
from conch.core.scheduler.base import Scheduler
from conch.core.scheduler.default import DefaultScheduler
from conch.core.scheduler.dynamic import DynamicBatcher
from conch.core.scheduler.priority import PriorityBatcher
from conch.core.spec import ModelSpec, WarmupSample
from conch.core.stats import QUEUED, ModelStatistics
from conch.core.validation import RequestValidator

log = logging.getLogger(__name__)


def scheduler_for(spec: ModelSpec) -> Scheduler:
    """The scheduler a model's config chooses."""
    batching = spec.batching
    if batching is None:
        return DefaultScheduler(spec.max_queue_size)
    settings = (
        spec.max_batch_size,
        batching.preferred_sizes,
        batching.max_queue_delay_ns,
        spec.max_queue_size,
    )
    if batching.policies:
        return PriorityBatcher(*settings, batching.policies, batching.default_level)
    return DynamicBatcher(*settings)


class Model:
    """One version of one model: its instances, its queue and its statistics.

    Attributes:
        spec: What it is.
        statistics: Its counters; they start at zero with every load.
        version_text: The version number as the protocol carries it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        backend_model: BackendModel,
        instances: Sequence[BackendInstance],
        clock: Clock = monotonic_ns,
    ) -> None:
        self.spec = spec
        self.statistics = ModelStatistics(self._gauges)
        self.version_text = str(spec.version)
        self._clock = clock
        self._backend_model = backend_model
        self._instances = list(instances)
        self._validate = RequestValidator(spec)
        self._executor = Executor(spec, self.statistics, clock)
        self._runner = Runner(
            spec.name,
            scheduler_for(spec),
            self._instances,
            self._executor,
            clock,
        )

    @classmethod
    def create(
        cls,
        spec: ModelSpec,
        backend_model: BackendModel,
        clock: Clock = monotonic_ns,
        warmup: Sequence[WarmupSample] = (),
    ) -> Model:
        """Makes and warms up all instances of a loaded backend model; closes what it made if one fails.

        Args:
            spec: The model version.
            backend_model: What the backend loaded; belongs to the model from here on.
            clock: Monotonic time in nanoseconds.
            warmup: Samples that run on each instance when it has been made.

        Raises:
            ConchError: An instance can't be made, or a sample can't be run on it.
        """
        instances: list[BackendInstance] = []
        try:
            warm_up = Warmup(spec, warmup, clock)
            for placement in place(spec.instance_groups):
                instance = backend_model.create_instance(placement)
                instances.append(instance)
                warm_up.run(instance, placement.name)
            return cls(spec, backend_model, instances, clock)
        except BaseException:
            _close_all(spec, instances, backend_model)
            raise

    @property
    def pending(self) -> int:
        """Requests accepted and not yet executing."""
        return self._runner.pending

    @property
    def readiness(self) -> Sequence[Readiness]:
        """The checks its instances make of themselves."""
        return [check for instance in self._instances if (check := instance.readiness) is not None]

    def submit(self, request: InferenceRequest, may_lead: bool = False) -> Runner | None:
        """Checks and queues a request; see `Runner.submit` for leading and for a version being closed.

        Raises:
            InvalidArgumentError: The request does not fit the model.
            UnavailableError: Its priority level has no place left.
            ResourceExhaustedError: The queue has none.
            ClosedError: The version takes no more requests.
        """
        self._validate(request)
        request.model = self
        return self._runner if self._runner.submit(request, may_lead) else None

    def cancel(self, request: InferenceRequest) -> bool:
        """Cancels a request: answers it at once if it is still queued, else marks it for the model.

        Returns:
            Whether it was still queued.
        """
        request.cancelled = True
        cancelled = self._runner.cancel(request)
        if request.state is RequestState.RUNNING:
            self._executor.cancels = True
        for each in cancelled:
            self.statistics.record_cancellation(self._clock() - each.received_ns, QUEUED)
            each.fail(CancelledError(""))
        return bool(cancelled)

    def continues(self, request: InferenceRequest) -> bool:
        """Whether a request belongs to a sequence that this version, possibly closing, has begun."""
        return self._runner.continues(request)

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests, finishes those it has, and frees the model.

        Args:
            timeout_s: How long to wait for requests to finish; None for as long as it takes.

        Returns:
            Whether everything finished. If not, nothing is freed: a thread may still run the model.
        """
        if not self._runner.close(timeout_s):
            return False
        _close_all(self.spec, self._instances, self._backend_model)
        return True

    def _gauges(self) -> tuple[int, int]:
        return self._runner.pending, self._runner.running

    def fail_queued(self, error: ConchError) -> int:
        """Answers everything queued with an error; returns how many requests that were."""
        failed = self._runner.take_queued()
        for request in failed:
            self.statistics.record_failure(self._clock() - request.received_ns)
            request.fail(error)
        return len(failed)


def _close_all(spec: ModelSpec, instances: Sequence[BackendInstance], model: BackendModel) -> None:
    for close in (*(instance.close for instance in instances), model.close):
        try:
            close()
        except Exception:
            log.exception("model '%s' version %d failed to close cleanly", spec.name, spec.version)
