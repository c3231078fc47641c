"""Worker processes with nothing but a link around them."""

from __future__ import annotations

import json
import logging
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.core import WAIT_S, Answers, make_spec

from conch.core.backend import BatchOutcome
from conch.core.bls import ServerCalls, Waiter
from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError, NotFoundError, UnavailableError
from conch.core.execution.placement import Placement
from conch.core.model_control import LoadParameter
from conch.core.reader import Reader
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import InlineClaim
from conch.core.spec import ModelSpec
from conch.core.tensor import Array, Tensor
from conch.ipc.channel import PacketChannel
from conch.ipc.tensors import (
    LayoutKey,
    MessageStream,
    Payload,
    Place,
    ReceivedMessage,
    describe_layout,
)
from conch.memory.cuda import CudaDevices
from conch.workers.connection.worker_connection import WorkerConnection
from conch.workers.environment import Environment, server_environment
from conch.workers.supervision.child_process import ChildProcess, start_worker
from conch.workers.supervision.process_monitor import ProcessMonitor

ROOT = Path(__file__).resolve().parents[2]
_SERVICES = str(ROOT / "services")
PLACEMENT = Placement("m_0_0", "CPU")
_SERVE = (
    "import sys; sys.path.insert(0, sys.argv[2]); "
    "from conch.workers.host.worker_loop import serve; serve(int(sys.argv[1]))"
)


class NoCalls:
    """A server that has no other models."""

    passes_blocks = False

    def __init__(self) -> None:
        self.waiters: set[Waiter] = set()

    def find(self, request: InferenceRequest) -> Any:
        raise NotFoundError(f"there is no model '{request.model_name}'")

    def submit(
        self, request: InferenceRequest, may_claim: bool = False, model: Any = None, parent: Any = None
    ) -> InlineClaim | None:
        raise NotFoundError(f"there is no model '{request.model_name}'")

    def cancel(self, request: InferenceRequest) -> None:
        request.cancelled = True

    def model_ready(self, name: str, version: str) -> bool:
        return False

    def fact(self, kind: str, name: str = "", version: str = "") -> object:
        raise UnavailableError("there is no server to ask")

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        raise UnavailableError("nothing can be loaded")

    def unload(self, name: str, unload_dependents: bool) -> None:
        raise UnavailableError("nothing can be unloaded")


class Running:
    """A worker, its process and its link."""

    def __init__(
        self, spec: ModelSpec, calls: ServerCalls, code: str = _SERVE, gpus: CudaDevices | None = None
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", code, str(theirs.fileno()), _SERVICES],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.lost: list[str] = []
        self._gone = threading.Event()
        channel = PacketChannel(ours, blocking=False)
        self.link = WorkerConnection(channel, PLACEMENT.name, spec, calls, self._on_lost, gpus=gpus)
        self._loaded = threading.Event()
        self.load_error: ConchError | None = None
        self.spec = spec

    def _on_lost(self, reason: str) -> None:
        self.lost.append(reason)
        self._gone.set()

    def load(self) -> None:
        """Loads the model; raises what comes of it."""

        def on_loaded(error: ConchError | None) -> None:
            self.load_error = error
            self._loaded.set()

        self.link.load([PLACEMENT], on_loaded)
        assert self._loaded.wait(WAIT_S)
        if self.load_error is not None:
            raise self.load_error

    def wait_lost(self) -> str:
        """Reason for which the worker was lost, once it is."""
        assert self._gone.wait(WAIT_S)
        (reason,) = self.lost
        return reason

    def start(self, batch: Batch) -> Begun:
        """Begins a batch."""
        begun = Begun(batch)
        batch.compute_start_ns = monotonic_ns()
        self.link.start(batch, begun.done)
        return begun

    def run(self, *requests: InferenceRequest) -> Sequence[InferenceResponse | None]:
        """Runs requests as a batch; raises if it fails."""
        return self.start(batch_of(*requests)).result()

    def infer(self, **arrays: Array) -> dict[str, Array]:
        """Runs one request that succeeds."""
        request, _ = request_of("", **arrays)
        (response,) = self.run(request)
        assert response is not None
        assert response.error is None, response.error
        return {tensor.name: tensor.numpy() for tensor in response.outputs}

    def end(self) -> None:
        """Ends everything, whatever state it is in."""
        closed = self.process.poll() is None and self.link.close(WAIT_S)
        if not closed:
            self.process.kill()
        self.link.lose("the test is over")
        self.link.close(0)
        self.process.wait(WAIT_S)


class Begun:
    """A batch that was begun."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.outcomes: list[BatchOutcome] = []
        self._over = threading.Event()

    def done(self, batch: Batch, outcome: BatchOutcome) -> None:
        assert batch is self.batch
        batch.settled = True  # as the runner does
        self.outcomes.append(outcome)
        self._over.set()

    def result(self) -> Sequence[InferenceResponse | None]:
        assert self._over.wait(WAIT_S)
        (outcome,) = self.outcomes
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None
        return outcome


def request_of(request_id: str = "", /, **arrays: Array) -> tuple[InferenceRequest, Answers]:
    """A request with inputs."""
    answers = Answers()
    inputs = {name: Tensor.from_array(name, array) for name, array in arrays.items()}
    return InferenceRequest("m", "", inputs, answers, monotonic_ns(), request_id), answers


def placed(key: LayoutKey, places: Sequence[Place]) -> Payload:
    """One list of tensors in blocks or on GPUs."""
    return _described(key, 3, b"".join([place.encode() for place in places]))


def inline(key: LayoutKey, sizes: Sequence[int] = (), data: bytes = b"") -> Payload:
    """One list of tensors in the message; sizes only of lists with strings."""
    payload = _described(key, 1, struct.pack(f"<{len(sizes)}Q", *sizes))
    payload.data = [data] if data else []
    return payload


def _described(key: LayoutKey, flags: int, rest: bytes) -> Payload:
    payload = Payload()
    payload.fields = struct.pack("<IB", 1, flags) + rest
    payload.texts = [describe_layout(key).text]
    return payload


def arrived(*packets: bytes, in_worker: bool = True) -> ReceivedMessage:
    """The last of some packets, received on a connection of their own."""
    own, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own, peer:
        stream = MessageStream(PacketChannel(own), in_worker)
        for packet in packets:
            peer.send(packet)
            message = stream.receive()
    return message


def batch_of(*requests: InferenceRequest) -> Batch:
    """A batch of requests."""
    return Batch(list(requests), len(requests))


def model_spec(directory: Path, source: str, **more: Any) -> ModelSpec:
    """The spec of a model with a source, which is written."""
    from dataclasses import replace

    version = directory / "m" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(source)
    return replace(
        make_spec(**more),
        backend="python",
        directory=version.parent,
        version_directory=version,
        model_file="model.py",
        config={"name": "m"},
    )


@contextmanager
def worker(spec: ModelSpec, calls: ServerCalls | None = None) -> Iterator[Running]:
    """A worker that has loaded its model, ended afterwards."""
    running = Running(spec, calls or NoCalls())
    try:
        running.load()
        yield running
    finally:
        running.end()


def completing(
    sockets: ExitStack,
    monitor: ProcessMonitor,
    directory: Path,
    code: str,
    on_end: Callable[[], None] = lambda: None,
    environment: Environment | None = None,
) -> ChildProcess:
    """Starts a worker that completes the config of a model with this code; `sockets` closes its socket."""
    (directory / "model.py").write_text(code)
    process, ours = start_worker(
        monitor, "model_0_0", environment or server_environment(), "complete", on_end
    )
    sockets.enter_context(ours)
    asked = {"config": {}, "directory": str(directory), "file_name": "model.py"}
    ours.sendall(json.dumps({**asked, "level": logging.INFO, "memory_limit_mb": None}).encode())
    ours.shutdown(socket.SHUT_WR)
    return process


class SlowClient(Answers, Reader):
    """A client that takes all responses, and has read none of them until `read` is called."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._has_read = False
        self._deferred: list[Callable[[], object]] = []

    def request(self, request_id: str = "", /, **arrays: Array) -> InferenceRequest:
        """A request of this client."""
        inputs = {name: Tensor.from_array(name, array) for name, array in arrays.items()}
        request = InferenceRequest("m", "", inputs, self, monotonic_ns(), request_id)
        request.reader = self
        return request

    @property
    def backpressure(self) -> bool:
        """See `Reader.backpressure`."""
        return not self._has_read

    def when_writable(self, work: Callable[[], object]) -> None:
        """See `Reader.when_writable`."""
        with self._lock:
            waits = self.backpressure
            if waits:
                self._deferred.append(work)
        if not waits:
            work()

    def read(self) -> None:
        """Reads all, also what comes later."""
        with self._lock:
            self._has_read = True
        for work in self._deferred:
            work()
