"""Calls of a library compiled for Triton to the server: its state, its models, inference by other models.

Threads: each question has a thread of its own, as an answer may take long; responses come on the thread that
reads.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError, UnavailableError, UnsupportedError, as_conch_error
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.spec import ModelSpec
from conch.core.tensor import Array, Tensor
from conch.workers.host.native_words import (
    NOTHING,
    ModelCall,
    Query,
    address_of,
    datatype_number,
    pack_error,
    pack_parameters,
    pack_reply,
    pack_text,
    pack_words,
)

if TYPE_CHECKING:
    from conch.workers.host.native_library import HostLibrary
    from conch.workers.host.server_client import ServerClient

_MODEL_READY, _SERVER_READY, _SERVER_METADATA, _MODEL_METADATA, _MODEL_STATISTICS, _MODEL_CONFIG = range(6)
_MODEL_INDEX, _LOAD, _UNLOAD, _UNLOAD_DEPENDENTS, _MODEL_PROPERTIES, _SERVER_LIVE = range(6, 12)
_SERVER_METRICS = 12

_FACTS = {
    _SERVER_METADATA: "server",
    _MODEL_METADATA: "model",
    _MODEL_STATISTICS: "statistics",
}
_START, _END = 1, 2
_FINAL = 1
_DECOUPLED, _BATCHES = 1, 2


class NativeCalls:
    """Questions of one library to the server."""

    def __init__(self, host: HostLibrary, calls: ServerClient, spec: ModelSpec) -> None:
        self._host = host
        self._calls = calls
        self._spec = spec
        self._open: dict[int, InferenceRequest] = {}

    def query(self, query: Query) -> None:
        """Answers a query."""

        def run() -> None:
            try:
                answer = self._answer(query)
            except Exception as error:  # boundary: the control plane's, for the library that asks
                self._host.refuse(query.call, as_conch_error(error))
            else:
                self._host.answer(query.call, answer)

        self._start(run, lambda error: self._host.refuse(query.call, error))

    def call(self, call: ModelCall, parent: InferenceRequest | None) -> None:
        """Sends a request to another model; `parent` is the request that needs it, if known."""

        def run() -> None:
            try:
                request = self._request(call, parent)
                model = self._calls.find(request)
                self._open[call.call] = request
                self._calls.submit(request, False, model, parent=parent)
            except Exception as error:  # boundary: the called model's, for the library that calls
                self._refuse(call, as_conch_error(error))
            else:
                self._host.call_taken(call.call)

        self._start(run, lambda error: self._refuse(call, error))

    def cancel(self, number: int) -> None:
        """Cancels a call."""
        request = self._open.get(number)
        if request is not None:
            self._calls.cancel(request)

    def _start(self, run: Callable[[], None], refuse: Callable[[ConchError], None]) -> None:
        try:
            threading.Thread(target=run, name="conch-native-call", daemon=True).start()
        except RuntimeError:
            refuse(UnavailableError("no thread can be started for a call: there are too many"))

    def _answer(self, query: Query) -> str:
        """The answer to a query, as the host reads it."""
        calls, operation = self._calls, query.operation
        version = str(query.version) if query.version >= 0 else ""
        if operation in (_SERVER_LIVE, _SERVER_READY):
            return str(int(bool(calls.fact("live" if operation == _SERVER_LIVE else "ready"))))
        if operation == _MODEL_READY:
            return str(int(calls.model_ready(query.model, version)))
        if operation == _MODEL_PROPERTIES:
            decoupled, batches = calls.properties(query.model, version)
            return str((_DECOUPLED if decoupled else 0) | (_BATCHES if batches else 0))
        if operation == _MODEL_CONFIG:
            return json.dumps(calls.query("config", name=query.model, version=version)["config"])
        if operation in _FACTS:
            return json.dumps(calls.fact(_FACTS[operation], query.model, version))
        if operation == _MODEL_INDEX:
            return json.dumps(calls.fact(query.text or "index"))
        if operation == _SERVER_METRICS:
            return str(calls.fact("metrics"))
        if operation == _LOAD:
            calls.load(query.model, query.parameters)
            return ""
        if operation in (_UNLOAD, _UNLOAD_DEPENDENTS):
            calls.unload(query.model, operation == _UNLOAD_DEPENDENTS)
            return ""
        raise UnsupportedError(f"the worker does not know the question {operation} of the C host")

    def _request(self, call: ModelCall, parent: InferenceRequest | None) -> InferenceRequest:
        inputs = {
            each.name: Tensor(
                each.name, each.datatype, each.shape, ctypes.string_at(each.address, each.nbytes)
            )
            for each in call.inputs
        }
        request = InferenceRequest(
            call.model,
            str(call.version) if call.version >= 0 else "",
            inputs,
            lambda request, response, final: self._reply(call, response, final),
            monotonic_ns(),
            call.id,
            tuple(call.requested) or None,
            dict(call.parameters) or None,
        )
        request.correlation_id = call.correlation_id
        request.sequence_start = call.flags & _START != 0
        request.sequence_end = call.flags & _END != 0
        request.priority = call.priority
        request.timeout_us = call.timeout_us
        request.empty_final = True
        request.deadline_ns = None if parent is None else parent.deadline_ns
        return request

    def _refuse(self, call: ModelCall, error: ConchError) -> None:
        self._host.call_taken(call.call)
        self._reply(call, InferenceResponse([], error), True)

    def _reply(self, call: ModelCall, response: InferenceResponse | None, final: bool) -> None:
        if final:
            self._open.pop(call.call, None)
        if response is None:
            self._host.reply(call.call, pack_words((_FINAL if final else 0, NOTHING, 0)))
        elif response.error is not None:
            self._host.reply(call.call, pack_error(call, response.error, final))
        else:
            arrays: list[Array] = []
            words = [pack_reply(call, NOTHING, final), pack_parameters(response.parameters or {})]
            words.append(pack_words((len(response.outputs),)))
            for tensor in response.outputs:
                arrays.append(np.frombuffer(tensor.data or bytes(1), np.uint8))
                words.append(pack_words((datatype_number(tensor.datatype), len(tensor.shape), *tensor.shape)))
                words += [pack_text(tensor.name), pack_words((address_of(arrays[-1]), tensor.nbytes))]
            self._host.reply(call.call, b"".join(words))
            del arrays  # the host has copied what it keeps
