"""A server with front processes: what they share, what ends with one of them, and what does not."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import httpx
import numpy as np
import numpy.typing as npt
import psutil
import pytest
import tritonclient.grpc as triton
from tests.support.draining import SERVING, Load
from tests.support.fronts import front_metrics
from tests.support.hazards import fronts_of, suspend
from tests.support.http2_peer import ErrorCode, FrameType, Http2Peer, call, ping
from tests.support.loading import load as load_model
from tests.support.metrics import scrape
from tests.support.parts import part_of, parts_request, write_parts
from tests.support.servers import (
    IN_PROCESS,
    WAIT_S,
    RawClient,
    ServerProcess,
    client_of,
    eventually,
    probe_inputs,
    serving_process,
    write_probe,
)
from tests.support.steered import Steering
from tests.support.traced_models import records
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.slow
Values = npt.NDArray[np.float32]
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_HEALTH = "/grpc.health.v1.Health/Check"
_SIZES = (4, 20_000)
"""Elements of tensors that travel in a message, and in a block."""
_WAITING = 64 << 20
"""Bytes of a stream that wait for its client."""


def _infer(client: triton.InferenceServerClient, values: Values, timeout_s: float = WAIT_S) -> Values:
    given = triton.InferInput("IN", [1, len(values)], "FP32")
    given.set_data_from_numpy(values[None])
    answer = client.infer("probe", [given], client_timeout=timeout_s).as_numpy("OUT")
    assert answer is not None
    found: Values = answer[0]
    return found


def _answers(server: ServerProcess, values: Values) -> bool:
    with client_of(server) as client:
        try:
            return np.array_equal(_infer(client, values, timeout_s=2.0), values)
        except InferenceServerException:
            return False


@contextmanager
def _serving(tmp_path: Path, *flags: str) -> Iterator[ServerProcess]:
    write_probe(tmp_path)
    with serving_process(tmp_path, flags=["--front-ends=2", *flags]) as server:
        yield server


@pytest.mark.parametrize("placement", ["in_process", "worker"])
def test_each_client_gets_its_own_bytes(tmp_path: Path, placement: str) -> None:
    """Also beside clients whose tensors have other sizes than their shapes: those are refused, alone."""
    wrong = Counter[str]()

    def ask(server: ServerProcess, number: int) -> None:
        random = np.random.default_rng(number)
        with client_of(server) as client:
            for _ in range(100):
                values = random.random(random.choice(_SIZES), np.float32)
                if not np.array_equal(_infer(client, values), values):
                    wrong["bytes of another"] += 1

    def ask_badly(server: ServerProcess, extra: int) -> None:
        request = service_pb2.ModelInferRequest(model_name="probe", raw_input_contents=[bytes(16 + extra)])
        request.inputs.add(name="IN", datatype="FP32", shape=[1, 4])
        with closing(RawClient(server.address)) as client:
            for _ in range(100):
                try:
                    client.infer(request)
                    wrong["accepted"] += 1
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                        wrong[error.details()] += 1

    with _serving(tmp_path, f"--backend-config=python,placement={placement}") as server:
        threads = [threading.Thread(target=ask, args=(server, number)) for number in range(3)]
        threads += [threading.Thread(target=ask_badly, args=(server, extra)) for extra in (4, -4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(count > 0 for count in front_metrics(server, "conch_front_cpu_seconds_total"))
    assert not wrong


def _kill_one(server: ServerProcess, values: Values) -> None:
    """Kills one of two fronts that have a client each: the other client notices nothing."""
    eventually(lambda: front_metrics(server, "conch_front_up") == [1, 1], "both serve")
    with client_of(server) as first, client_of(server) as second:
        for client in (first, second):
            assert np.array_equal(_infer(client, values), values)
        eventually(lambda: front_metrics(server, "conch_front_connections") == [1, 1], "each has a client")
        restarts = sum(front_metrics(server, "conch_front_restarts_total"))
        fronts_of(server)[0].kill()
        failed = 0
        for client in (first, second):
            try:
                assert np.array_equal(_infer(client, values), values)
            except InferenceServerException:
                failed += 1
        assert failed <= 1
        eventually(
            lambda: sum(front_metrics(server, "conch_front_restarts_total")) > restarts, "it is noticed"
        )
        for client in (first, second):
            assert np.array_equal(_infer(client, values), values)
    eventually(lambda: front_metrics(server, "conch_front_connections") == [0, 0], "their clients have left")


@pytest.mark.parametrize("placement", ["in_process", "worker"])
def test_a_front_that_dies_takes_its_connections_only(tmp_path: Path, placement: str) -> None:
    values = np.arange(_SIZES[1], dtype=np.float32)
    with _serving(tmp_path, f"--backend-config=python,placement={placement}") as server:
        core = psutil.Process(server.process.pid)
        _kill_one(server, values)
        descriptors = core.num_fds()
        for _ in range(4):
            _kill_one(server, values)
        # How many blocks are mapped varies by a few; each has two descriptors, as has a front's link.
        eventually(lambda: core.num_fds() < descriptors + 8, "its descriptors are closed")
        assert sum(front_metrics(server, "conch_front_restarts_total")) == 5
        assert front_metrics(server, "conch_pending_requests") == [0]


def test_connections_that_a_lost_front_has_not_taken_go_to_another(tmp_path: Path) -> None:
    with (
        _serving(tmp_path, IN_PROCESS) as server,
        closing(RawClient(server.address)) as client,
        closing(http.client.HTTPConnection(server.http_address, timeout=WAIT_S)) as over_http,
    ):
        for front in fronts_of(server):
            suspend(front)
        live = client.channel.unary_unary(_HEALTH).future(b"", timeout=WAIT_S)
        over_http.request("GET", "/v2/models/probe")
        eventually(lambda: sum(front_metrics(server, "conch_front_connections")) == 2, "both are given")
        for front in fronts_of(server):
            front.kill()
        assert live.result() == SERVING
        assert over_http.getresponse().status == http.HTTPStatus.OK


def _sent(client: triton.InferenceServerClient) -> int:
    """Number of responses of a request that have been sent."""
    return len(client.get_inference_statistics("parts").model_stats[0].response_stats)


def test_a_front_that_hangs_delays_no_other(tmp_path: Path) -> None:
    """Data queued for it is bounded, here of a stream of 400 MB; all of it comes once the front goes on."""
    count, width = 100, 1 << 20
    least, most = _WAITING // (4 * width), 2 * _WAITING // (4 * width)
    values = np.arange(4, dtype=np.float32)
    write_parts(tmp_path)
    with (
        _serving(tmp_path, IN_PROCESS, "--allow-http=false") as server,
        closing(RawClient(server.address)) as reader,
        client_of(server) as other,
    ):
        parts = map(part_of, reader.stream([parts_request(0, count, width)]))
        assert next(parts) == (0, width)
        connections = front_metrics(server, "conch_front_connections")
        hanging = sorted(fronts_of(server), key=lambda front: front.pid)[connections.index(1)]
        suspend(hanging)
        try:
            eventually(lambda: _sent(other) >= least, "answers wait for it")
            for _ in range(30):
                assert np.array_equal(_infer(other, values), values)
            eventually(lambda: _answers(server, values), "a new client gets another front")
            assert _sent(other) < most
        finally:
            hanging.resume()
        assert list(parts) == [(number, width) for number in range(1, count)]


def test_a_core_that_hangs_is_not_alive_but_loses_nothing(tmp_path: Path) -> None:
    """Its fronts read on: what they have read is counted from then on, and answered later."""
    trace = tmp_path / "trace"
    configs = ("level=TIMESTAMPS", "rate=1", f"triton,file={trace}")
    flags = [IN_PROCESS, *(f"--trace-config={each}" for each in configs)]
    content = service_pb2.ModelInferRequest(model_name="probe", raw_input_contents=[bytes(16)])
    content.inputs.add(name="IN", datatype="FP32", shape=[1, 4])
    (tmp_path / "models").mkdir()
    with _serving(tmp_path / "models", *flags) as server:
        core = psutil.Process(server.process.pid)
        with closing(Http2Peer(server.address)) as peer:
            peer.handshake()
            suspend(core)
            try:
                peer.send(
                    call(1, content.SerializeToString(), _INFER), call(3), call(5, path=_HEALTH), ping()
                )
                received = peer.wait_any()
                while received.kind != FrameType.PING:
                    assert not received.stream, "only the core answers calls"
                    received = peer.wait_any()
            finally:
                resumed_ns = time.monotonic_ns()
                core.resume()
            ended = set[int]()
            while ended != {1, 3, 5}:
                received = peer.wait_any()
                if received.ends:
                    ended.add(received.stream)
    stamps = {each["name"]: each["ns"] for record in records(trace) for each in record.get("timestamps", ())}
    assert stamps["GRPC_WAITREAD_START"] < resumed_ns < stamps["REQUEST_START"]


_OF_THE_MOMENT = ("_us", "ts", "trace_id", "error")
_OF_THE_PROCESS = re.compile("duration|_bytes|cpu|process_|python_|saturation|repository|conch_front_")


def _names_a_bad_client(server: ServerProcess) -> bool:
    """True if the log has the verbose record of a client that breaks HTTP/2, here by a PING of 7 bytes."""
    with closing(Http2Peer(server.address)) as peer:
        peer.handshake()
        peer.send(ping(bytes(7)))
        peer.wait_connection_error(ErrorCode.FRAME_SIZE_ERROR)
    return "was disconnected" in server.errors


def _records(directory: Path, fronts: int) -> tuple[list[str], list[str], dict[str, float]]:
    """Records of a server of requests of all kinds: lines of its log, stamps of its traces, counts."""
    models, access, trace = directory / "models", directory / "access", directory / "trace"
    write_probe(models)
    write_parts(models)
    flags = [IN_PROCESS, f"--front-ends={fronts}", f"--access-log={access}"]
    flags += [f"--trace-config={each}" for each in ("level=TIMESTAMPS", "rate=1", f"triton,file={trace}")]
    refused = (("probe", (9, 4), ""), ("absent", (1, 4), ""), ("probe", (1, 4), "raise"))
    with serving_process(models, flags=flags) as server:
        with client_of(server) as client, closing(RawClient(server.address)) as raw:
            for size in _SIZES:
                _infer(client, np.zeros(size, np.float32))
            outputs = [triton.InferRequestedOutput("OUT", class_count=1)]
            client.infer("probe", probe_inputs(), outputs=outputs, request_id="classes")
            for model, shape, order in refused:
                with pytest.raises(InferenceServerException):
                    client.infer(model, probe_inputs(0, shape), parameters={"do": order})
            with pytest.raises(grpc.RpcError):
                raw.infer(b"\xff\xff")
            assert len(list(raw.stream([parts_request(0, 3, 4)]))) == 3
        eventually(lambda: access.read_text().count("\n") == 8, "each has a line")
        found = scrape(server.metrics_url)
        assert not _names_a_bad_client(server)
        httpx.post(f"http://{server.http_address}/v2/logging", json={"log_verbose_level": 1})
        eventually(lambda: _names_a_bad_client(server), "the new level holds in all processes")
    lines = [json.loads(line) for line in access.read_text().splitlines()]
    for line in lines:
        line["client"] = line["client"].rpartition(":")[0]
    stamps: dict[int, list[str]] = {}
    for record in records(trace):
        stamps.setdefault(record["id"], []).extend(each["name"] for each in record.get("timestamps", ()))
    return (
        sorted(str({k: v for k, v in line.items() if not k.endswith(_OF_THE_MOMENT)}) for line in lines),
        sorted(map(str, stamps.values())),
        {str(key): value for key, value in found.items() if not _OF_THE_PROCESS.search(str(key))},
    )


def test_logs_traces_and_metrics_are_those_of_one_process(tmp_path: Path) -> None:
    alone, with_fronts = (_records(tmp_path / f"{fronts}", fronts) for fronts in (0, 2))
    assert with_fronts == alone
    assert len(alone[0]) == len(alone[1]) == 8
    assert len(alone[2]) > 50


def test_swaps_under_load_fail_nothing(tmp_path: Path) -> None:
    steering = Steering(tmp_path)
    steering.write(tmp_path / "models", "m", 1)
    flags = ["--front-ends=4", "--model-control-mode=explicit", "--load-model=m"]
    with (
        serving_process(tmp_path / "models", flags=flags) as server,
        closing(RawClient(server.address)) as operator,
    ):
        loads = [Load(server.address, "m", polite=False) for _ in range(3)]
        eventually(lambda: all(front_metrics(server, "conch_front_connections")), "all fronts have clients")
        for version in range(2, 12):
            completed = [load.completed for load in loads]
            steering.write(tmp_path / "models", "m", version)
            assert load_model(operator, "m") == {}
            for load, before in zip(loads, completed, strict=True):
                eventually(lambda load=load, before=before: load.completed > before + 20, "they go on")  # type: ignore[misc]
        for load in loads:
            load.enough.set()
            load.join()
    assert [failure for load in loads for failure in load.failures] == []
    assert steering.ran() == sum(load.completed for load in loads)


def test_fronts_end_with_their_core(tmp_path: Path) -> None:
    with _serving(tmp_path, IN_PROCESS) as server:
        fronts = fronts_of(server)
        assert len(fronts) == 2
        server.kill()
        gone, alive = psutil.wait_procs(fronts, WAIT_S)
        assert len(gone) == 2
        assert not alive
