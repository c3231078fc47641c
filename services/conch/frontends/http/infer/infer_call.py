"""State of one infer request between its headers and its response. Used by: `infer_route`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from conch.core.request import InferenceRequest
from conch.core.servable import Servable
from conch.frontends.http.http_exchange import HttpExchange, Reply
from conch.frontends.http.infer.infer_response import Answer, BinaryOutputs

Work = Callable[[], Answer | InferenceRequest]
"""Slow work: decodes and submits a request, or builds its response."""


class CallRoute(Protocol):
    """The infer route, as its calls use it."""

    def cancel(self, request: InferenceRequest) -> None:
        """Cancels a request."""

    def work(self, call: InferCall, what: Work) -> None:
        """Runs slow work on the parsing pool and delivers its result to the call."""


class InferCall:
    """One infer request. Used on the event loop, except while its body is parsed.

    Args:
        route: The infer route.
        exchange: The HTTP request.
        model_name: Model name in the path.
        version: Version in the path, or empty.
        received_ns: When the request arrived.

    Attributes:
        model: The model, if already resolved.
        packed: True if the body is compressed.
        head: Length of the JSON; None for the whole body.
        encoding: Compression of the response, or None.
        wanted: Outputs to send as binary.
        request: The core request while it runs.
    """

    __slots__ = (
        "_route",
        "encoding",
        "exchange",
        "head",
        "model",
        "model_name",
        "packed",
        "received_ns",
        "request",
        "version",
        "wanted",
    )

    wanted: BinaryOutputs

    def __init__(
        self, route: CallRoute, exchange: HttpExchange, model_name: str, version: str, received_ns: int
    ) -> None:
        self._route = route
        self.exchange = exchange
        self.model_name = model_name
        self.version = version
        self.received_ns = received_ns
        self.model: Servable | None = None
        self.packed = False
        self.head: int | None = None
        self.encoding: bytes | None = None
        self.request: InferenceRequest | None = None

    def deliver(self, item: Answer | InferenceRequest) -> None:
        """Handles a response, a function that builds it, or the request once it is submitted."""
        if isinstance(item, Reply):
            # Breaks a reference cycle that would keep the tensors until garbage collection.
            self.request = None
            if not self.exchange.began:
                self.exchange.respond(*item)
        elif not isinstance(item, InferenceRequest):
            self._route.work(self, item)
        elif self.exchange.lost:
            self._route.cancel(item)
        elif not self.exchange.began:
            self.request = item

    def abandon(self) -> None:
        """Cancels the request after a disconnect."""
        request, self.request = self.request, None
        if request is not None:
            self._route.cancel(request)
