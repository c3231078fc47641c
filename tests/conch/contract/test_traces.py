"""Traces of real requests, over both protocols: which there are, and how they belong together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tests.support.servers import WAIT_S, LocalServer, client_of, eventually, serving
from tests.support.traced_models import records, write_models
from tests.support.tracing import triton_summary
from tritonclient.utils import InferenceServerException


class Traced:
    """A server whose requests are all traced, and its trace file.

    Attributes:
        server: The server.
        file: The file.
    """

    def __init__(self, server: LocalServer, file: Path) -> None:
        self.server = server
        self.file = file

    def ask(self, protocol: str, model: str, number: int = 1, request_id: str = "", **options: Any) -> Any:
        module: Any = triton_http if protocol == "http" else triton
        given = module.InferInput("IN", [1], "INT32")
        given.set_data_from_numpy(np.array([number], np.int32))
        if protocol == "http":
            with triton_http.InferenceServerClient(self.server.http_address) as client:
                return client.infer(model, [given], request_id=request_id, **options)
        with client_of(self.server) as client:
            return client.infer(model, [given], request_id=request_id, **options)


@contextmanager
def tracing(root: Path, *more: str, flags: tuple[str, ...] = ()) -> Iterator[Traced]:
    file = root / "trace.json"
    configs = ("level=TIMESTAMPS", "rate=1", f"triton,file={file}", *more)
    repository = write_models(root / "models")
    with serving(repository, flags=[*(f"--trace-config={text}" for text in configs), *flags]) as server:
        yield Traced(server, file)


def headers(file: Path) -> dict[int, dict[str, Any]]:
    return {record["id"]: record for record in records(file) if "model_name" in record}


def names(file: Path) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for record in records(file):
        for stamp in record.get("timestamps", ()):
            found.setdefault(record["id"], []).append(stamp["name"])
    return found


CORE = ["REQUEST_START", "QUEUE_START"]
COMPUTE = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
RESPONDED = "INFER_RESPONSE_COMPLETE"
FRONT = {
    "http": ["HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END", RESPONDED],
    "grpc": ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END", RESPONDED],
}
END = ["REQUEST_END"]


@pytest.mark.parametrize("placement", ["in_process", "worker"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_tree_has_each_model_that_took_part(tmp_path: Path, protocol: str, placement: str) -> None:
    with tracing(tmp_path, flags=(f"--backend-config=python,placement={placement}",)) as traced:
        traced.ask(protocol, "leaf", request_id="a")
        traced.ask(protocol, "caller", request_id="b")
    by_id = headers(traced.file)
    children = {number: header.get("parent_id") for number, header in by_id.items()}
    models = {number: header["model_name"] for number, header in by_id.items()}
    pairs = [(models[number], models.get(up or 0)) for number, up in children.items()]
    steps = [("leaf", "ensemble")] * 2
    assert pairs == [("leaf", None), ("caller", None), ("ensemble", "caller"), *steps]
    assert [header.get("request_id") for header in by_id.values()][:2] == ["a", "b"]
    for number, found in names(traced.file).items():
        compute = [] if by_id[number]["model_name"] == "ensemble" else COMPUTE
        front = [] if children[number] else FRONT[protocol]
        assert sorted(found) == sorted(CORE + compute + END + front), by_id[number]
    spans = triton_summary(records(traced.file), protocol.upper())
    assert len(spans["leaf", 1]["request"]) == 3


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_requests_that_end_early(tmp_path: Path, protocol: str) -> None:
    """Refused ones, failed ones and those that a cache answers."""
    with tracing(tmp_path, flags=("--cache-config=local,size=1048576",)) as traced:
        for model, number in (("leaf", -1), ("gone", 1)):
            with pytest.raises(InferenceServerException):
                traced.ask(protocol, model, number)
        with pytest.raises(InferenceServerException):
            traced.ask(protocol, "leaf", model_version="7")
        for _ in range(2):
            traced.ask(protocol, "cached", 5)
    by_id, found = headers(traced.file), names(traced.file)
    computed = [number for number in by_id if "COMPUTE_START" in found[number]]
    assert [by_id[number]["model_name"] for number in computed] == ["leaf", "cached"]
    assert len({number for number, header in by_id.items() if header["model_name"] == "cached"}) == 2
    assert all({"REQUEST_START", "REQUEST_END"} <= set(found[number]) for number in computed)


def test_streams_have_a_stamp_for_each_response(tmp_path: Path) -> None:
    with tracing(tmp_path) as traced, client_of(traced.server) as client:
        answers: SimpleQueue[Any] = SimpleQueue()
        client.start_stream(lambda result, error: answers.put(error or result))
        for number in (3, 0):
            given = triton.InferInput("IN", [1], "INT32")
            given.set_data_from_numpy(np.array([number], np.int32))
            client.async_stream_infer("many", [given], enable_empty_final_response=True)
        for _ in range(5):
            assert not isinstance(answers.get(timeout=WAIT_S), Exception)
        client.stop_stream()
    found = list(names(traced.file).values())
    assert [each.count("GRPC_SEND_START") for each in found] == [4, 1]
    for each in found:
        assert each.count("GRPC_SEND_START") == each.count("GRPC_SEND_END")
        assert each.count(RESPONDED) == each.count("COMPUTE_END") == 1


def test_a_cancelled_request_is_traced_once(tmp_path: Path) -> None:
    with tracing(tmp_path) as traced, client_of(traced.server) as client:
        given = triton.InferInput("IN", [1], "INT32")
        given.set_data_from_numpy(np.array([99], np.int32))
        done = threading.Event()
        runs = tmp_path / "runs"
        call = client.async_infer("leaf", [given], lambda result, error: done.set(), request_id=str(runs))
        eventually(runs.exists, "it runs")
        call.cancel()
        assert done.wait(WAIT_S)
    (found,) = names(traced.file).values()
    assert {"GRPC_WAITREAD_END", "COMPUTE_START", "REQUEST_END"} <= set(found)


def test_what_is_sampled(tmp_path: Path) -> None:
    """Settings change at run time; counts are exact whatever comes at once."""
    with tracing(tmp_path, "rate=4") as traced, client_of(traced.server) as client:
        for _ in range(8):
            traced.ask("grpc", "leaf")
        client.update_trace_settings("leaf", {"trace_rate": "1", "trace_count": "5"})
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: traced.ask("grpc", "leaf", number), range(40)))
        assert client.get_trace_settings("leaf", as_json=True)["settings"]["trace_count"]["value"] == ["0"]
        client.update_trace_settings("", {"trace_level": ["OFF"]})
        traced.ask("grpc", "cached")
    assert len(headers(traced.file)) == 2
    assert len(headers(Path(f"{traced.file}.0"))) == 5


def test_tensors(tmp_path: Path) -> None:
    with tracing(tmp_path, "level=TENSORS") as traced:
        traced.ask("http", "ensemble", 3)
    found = [
        (record["id"], record["activity"], record["tensor"]["data"])
        for record in records(traced.file)
        if "tensor" in record
    ]
    queued, made = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"
    assert sorted(found) == [
        (1, made, "5"), (1, queued, "3"), (2, made, "4"), (2, queued, "3"), (3, made, "5"), (3, queued, "4")
    ]  # fmt: skip


def test_slow_and_failed_requests_are_kept_after_the_fact(tmp_path: Path) -> None:
    with tracing(tmp_path, "rate=1000", "slow=2s", "failed=true") as traced:
        traced.ask("http", "leaf")
        with pytest.raises(InferenceServerException):
            traced.ask("http", "leaf", -1)
        with pytest.raises(InferenceServerException):
            traced.ask("grpc", "leaf", model_version="7")
    assert [header["model_name"] for header in headers(traced.file).values()] == ["leaf", "leaf"]


def test_what_a_full_disk_does_not_take_is_counted(tmp_path: Path) -> None:
    configs = ("level=TIMESTAMPS", "rate=1", "triton,file=/dev/full")
    repository = write_models(tmp_path / "models")
    with serving(repository, flags=[f"--trace-config={text}" for text in configs]) as server:
        traced = Traced(server, tmp_path)
        for _ in range(3):
            traced.ask("http", "leaf")
        lost = 'conch_trace_dropped_total{reason="disk"} 3'
        eventually(lambda: lost in httpx.get(server.metrics_url).text, "all of them are counted")
