"""`ServableWrapper`: a `Servable` in front of another one, to which it passes everything on but requests."""

from __future__ import annotations

from collections.abc import Sequence

from conch.core.errors import ConchError
from conch.core.request import InferenceRequest
from conch.core.servable import Readiness, Servable, WorkerStatus
from conch.core.spec import ModelSpec


class ServableWrapper:
    """The base of such classes; they have `submit`.

    Attributes:
        model: The model behind.
        statistics: The model's counters.
        version_text: The version number as the protocol carries it.
    """

    def __init__(self, model: Servable) -> None:
        self.model = model
        self.statistics = model.statistics
        self.version_text = model.version_text

    @property
    def spec(self) -> ModelSpec:
        """The model's spec."""
        return self.model.spec

    @property
    def readiness(self) -> Sequence[Readiness]:
        """The model's readiness checks."""
        return self.model.readiness

    @property
    def workers(self) -> Sequence[WorkerStatus]:
        """States of the model's worker processes."""
        return self.model.workers

    @property
    def notes(self) -> Sequence[str]:
        """Deviations of the model from its config."""
        return self.model.notes

    @property
    def pending(self) -> int:
        """Requests accepted and not yet executing."""
        return self.model.pending

    @property
    def live_sequences(self) -> int:
        """Number of live sequences."""
        return self.model.live_sequences

    def cancel(self, request: InferenceRequest) -> bool:
        """Cancels a request; see `Servable.cancel`."""
        return self.model.cancel(request)

    def continues(self, request: InferenceRequest) -> bool:
        """True if a request belongs to a live sequence."""
        return self.model.continues(request)

    def end_sequence(self, correlation_id: int | str) -> None:
        """Ends a sequence; see `Servable.end_sequence`."""
        self.model.end_sequence(correlation_id)

    def close(self, timeout_s: float | None = None) -> bool:
        """Closes the model, which refuses new requests; see `Servable.close`."""
        return self.model.close(timeout_s)

    def fail_queued(self, error: ConchError) -> int:
        """Fails all queued requests; returns their number."""
        return self.model.fail_queued(error)
