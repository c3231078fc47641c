"""Counts of one load process in one second."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from conch_tools.perf.measure.histogram import Histogram
from conch_tools.perf.measure.records import CallRecord


@dataclass(slots=True)
class Slice:
    """Requests that ended in one second of the load, whenever they began.

    Attributes:
        second: Whole seconds since the load began.
        sent: Requests sent in this second.
        answered: Requests answered without an error.
        responses: Their responses; more than ``answered`` for decoupled models.
        errors: Requests that failed, by status: a gRPC code's name, an HTTP status, or what became of the
            connection.
        late: Requests sent more than 1 ms after their time; always 0 in a closed loop.
        shed: Requests whose time came while as many as allowed were outstanding; never sent.
        latency: Times from a request's due time to its last response.
        service: Times from a request's sending to its last response. Equal to ``latency`` in a closed loop.
        first: Times from the sending to the first response, for streamed requests.
        between: Times between responses of one request.
        next_one: Times from the first to the second response of one request.
        token: Times from the first to the last response of a request with several, divided by their number
            without the first.
        records: Requests that were answered, if they are kept; not in files.
        sequences: Sequences whose last request was answered.
    """

    second: int
    sent: int = 0
    answered: int = 0
    responses: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    late: int = 0
    shed: int = 0
    latency: Histogram = field(default_factory=Histogram)
    service: Histogram = field(default_factory=Histogram)
    first: Histogram = field(default_factory=Histogram)
    between: Histogram = field(default_factory=Histogram)
    next_one: Histogram = field(default_factory=Histogram)
    token: Histogram = field(default_factory=Histogram)
    records: list[CallRecord] = field(default_factory=list)
    sequences: int = 0

    def add(self, other: Slice) -> None:
        """Adds what another process counted in the same second."""
        self.sent += other.sent
        self.answered += other.answered
        self.responses += other.responses
        self.errors.update(other.errors)
        self.late += other.late
        self.shed += other.shed
        self.sequences += other.sequences
        for name in ("latency", "service", "first", "between", "next_one", "token"):
            histogram: Histogram = getattr(self, name)
            histogram.add(getattr(other, name))
        self.records += other.records
