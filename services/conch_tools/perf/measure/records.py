"""One request in full, for the profile export of perf_analyzer's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]
"""A tensor: a scalar for one element, else a flat list; BYTES as text."""


class KeptResponse(NamedTuple):
    """A response as received.

    Attributes:
        at_ns: Time at which it was handled, monotonic: later than that of one that was read with it.
        body: A gRPC message without its prefix, the body of an HTTP response, or a server-sent event.
        head_bytes: Length of the JSON before the tensors of an HTTP body; 0 for none.
    """

    at_ns: int
    body: bytes
    head_bytes: int = 0


class CallRecord(NamedTuple):
    """A request as a load process knows it.

    Attributes:
        row: Number of its data.
        sequence_id: 0 for none.
        sent_ns: Time at which it was sent, monotonic.
    """

    row: int
    sequence_id: int
    sent_ns: int
    responses: list[KeptResponse]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request and its responses.

    The load side makes records only for ``--profile-export-file``: they cost more than the histograms.

    Attributes:
        timestamp_ns: Wall-clock time of the send.
        sequence_id: None outside sequences.
        inputs: Input tensors by name.
        response_timestamps: Wall-clock time of each response in ns, in order; empty for a failed request.
        outputs: Output tensors by name, for each response; may be empty if not kept.
    """

    timestamp_ns: int
    sequence_id: int | None = None
    inputs: Mapping[str, Value] = field(default_factory=dict)
    response_timestamps: tuple[int, ...] = ()
    outputs: tuple[Mapping[str, Value], ...] = ()
