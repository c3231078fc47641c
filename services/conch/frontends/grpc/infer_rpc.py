"""ModelInfer: one request, one response.

Threads and locks: requests arrive on a transport's thread; long messages are decoded on a pool; the thread
that has a response sends it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from conch.core.clock import Clock
from conch.core.errors import ConchError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_errors import unsendable
from conch.core.servable import InlineClaim
from conch.core.tensor import Buffer
from conch.door.door import Door
from conch.frontends.grpc.guarded_rpcs import PrepareRequest
from conch.frontends.grpc.request_decoder import LONG_BYTES, MakeDecoder, RequestDecoder
from conch.frontends.grpc.response_encoder import ResponseEncoder, retry_metadata
from conch.frontends.grpc.rpc_calls import UnaryRpc
from conch.frontends.load_reports import LoadReports, trailing

_DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"


class InferHandler:
    """Handles ModelInfer calls.

    Args:
        door: Makes the admission.
        queue_inline: Takes claims of models that the transport's thread may run inline.
        encoder: Encodes responses.
        clock: Monotonic time in nanoseconds.
        decoding: Decodes long messages, off the transport's thread.
        prepare: Completes or refuses each decoded request, or None.
        compression: gRPC's name of the compression algorithm of responses, or None.
        reports: Adds load reports to the trailing metadata, or None.
        make_decoder: Makes the decoder of requests.

    Attributes:
        admission: Admits the requests.
    """

    def __init__(
        self,
        door: Door,
        queue_inline: Callable[[InlineClaim], None],
        encoder: ResponseEncoder,
        clock: Clock,
        decoding: Executor,
        prepare: PrepareRequest | None = None,
        compression: str | None = None,
        reports: LoadReports | None = None,
        make_decoder: MakeDecoder = RequestDecoder,
    ) -> None:
        self.admission = door.admission("grpc")
        self._queue_inline = queue_inline
        self._encoder = encoder
        self._clock = clock
        self._decode = make_decoder()
        self._decoding = decoding
        self._prepare = prepare
        self._compression = compression
        self._reports = reports
        self._plain = compression is None and reports is None and not self.admission.adds_metadata

    def __call__(self, call: UnaryRpc, message: Buffer, polling: bool = True) -> None:
        """Submits one request; the responder replies.

        `polling` is True on a transport's thread, which leaves long messages to a pool.
        """
        now_ns = self._clock()
        request: InferenceRequest | None = None
        try:
            if polling and len(message) >= LONG_BYTES and self._decode.is_long(message):
                self.admission.defer(len(message), self._decoding, partial(self, call, message, False))
                return
            request = self._decode(message, self._respond, now_ns)
            request.context = call
            request.deadline_ns = call.deadline_ns(now_ns)
            if self._prepare is not None:
                self._prepare(request, call, len(message))
            if self.admission.closed:
                self.admission.check_open()
            call.watch(self.admission.cancel, request)
            claim = self.admission.admit(request, polling, None, call, len(message), single=_DECOUPLED)
            if claim is not None:
                self._queue_inline(claim)
        except Exception as error:  # boundary: the client gets an answer, whatever happens
            self._refuse(call, message, request, error, now_ns)

    def _refuse(
        self,
        call: UnaryRpc,
        message: Buffer,
        request: InferenceRequest | None,
        error: Exception,
        received_ns: int,
    ) -> None:
        # A local variable of `__call__` would be in a reference cycle with the traceback of the error.
        shown = self.admission.refuse(request, error, call, len(message), received_ns)
        self._abort(call, shown)

    def _abort(self, call: UnaryRpc, error: ConchError) -> None:
        call.abort(error.grpc_status, error.message, trailing(self._reports, retry_metadata(error)))

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        call: UnaryRpc = request.context  # type: ignore[assignment]  # `__call__` has set it
        try:
            if response is not None and response.error is not None:
                self._abort(call, response.error)
                return
            message = self._encoder.message(request, response)
            if request.watch is not None:
                request.watch.bytes_out += len(message)
            if self._plain:
                call.reply(message)
            else:
                call.reply_with(message, self._compression, trailing(self._reports))
        except ConchError as error:
            self._abort(call, error)
        except Exception as unknown:  # boundary: outputs that user code has made
            self._abort(call, unsendable(request.model_name, response, unknown))
