"""Thousands of loads from a few clients: what waits is bounded, and leaves with its client."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from tests.support.attacks import health_probe
from tests.support.raw_http import RawHttp, request
from tests.support.servers import (
    IN_PROCESS,
    NUMBER_CONFIG,
    WAIT_S,
    ServerProcess,
    check_simple,
    client_of,
    copy_example,
    eventually,
    serving_process,
    simple_inputs,
    write_model,
)
from tritonclient.grpc import service_pb2

from conch.door.thread_pool import MOST_WAITING

LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
LIVE = "/inference.GRPCInferenceService/ServerLive"
HANGING = [f"hangs{number}" for number in range(32)]
"""As many as a front end lets load at a time."""

MOST_S = 0.5
"""Processor time that the server may take for others while a health check waits."""
MODEL = """
import time
from pathlib import Path


class TritonPythonModel:
    def initialize(self, args):
        begun = Path(args["model_repository"]).parent.parent / "begun"
        begun.mkdir(exist_ok=True)
        (begun / args["model_name"]).touch()
        while args["model_name"].startswith("hangs") and not (begun.parent / "go_on").exists():
            time.sleep(0.01)

    def execute(self, requests):
        return []
"""


class Place:
    """A server with models whose loads hang until they may go on."""

    def __init__(self, directory: Path, server: ServerProcess) -> None:
        self.directory = directory
        self.server = server

    def has_begun(self, model: str) -> bool:
        """True once a load has come as far as the model's code."""
        return (self.directory / "begun" / model).exists()

    def wait_until_all_hang(self) -> None:
        """Waits until no thread for loads is left."""
        eventually(lambda: all(map(self.has_begun, HANGING)), "the loads begin")

    def go_on(self) -> None:
        """Lets the loads end."""
        (self.directory / "go_on").touch()


@pytest.fixture
def place(tmp_path: Path, grpc_is_warm: None) -> Iterator[Place]:
    for name in (*HANGING, "late", "other"):
        write_model(tmp_path / "models", name, NUMBER_CONFIG, {"model.py": MODEL})
    copy_example(tmp_path / "models", "simple")
    flags = ["--model-control-mode=explicit", "--load-model=simple", IN_PROCESS]
    flags.append(f"--model-load-thread-count={len(HANGING) + 1}")
    with serving_process(tmp_path / "models", flags=flags) as server:
        made = Place(tmp_path, server)
        try:
            yield made
        finally:
            made.go_on()


def message(model: str) -> bytes:
    return bytes(service_pb2.RepositoryModelLoadRequest(model_name=model).SerializeToString())


def is_refused(channel: grpc.Channel, call: Any) -> bool:
    """True if a call of a channel has been refused; else it waits, or has ended well."""
    # On the same connection, so the server has read the call before this one.
    channel.unary_unary(LIVE)(b"", timeout=WAIT_S)
    with suppress(grpc.FutureTimeoutError):
        return call.exception(3.0) is not None
    return False


def test_loads_that_wait_are_limited_and_leave_with_their_clients(place: Place) -> None:
    """Any number could wait, with any number of bytes: 3,000 loads with a config of 1 MB took 1.1 GB."""
    answers: Counter[str] = Counter()
    counted = threading.Condition()

    def ended(call: Any) -> None:
        with counted:
            answers[call.details() if call.code() is not grpc.StatusCode.OK else "OK"] += 1
            counted.notify_all()

    each, connections = 1000, 2
    refused = each * connections - MOST_WAITING
    full = f"{MOST_WAITING} loads wait already; try again when some of them have ended"
    with ExitStack() as stack:

        def connected() -> grpc.Channel:
            channel = grpc.insecure_channel(place.server.address, [("grpc.use_local_subchannel_pool", 1)])
            return stack.enter_context(closing(channel))

        own = connected()
        load = own.unary_unary(LOAD)
        hanging = [load.future(message(model), timeout=2 * WAIT_S) for model in HANGING]
        place.wait_until_all_hang()
        probe = stack.enter_context(health_probe(place.server))
        waiting = [
            storm.future(message("late"), timeout=2 * WAIT_S)
            for storm in [connected().unary_unary(LOAD) for _ in range(connections)]
            for _ in range(each)
        ]
        for call in waiting:
            call.add_done_callback(ended)
        with counted:
            assert counted.wait_for(lambda: answers.total() >= refused, WAIT_S), answers
        assert answers == {full: refused}
        assert load.future(message("other"), timeout=WAIT_S).exception(WAIT_S).details() == full
        with client_of(place.server) as client:
            check_simple(client.infer("simple", simple_inputs(), client_timeout=WAIT_S))
            client.unload_model("late")
            for call in waiting:
                call.cancel()
            last = load.future(message("other"), timeout=2 * WAIT_S)
            while is_refused(own, last):
                assert last.details() == full
                last = load.future(message("other"), timeout=2 * WAIT_S)
            place.go_on()
            for call in (last, *hanging):
                call.result(WAIT_S)
    assert not place.has_begun("late")
    assert probe.worst_cpu_s < MOST_S


def test_a_load_leaves_the_queue_with_its_connection(place: Place) -> None:
    load = "/v2/repository/models/{}/load"
    with ExitStack() as stack, closing(RawHttp(place.server.http_address)) as last:
        for model in HANGING:
            connection = stack.enter_context(closing(RawHttp(place.server.http_address)))
            connection.send(request("POST", load.format(model)))
        place.wait_until_all_hang()
        process = psutil.Process(place.server.process.pid)
        files = process.num_fds()
        with ExitStack() as others:
            for _ in range(10):
                late = others.enter_context(closing(RawHttp(place.server.http_address)))
                late.send(request("POST", load.format("late")))
            eventually(lambda: process.num_fds() == files + 10, "the server has the connections")
        eventually(lambda: process.num_fds() == files, "the server has noticed that their clients are gone")
        last.send(request("POST", load.format("other")))
        place.go_on()
        response = last.response()
        assert response is not None and response.status == 200
    assert not place.has_begun("late")
