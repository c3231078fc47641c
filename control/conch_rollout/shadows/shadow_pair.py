"""A request and its copy, with the answers to both."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Protocol

from conch.core.errors import ConchError, QueueTimeoutError, UnavailableError
from conch.core.request import InferenceRequest, InferenceResponse, Parameter, Responder
from conch.core.response_cache.cache_key import ORDER
from conch.core.response_cache.cached_model import Use
from conch.core.servable import Servable
from conch.core.tensor import Tensor
from conch_rollout.shadows.comparison import VersionAnswer

log = logging.getLogger(__name__)

MOST_RESPONSES = 1024
"""Responses to a copy, and those of its request that are kept."""
MOST_ANSWER_BYTES = 16 << 20
"""Bytes of one answer that are kept."""

_number = count(1)  # of copies whose requests have no id
# Codes of errors that tell of load or of a client that has left, and nothing about the model.
_UNRUN = frozenset(("CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"))


def _ran(error: ConchError | None) -> bool:
    """True if the model has run: no error, or one other than cancellation, expiry and a full queue."""
    return error is None or not (error.code in _UNRUN or isinstance(error, QueueTimeoutError))


class ShadowRequest(InferenceRequest):
    """A copy of a request."""

    __slots__ = ()


class MirroredSequence:
    """A sequence that is mirrored.

    Attributes:
        candidate: The version with the copies.
        waiting: Its pairs in the order of the requests, from the first one that is not answered.
        broken: True if no further copies are made.
        used_ns: Time of the last request.
    """

    __slots__ = ("broken", "candidate", "used_ns", "waiting")

    def __init__(self, candidate: Servable) -> None:
        self.candidate = candidate
        self.waiting: deque[ShadowPair] = deque()
        self.broken = False
        self.used_ns = 0


class PairOwner(Protocol):
    """The shadow of a pair."""

    def hold(self, pair: ShadowPair, nbytes: int) -> bool:
        """Reserves more bytes of answers for the pair; False if the shadow's pairs hold too many."""

    def answered(self, pair: ShadowPair) -> None:
        """The client's request has had its last response."""

    def ended(self, pair: ShadowPair) -> None:
        """The copy has had its last response."""


def copy_of(
    request: InferenceRequest,
    inputs: dict[str, Tensor],
    stable: Servable,
    candidate: Servable,
    responder: Responder,
) -> ShadowRequest:
    """A copy of a request: without regions, deadline and timeout, on the lowest level."""
    spec = candidate.spec
    requested = request.requested
    if requested is None:  # the candidate may have further outputs
        requested = tuple(tensor.name for tensor in stable.spec.outputs)
    parameters: dict[str, Parameter] | None = request.parameters
    if spec.cached or spec.ensemble is not None:
        parameters = {**(parameters or {}), ORDER: Use.BYPASS.value}
    copy = ShadowRequest(
        request.model_name,
        candidate.version_text,
        inputs,
        responder,
        0,
        f"shadow-{request.id or next(_number)}",
        requested,
        parameters,
    )
    copy.classes = request.classes
    copy.correlation_id = request.correlation_id
    copy.sequence_start, copy.sequence_end = request.sequence_start, request.sequence_end
    copy.empty_final = request.empty_final
    if spec.batching is not None:
        copy.priority = len(spec.batching.policies)
    return copy


class ShadowPair:
    """A request and its copy. Threads: those that respond, one at a time for each side.

    Args:
        owner: Its shadow.
        request: The client's request.
        inputs: The inputs of the copy.
        stable: The version for the request.
        candidate: The version for the copy.
        ignored: Names of outputs that are not compared.
        compares: True if the answers are to be compared.

    Attributes:
        responder: The responder of the client's request without the pair.
        request_id: Id of the client's request.
        copy: The copy.
        sequence: The sequence of both; None for none.
        trace_copy: Traces the copy; None if the request is not traced.
        compares: As given; False once an answer can't be kept.
        answered: True if the client's request has had its last response.
        refused: True if stable did not run the request, or its client left.
        ours: The answer of the stable version.
        theirs: The answer of the candidate.
        input_bytes: Bytes of inputs that the pair holds.
        answer_bytes: Bytes of answers that the pair holds.
    """

    __slots__ = (
        "_ignored",
        "_owner",
        "answer_bytes",
        "answered",
        "candidate",
        "compares",
        "copy",
        "input_bytes",
        "ours",
        "refused",
        "request_id",
        "responder",
        "sequence",
        "theirs",
        "trace_copy",
    )

    responder: Responder

    def __init__(
        self,
        owner: PairOwner,
        request: InferenceRequest,
        inputs: dict[str, Tensor],
        stable: Servable,
        candidate: Servable,
        ignored: Collection[str],
        compares: bool,
    ) -> None:
        self._owner = owner
        self._ignored = ignored
        self.candidate = candidate
        self.request_id = request.id
        self.compares = compares
        self.trace_copy = None if request.watch is None else request.watch.copy_trace()
        self.sequence: MirroredSequence | None = None
        self.answered = self.refused = False
        self.ours, self.theirs = VersionAnswer(), VersionAnswer()
        self.input_bytes = self.answer_bytes = 0
        self.copy = copy_of(request, inputs, stable, candidate, self._take)

    # --- the client's request

    def before(self, responder: Responder) -> ShadowPair:
        """Wraps the responder of the client's request."""
        self.responder = responder
        return self

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Passes a response of stable on, and keeps it; see `Responder`."""
        outputs = () if response is None else tuple(response.outputs)
        error = None if response is None else response.error
        try:
            self.responder(request, response, final)
        finally:
            # Its memory is the model's until this returns.
            self._keep(self.ours, outputs, error)
            if final:
                self.refused = request.cancelled or isinstance(error, UnavailableError) or not _ran(error)
                self._owner.answered(self)

    # --- the copy

    def _take(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Takes a response to the copy."""
        answer = self.theirs
        was_cut = answer.cut
        if response is not None:
            self._keep(answer, response.outputs, response.error)
        if final:
            self._owner.ended(self)
        elif answer.cut and not was_cut and request.model is not None:
            request.model.cancel(request)

    # --- both

    def _keep(self, answer: VersionAnswer, outputs: Sequence[Tensor], error: ConchError | None) -> None:
        """Adds copies of a response's outputs to an answer; never raises."""
        answer.error = answer.error or error
        if not outputs or answer.cut:
            return
        kept: Sequence[Tensor] = ()
        if self.compares:
            try:
                kept = self._copies(answer, outputs)
            except Exception:  # boundary: outputs of models, which may be any object; or no memory
                log.debug("an output of a shadow pair could not be kept", exc_info=True)
                self.compares = False
        if not answer.cut:
            answer.responses.append(kept)
            answer.cut = len(answer.responses) == MOST_RESPONSES

    def _copies(self, answer: VersionAnswer, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Private copies of outputs; none if there are too many bytes."""
        wanted = []
        for tensor in outputs:
            if tensor.on_device and not tensor.has_data:
                answer.unread.add(tensor.name)  # to read it from the device takes too long here
            elif tensor.name not in self._ignored:
                wanted.append(tensor)
        nbytes = sum(tensor.nbytes for tensor in wanted)
        answer.cut = answer.nbytes + nbytes > MOST_ANSWER_BYTES
        if answer.cut:
            return ()
        if not self._owner.hold(self, nbytes):
            self.compares = False
            return ()
        answer.nbytes += nbytes
        return [tensor.detached(tensor.name) for tensor in wanted]

    @property
    def comparable(self) -> bool:
        """True if the answers can be compared, once both requests have had their last response."""
        empty = any(answer.cut and not answer.responses for answer in (self.ours, self.theirs))
        return self.compares and not empty and _ran(self.theirs.error)

    def tensors(self) -> Mapping[str, Tensor]:
        """All that it holds, by names such as ``candidate/0/OUT``, for a file."""
        found = {f"input/{name}": tensor for name, tensor in self.copy.inputs.items()}
        for side, answer in (("stable", self.ours), ("candidate", self.theirs)):
            for number, outputs in enumerate(answer.responses):
                found |= {f"{side}/{number}/{tensor.name}": tensor for tensor in outputs}
        return found
