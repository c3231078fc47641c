"""What a loaded model version looks like to those who send it requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from conch.core.errors import ConchError
from conch.core.readiness import Readiness
from conch.core.request import InferenceRequest
from conch.core.spec import ModelSpec
from conch.core.stats import ModelStatistics
from conch.core.workers import WorkerStatus


class ClosedError(Exception):
    """The model version takes no more requests; whoever submits looks its successor up."""


class Leadable(Protocol):
    """A model with requests that a thread has promised to see to."""

    @property
    def fast(self) -> bool:
        """Whether a batch is short enough to be run while nobody polls."""

    def lead(self, budget_ns: int | None = None) -> bool:
        """Runs batches until nothing is left, or the budget is used up: then True."""

    def lead_one(self) -> bool:
        """Runs one batch if one is ready, and has others see to the rest; True if something is left then."""

    def hand_over(self) -> None:
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
        """What it is; replaced where nothing but the number of instances changes."""

    @property
    def pending(self) -> int:
        """Requests accepted and not yet executing."""

    @property
    def held(self) -> int:
        """How many sequences it has begun and not ended."""

    @property
    def readiness(self) -> Sequence[Readiness]:
        """The checks it makes of itself when somebody asks whether it is ready; they may take time."""

    @property
    def workers(self) -> Sequence[WorkerStatus]:
        """What the processes of its instances are in, of those that have one of their own."""

    @property
    def notes(self) -> Sequence[str]:
        """What it does against its config, though it is served."""

    def submit(self, request: InferenceRequest, may_lead: bool = False) -> Leadable | None:
        """Checks and takes a request; the responder gets every outcome except those raised here.

        Args:
            request: The request.
            may_lead: Whether the caller is willing to run batches soon.

        Returns:
            What the caller has to lead or hand over soon, only if it may lead; else None.

        Raises:
            ConchError: The request does not fit the model, or can't be queued.
            ClosedError: The version takes no more requests.
        """

    def cancel(self, request: InferenceRequest) -> bool:
        """Cancels a request: answers it at once if it is still queued, else marks it for the model.

        Returns:
            Whether it was still queued.
        """

    def continues(self, request: InferenceRequest) -> bool:
        """Whether a request belongs to a sequence that this version, possibly closing, has begun."""

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests, finishes those it has, and frees the model.

        Args:
            timeout_s: How long to wait for requests to finish; None for as long as it takes.

        Returns:
            Whether everything finished. If not, nothing is freed: a thread may still run the model.
        """

    def fail_queued(self, error: ConchError) -> int:
        """Answers everything queued with an error; returns how many requests that were."""
