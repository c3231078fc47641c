"""Fronts that are killed under load of all kinds: only their own connections end, and all answers are right.

`CONCH_FRONT_KILLS` sets how many; a thousand take half an hour. `--log-cli-level=info` shows how far it is,
and what the core holds.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from tests.support.hazards import fronts_of, suspend
from tests.support.metrics import Samples, scrape
from tests.support.parts import part_of, parts_request, write_parts
from tests.support.sequence_models import write_sums
from tests.support.servers import (
    WAIT_S,
    RawClient,
    ServerProcess,
    eventually,
    serving_process,
    write_probe,
)
from tests.support.sharing import in_region, register_request, shared_object
from tritonclient.grpc import service_pb2

pytestmark = pytest.mark.slow
log = logging.getLogger(__name__)

KILLS = int(os.environ.get("CONCH_FRONT_KILLS", "6"))
FRONTS = 3
_REPORT_EVERY = 25
_SETTLED = 100
"""After so many kills the core's memory grows no more."""
_MOST_GROWTH = 8 << 20
_IN_FLIGHT = 16
_POOL = 4
"""Threads of pools that start when there is work for them."""
_LEAVES = 0.005
_HURRIES = 0.1
"""Share of kills that come before all fronts serve again."""
_PARTS = 12
_WIDTHS = (1, 500, 20_000)
_SIZES = (4, 1_000, 30_000, 150_000)
"""Elements of tensors that travel in messages, and in blocks."""

_PLACED = 'dynamic_batching {{ }} parameters {{ key: "CONCH_PLACEMENT" value {{ string_value: "{}" }} }}'


def _write_models(repository: Path) -> None:
    for placement in ("in_process", "worker"):
        write_probe(repository, placement, _PLACED.format(placement))
    write_parts(repository)
    write_sums(repository, "sums", "oldest")


def _request(model: str, values: NDArray[Any]) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[values.tobytes()])
    request.inputs.add(name="IN", datatype="FP32", shape=values.shape)
    request.outputs.add(name="OUT")
    return request


def _output(response: Any) -> NDArray[Any]:
    return np.frombuffer(response.raw_output_contents[0], np.float32)


class _Wrong(Exception):
    """An answer that is not the expected one."""


def _expect(right: bool, what: str) -> None:
    if not right:
        raise _Wrong(what)


class _Clients:
    """A client of each kind, which has an address of its own: a front's connections tell whose they are."""

    def __init__(self, port: int) -> None:
        self._enough = threading.Event()
        works = (_small, _several_sizes, _in_worker, _many, _regions, _streams, _streams, _sequences, _asking)
        self.all = [_Client(number, work, port, self._enough) for number, work in enumerate(works, 2)]
        for client in self.all:
            client.start()

    def stop(self) -> None:
        """Ends them."""
        self._enough.set()
        for client in self.all:
            client.join(2 * WAIT_S)
            assert not client.is_alive()

    def wait_for_more(self) -> None:
        """Waits until each has got further answers, on a connection that has answered before."""
        before = [client.answers for client in self.all]
        for client, answers in zip(self.all, before, strict=True):
            eventually(lambda c=client, a=answers: c.answers > a + 1, f"{client.name} goes on")  # type: ignore[misc]

    def at(self, addresses: set[str]) -> set[tuple[int, int]]:
        """Connections with these addresses."""
        return {client.key for client in self.all if client.host in addresses}


class _Added(NamedTuple):
    """A request to add to a sequence, and what the sum is before it."""

    sequence: int
    total: int
    value: int
    start: bool
    end: bool


class _Client(threading.Thread):
    """Does one kind of work, on a new connection after each loss."""

    def __init__(
        self, number: int, work: Callable[[_Client], None], port: int, enough: threading.Event
    ) -> None:
        super().__init__(name=f"client {work.__name__}")
        self.host = f"127.0.0.{number}"
        self.answers = 0
        self.connection = 0
        self.lost: dict[tuple[int, int], str] = {}
        self.wrong: list[str] = []
        self.random = np.random.default_rng(number)
        self.raw: Any = None
        self.adding: _Added | None = None
        self.region = ""
        self._number = number
        self._work = work
        self._port = port
        self._enough = enough

    @property
    def key(self) -> tuple[int, int]:
        """Itself, and which of its connections it uses."""
        return self._number, self.connection

    @property
    def goes_on(self) -> bool:
        """True if it is to send more on this connection."""
        return not self._enough.is_set() and self.random.random() > _LEAVES

    def count(self) -> None:
        """Counts a right answer."""
        self.answers += 1

    def values(self, size: int) -> NDArray[np.float32]:
        """Numbers that no other request has."""
        return self.random.random((1, size), np.float32)

    def run(self) -> None:
        """Works until it is enough."""
        while not self._enough.is_set():
            self.connection += 1
            target = f"{self.host}:{self._port}"
            with closing(RawClient(target, ("grpc.use_local_subchannel_pool", 1))) as self.raw:
                try:
                    self._work(self)
                except grpc.RpcError as error:
                    if error.code() is grpc.StatusCode.UNAVAILABLE:
                        self.lost[self.key] = str(error.details())
                    else:
                        self.wrong.append(f"{self.name}: {error.code().name} {error.details()}")
                except _Wrong as error:
                    self.wrong.append(f"{self.name}: {error}")


def _echo(client: _Client, model: str, size: int) -> None:
    values = client.values(size)
    answer = _output(client.raw.infer(_request(model, values)))
    _expect(answer.tobytes() == values.tobytes(), f"{size} values of another request")
    client.count()


def _small(client: _Client) -> None:
    while client.goes_on:
        _echo(client, "in_process", _SIZES[0])


def _several_sizes(client: _Client) -> None:
    while client.goes_on:
        _echo(client, "in_process", client.random.choice(_SIZES))


def _in_worker(client: _Client) -> None:
    while client.goes_on:
        _echo(client, "worker", client.random.choice(_SIZES))


def _many(client: _Client) -> None:
    """Has many requests in flight on its connection."""
    method = client.raw.channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=service_pb2.ModelInferResponse.FromString,
    )
    while client.goes_on:
        values = [client.values(client.random.choice(_SIZES[:3])) for _ in range(_IN_FLIGHT)]
        futures = [
            method.future(_request(model, each), timeout=WAIT_S)
            for model, each in zip(("in_process", "worker") * _IN_FLIGHT, values, strict=False)
        ]
        for each, future in zip(values, futures, strict=True):
            _expect(_output(future.result()).tobytes() == each.tobytes(), "values of another in flight")
        client.count()


def _regions(client: _Client) -> None:
    """New regions for each connection: a request that was lost may still write to its own."""
    size = _SIZES[2] * 4
    with shared_object(2 * size) as memory:
        if client.lost:
            client.raw.unary(service_pb2.SystemSharedMemoryUnregisterRequest(name=client.region))
        client.raw.unary(register_request(memory.key, memory.key, 2 * size))
        client.region = memory.key
        while client.goes_on:
            values = client.values(_SIZES[2])
            memory.write(values)
            request = service_pb2.ModelInferRequest(
                model_name=("in_process", "worker")[client.random.integers(2)]
            )
            given = request.inputs.add(name="IN", datatype="FP32", shape=values.shape)
            in_region(given.parameters, memory.key, size)
            in_region(request.outputs.add(name="OUT").parameters, memory.key, size, size)
            client.raw.infer(request)
            _expect(memory.read(values.size, size).tobytes() == values.tobytes(), "another region's values")
            client.count()
        client.raw.unary(service_pb2.SystemSharedMemoryUnregisterRequest(name=memory.key))


def _streams(client: _Client) -> None:
    """Decoupled responses come in order and as a whole, or up to the loss."""
    while client.goes_on:
        first = int(client.random.integers(1 << 20))
        width = int(client.random.choice(_WIDTHS))
        wanted = iter(range(first, first + _PARTS))
        for response in client.raw.stream([parts_request(first, _PARTS, width)]):
            number = next(wanted, None)
            _expect(part_of(response) == (number, width), f"{part_of(response)} for {number}")
        _expect(next(wanted, None) is None, "a stream ends early")
        client.count()


def _sequences(client: _Client) -> None:
    """A sequence outlives its connection: the request that was lost has been added, or has not."""
    if client.adding is not None:
        _end_lost(client, client.adding)
    sequence = client.connection << 32
    while client.goes_on:
        sequence += 1
        steps = int(client.random.integers(2, 6))
        for step in range(1, steps + 1):
            client.adding = _Added(sequence, sum(range(step)), step, step == 1, step == steps)
            _expect(_add(client, client.adding) == sum(range(step + 1)), "a wrong sum")
            client.count()
        client.adding = None


def _end_lost(client: _Client, lost: _Added) -> None:
    """Ends a sequence whose last request was lost."""
    before, after = lost.total, lost.total + lost.value
    end = _Added(lost.sequence, after, 0, False, True)
    client.adding = None if lost.end else end
    try:
        found = _add(client, end)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT or not (lost.start or lost.end):
            raise
    else:
        _expect(found in (before, after), f"{found}, not {before} or {after}")
    client.adding = None
    client.count()


def _add(client: _Client, added: _Added) -> float:
    request = _request("sums", np.full((1, 1), added.value, np.float32))
    request.parameters["sequence_id"].int64_param = added.sequence
    request.parameters["sequence_start"].bool_param = added.start
    request.parameters["sequence_end"].bool_param = added.end
    return float(_output(client.raw.infer(request))[0])


def _asking(client: _Client) -> None:
    while client.goes_on:
        _expect(client.raw.unary(service_pb2.ServerReadyRequest()).ready, "not ready")
        found = client.raw.unary(service_pb2.ModelMetadataRequest(name="parts"))
        _expect(found.name == "parts", "the metadata of another model")
        client.count()


class _Held(NamedTuple):
    """Resources of the core; memory and descriptors without those of blocks, which stay for 30 s."""

    memory: int
    descriptors: int
    threads: int
    blocks: int


def _held(core: psutil.Process) -> _Held:
    blocks = Path(f"/proc/{core.pid}/maps").read_text().count("memfd:conch-tensors")
    descriptors = 0
    for each in Path(f"/proc/{core.pid}/fd").iterdir():
        with suppress(OSError):  # it has been closed meanwhile
            descriptors += "memfd:conch-tensors" not in os.readlink(each)
    memory = core.memory_info()
    return _Held(memory.rss - memory.shared, descriptors, core.num_threads(), blocks)


def _busy_fronts(server: ServerProcess) -> list[psutil.Process]:
    """Processes of fronts that have connections."""
    found = []
    for front in fronts_of(server):
        with suppress(psutil.NoSuchProcess):
            if front.net_connections():
                found.append(front)
    return found


def _total(found: Samples, name: str) -> float:
    return sum(value for (each, _), value in found.items() if each == name)


def _kill_one(server: ServerProcess, clients: _Clients, dice: random.Random) -> set[tuple[int, int]]:
    """Kills a front; the connections that end with it."""
    victim = dice.choice(eventually(lambda: _busy_fronts(server), "fronts have connections"))
    suspend(victim)  # so that it neither accepts nor closes connections
    # Twice: the list of all sockets may miss one while others come and go.
    held = victim.net_connections() + victim.net_connections()
    addresses = {each.laddr.ip.removeprefix("::ffff:") for each in held}
    doomed = clients.at(addresses)
    victim.kill()
    return doomed


@pytest.mark.timeout(1200 + 60 * KILLS)
def test_front_kills(tmp_path: Path, grpc_is_warm: None) -> None:
    _write_models(tmp_path)
    dice = random.Random(KILLS)
    doomed: set[tuple[int, int]] = set()
    with serving_process(tmp_path, flags=[f"--front-ends={FRONTS}"]) as server:
        core = psutil.Process(server.process.pid)
        clients = _Clients(server.port)
        try:
            clients.wait_for_more()
            before = settled = _held(core)
            for kill in range(1, KILLS + 1):
                if dice.random() > _HURRIES:
                    eventually(lambda: _all_serve(server), "all serve again")
                doomed |= _kill_one(server, clients, dice)
                clients.wait_for_more()
                if kill % _REPORT_EVERY == 0:
                    _report(kill, clients, core)
                if kill == _SETTLED:
                    settled = _held(core)
        finally:
            clients.stop()
        assert [each for client in clients.all for each in client.wrong] == []
        lost = {key: why for client in clients.all for key, why in client.lost.items()}
        assert lost
        others = {key: why for key, why in lost.items() if key not in doomed}
        assert others == {}, "connections of other fronts ended"
        eventually(lambda: _serves_nothing(server), "all that was lost is cancelled")
        _report(KILLS, clients, core)
        log.info("before the kills: %s", before)
        eventually(lambda: _held(core).descriptors <= before.descriptors, "descriptors are closed")
        eventually(lambda: _held(core).threads <= before.threads + _POOL, "threads end")
        assert KILLS <= _SETTLED or _held(core).memory <= settled.memory + _MOST_GROWTH


def _all_serve(server: ServerProcess) -> bool:
    return _total(scrape(server.metrics_url), "conch_front_up") == FRONTS


def _serves_nothing(server: ServerProcess) -> bool:
    found = scrape(server.metrics_url)
    return (
        _total(found, "conch_front_up") == FRONTS
        and _total(found, "conch_front_restarts_total") == KILLS
        and not _total(found, "conch_front_connections")
        and not _total(found, "conch_pending_requests")
    )


def _report(kill: int, clients: _Clients, core: psutil.Process) -> None:
    answers = sum(client.answers for client in clients.all)
    lost = sum(len(client.lost) for client in clients.all)
    wrong = sum(len(client.wrong) for client in clients.all)
    log.info("%d kills, %d answers, %d lost, %d wrong: %s", kill, answers, lost, wrong, _held(core))
