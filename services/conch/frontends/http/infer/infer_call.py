"""State of one infer request between its headers and its response.

Used by: `infer_asgi`, `infer_fast_path`, `infer_route`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Protocol

from conch.core.request import InferenceRequest
from conch.core.servable import Servable
from conch.frontends.http.infer.infer_response import Answer, BinaryOutputs, Headers, Reply

Body = Callable[[], memoryview]
"""Returns a body; may copy it."""


class CallRoute(Protocol):
    """The infer route, as its calls use it."""

    def cancel(self, request: InferenceRequest) -> None:
        """Cancels a request."""

    def work(self, call: InferCall, what: Callable[[], Answer | InferenceRequest]) -> None:
        """Runs slow work on the parsing pool and delivers its result to the call."""

    def run(self, call: InferCall) -> None:
        """Executes a request with its complete body; may deliver the response before it returns."""

    def too_large(self, call: InferCall, size: int) -> Reply:
        """Builds the response to a body over the limit; the rest is not read."""

    def too_many_chunks(self, call: InferCall) -> Reply:
        """Builds the response to a body with too many chunks."""


class InferCall:
    """One infer request. Used on the event loop, except while its body is parsed.

    Args:
        route: The infer route.
        model_name: Model name in the path.
        version: Version in the path, or empty.
        headers: Headers with lower-case names.
        named: Headers with names as received, in order.
        client: Address of the client.
        send: Called once with the response, on the loop.

    Attributes:
        model: The model, if already resolved.
        packed: True if the body is compressed.
        head: Length of the JSON; None for the whole body.
        length: Announced body length, or None.
        most: Limit of the body.
        body: Returns the body once complete.
        size: Length of the body.
        received_ns: When the request arrived.
        gone: True once the client disconnected.
        encoding: Compression of the response, or None.
        wanted: Outputs to send as binary.
        request: The core request while it runs.
    """

    __slots__ = (
        "_route",
        "_send",
        "body",
        "client",
        "encoding",
        "gone",
        "head",
        "headers",
        "length",
        "model",
        "model_name",
        "most",
        "named",
        "packed",
        "received_ns",
        "request",
        "size",
        "version",
        "wanted",
    )

    def __init__(
        self,
        route: CallRoute,
        model_name: str,
        version: str,
        headers: Mapping[bytes, bytes],
        named: Headers,
        client: str,
        send: Callable[[Reply], None],
    ) -> None:
        self._route = route
        self._send: Callable[[Reply], None] | None = send
        self.gone = False
        self.model_name = model_name
        self.version = version
        self.headers = headers
        self.named = named
        self.client = client
        self.model: Servable | None = None
        self.packed = False
        self.head: int | None = None
        self.length: int | None = None
        self.most = sys.maxsize
        self.body: Body = no_body
        self.size = 0
        self.received_ns = 0
        self.encoding: bytes | None = None
        self.wanted = BinaryOutputs(False)
        self.request: InferenceRequest | None = None

    def deliver(self, item: Answer | InferenceRequest) -> None:
        """Handles a response, a function that builds it, or a request decoded on another thread."""
        if isinstance(item, InferenceRequest):
            if self.gone:
                self._route.cancel(item)
            elif self._send is not None:  # else the response is already sent
                self.request = item
        elif not isinstance(item, Reply):
            self._route.work(self, item)
        else:
            # Breaks a reference cycle that would keep the tensors until garbage collection.
            self.request = None
            send, self._send = self._send, None
            if send is not None:
                send(item)

    def abandon(self) -> None:
        """Cancels the request after a disconnect."""
        self.gone = True
        self._send = None
        request, self.request = self.request, None
        if request is not None:
            self._route.cancel(request)


def no_body() -> memoryview:
    """Returns an empty body."""
    return memoryview(b"")
