"""The interface of a loaded model version, or ensemble version, that serves requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from conch.core.errors import ConchError
from conch.core.model_statistics import ModelStatistics
from conch.core.request import InferenceRequest
from conch.core.spec import ModelSpec


class ClosedError(Exception):
    """The model version takes no more requests; `Admission` resolves its successor."""


class Readiness(Protocol):
    """A readiness check of one instance, which runs on its own thread with a time limit."""

    def start(self) -> None:
        """Starts a check, unless one is running."""

    def result(self) -> bool:
        """Waits for the check; False if it fails or times out."""


def all_ready(checks: Iterable[Readiness]) -> bool:
    """Runs checks in parallel; True if all succeed."""
    started = list(checks)
    for check in started:
        check.start()
    return all([check.result() for check in started])


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """State of an instance's worker process.

    Attributes:
        state: ``starting``, ``serving``, ``lost``, ``waiting`` for its next start, or ``closed``.
        restarts: Number of restarts.
        pid: Process id; None while there is no process.
        reason: Reason for which the worker does not serve; empty if it does.
    """

    state: str
    restarts: int
    pid: int | None
    reason: str


class InlineClaim(Protocol):
    """A claim to run batches of a model inline, on the thread that submitted its requests.

    The claimant calls one of the methods below soon; until then no other thread is woken for the requests.
    """

    @property
    def fast(self) -> bool:
        """True if batches are short enough to run while no thread polls."""

    def run_inline(self, budget_ns: int | None = None) -> bool:
        """Runs batches until nothing is ready, or the budget is used up: then True, and claimed again."""

    def run_batch_inline(self) -> bool:
        """Runs one batch, waking a thread for others; True if something is ready then, and claimed again."""

    def release(self) -> None:
        """Leaves the requests to the model's own threads."""


class Servable(Protocol):
    """One version of one model, or of an ensemble of models.

    Attributes:
        statistics: Its counters; they start at zero with every load.
        version_text: The version number as the protocol carries it.
    """

    statistics: ModelStatistics
    version_text: str

    @property
    def spec(self) -> ModelSpec:
        """Spec of the version; replaced if only the number of instances changes."""

    @property
    def pending(self) -> int:
        """Requests accepted and not yet executing."""

    @property
    def live_sequences(self) -> int:
        """Number of sequences begun and not ended."""

    @property
    def readiness(self) -> Sequence[Readiness]:
        """The readiness checks of its instances; they may take time."""

    @property
    def workers(self) -> Sequence[WorkerStatus]:
        """Status of each instance's worker process, if any."""

    @property
    def notes(self) -> Sequence[str]:
        """Ways in which the model deviates from its config."""

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> InlineClaim | None:
        """Checks and takes a request; the responder gets every outcome except those raised here.

        Args:
            request: The request.
            may_claim: True if the caller may run batches inline.

        Returns:
            The claim that the caller runs or releases soon, only with `may_claim`; else None.

        Raises:
            ConchError: The request does not fit the model, or can't be queued.
            ClosedError: The version takes no more requests.
        """

    def cancel(self, request: InferenceRequest) -> bool:
        """Cancels a request: answers it at once if it is still queued, else marks it for the model.

        Returns:
            True if it was still queued.
        """

    def continues(self, request: InferenceRequest) -> bool:
        """True if a request belongs to a sequence that this version, possibly closing, has begun."""

    def end_sequence(self, correlation_id: int | str) -> None:
        """Ends a live sequence without a further request: if it is not idle, after what is queued of it."""

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests, finishes those it has, and frees the model.

        Args:
            timeout_s: Longest wait for requests to finish, in seconds; None for no limit.

        Returns:
            True if everything finished. If not, nothing is freed: a thread may still run the model.
        """

    def fail_queued(self, error: ConchError) -> int:
        """Answers all queued requests with an error; returns their number."""
