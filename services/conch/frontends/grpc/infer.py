"""ModelInfer: one message in, one out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor

from conch.core.clock import Clock
from conch.core.errors import ConchError, InternalError, UnavailableError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.sending import unsendable
from conch.core.server_core import ServerCore
from conch.core.watch import watch_of
from conch.frontends.grpc.adapter import Server, UnaryCall
from conch.frontends.grpc.decode import LONG_BYTES, RequestDecoder
from conch.frontends.grpc.encode import ResponseEncoder
from conch.frontends.grpc.forward import HeaderForwarder
from conch.frontends.grpc.retry import retry_metadata
from conch.frontends.grpc.single import SingleResponse
from conch.memory.regions import Regions

_PROTOCOL = "grpc"

log = logging.getLogger(__name__)


class InferHandler:
    """Answers ModelInfer calls.

    Args:
        core: Runs the requests.
        server: Leads models.
        encoder: Makes the response messages.
        clock: Monotonic time in nanoseconds.
        long: Takes long messages, off the polling threads.
        forward: Turns call metadata into request parameters, or None.
        compression: gRPC's name of the algorithm responses are compressed with, or None.
        regions: The shared-memory regions that tensors may lie in; None for none.

    Attributes:
        refused: How many requests came after `refuse`.
    """

    def __init__(
        self,
        core: ServerCore,
        server: Callable[[], Server],
        encoder: ResponseEncoder,
        clock: Clock,
        long: Executor,
        forward: HeaderForwarder | None = None,
        compression: str | None = None,
        regions: Regions | None = None,
    ) -> None:
        self._model_for = core.model_for
        self._submit = core.submit
        self._cancel = core.cancel
        self._server_of = server
        self._encoder = encoder
        self._clock = clock
        self._decode = RequestDecoder(regions)
        self._long = long
        self._forward = forward
        self._compression = compression
        self._check = core.check_takes
        self._log = core.request_log
        self.refused = 0

    def __call__(self, call: UnaryCall, message: bytes, polling: bool = True) -> None:
        """Takes one request; it is answered when its batch has run.

        Args:
            call: Its call.
            message: The request.
            polling: Whether the calling thread is a polling one, which has no time for long messages.
        """
        if polling and len(message) >= LONG_BYTES and self._decode.is_long(message):
            self._long.submit(self, call, message, False)
            return
        now_ns = self._clock()
        request: InferenceRequest | None = None
        try:
            request = self._decode(message, self._respond, now_ns)
            request.context = call
            request.deadline_ns = call.deadline_ns(now_ns)
            if self._forward is not None:
                self._forward(request, call.metadata)
            self._check(request)
            model = self._model_for(request)
            if self._log is not None:
                self._log.begin(request, model, _PROTOCOL, call.peer, len(message))
            if model.spec.decoupled:
                request.intercept(lambda responder: SingleResponse(responder, self._cancel), waits=True)
            call.watch(self._cancel, request)
            to_lead = self._submit(request, polling, model)
            if to_lead is not None:
                self._server_of().promise(to_lead)
        except ConchError as error:
            if request is not None:
                request.discard()
            self._refused(call, message, request, error, now_ns)
        except Exception as error:
            if request is not None:
                request.discard()
            log.exception("a request could not be handled")
            shown = InternalError(f"the request could not be handled: {error}")
            self._refused(call, message, request, shown, now_ns)

    def _refused(
        self,
        call: UnaryCall,
        message: bytes,
        request: InferenceRequest | None,
        error: ConchError,
        received_ns: int,
    ) -> None:
        call.abort(error.grpc_status, error.message, retry_metadata(error))
        if self._log is not None:
            self._log.refuse(request, error, _PROTOCOL, call.peer, len(message), received_ns)

    def refuse(self) -> None:
        """Takes no more requests."""
        self._check = self._refuse

    def _refuse(self, request: InferenceRequest) -> None:
        self.refused += 1
        raise UnavailableError("Server exiting")

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        call = request.context
        assert isinstance(call, UnaryCall)
        try:
            if response is not None and response.error is not None:
                error = response.error
                call.abort(error.grpc_status, error.message, retry_metadata(error))
                return
            message = self._encoder.message(request, response)
            if self._log is not None and (watch := watch_of(request)) is not None:
                watch.bytes_out += len(message)
            if self._compression is None:
                call.reply(message)
            else:
                call.reply_compressed(message, self._compression)
        except ConchError as error:
            call.abort(error.grpc_status, error.message)
        except Exception as error:
            shown = unsendable(request.model_name, response, error)
            call.abort(shown.grpc_status, shown.message)
