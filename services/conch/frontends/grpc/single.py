"""Unary calls to decoupled models: answered where the model has exactly one response."""

from __future__ import annotations

import threading
from collections.abc import Callable

from conch.core.errors import UnsupportedError
from conch.core.request import InferenceRequest, InferenceResponse, Responder


class SingleResponse:
    """A responder that passes one response on, and holds no more than one.

    The only response of a request is kept until the model says that it was the last. With a second one, or
    with the end of a request that has had none, the call gets the error that Triton gives to every such
    call. A model that has more to say is told that its request is cancelled.

    Args:
        responder: Takes the answer.
        cancel: Called with a request whose model has not finished but need not go on.
        refusal: The text of that error.
    """

    def __init__(
        self,
        responder: Responder,
        cancel: Callable[[InferenceRequest], None],
        refusal: str = "ModelInfer RPC doesn't support models with decoupled transaction policy",
    ) -> None:
        self._refusal = refusal
        self._responder = responder
        self._cancel = cancel
        self._lock = threading.Lock()
        self._kept: InferenceResponse | None = None
        self._answered = False

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Takes what the model says, from any thread."""
        with self._lock:
            if self._answered:
                return
            kept, self._kept = self._kept, None
            failed = response is not None and response.error is not None
            surplus = kept is not None and response is not None and not failed
            if not (final or failed or surplus):
                self._kept = response
                return
            self._answered = True
        answer = response or kept
        if answer is None or surplus:
            answer = InferenceResponse([], UnsupportedError(self._refusal))
        if not final:
            self._cancel(request)
        self._responder(request, answer, True)
