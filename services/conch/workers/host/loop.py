"""A worker's main thread: it loads the model, executes its batches, and ends when the server says so."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence

from conch.backends.python.instance import PythonInstance, open_instance
from conch.backends.python.metrics import keep_metrics_in
from conch.core.backend import Outcome
from conch.core.errors import ConchError, InternalError, as_conch_error
from conch.core.instances.placement import Placement
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduler.base import Batch
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor
from conch.workers import wire
from conch.workers.channel import Channel, ChannelClosedError
from conch.workers.exchange import Exchange, Incoming, Payload
from conch.workers.host.calls import WorkerCalls
from conch.workers.host.logs import log_to_server
from conch.workers.host.metrics import RemoteFamilies
from conch.workers.host.reading import Reading, Watch
from conch.workers.host.requests import HostRequest, Requests
from conch.workers.specs import placement_from_json, spec_from_json
from conch.workers.wire import DoneRecord, Kind, ResponseRecord, WireError

SERVER_GONE = 3
"""The exit status of a worker whose server has gone."""
BAD_MESSAGE = 4
"""The exit status of a worker that could not understand its server."""


def serve(descriptor: int) -> None:
    """Serves a socket until the server closes it or says that it is enough."""
    Host(Channel(socket.socket(fileno=descriptor))).run()


class Host:
    """One instance of a model, and the server that it works for.

    Args:
        channel: The socket to the server.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._exchange = Exchange(channel, in_worker=True)
        self._reading = Reading(self._step)
        self._watch = Watch(self._reading)
        self._calls = WorkerCalls(self._exchange, self._reading, self._watch)
        self._families = RemoteFamilies(self)
        self._todo: deque[tuple[int, Batch] | None] = deque()
        self._loading: Incoming | None = None
        self._load: tuple[ModelSpec, Placement] | None = None
        self._requests: Requests | None = None
        self._instance: PythonInstance | None = None
        self._decoupled = False

    def run(self) -> None:
        """Works until the server says that it is enough."""
        try:
            self._exchange.send(Kind.HELLO, 0, wire.encode_hello(os.getpid()))
            self._reading.until(lambda: self._load is not None or bool(self._todo))
            if self._load is not None and self._open(*self._load):
                self._serve()
        except ChannelClosedError:
            os._exit(SERVER_GONE)
        # Others may hold the socket open: children that the model has started.
        self._channel.shut()

    # --- for the parts ----------------------------------------------------------------------------------

    def ask(self, question: str, **more: object) -> dict[str, object]:
        """Asks the server something, and waits for the answer."""
        return self._calls.ask(question, **more)

    def tell(self, kind: Kind, subject: int, fields: bytes) -> None:
        """Sends a message without tensors."""
        self._exchange.send(kind, subject, fields)

    # --- what the main thread does ------------------------------------------------------------------------

    def _open(self, spec: ModelSpec, placement: Placement) -> bool:
        keep_metrics_in(self._families)
        self._decoupled = spec.decoupled
        self._watch.begin()  # an `initialize` may take long, and ask the server for something
        try:
            instance = open_instance(spec, placement, self._calls)
        except ConchError as error:
            self._exchange.send(Kind.FAILED, 0, wire.encode_error(error))
            return False
        finally:
            self._watch.end()
        instance.leave_shaping()
        self._instance = instance
        self._requests = Requests(spec, self._respond)
        facts = {"readiness": instance.readiness is not None, "leads": instance.leads}
        self._exchange.send(Kind.LOADED, 0, wire.encode_json(facts))
        return True

    def _serve(self) -> None:
        todo, reading, watch = self._todo, self._reading, self._watch
        instance = self._instance
        assert instance is not None, "it has been loaded"

        def something() -> bool:
            return bool(todo)

        while True:
            reading.until(something)
            item = todo.popleft()
            watch.begin()
            if item is None:
                break
            self._execute(instance, *item)
            del item
            watch.end()
        instance.close()
        self._families.flush()

    def _execute(self, instance: PythonInstance, number: int, batch: Batch) -> None:
        outcome: Outcome
        try:
            outcome = instance.execute(batch)
        except BaseException as error:  # the process ends when the server says so, not when a model raises
            outcome = error
        self._done(number, batch, outcome)
        self._families.flush()

    def _done(self, number: int, batch: Batch, outcome: Outcome) -> None:
        if not isinstance(outcome, BaseException):
            try:
                message = self._responses(batch, outcome)
            except Exception as error:  # no memory for them, or they are not what they say they are
                outcome = InternalError(f"responses can't be sent: {error}")
        if isinstance(outcome, BaseException):
            assert self._requests is not None, "batches come when the model is loaded"
            error = wire.encode_error(as_conch_error(outcome))
            for request in batch.requests:
                assert isinstance(request, HostRequest)
                self._requests.remove(request.number)
            message = _times(batch, 0, len(error)) + error, None
        fields, payload = message
        # The inputs' memory goes back with this message, unless the model has kept it.
        del batch, outcome
        self._exchange.send(Kind.DONE, number, fields, payload)

    def _responses(
        self, batch: Batch, responses: Sequence[InferenceResponse | None] | None
    ) -> tuple[bytes, Payload]:
        requests = self._requests
        assert requests is not None, "batches come when the model is loaded"
        entries = responses if responses is not None else [None] * len(batch.requests)
        records: list[ResponseRecord] = []
        lists: list[Sequence[Tensor]] = []
        for request, response in zip(batch.requests, entries, strict=True):
            assert isinstance(request, HostRequest)
            record = ResponseRecord(response is not None)
            records.append(record)
            if response is not None:
                record.error, record.parameters = response.error, response.parameters
                requests.remove(request.number)
            elif request.rescheduled:
                record.rescheduled = True
                if request.answered:
                    requests.remove(request.number)
            record.failed = getattr(request, "failed", False)
            if record.has_tensors and response is not None:
                lists.append(response.outputs)
        payload = self._exchange.pack(lists)
        batch.bytes_copied += payload.bytes_copied
        parts = [_times(batch, len(records), 0)]
        described = iter(payload.lists)
        for record in records:
            parts.append(record.encode())
            if record.has_tensors:
                parts.append(next(described))
        for request in batch.requests:
            request.inputs = {}
        return b"".join(parts), payload

    # --- what any thread does -----------------------------------------------------------------------------

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Sends a response that a sender sends, once the server has handed enough of the others on."""
        assert isinstance(request, HostRequest) and self._requests is not None
        if request.filler:
            return
        if self._decoupled and request.credit <= 0:
            self._watch.attend()
            self._reading.until(lambda: request.credit > 0)
        record = ResponseRecord(response is not None, final=final)
        outputs: Sequence[Tensor] = ()
        if response is not None:
            record.error, record.parameters, outputs = response.error, response.parameters, response.outputs
        record.failed = getattr(request, "failed", False)
        try:
            payload = self._exchange.pack([outputs] if record.has_tensors else [])
        except Exception as error:  # no memory for it, or it is not what it says it is
            record.error, outputs = InternalError(f"a response can't be sent: {error}"), ()
            payload = self._exchange.pack([])
        request.credit -= wire.units(outputs)
        if final:
            self._requests.remove(request.number)
        fields = record.encode() + b"".join(payload.lists)
        self._exchange.send(Kind.RESPONSE, request.number, fields, payload)

    def _step(self) -> None:
        """Receives one message and does what it says."""
        try:
            incoming = self._exchange.receive()
            self._handle(incoming)
        except ChannelClosedError:
            # At once: a model may be in the middle of something that never ends.
            os._exit(SERVER_GONE)
        except WireError as error:
            sys.stderr.write(f"conch worker: {error}\n")
            sys.stderr.flush()
            os._exit(BAD_MESSAGE)

    def _handle(self, incoming: Incoming) -> None:
        message = incoming.message
        kind, subject = message.kind, message.subject
        requests = self._requests
        if kind is Kind.EXECUTE and requests is not None:
            self._todo.append((subject, requests.batch(incoming)))
        elif kind is Kind.REPLY:
            self._calls.on_reply(incoming)
        elif kind is Kind.ANSWER:
            self._calls.on_answer(incoming)
        elif kind is Kind.CREDIT and requests is not None:
            request = requests.get(subject)
            if request is not None:
                request.credit += wire.decode_credit(message.fields)
        elif kind is Kind.CANCEL and requests is not None:
            request = requests.get(subject)
            if request is not None:
                request.cancelled = True
                request.tell_cancelled()
        elif kind is Kind.FORGET and requests is not None:
            request = requests.get(subject)
            if request is not None:
                request.answered = True
                request.kept = None
                requests.remove(subject)
        elif kind is Kind.READY:
            threading.Thread(
                target=self._say_ready, args=(subject,), name="conch-ready", daemon=True
            ).start()
        elif kind is Kind.LEVEL:
            self._set_level(wire.decode_json(message.fields))
        elif kind is Kind.CLOSE:
            self._todo.append(None)
        elif kind is Kind.HELLO:
            wire.check_hello(message.fields, "server")
        elif kind is Kind.LOAD and self._load is None:
            self._begin_load(wire.decode_json(message.fields))
        else:
            raise WireError(f"a message {kind.name} was not expected")

    def _begin_load(self, fields: dict[str, object]) -> None:
        spec, placement = spec_from_json(fields.get("spec")), placement_from_json(fields.get("placement"))
        level = fields.get("level")
        log_to_server(self.tell, level if isinstance(level, int) else 0)
        self._load = spec, placement

    def _set_level(self, fields: dict[str, object]) -> None:
        import logging

        level = fields.get("level")
        if isinstance(level, int):
            logging.getLogger().setLevel(level)

    def _say_ready(self, subject: int) -> None:
        check = None if self._instance is None else self._instance.readiness
        ready = False
        if check is not None:
            check.start()
            ready = check.result()
        try:
            self._exchange.send(Kind.READY, subject, wire.encode_json({"ready": ready}))
        except ChannelClosedError:
            os._exit(SERVER_GONE)


def _times(batch: Batch, count: int, error: int) -> bytes:
    return DoneRecord(
        batch.compute_input_end_ns, batch.compute_output_start_ns, batch.bytes_copied, count, error
    ).encode()
