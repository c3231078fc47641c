"""The worker's main loop: loads the model, executes batches, ends when the server says so.

A worker has one instance of a Python model, or all instances of a model that a library runs. Each instance
has a *lane*: a queue of batches, and the thread that executes them. Instances on one GPU share a lane if the
library asks for it.

Owns: the channel, the lanes. Threads: the main thread loads, and executes for the first lane; whichever
thread reads (see host_reader) handles messages.
"""

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
from typing import TYPE_CHECKING, NamedTuple, Protocol

from conch.backends.python.api.pb_metrics import use_metric_families
from conch.backends.python.python_settings import Settings
from conch.backends.python.runtime.python_instance import (
    AsyncPythonInstance,
    PythonInstance,
    open_instance,
)
from conch.backends.python.runtime.tracebacks import limit_memory
from conch.core.backend import BatchOutcome
from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError
from conch.core.execution.placement import Placement
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import Readiness
from conch.core.spec import ModelSpec
from conch.ipc import codec
from conch.ipc.busy_poll import BusyPoll
from conch.ipc.channel import ChannelClosedError, Kind, PacketChannel, WireError, lost_kind
from conch.ipc.response_credit import decode_credit
from conch.ipc.spec_json import (
    Library,
    library_from_json,
    placement_from_json,
    spec_from_json,
)
from conch.ipc.tensors import MessageStream, ReceivedMessage, UnreachableError, unmapped_error
from conch.ipc.worker_log import log_to_server
from conch.workers.host.host_reader import BackupReader, HostReader
from conch.workers.host.hosted_metrics import RemoteFamilies
from conch.workers.host.hosted_requests import HostedRequests
from conch.workers.host.response_writer import JoinedResponses, Responses, ResponseWriter
from conch.workers.host.server_client import ServerClient

if TYPE_CHECKING:
    from conch.workers.host.native_model import NativeModel

SERVER_GONE = 3
"""Exit status: the server has closed the socket."""
BAD_MESSAGE = 4
"""Exit status: a message of the server was malformed."""
FAILED = 5
"""Exit status: handling a message of the server failed."""


def serve(descriptor: int) -> None:
    """Serves a socket until the server closes it or sends CLOSE."""
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    host = Host(PacketChannel(sock))
    os.register_at_fork(after_in_child=host.forked)
    host.run()
    if host.runs_library:
        # Threads of the library may still run, which its exit handlers do not expect.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class HostedInstance(Protocol):
    """An instance of the model, as a lane uses it."""

    readiness: Readiness | None

    def execute(self, batch: Batch) -> Responses | JoinedResponses | None:
        """See `BackendInstance.execute`."""

    def close(self) -> None:
        """Frees it."""


class Load(NamedTuple):
    """A model to load, with its instances and its library, as the server has sent it."""

    spec: ModelSpec
    placements: list[Placement]
    library: Library | None


class Lane:
    """The batches of one thread.

    Attributes:
        todo: Batches that wait for the thread; None: the server has sent CLOSE.
        backup_reader: Reads during a long execution.
    """

    __slots__ = ("backup_reader", "todo")

    def __init__(self, reader: HostReader) -> None:
        self.todo: deque[tuple[int, Batch] | None] = deque()
        self.backup_reader = BackupReader(reader)


class Host:
    """The instances of a model, and their connection to the server."""

    def __init__(self, channel: PacketChannel) -> None:
        self._channel = channel
        self._stream = MessageStream(channel, in_worker=True)
        self._reader = HostReader(self._handle_next, channel.ready)
        first = Lane(self._reader)
        self._lanes = [first]  # by instance
        self._instances: Sequence[HostedInstance] = ()  # once they are loaded
        self._calls = ServerClient(self._stream, self._reader, first.backup_reader)
        self._families = RemoteFamilies(self)
        self._load: Load | None = None
        self._writer: ResponseWriter | None = None
        self._native: NativeModel | None = None
        self._over = False  # the conversation has ended
        self._forked = False
        self._handlers: dict[Kind, Callable[[int, ReceivedMessage], None]] = {
            Kind.EXECUTE: self._on_execute,
            Kind.REPLY: self._calls.on_reply,
            Kind.RESULT: self._calls.on_result,
            Kind.CREDIT: self._on_credit,
            Kind.CANCEL: self._on_cancel,
            Kind.FORGET: self._on_forget,
            Kind.READY: self._on_ready,
            Kind.ALIVE: self._on_alive,
            Kind.LEVEL: self._on_level,
            Kind.CLOSE: self._on_close,
            Kind.HELLO: self._on_hello,
            Kind.LOAD: self._on_load,
            Kind.DEVICES: self._on_devices,
            Kind.FREED: self._on_freed,
            Kind.LOST: self._on_message_lost,
        }

    def run(self) -> None:
        """Loads and executes until the server sends CLOSE."""
        try:
            self._stream.send(Kind.HELLO, 0, codec.encode_hello(os.getpid()))
            self._reader.until(lambda: self._load is not None or bool(self._lanes[0].todo))
            if self._load is not None and self._open(self._load):
                self._serve()
        except ChannelClosedError:
            self._server_gone()
        # From here on a closed channel does not end the process: exit handlers of the model still run. The
        # model's children may hold the socket open.
        self._over = True
        self._channel.shut_down()

    def forked(self) -> None:
        """Detaches a fork of the worker from the connection."""
        self._over = self._forked = True
        self._stream.forked()
        self._reader.forked()

    @property
    def runs_library(self) -> bool:
        """True if a library runs the model."""
        return self._native is not None

    # --- used by parts ------------------------------------------------------------------------------------

    def query(self, kind: str, /, **fields: object) -> dict[str, object]:
        """Sends a query to the server and waits for the result."""
        return self._calls.query(kind, **fields)

    def notify(self, kind: Kind, subject: int, fields: bytes) -> None:
        """Sends a message without tensors."""
        self._stream.send(kind, subject, fields)

    def _note(self, text: str) -> None:
        try:
            self._stream.send(Kind.NOTE, 0, codec.encode_json({"text": text}))
        except ChannelClosedError:
            pass  # the server has closed its end

    # --- on the main thread -------------------------------------------------------------------------------

    def _open(self, load: Load) -> bool:
        use_metric_families(self._families)
        settings = Settings.of(load.spec)
        if settings.memory_limit_mb is not None:
            limit_memory(settings.memory_limit_mb)
        first = self._lanes[0]
        first.backup_reader.arm()  # `initialize` may take long and query the server
        try:
            facts = (
                self._open_python(load) if load.library is None else self._open_library(load, load.library)
            )
        except ConchError as error:
            if self._forked:
                raise error.__cause__ or error from None
            self._stream.send(Kind.FAILED, 0, codec.encode_error(error))
            return False
        finally:
            first.backup_reader.disarm()
        by_address = load.library is not None and load.spec.padding is None
        self._writer = ResponseWriter(load.spec, self._stream, self._reader, by_address)
        self._stream.send(Kind.LOADED, 0, codec.encode_json(facts))
        return True

    def _open_python(self, load: Load) -> dict[str, bool]:
        """Opens the instance of a Python model; returns what the server must know of it."""
        (placement,) = load.placements
        instance = open_instance(load.spec, placement, self._calls, self._note)
        self._instances = (instance,)
        instance.leave_shaping(load.spec)
        return {
            "readiness": instance.readiness is not None,
            "concurrent": isinstance(instance, AsyncPythonInstance),
            "starts_requests": instance.starts_requests,
        }

    def _open_library(self, load: Load, library: Library) -> dict[str, bool]:
        """Opens all instances of a model that a library runs."""
        from conch.workers.host.native_model import NativeModel  # not needed by Python models

        self._native = model = NativeModel(load.spec, library, self._calls, self._families, self._note)
        model.open(load.placements)
        self._instances = model.instances
        self._lanes = [self._lanes[number] for number in model.threads]
        return {"readiness": model.has_readiness, "concurrent": True, "starts_requests": False}

    def _serve(self) -> None:
        """Executes batches of all lanes until the server sends CLOSE."""
        first, *others = dict.fromkeys(self._lanes)
        threads = [
            threading.Thread(target=self._serve_beside, args=(lane,), name=f"conch-lane-{number}")
            for number, lane in enumerate(others, 1)
        ]
        for thread in threads:
            thread.start()
        self._serve_lane(first, not others)
        for thread in threads:
            thread.join()
        for instance in self._instances:
            instance.close()
        assert self._writer is not None, "it has been loaded"
        self._writer.close()
        self._families.flush()
        if self._stream.devices is not None:
            self._stream.devices.close()

    def _serve_beside(self, lane: Lane) -> None:
        try:
            self._serve_lane(lane, False)
        except ChannelClosedError:
            self._server_gone()

    def _serve_lane(self, lane: Lane, alone: bool) -> None:
        todo, reader, backup_reader = lane.todo, self._reader, lane.backup_reader
        writer = self._writer
        assert writer is not None, "it has been loaded"
        if self._native is not None:
            self._native.enter_thread(self._lanes.index(lane))
        if not alone:
            self._serve_with_others(lane, writer)
            return

        arrivals = select.poll()
        arrivals.register(self._channel.fileno(), select.POLLIN)
        busy_poll = BusyPoll(partial(arrivals.poll, 0))
        while True:
            since_ns = monotonic_ns()
            if not todo:
                busy_poll.wait()
            reader.until(todo.__len__)
            backup_reader.arm()
            if todo[0] is None:  # CLOSE
                break
            busy_poll.record_arrival(len(todo[0][1].requests), since_ns)
            self._execute(todo, writer)
            backup_reader.disarm()

    def _serve_with_others(self, lane: Lane, writer: ResponseWriter) -> None:
        """As `_serve_lane` without polling, which would take the processor from the other lanes."""
        todo, reader, backup_reader = lane.todo, self._reader, lane.backup_reader
        while True:
            reader.until(todo.__len__)
            backup_reader.arm()
            if todo[0] is None:  # CLOSE
                break
            self._execute(todo, writer)
            backup_reader.disarm()

    def _execute(self, todo: deque[tuple[int, Batch] | None], writer: ResponseWriter) -> None:
        item = todo.popleft()
        assert item is not None, "the lane has checked"
        number, batch = item
        outcome: BatchOutcome | JoinedResponses
        try:
            outcome = self._instances[batch.instance or 0].execute(batch)
        except BaseException as error:  # the server ends the process, not a model that raises
            outcome = error
        if self._forked:  # a child process that `execute` returned in
            raise outcome if isinstance(outcome, BaseException) else SystemExit(0)
        encoded = writer.encode(number, batch, outcome)
        # The memory of the inputs returns with this message, unless the model keeps it.
        del item, batch, outcome
        writer.send_done(number, *encoded)
        if self._families.forgotten:
            self._families.flush()

    # --- on the thread that reads -------------------------------------------------------------------------

    def _handle_next(self) -> None:
        """Receives and handles one message."""
        received = None
        try:
            received = self._stream.receive()
            handler = self._handlers.get(received.kind)
            if handler is None:
                raise WireError(f"a message {received.kind.name} was not expected")
            handler(received.subject, received)
            self._stream.mark_handled()
        except ChannelClosedError:
            self._server_gone()
            raise
        except WireError as malformed:
            sys.stderr.write(f"conch worker: {malformed}\n")
            sys.stderr.flush()
            os._exit(BAD_MESSAGE)
        except BaseException as error:  # boundary: the top of the process
            nothing = received is None and not self._stream.interrupted()
            if nothing and not isinstance(error, MemoryError):
                raise  # from a signal handler of the model; nothing was received
            # A message is lost, and perhaps the thread that read: a new worker is safer.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(FAILED)

    def _server_gone(self) -> None:
        """Ends the process at once, because `execute` may never return."""
        if not self._over:
            os._exit(SERVER_GONE)

    def _on_execute(self, subject: int, received: ReceivedMessage) -> None:
        try:
            batch = self._open_requests.batch(subject, received)
        except UnreachableError as error:
            sys.stderr.write(f"conch worker: {error.message}\n")
            self._stream.send(Kind.UNREACHABLE, subject)  # the server resends it
            return
        try:
            self._lanes[batch.instance or 0].todo.append((subject, batch))
        except IndexError:
            raise WireError(f"there is no instance {batch.instance}") from None

    def _on_devices(self, subject: int, received: ReceivedMessage) -> None:
        # Sent only by servers that use GPUs; the import is heavy.
        from conch.ipc.devices import use_in_worker
        from conch.memory.cuda import cuda_devices

        use_in_worker(self._stream, cuda_devices(), bytes(received.fields))

    def _on_freed(self, subject: int, received: ReceivedMessage) -> None:
        from conch.ipc.devices import WorkerDevices

        devices = self._stream.devices
        if isinstance(devices, WorkerDevices):
            devices.freed(bytes(received.fields))

    def _on_message_lost(self, subject: int, received: ReceivedMessage) -> None:
        """Reports a message that could not be read."""
        kind = lost_kind(received.fields)
        if kind is Kind.EXECUTE:
            self._stream.send(Kind.UNREACHABLE, subject)  # the server resends it
        elif kind is Kind.REPLY or kind is Kind.RESULT:
            self._calls.lost(subject, kind, unmapped_error())
        else:
            raise WireError("a message was lost that can't be done without")

    def _on_credit(self, subject: int, received: ReceivedMessage) -> None:
        requests = self._open_requests
        for number, units in decode_credit(received.fields):
            request = requests.get(number)
            if request is not None:
                request.granted += units
                if request.waiting:
                    request.granted_more()

    def _on_cancel(self, subject: int, received: ReceivedMessage) -> None:
        request = self._open_requests.get(subject)
        if request is not None:
            request.cancelled = True
            request.notify_cancelled()

    def _on_forget(self, subject: int, received: ReceivedMessage) -> None:
        request = self._open_requests.get(subject)
        if request is not None:
            request.completed = True
            request.backend_state = None
            self._open_requests.remove(request)
            if self._native is not None:
                self._native.forget_waiting(request)

    def _on_ready(self, subject: int, received: ReceivedMessage) -> None:
        try:
            threading.Thread(
                target=self._check_ready, args=(subject,), name="conch-ready", daemon=True
            ).start()
        except RuntimeError:  # no memory, or too many threads
            self._reply_ready(subject, False)

    def _on_alive(self, subject: int, received: ReceivedMessage) -> None:
        answer = partial(self._reply_alive, subject)
        instance = self._instances[0] if self._instances else None
        if isinstance(instance, PythonInstance):
            instance.when_alive(answer)
        else:
            answer()

    def _reply_alive(self, subject: int) -> None:
        try:
            self._stream.send(Kind.ALIVE, subject)
        except ChannelClosedError:
            self._server_gone()

    def _on_close(self, subject: int, received: ReceivedMessage) -> None:
        for lane in dict.fromkeys(self._lanes):
            lane.todo.append(None)

    def _on_hello(self, subject: int, received: ReceivedMessage) -> None:
        codec.check_hello(received.fields, "server")

    def _on_load(self, subject: int, received: ReceivedMessage) -> None:
        if self._load is not None:
            raise WireError("a second message to load a model")
        fields = codec.decode_json(received.fields)
        placements = fields.get("placements")
        if not isinstance(placements, list) or not placements:
            raise WireError("a model is loaded without placements of its instances")
        load = Load(
            spec_from_json(fields.get("spec")),
            [placement_from_json(placement) for placement in placements],
            library_from_json(fields.get("library")),
        )
        if load.library is None and len(placements) != 1:
            raise WireError("a worker has one instance of a Python model")
        level = fields.get("level")
        log_to_server(partial(self.notify, Kind.LOG, 0), level if isinstance(level, int) else logging.NOTSET)
        self._lanes += [Lane(self._reader) for _ in placements[1:]]
        self._load = load

    def _on_level(self, subject: int, received: ReceivedMessage) -> None:
        level = codec.decode_json(received.fields).get("level")
        if isinstance(level, int):
            logging.getLogger().setLevel(level)
            if self._native is not None:
                self._native.follow_log_level()

    @property
    def _open_requests(self) -> HostedRequests:
        if self._writer is None:
            raise WireError("there is no model yet")
        return self._writer.requests

    def _check_ready(self, subject: int) -> None:
        check = self._instances[0].readiness if self._instances else None
        ready = False
        if check is not None:
            check.start()
            ready = check.result()
        self._reply_ready(subject, ready)

    def _reply_ready(self, subject: int, ready: bool) -> None:
        try:
            self._stream.send(Kind.READY, subject, codec.encode_json({"ready": ready}))
        except ChannelClosedError:
            self._server_gone()
