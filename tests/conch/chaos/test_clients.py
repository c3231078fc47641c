"""Clients that vanish, change their minds, do not read, or come in crowds."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from tests.support.calls import FLOOD, FLOOD_CONFIG, INFER, STREAM, blocked, counts, probe_request
from tests.support.names import made_here
from tests.support.servers import (
    ROOT,
    WAIT_S,
    RawClient,
    ServerProcess,
    check_simple,
    client_of,
    eventually,
    probe,
    serving_process,
    simple_inputs,
    simple_request,
    started,
    write_model,
)
from tritonclient.grpc import service_pb2

VANISHING = """
import sys
sys.path.insert(0, {root!r})
from tests.support.servers import RawClient
from tests.support.calls import INFER, STREAM, probe_request
request = probe_request(started={started!r}, until_cancelled={noticed!r})
raw = RawClient({address!r})
if {stream}:
    call = raw.channel.stream_stream(STREAM)(iter([request]), timeout=60)
    next(call)
else:
    raw.channel.unary_unary(INFER)(request, timeout=60)
"""


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_are_killed(server: ServerProcess, tmp_path: Path, stream: bool) -> None:
    begun, noticed = tmp_path / "started", tmp_path / "noticed"
    code = VANISHING.format(
        root=str(ROOT), started=str(begun), noticed=str(noticed), address=server.address, stream=stream
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        eventually(begun.exists, "the model runs")
    finally:
        process.kill()
        process.wait(WAIT_S)
    eventually(noticed.exists, "the model sees that its client is gone")
    with client_of(server) as client:
        probe(client)
        check_simple(client.infer("simple", simple_inputs()))


def test_cancelled_requests_leave_the_queue(server: ServerProcess, tmp_path: Path) -> None:
    with client_of(server) as client, closing(RawClient(server.address)) as raw:
        before = counts(client)
        with blocked(server, tmp_path):
            call = raw.channel.unary_unary(INFER)
            queued = [call.future(probe_request(), timeout=WAIT_S) for _ in range(200)]
            # On the same connection, so the server has read the requests before this one.
            assert raw("ServerLive", service_pb2.ServerLiveRequest()).live
            for future in queued[::2]:
                future.cancel()
            # While the model is still busy: none of them waits for it.
            eventually(lambda: counts(client)[1] == before[1] + 100, "they are counted as failed")
            assert counts(client)[0] == before[0]
        for future in queued[1::2]:
            assert future.result()
        assert counts(client) == (before[0] + 101, before[1] + 100)


def test_cancelled_requests_that_the_model_answers_are_freed(server: ServerProcess, tmp_path: Path) -> None:
    """Their answers, too late, are not kept by a call that has ended."""
    memory = psutil.Process(server.process.pid).memory_info
    before = 0
    with closing(RawClient(server.address)) as raw:
        for number in range(30):
            begun, noticed = tmp_path / f"started{number}", tmp_path / f"noticed{number}"
            message = probe_request(started=str(begun), until_cancelled=str(noticed))
            request = service_pb2.ModelInferRequest.FromString(message)
            request.inputs[0].shape[:] = [1, 1 << 20]
            request.raw_input_contents[:] = [bytes(4 << 20)]
            call = raw.channel.unary_unary(INFER).future(request.SerializeToString(), timeout=WAIT_S)
            eventually(begun.exists, "the model runs")
            call.cancel()
            eventually(noticed.exists, "the model sees that nobody waits")
            if number == 5:
                before = memory().rss
        assert raw.infer(probe_request())
        eventually(lambda: memory().rss < before + 40 * 2**20, "they are freed")


def test_a_cancelled_stream_leaves_the_queue(server: ServerProcess, tmp_path: Path) -> None:
    with client_of(server) as client, closing(RawClient(server.address)) as raw:
        before = counts(client)
        with blocked(server, tmp_path):
            call = raw.channel.stream_stream(STREAM)(iter([probe_request()] * 50), timeout=WAIT_S)
            call.initial_metadata()
            eventually(lambda: raw("ServerLive", service_pb2.ServerLiveRequest()).live, "the server lives")
            call.cancel()
            # How many of the 50 had been read by then is up to the network.
            eventually(lambda: counts(client)[0] == before[0], "nothing of it ran")
        probe(client)
        success, failed = counts(client)
        assert success == before[0] + 2
        assert failed <= before[1] + 50


def test_a_slow_reader_holds_up_nobody(repository: Path, tmp_path: Path) -> None:
    write_model(tmp_path, "flood", FLOOD_CONFIG, {"model.py": FLOOD})
    request = service_pb2.ModelInferRequest(
        model_name="flood", raw_input_contents=[np.array([500], np.int32).tobytes()]
    )
    request.inputs.add(name="COUNT", datatype="INT32", shape=[1])
    with serving_process(repository, tmp_path) as server, client_of(server) as client:
        with closing(RawClient(server.address)) as raw:
            method = raw.channel.stream_stream(
                STREAM, response_deserializer=service_pb2.ModelStreamInferResponse.FromString
            )
            call = method(iter([request.SerializeToString()]), timeout=WAIT_S)
            first = next(call)  # and then it does not read on
            for start in range(50):
                check_simple(client.infer("simple", simple_inputs(start)), start)
            numbers = [m.infer_response.raw_output_contents[0][0] for m in (first, *call)]
        assert numbers == [number % 251 for number in range(500)]


def test_a_sender_that_does_not_read_is_made_to_wait(server: ServerProcess) -> None:
    """The server takes in no more of its requests than it can answer, and answers all once it reads."""
    total, floats = 500, 1 << 18
    sent = 0

    def requests() -> Iterator[bytes]:
        nonlocal sent
        for number in range(total):
            array = np.full(floats, number, np.float32)
            request = service_pb2.ModelInferRequest(model_name="probe", raw_input_contents=[array.tobytes()])
            request.inputs.add(name="IN", datatype="FP32", shape=[1, floats])
            request.id = str(number)
            yield request.SerializeToString()
            sent += 1

    memory = psutil.Process(server.process.pid).memory_info
    with closing(RawClient(server.address)) as raw, client_of(server) as client:
        probe(client)
        before = memory().rss
        call = raw.channel.stream_stream(STREAM)(requests(), timeout=2 * WAIT_S)
        call.initial_metadata()
        eventually(lambda: sent > 10, "it sends")
        most, last, quiet = 0, sent, 0
        while quiet < 20:  # a second without any progress
            threading.Event().wait(0.05)
            most = max(most, memory().rss)
            quiet = quiet + 1 if sent == last else 0
            last = sent
        assert sent < total, "the server has taken in everything"
        assert most - before < 400 * 2**20
        probe(client)  # no other client has to wait
        for number, message in enumerate(call):
            answer = service_pb2.ModelStreamInferResponse.FromString(message)
            assert answer.error_message == ""
            assert answer.infer_response.id == str(number)
            assert (
                answer.infer_response.raw_output_contents[0] == np.full(floats, number, np.float32).tobytes()
            )
        assert number == total - 1 and sent == total


def test_a_reader_that_gives_up(repository: Path, tmp_path: Path) -> None:
    write_model(tmp_path, "flood", FLOOD_CONFIG, {"model.py": FLOOD})
    request = service_pb2.ModelInferRequest(
        model_name="flood", raw_input_contents=[np.array([300], np.int32).tobytes()]
    )
    request.inputs.add(name="COUNT", datatype="INT32", shape=[1])
    with serving_process(repository, tmp_path) as server, client_of(server) as client:
        process = psutil.Process(server.process.pid)

        def give_up() -> None:
            with closing(RawClient(server.address)) as raw:
                call = raw.channel.stream_stream(STREAM)(iter([request.SerializeToString()]), timeout=WAIT_S)
                next(call)
                call.cancel()
            check_simple(client.infer("simple", simple_inputs()))

        give_up()  # starts what serves all streams
        threads = process.num_threads()
        for _ in range(5):
            give_up()
        eventually(lambda: process.num_threads() <= threads + 4, "the threads of those streams end")


def test_two_hundred_clients(server: ServerProcess) -> None:
    outcomes: Counter[str] = Counter()
    barrier = threading.Barrier(200)

    def ask(number: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with closing(triton.InferenceServerClient(server.address, channel_args=options)) as client:
            barrier.wait(WAIT_S)
            try:
                for round_number in range(5):
                    start = number * 10 + round_number
                    check_simple(client.infer("simple", simple_inputs(start), client_timeout=WAIT_S), start)
                    outcomes["good"] += 1
            except Exception as error:
                outcomes[f"{type(error).__name__}: {error}"] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert outcomes == {"good": 1000}


def test_connections_come_and_go(server: ServerProcess) -> None:
    with client_of(server) as client:
        process = psutil.Process(server.process.pid)
        check_simple(client.infer("simple", simple_inputs()))
        before = process.num_fds()
        for _ in range(50):
            with client_of(server) as passing:
                check_simple(passing.infer("simple", simple_inputs()))
        eventually(lambda: process.num_fds() <= before + 2, "the connections are closed")


def test_garbage_on_the_port(server: ServerProcess) -> None:
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        random.Random(3).randbytes(4096),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 99,
    ):
        with closing(socket.create_connection(("127.0.0.1", server.port))) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(WAIT_S)
            with suppress(ConnectionError):
                while connection.recv(4096):
                    pass
        with client_of(server) as client:
            check_simple(client.infer("simple", simple_inputs()))


def test_a_killed_server_leaves_nothing(repository: Path, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    running = tmp_path / "started"
    with started(f"--model-repository={repository}", "--grpc-port=0") as server:
        server.wait_ready()
        children = psutil.Process(server.process.pid).children(recursive=True)
        with closing(RawClient(server.address)) as raw:
            future = raw.channel.unary_unary(INFER).future(
                probe_request(started=str(running), wait_for=str(tmp_path / "never")), timeout=WAIT_S
            )
            eventually(running.exists, "the model runs")
            server.signal(signal.SIGKILL)
            assert server.wait() == -signal.SIGKILL
            assert future.exception(WAIT_S).code() == grpc.StatusCode.UNAVAILABLE
        eventually(lambda: not any(child.is_running() for child in children), "no child lives on")
    assert not made_here(set(os.listdir("/dev/shm")) - before)
    # Its port can be had again at once.
    with started(f"--model-repository={repository}", "--grpc-port=0") as again:
        again.wait_ready()
        with closing(RawClient(again.address)) as raw:
            assert raw.infer(simple_request()).model_name == "simple"
        assert again.stop() == 0
