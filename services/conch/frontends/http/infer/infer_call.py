"""One infer request on its way in and out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from conch.core.request import InferenceRequest
from conch.core.servable import Servable
from conch.frontends.http.infer.infer_response import Answer, BinaryOutputs, Headers, Reply

if TYPE_CHECKING:
    from conch.frontends.http.infer.infer_route import InferRoute

Body = Callable[[], memoryview]
"""Gives a body; may copy all of it."""


class InferCall:
    """What has come of one request, and what is needed to answer it.

    Used on the loop, except for what reads its body.

    Args:
        route: Answers it.
        model_name: The name in the path.
        version: The version in the path, or empty.
        headers: The headers, with lower-case names.
        named: The same with names as the client wrote them, in order.
        client: Address of the client.
        send: Called with the response, once, on the loop.

    Attributes:
        model: The model, if it can be told by name and version.
        packed: Whether the body is compressed.
        head: How long the JSON is; None for the whole body.
        length: How long the body is to be; None where nobody knows.
        most: How long it may be.
        body: Gives the body, once it has come.
        size: How long it is.
        received_ns: When the request arrived.
        gone: Whether the client has hung up.
        encoding: How the response is to be compressed, or None.
        wanted: Which outputs are sent in binary form.
        request: The request, from when it has been made until it is answered.
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
        route: InferRoute,
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
        """Takes the response, or what makes it, or the request that was made of the body elsewhere."""
        if isinstance(item, InferenceRequest):
            if self.gone:
                self._route.cancel(item)
            elif self._send is not None:  # else it has been answered already
                self.request = item
        elif not isinstance(item, Reply):
            self._route.work(self, item)
        else:
            # The request knows this call: together they would keep all tensors until the collector comes.
            self.request = None
            send, self._send = self._send, None
            if send is not None:
                send(item)

    def abandon(self) -> None:
        """Says that the client is gone."""
        self.gone = True
        self._send = None
        request, self.request = self.request, None
        if request is not None:
            self._route.cancel(request)


def no_body() -> memoryview:
    """The body of a request that has none."""
    return memoryview(b"")
