"""What a request may have besides its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict

from conch.core.clock import monotonic_ns
from conch.core.request import InferenceRequest, Parameter, Responder
from conch.core.tensor import Tensor


class Request(TypedDict, total=False):
    """What a request may have besides its inputs.

    Attributes:
        outputs: Names of the outputs wanted; all, if it is not given.
        parameters: Request parameters.
        request_id: Its id.
        sequence_id: The sequence that it belongs to.
        sequence_start: Whether it begins the sequence.
        sequence_end: Whether it ends the sequence.
        priority: Its priority level.
        timeout_us: How long it may wait in the queue, in microseconds.
        deadline_s: Seconds after which nobody waits any more.
    """

    outputs: Iterable[str]
    parameters: Mapping[str, Parameter]
    request_id: str
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool
    priority: int
    timeout_us: int
    deadline_s: float


def request_of(
    name: str, version: str, tensors: dict[str, Tensor], responder: Responder, given: Request
) -> InferenceRequest:
    """Makes a request, as a front end does."""
    now = monotonic_ns()
    outputs, parameters = given.get("outputs"), given.get("parameters")
    request = InferenceRequest(
        name,
        version,
        tensors,
        responder,
        now,
        given.get("request_id", ""),
        None if outputs is None else tuple(outputs),
        dict(parameters) if parameters else None,
    )
    request.correlation_id = given.get("sequence_id", 0)
    request.sequence_start = given.get("sequence_start", False)
    request.sequence_end = given.get("sequence_end", False)
    request.priority = given.get("priority", 0)
    request.timeout_us = given.get("timeout_us", 0)
    request.responses_wait = True
    if "deadline_s" in given:
        request.deadline_ns = now + round(given["deadline_s"] * 1e9)
    return request
