"""A worker's main thread: it loads the model, executes its batches, and ends when the server says so."""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from conch.backends.python.instance import AsyncPythonInstance, PythonInstance, open_instance
from conch.backends.python.limits import limit_memory
from conch.backends.python.metrics import keep_metrics_in
from conch.backends.python.settings import Settings
from conch.core.backend import Outcome
from conch.core.errors import ConchError, InternalError, as_conch_error, message_of
from conch.core.instances.placement import Placement
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduler.base import Batch
from conch.core.sending import at_fault
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor
from conch.workers import wire
from conch.workers.channel import Channel, ChannelClosedError
from conch.workers.exchange import Exchange
from conch.workers.gpu_tensors import UnreachableError
from conch.workers.host.calls import WorkerCalls
from conch.workers.host.logs import log_to_server
from conch.workers.host.metrics import RemoteFamilies
from conch.workers.host.reading import Reading, Watch
from conch.workers.host.requests import HostRequest, Requests
from conch.workers.incoming import Incoming
from conch.workers.packing import Payload
from conch.workers.specs import placement_from_json, spec_from_json
from conch.workers.spinning import Spinning
from conch.workers.wire import DoneRecord, Kind, ResponseRecord, WireError

SERVER_GONE = 3
"""The exit status of a worker whose server has gone."""
BAD_MESSAGE = 4
"""The exit status of a worker that could not understand its server."""
FAILED = 5
"""The exit status of a worker that failed with a message of its server's."""


def serve(descriptor: int) -> None:
    """Serves a socket until the server closes it or says that it is enough."""
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    host = Host(Channel(sock))
    os.register_at_fork(after_in_child=host.forked)
    host.run()


class Host:
    """One instance of a model, and the server that it works for.

    Args:
        channel: The socket to the server.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._exchange = Exchange(channel, in_worker=True)
        self._reading = Reading(self._step, channel.ready)
        self._watch = Watch(self._reading)
        self._calls = WorkerCalls(self._exchange, self._reading, self._watch)
        self._families = RemoteFamilies(self)
        self._todo: deque[tuple[int, Batch] | None] = deque()
        self._load: tuple[ModelSpec, Placement] | None = None
        self._requests: Requests | None = None
        self._instance: PythonInstance | None = None
        self._name = ""
        self._decoupled = False
        self._over = False  # nothing is said any more, and threads that wait for something are told
        self._forked = False
        self._handlers: dict[Kind, Callable[[int, Incoming], None]] = {
            Kind.EXECUTE: self._on_execute,
            Kind.REPLY: self._calls.on_reply,
            Kind.ANSWER: self._calls.on_answer,
            Kind.CREDIT: self._on_credit,
            Kind.CANCEL: self._on_cancel,
            Kind.FORGET: self._on_forget,
            Kind.READY: self._on_ready,
            Kind.LEVEL: self._on_level,
            Kind.CLOSE: self._on_close,
            Kind.HELLO: self._on_hello,
            Kind.LOAD: self._on_load,
            Kind.DEVICES: self._on_devices,
            Kind.GONE: self._on_gone,
        }

    def run(self) -> None:
        """Works until the server says that it is enough."""
        try:
            self._exchange.send(Kind.HELLO, 0, wire.encode_hello(os.getpid()))
            self._reading.until(lambda: self._load is not None or bool(self._todo))
            if self._load is not None and self._open(*self._load):
                self._serve()
        except ChannelClosedError:
            self._server_gone()
        # From here on the end of the conversation is no reason to end at once: what the model has for the
        # end of the interpreter is still to run. Others may hold the socket open: children of the model's.
        self._over = True
        self._channel.shut()

    def forked(self) -> None:
        """Says that this process is a fork of the worker: the conversation is not its own."""
        self._over = self._forked = True
        self._exchange.forked()
        self._reading.forked()

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
        self._name, self._decoupled = spec.name, spec.decoupled
        settings = Settings.of(spec)
        if settings.memory_limit_mb is not None:
            limit_memory(settings.memory_limit_mb)
        self._watch.begin()  # an `initialize` may take long, and ask the server for something
        try:
            instance = open_instance(spec, placement, self._calls)
        except ConchError as error:
            if self._forked:
                raise error.__cause__ or error from None
            self._exchange.send(Kind.FAILED, 0, wire.encode_error(error))
            return False
        finally:
            self._watch.end()
        instance.leave_shaping(spec)
        self._instance = instance
        self._requests = Requests(spec, self._respond)
        facts = {
            "readiness": instance.readiness is not None,
            "concurrent": isinstance(instance, AsyncPythonInstance),
        }
        self._exchange.send(Kind.LOADED, 0, wire.encode_json(facts))
        return True

    def _serve(self) -> None:
        todo, reading, watch = self._todo, self._reading, self._watch
        instance = self._instance
        assert instance is not None, "it has been loaded"

        def something() -> bool:
            return bool(todo)

        arrivals = select.poll()
        arrivals.register(self._channel.fileno(), select.POLLIN)
        spinning = Spinning(partial(arrivals.poll, 0))
        while True:
            if not todo:
                spinning.wait()
            reading.until(something)
            watch.begin()
            if todo[0] is None:
                break
            self._execute(instance)
            watch.end()
        instance.close()
        self._families.flush()
        if self._exchange.devices is not None:
            self._exchange.devices.close()

    def _execute(self, instance: PythonInstance) -> None:
        item = self._todo.popleft()
        assert item is not None, "the end has been looked for"
        number, batch = item
        outcome: Outcome
        try:
            outcome = instance.execute(batch)
        except BaseException as error:  # the process ends when the server says so, not when a model raises
            outcome = error
        if self._forked:  # a child that the model has not ended goes where a program of its own would
            raise outcome if isinstance(outcome, BaseException) else SystemExit(0)
        fields, payload = self._outcome(batch, outcome)
        # The memory of the inputs goes back with this message, unless the model has kept it.
        del item, batch, outcome
        try:
            self._exchange.send(Kind.DONE, number, fields, payload)
        except (OSError, MemoryError, ConchError) as error:  # there is no room for it
            text = wire.encode_error(InternalError(f"responses can't be sent: {message_of(error)}"))
            self._exchange.send(Kind.DONE, number, DoneRecord(0, 0, 0, 0, len(text)).encode() + text)
        self._families.flush()

    def _outcome(self, batch: Batch, outcome: Outcome) -> tuple[bytes, Payload | None]:
        if not isinstance(outcome, BaseException):
            try:
                try:
                    return self._responses(batch, outcome)
                except Exception:
                    if not self._blame(outcome):
                        raise
                    return self._responses(batch, outcome)
            except Exception as error:  # no memory for them, or they are not what they say they are
                outcome = InternalError(f"responses can't be sent: {message_of(error)}")
        assert self._requests is not None, "batches come when the model is loaded"
        text = wire.encode_error(as_conch_error(outcome))
        for request in batch.requests:
            assert isinstance(request, HostRequest)
            self._requests.remove(request.number)
        return _times(batch, 0, len(text)) + text, None

    def _blame(self, responses: Sequence[InferenceResponse | None] | None) -> bool:
        """Makes errors of the responses that can't be sent, so that the others can; whether there are any."""
        blamed = False
        for response in responses or ():
            error = at_fault(self._name, response)
            if response is not None and error is not None:
                response.outputs, response.error = [], error
                blamed = True
        return blamed

    def _responses(
        self, batch: Batch, responses: Sequence[InferenceResponse | None] | None
    ) -> tuple[bytes, Payload]:
        requests = self._requests
        assert requests is not None, "batches come when the model is loaded"
        entries = responses if responses is not None else [None] * len(batch.requests)
        heads: list[tuple[bytes, bool]] = []
        lists: list[Sequence[Tensor]] = []
        plain = True
        for request, response in zip(batch.requests, entries, strict=True):
            assert isinstance(request, HostRequest)
            if response is not None or (request.answered and not request.rescheduled):
                requests.remove(request.number)
            elif request.rescheduled:
                # Also if it has been answered: the server may not know that when it sends it again.
                requests.keep(request)
            record = _record(request, response)
            if record is None:
                heads.append((wire.PLAIN_RESPONSE, True))
            else:
                plain = False
                heads.append((record.encode(), record.has_tensors))
            if response is not None and response.error is None:
                lists.append(response.outputs)
        payload = self._exchange.pack(lists, True, True)
        batch.bytes_copied += payload.bytes_copied
        if plain and payload.alike is not None:
            return _times(batch, len(heads), 0, True) + payload.alike, payload
        parts = [_times(batch, len(heads), 0)]
        described = iter(payload.lists)
        for head, has_tensors in heads:
            parts.append(head)
            if has_tensors:
                parts.append(next(described))
        return b"".join(parts), payload

    # --- what any thread does -----------------------------------------------------------------------------

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Sends a response that a sender sends, once the server has handed enough of the others on."""
        assert isinstance(request, HostRequest) and self._requests is not None
        if request.filler:
            return
        if self._decoupled and request.granted <= request.spent and not self._has_credit(request):
            return
        record = ResponseRecord(response is not None, final=final)
        outputs: Sequence[Tensor] = ()
        if response is not None:
            record.error, record.parameters, outputs = response.error, response.parameters, response.outputs
        record.failed = getattr(request, "failed", False)
        try:
            try:
                self._send_response(request, record, outputs)
            except ChannelClosedError:
                raise
            except Exception as error:  # no memory for it, or it is not what it says it is
                record.present, record.parameters = True, None
                record.error = at_fault(self._name, response)
                if record.error is None:
                    record.error = InternalError(f"a response can't be sent: {message_of(error)}")
                # Nothing may follow an error; what the model goes on to send goes nowhere.
                record.final = request.answered = True
                self._send_response(request, record, ())
        except ChannelClosedError:
            pass  # whoever reads notices, and ends the process

    def _has_credit(self, request: HostRequest) -> bool:
        """Waits until the server wants more responses to a request; False if it wants none any more."""
        requests = self._requests
        assert requests is not None
        number = request.number
        try:
            self._reading.until(
                lambda: request.granted > request.spent or requests.get(number) is not request
            )
        except ChannelClosedError:
            return False
        return requests.get(number) is request

    def _send_response(self, request: HostRequest, record: ResponseRecord, outputs: Sequence[Tensor]) -> None:
        head = record.encode()
        # Copies, also of outputs on GPUs: the model may go on to write to them at once.
        payload = self._exchange.pack([outputs] if record.has_tensors else [])
        if record.final:
            assert self._requests is not None
            self._requests.remove(request.number)
            if request.rescheduled:
                self._requests.keep(request)  # until the server says what becomes of it
        fields = head + b"".join(payload.lists)
        request.spent += wire.units(outputs)  # nobody else does so: senders hold a lock
        self._exchange.send(Kind.RESPONSE, request.number, fields, payload)

    def _step(self) -> None:
        """Receives one message and does what it says."""
        incoming = None
        try:
            incoming = self._exchange.receive()
            self._handle(incoming)
            self._exchange.seen_to()
        except ChannelClosedError:
            self._server_gone()
            raise
        except WireError as error:
            sys.stderr.write(f"conch worker: {error}\n")
            sys.stderr.flush()
            os._exit(BAD_MESSAGE)
        except BaseException as error:
            nothing = incoming is None and not self._exchange.interrupted()
            if nothing and not isinstance(error, MemoryError):
                raise  # by a handler of a signal, which the model has: nothing had been received
            # A message is lost, and perhaps with it whoever has read so far: better a new worker than that.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(FAILED)

    def _server_gone(self) -> None:
        """Ends the process at once: a model may be in the middle of something that never ends."""
        if not self._over:
            os._exit(SERVER_GONE)

    def _handle(self, incoming: Incoming) -> None:
        message = incoming.message
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise WireError(f"a message {message.kind.name} was not expected")
        handler(message.subject, incoming)

    def _on_execute(self, subject: int, incoming: Incoming) -> None:
        try:
            batch = self._received.batch(incoming)
        except UnreachableError as error:
            sys.stderr.write(f"conch worker: {error.message}\n")
            self._exchange.send(Kind.UNREACHABLE, subject)  # the server sends it again
            return
        self._todo.append((subject, batch))

    def _on_devices(self, subject: int, incoming: Incoming) -> None:
        # Only a server that uses GPUs says so, and few do.
        from conch.memory.cuda import cuda_devices
        from conch.workers.devices import use_in_worker

        use_in_worker(self._exchange, cuda_devices(), bytes(incoming.message.fields))

    def _on_gone(self, subject: int, incoming: Incoming) -> None:
        from conch.workers.devices import WorkerDevices

        devices = self._exchange.devices
        if isinstance(devices, WorkerDevices):
            devices.gone(bytes(incoming.message.fields))

    def _on_credit(self, subject: int, incoming: Incoming) -> None:
        request = self._received.get(subject)
        if request is not None:
            request.granted += wire.decode_credit(incoming.message.fields)

    def _on_cancel(self, subject: int, incoming: Incoming) -> None:
        request = self._received.get(subject)
        if request is not None:
            request.cancelled = True
            request.tell_cancelled()

    def _on_forget(self, subject: int, incoming: Incoming) -> None:
        request = self._received.get(subject)
        if request is not None:
            request.answered = True
            request.kept = None
            self._received.remove(subject)

    def _on_ready(self, subject: int, incoming: Incoming) -> None:
        try:
            threading.Thread(target=self._say_ready, args=(subject,), name="conch-ready", daemon=True).start()
        except RuntimeError:  # there is no memory for one, or too many are there
            self._answer_ready(subject, False)

    def _on_close(self, subject: int, incoming: Incoming) -> None:
        self._todo.append(None)

    def _on_hello(self, subject: int, incoming: Incoming) -> None:
        wire.check_hello(incoming.message.fields, "server")

    def _on_load(self, subject: int, incoming: Incoming) -> None:
        if self._load is not None:
            raise WireError("it has been told before what to load")
        fields = wire.decode_json(incoming.message.fields)
        spec, placement = spec_from_json(fields.get("spec")), placement_from_json(fields.get("placement"))
        level = fields.get("level")
        tell = partial(self.tell, Kind.LOG, 0)
        log_to_server(tell, level if isinstance(level, int) else logging.NOTSET)
        self._load = spec, placement

    def _on_level(self, subject: int, incoming: Incoming) -> None:
        level = wire.decode_json(incoming.message.fields).get("level")
        if isinstance(level, int):
            logging.getLogger().setLevel(level)

    @property
    def _received(self) -> Requests:
        requests = self._requests
        if requests is None:
            raise WireError("there is no model yet")
        return requests

    def _say_ready(self, subject: int) -> None:
        check = None if self._instance is None else self._instance.readiness
        ready = False
        if check is not None:
            check.start()
            ready = check.result()
        self._answer_ready(subject, ready)

    def _answer_ready(self, subject: int, ready: bool) -> None:
        try:
            self._exchange.send(Kind.READY, subject, wire.encode_json({"ready": ready}))
        except ChannelClosedError:
            self._server_gone()


def _record(request: HostRequest, response: InferenceResponse | None) -> ResponseRecord | None:
    """What a batch says of a request; None for a response that is nothing but its tensors."""
    failed = getattr(request, "failed", False)
    if response is None:
        return ResponseRecord(rescheduled=request.rescheduled, failed=failed)
    if response.error is None and not response.parameters and not failed:
        return None
    return ResponseRecord(True, response.error, response.parameters, failed=failed)


def _times(batch: Batch, count: int, error: int, alike: bool = False) -> bytes:
    times = batch.compute_input_end_ns, batch.compute_output_start_ns
    return DoneRecord(*times, batch.bytes_copied, count, error, alike).encode()
