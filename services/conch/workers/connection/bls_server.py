"""The server's side of what a worker's model asks of it: other models, what is loaded, metrics."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from conch.backends.python.calls.bls_call import not_ready
from conch.backends.python.calls.deadlock_detection import DEADLOCK
from conch.core.bls import ServerCalls
from conch.core.clock import monotonic_ns
from conch.core.ensembles.ensemble_claim import EnsembleClaim
from conch.core.errors import ConchError, UnavailableError, as_conch_error
from conch.core.execution.async_runner import AsyncRunner
from conch.core.execution.pending_batch import bypassing_claims
from conch.core.model_control import LoadParameter
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.servable import InlineClaim, Servable
from conch.core.tensor import Tensor
from conch.workers.connection.message_stream import Exchange
from conch.workers.connection.packet_channel import ChannelClosedError
from conch.workers.connection.waiting_calls import Waits
from conch.workers.connection.worker_metrics import WorkerMetrics
from conch.workers.connection.worker_responses import Hands
from conch.workers.protocol import message_records, wire
from conch.workers.protocol.message_records import RequestRecord, ResponseRecord
from conch.workers.protocol.received_message import ReceivedMessage
from conch.workers.protocol.tensor_transport import UnreachableError
from conch.workers.protocol.wire import Kind, WireError

log = logging.getLogger(__name__)

Question = dict[str, Any]

_MOST_NESTED = 8
"""So many calls deep, where each is waited for while another one is."""


class _Depth(threading.local):
    value = 0


_depth = _Depth()


class WorkerCaller:
    """Answers one worker.

    Args:
        exchange: Where the answers go.
        calls: The server.
        metrics: The metrics that the model holds.
        hands: Threads for what may take a while.
        waits: What its threads wait for.
        executing: The request of a number that the worker has, if it has not been answered.

    Attributes:
        metrics: As above.
    """

    def __init__(
        self,
        exchange: Exchange,
        calls: ServerCalls,
        metrics: WorkerMetrics,
        hands: Hands,
        waits: Waits,
        executing: Callable[[int], InferenceRequest | None],
    ) -> None:
        self._exchange = exchange
        self._calls = calls
        self.metrics = metrics
        self._hands = hands
        self._waits = waits
        self._executing = executing
        self._lock = threading.Lock()
        self._open: dict[int, InferenceRequest] = {}
        self._closed = False
        self._quick: dict[str, Callable[[Question], dict[str, object]]] = {
            "find": self._find,
            "family": metrics.family,
            "metric": metrics.metric,
            "value": metrics.value,
            "waits": self._waiting,
        }
        self._slow: dict[str, Callable[[Question], dict[str, object]]] = {
            "ready": self._ready,
            "load": self._load,
            "unload": self._unload,
        }

    def call(self, number: int, received: ReceivedMessage) -> None:
        """Runs a request of the model's.

        Raises:
            WireError: It is none.
        """
        record = RequestRecord.decode(received.reader)
        inputs: dict[str, Tensor] = {}
        unreachable: UnreachableError | None = None
        try:
            inputs = {tensor.name: tensor for tensor in received.tensors()}
        except UnreachableError as error:
            unreachable = error
        received.reader.end()
        if len(record.model) != 2:
            raise WireError("a call names a model and its version")
        request = InferenceRequest(
            *record.model,
            inputs,
            partial(self._respond, number),
            monotonic_ns(),
            record.id,
            record.requested,
            None if record.parameters is None else dict(record.parameters),
        )
        request.priority = record.priority
        request.timeout_us = record.timeout_us
        request.correlation_id = record.correlation_id
        request.sequence_start = bool(record.flags & message_records.SEQUENCE_START)
        request.sequence_end = bool(record.flags & message_records.SEQUENCE_END)
        request.empty_final = bool(record.flags & message_records.EMPTY_FINAL)
        request.deadline_ns = record.deadline_ns
        with self._lock:
            if self._closed:
                return
            if number in self._open:
                raise WireError(f"call {number} is there already")
            self._open[number] = request
        try:
            if unreachable is not None:
                raise unreachable
            model = self._find_model(request)
            decoupled = model.spec.decoupled
            if record.flags & (
                message_records.BELIEVED_SINGLE if decoupled else message_records.BELIEVED_DECOUPLED
            ):
                raise UnavailableError(
                    f"model '{request.model_name}' has become {'' if decoupled else 'not '}decoupled since "
                    f"it was called before; send the request again"
                )
            # This thread may be the one that has promised to lead the model, and waits for who calls it.
            lead = EnsembleClaim.current()
            if lead is not None:
                lead.release()
            with bypassing_claims():
                claim = self._calls.submit(request, True, model)
            if claim is not None:
                _run_claim(claim)
        except Exception as error:
            self._respond(number, request, InferenceResponse([], as_conch_error(error)), True, True)

    def _find_model(self, request: InferenceRequest) -> Servable:
        try:
            return self._calls.find(request)
        except ConchError as error:
            raise not_ready(request.model_name, error) from None

    def cancel(self, number: int) -> None:
        """Says that the model does not wait for a call any more."""
        request = self._open.get(number)
        if request is not None:
            self._waits.over(number)
            self._calls.cancel(request)

    def ask(self, number: int, question: Question) -> None:
        """Answers a question, now or later.

        Raises:
            WireError: It is none.
        """
        what = question.get("ask")
        quick = self._quick.get(what) if isinstance(what, str) else None
        if quick is not None:
            self._answer(number, quick, question)
            return
        slow = self._slow.get(what) if isinstance(what, str) else None
        if slow is None:
            raise WireError(f"there is no question '{what}'")
        if not self._hands.run(partial(self._answer, number, slow, question)):
            error = UnavailableError("the server can't start a thread to answer with: there are too many")
            self._send_answer(number, message_records.encode_error(error))

    def lost(self, number: int, kind: Kind, error: ConchError) -> None:
        """Answers a call or a question that could not be read."""
        if kind is Kind.ASK:
            self._send_answer(number, message_records.encode_error(error))
            return
        try:
            self._send_reply(number, InferenceResponse([], error), True, True)
        except ChannelClosedError:
            pass  # the reader notices

    def close(self) -> None:
        """Cancels all calls: nobody waits for them any more."""
        with self._lock:
            self._closed = True
            requests = list(self._open.values())
            self._open.clear()
        for request in requests:
            self._calls.cancel(request)
        self._waits.close()
        self.metrics.close()

    def _respond(
        self,
        number: int,
        request: InferenceRequest,
        response: InferenceResponse | None,
        final: bool,
        refused: bool = False,
    ) -> None:
        if self._open.get(number) is not request:
            return
        if final:
            with self._lock:
                self._open.pop(number, None)
        elif request.model is None or request.model.spec.ensemble is None:
            # There may be any number of them. What ensembles answer comes on threads of others.
            self._exchange.channel.wait_for_room()
        try:
            try:
                self._send_reply(number, response, final, refused)
            except ChannelClosedError:
                raise
            except Exception as error:  # no memory for it, or it is not what it says it is
                self._send_reply(number, InferenceResponse([], as_conch_error(error)), final, refused)
        except ChannelClosedError:
            pass  # whoever reads notices, and cancels what is left
        if self._waits:
            self._waits.over(number)

    def _send_reply(
        self, number: int, response: InferenceResponse | None, final: bool, refused: bool
    ) -> None:
        if response is None:
            head, lists = ResponseRecord(False, final=final, failed=refused).encode(), []
        else:
            error, parameters = response.error, response.parameters
            lists = [response.outputs] if error is None else []
            if final and not refused and error is None and not parameters:
                head = message_records.LAST_RESPONSE  # as most are
            else:
                head = ResponseRecord(True, error, parameters, final, failed=refused).encode()
        payload = self._exchange.pack(lists)
        self._exchange.send(Kind.REPLY, number, b"".join([head, *payload.lists]), payload)

    def _answer(
        self, number: int, answer: Callable[[Question], dict[str, object]], question: Question
    ) -> None:
        try:
            fields = wire.encode_json(answer(question))
        except Exception as error:
            if not isinstance(error, ConchError | WireError):  # nonsense is for the model to hear of
                log.exception("a question of a worker's could not be answered")
            fields = message_records.encode_error(as_conch_error(error))
        self._send_answer(number, fields)

    def _send_answer(self, number: int, fields: bytes) -> None:
        try:
            self._exchange.send(Kind.ANSWER, number, fields)
        except ChannelClosedError:
            pass  # whoever reads notices

    def _find(self, question: Question) -> dict[str, object]:
        request = InferenceRequest(_text(question, "name"), _text(question, "version"), {}, _nobody, 0)
        correlation = question.get("correlation", 0)
        request.correlation_id = correlation if isinstance(correlation, int | str) else 0
        request.sequence_start = bool(question.get("start"))
        spec = self._calls.find(request).spec
        return {"name": spec.name, "version": spec.version, "decoupled": spec.decoupled}

    def _waiting(self, question: Question) -> dict[str, object]:
        number, executed = question.get("call"), question.get("requests")
        if not isinstance(number, int) or not isinstance(executed, list):
            raise WireError("'call' or 'requests' of a question is not what it may be")
        request = self._open.get(number)
        if request is None:  # the answer is on its way
            return {"known": True, "found": False}
        parents = [parent for each in executed if (parent := self._executing(each)) is not None]
        known = self._waits.said(number, request, parents)
        if self._open.get(number) is not request:  # it has been answered in this moment
            self._waits.over(number)
            return {"known": True, "found": False}
        if not known:
            return {"known": False, "found": False}
        found, for_ever = self._waits.look(number)
        if for_ever:
            error = UnavailableError(DEADLOCK.format(model=request.model_name))
            self._respond(number, request, InferenceResponse([], error), True)
            self._calls.cancel(request)
        return {"known": True, "found": found}

    def _ready(self, question: Question) -> dict[str, object]:
        return {"ready": self._calls.model_ready(_text(question, "name"), _text(question, "version"))}

    def _load(self, question: Question) -> dict[str, object]:
        parameters = question.get("parameters")
        if not isinstance(parameters, dict):
            raise WireError("'parameters' of a question is not an object")
        name = _text(question, "name")
        with self._waits.loading(name):
            self._calls.load(name, {key: _parameter(value) for key, value in parameters.items()})
        return {}

    def _unload(self, question: Question) -> dict[str, object]:
        self._calls.unload(_text(question, "name"), bool(question.get("dependents")))
        return {}


def _text(question: Question, key: str) -> str:
    value = question.get(key)
    if not isinstance(value, str):
        raise WireError(f"'{key}' of a question is not a text")
    return value


def _parameter(value: object) -> LoadParameter:
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict) and isinstance(value.get("file"), str):
        try:
            return base64.b64decode(value["file"], validate=True)
        except ValueError as error:
            raise WireError(f"a file can't be read: {error}") from None
    raise WireError("a parameter of a load is not what it may be")


def _nobody(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """Takes the responses of a request that is never sent."""


def _run_claim(model: InlineClaim) -> None:
    """Has a model run that was called, here and now if it is in a worker too and quick.

    Models in this process are left to threads of their own: they may take as long as they like.
    """
    if isinstance(model, AsyncRunner) and _depth.value < _MOST_NESTED:
        _depth.value += 1
        try:
            # Once to begin a batch, once to receive what comes of it.
            if not (model.run_inline(0) and model.run_inline(0)):
                return
        finally:
            _depth.value -= 1
    model.release()
