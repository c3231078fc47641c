"""What ``--log-verbose`` logs of requests, in the words of Triton's log: start, batch, responses, end.

Models look at `REQUESTS.on` once for each request and each batch; nothing else is done while it is off.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from conch.core.request import InferenceRequest, InferenceResponse, Responder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from conch.core.scheduling.base import Batch
    from conch.core.servable import Servable
    from conch.core.spec import ModelSpec
    from conch.core.tensor import Tensor

log = logging.getLogger(__name__)


class RequestLines:
    """Logs what becomes of requests.

    Attributes:
        on: Whether verbose messages are logged.
    """

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False

    def begin(self, request: InferenceRequest, model: Servable) -> None:
        """Logs a request that is about to be queued, and from then on its responses."""
        names = "all" if request.requested is None else ", ".join(request.requested)
        log.debug(
            "%sprepared: model: %s, requested version: %s, actual version: %s, correlation id: %s, "
            "batch size: %d, priority: %d, timeout (us): %d, inputs: %s, requested outputs: %s",
            request.log_prefix,
            request.model_name,
            request.model_version or -1,
            model.version_text,
            request.correlation_id,
            request.batch_size,
            request.priority,
            request.timeout_us,
            _described(request.inputs.values()),
            names,
        )
        # Behind regions: outputs go there directly only if nothing is in between.
        uses = getattr(request, "uses", None)
        (request if uses is None else uses).intercept(_Responses)

    def execute(self, batch: Batch, spec: ModelSpec) -> None:
        """Logs a batch that an instance begins to run."""
        log.debug(
            "model %s, version %d, executing %d requests, batch size: %d",
            spec.name,
            spec.version,
            len(batch.requests),
            batch.size,
        )


class _Responses:
    """Stands before a request's responder, and logs what comes by."""

    __slots__ = ("_responder",)

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        if response is not None:
            what = response.error.message if response.error is not None else _described(response.outputs)
            kind = "outputs" if response.error is None else "error"
            log.debug("%sadd response, model: %s, %s: %s", request.log_prefix, request.model_name, kind, what)
        if final:
            log.debug("%sreleased, model: %s", request.log_prefix, request.model_name)
        self._responder(request, response, final)


def _described(tensors: Iterable[Tensor]) -> str:
    return "; ".join(f"{each.name}, type: {each.datatype}, shape: {list(each.shape)}" for each in tensors)


REQUESTS = RequestLines()
"""Those of this process."""
