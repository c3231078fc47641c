"""Models that come, go and change while requests are coming in: no request fails for it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.servers import (
    NUMBER_CONFIG,
    WAIT_S,
    RawClient,
    ServerProcess,
    check_simple,
    client_of,
    eventually,
    probe,
    probe_inputs,
    serving_process,
    simple_inputs,
    write_model,
    write_probe,
)
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

SLOW = """
import os
import time
from pathlib import Path


class TritonPythonModel:
    def initialize(self, args):
        Path({running!r} + args["model_name"]).touch()
        while not Path({go!r}).exists():
            time.sleep(0.01)

    def execute(self, requests):
        return []
"""


class Traffic:
    """Clients that send requests, one after the other, until the test stops them."""

    def __init__(self, server: ServerProcess, model: str) -> None:
        self._server = server
        self._model = model
        self._stop = threading.Event()
        self.completed = 0
        self.errors: list[BaseException] = []
        self.seen: set[str] = set()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(3)]

    def _run(self, number: int) -> None:
        with client_of(self._server) as client:
            try:
                while not self._stop.is_set():
                    if self._model == "simple":
                        check_simple(client.infer("simple", simple_inputs(number)), number)
                    else:
                        said = probe(client, float(number), self._model)
                        self.seen.add(said["parameters"].get("x", ""))
                    self.completed += 1
            except BaseException as error:
                self.errors.append(error)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def goes_on(self) -> None:
        """Waits until some more requests have been answered."""
        target = self.completed + 20
        eventually(lambda: self.completed >= target or self.errors, "traffic goes on")


@contextmanager
def traffic(server: ServerProcess, model: str) -> Iterator[Traffic]:
    """Traffic during the block; none of it may fail."""
    load = Traffic(server, model)
    load.start()
    try:
        load.goes_on()
        yield load
        load.goes_on()
    finally:
        load.stop()
    assert load.errors == []


def test_load_and_unload_of_another_model(server: ServerProcess) -> None:
    with client_of(server) as client, traffic(server, "simple") as load:
        for _ in range(10):
            client.unload_model("probe")
            with pytest.raises(InferenceServerException) as raised:
                client.infer("probe", probe_inputs())
            assert raised.value.status() == "StatusCode.NOT_FOUND"
            client.load_model("probe")
            probe(client)
            load.goes_on()


@pytest.mark.parametrize("model", ["probe", "simple"])
def test_reload_under_traffic(server: ServerProcess, repository: Path, model: str) -> None:
    config = repository / model / "config.pbtxt"
    original = config.read_text()
    try:
        with client_of(server) as client, traffic(server, model) as load:
            for number in range(10):
                size = 8 + number % 2
                config.write_text(original.replace("max_batch_size: 8", f"max_batch_size: {size}"))
                client.load_model(model)
                assert client.get_model_config(model).config.max_batch_size == size
                load.goes_on()
    finally:
        config.write_text(original)


def test_reload_that_fails_under_traffic(server: ServerProcess, repository: Path) -> None:
    code = repository / "probe" / "1" / "model.py"
    original = code.read_text()
    try:
        with client_of(server) as client, traffic(server, "probe") as load:
            for number in range(5):
                code.write_text(f"raise OSError('half written {number}')\n")
                with pytest.raises(InferenceServerException, match="half written"):
                    client.load_model("probe")
                load.goes_on()
    finally:
        code.write_text(original)


def test_a_config_that_breaks_under_traffic(server: ServerProcess, repository: Path) -> None:
    config = repository / "probe" / "config.pbtxt"
    original = config.read_text()
    try:
        with client_of(server) as client, traffic(server, "probe") as load:
            for broken in ("max_batch: 1", original + "input [ {", original + "max_batch_size: -1"):
                config.write_text(broken)
                with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
                    client.load_model("probe")
                load.goes_on()
    finally:
        config.write_text(original)


def test_versions_that_come_and_go_while_another_one_serves(tmp_path: Path, grpc_is_warm: None) -> None:
    """The one that stays is not loaded again: it goes on counting."""
    directory = write_probe(tmp_path, extra="dynamic_batching { } version_policy { all { } }")
    second = directory / "2"
    with (
        serving_process(tmp_path, flags=["--model-control-mode=explicit", "--load-model=*"]) as server,
        client_of(server) as client,
    ):
        for turn in range(3):
            shutil.copytree(directory / "1", second)
            client.load_model("probe")
            assert probe(client, model_version="2") is not None
            assert probe(client, model_version="1") is not None
            shutil.rmtree(second)
            client.load_model("probe")
            assert not client.is_model_ready("probe", "2")
            (statistics,) = client.get_inference_statistics("probe").model_stats
            assert statistics.inference_count == turn + 1


def test_many_reloads_leak_nothing(tmp_path: Path) -> None:
    code = write_probe(tmp_path) / "1" / "model.py"
    original = code.read_text()
    with serving_process(tmp_path, flags=["--model-control-mode=explicit", "--load-model=probe"]) as server:
        process = psutil.Process(server.process.pid)

        def reload(number: int, client: Any) -> None:
            code.write_text(f"{original}\n# {number}\n")
            client.load_model("probe")
            probe(client)

        with client_of(server) as client:
            for number in range(5):
                reload(number, client)
            threads, files, memory = process.num_threads(), process.num_fds(), process.memory_info().rss
            for number in range(5, 35):
                reload(number, client)
            eventually(lambda: process.num_threads() <= threads + 1, "threads of old versions end")
            eventually(lambda: process.num_fds() <= files + 1, "files of old versions are closed")
            eventually(lambda: process.memory_info().rss < memory + 20 * 1024**2, "memory is freed")


def test_concurrent_loads_and_unloads(server: ServerProcess, repository: Path) -> None:
    """Whatever the order, each call is answered and the model ends as it was asked for last.

    Loads that an unload has overtaken say so; nothing else fails.
    """
    failures: list[BaseException] = []

    def churn(number: int) -> None:
        with client_of(server) as client:
            for turn in range(10):
                try:
                    if (number + turn) % 2:
                        client.load_model("probe")
                    else:
                        client.unload_model("probe")
                except BaseException as error:
                    if "current load operation is out-dated" not in str(error):
                        failures.append(error)

    with traffic(server, "simple"):
        threads = [threading.Thread(target=churn, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        with client_of(server) as client:
            client.load_model("probe")
            probe(client)
    assert failures == []


def test_slow_loads_hold_up_nothing_else(tmp_path: Path) -> None:
    """More of them than any pool of threads that answers other calls may have."""
    repository = tmp_path / "models"
    write_probe(repository)
    go = tmp_path / "go"
    code = SLOW.format(running=str(tmp_path / "loading-"), go=str(go))
    names = [f"slow{number}" for number in range(20)]
    for name in names:
        write_model(repository, name, NUMBER_CONFIG, {"model.py": code})
    flags = ["--model-control-mode=explicit", "--load-model=probe", "--model-load-thread-count=3"]
    with (
        serving_process(repository, flags=flags) as server,
        client_of(server) as client,
        closing(RawClient(server.address)) as raw,
    ):
        load = raw.channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")
        messages = [service_pb2.RepositoryModelLoadRequest(model_name=name) for name in names]
        try:
            loading = [load.future(message.SerializeToString(), timeout=2 * WAIT_S) for message in messages]
            eventually(lambda: len(list(tmp_path.glob("loading-*"))) == 3, "as many load as may")
            # On the same connection, so the server has read the loads before this one.
            assert raw("ServerLive", service_pb2.ServerLiveRequest()).live
            for _ in range(5):
                index = client.get_model_repository_index(client_timeout=WAIT_S).models
                assert len(index) == 21
                assert sum(line.state == "LOADING" for line in index) == 3
                probe(client)
            client.unload_model("probe", client_timeout=WAIT_S)
            assert not client.is_model_ready("probe", client_timeout=WAIT_S)
        finally:
            go.touch()
        for future in loading:
            assert future.result() == b""
        assert all(client.is_model_ready(name) for name in names)
