"""Gauges by which gateways choose a server: of its queue, and of engines with gauges of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.llm_models import running, write_words
from tests.support.metrics import scrape
from tests.support.raw_http import raw_http, request
from tests.support.servers import LocalServer, client_of, eventually, serving, write_model

WAITING, RUNNING = "conch_llm_waiting_requests", "conch_llm_running_requests"
KV_USAGE = "conch_llm_kv_cache_usage_ratio"
INSTANCES = 4

_TEXT = """
    backend: "python"
    input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
"""
_VECTORS = """
    backend: "python"
    input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
"""
_ENGINE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.kept = []
        for name, values in {
            "vllm:num_requests_waiting": (5, 1),
            "vllm:num_requests_running": (3, 4),
            "vllm:kv_cache_usage_perc": (0.25, 0.5),
        }.items():
            family = pb_utils.MetricFamily(name=name, description="-", kind=pb_utils.MetricFamily.GAUGE)
            for engine, value in enumerate(values):
                metric = family.Metric(labels={"model": args["model_name"], "engine": str(engine)})
                metric.set(value)
                self.kept.append((family, metric))

    def execute(self, requests):
        raise NotImplementedError
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's repository."""
    directory = tmp_path_factory.mktemp("models")
    write_words(directory)
    write_model(directory, "engine", _TEXT, {"model.py": _ENGINE})
    write_model(directory, "vectors", _VECTORS, {"model.py": _ENGINE})
    return directory


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[LocalServer]:
    """A server with the text model, an engine, and a model that has an engine's gauges and no text."""
    with serving(models) as running:
        with client_of(running) as client:
            assert client.is_server_ready()
        yield running


def gauges(server: LocalServer, name: str) -> dict[str, float]:
    """Values of a gauge by model."""
    found = scrape(server.metrics_url).items()
    return {dict(labels)["model"]: value for (family, labels), value in found if family == name}


def test_requests_are_counted_in_the_queue_and_in_the_model(server: LocalServer, models: Path) -> None:
    body = json.dumps({"model": "words", "prompt": "endless", "stream": True}).encode()
    with ExitStack() as open_connections:
        for _ in range(INSTANCES + 2):
            connection = open_connections.enter_context(raw_http(server.http_address))
            connection.send(request("POST", "/v1/completions", body))
        eventually(lambda: running(models) == INSTANCES, "all instances answer")
        eventually(lambda: gauges(server, WAITING)["words"] == 2, "the others wait")
        eventually(lambda: gauges(server, RUNNING)["words"] == INSTANCES, "they run")
    eventually(lambda: gauges(server, WAITING)["words"] + gauges(server, RUNNING)["words"] == 0, "all end")


def test_an_engine_s_own_gauges_count(server: LocalServer) -> None:
    assert gauges(server, WAITING)["engine"] == 6
    assert gauges(server, RUNNING)["engine"] == 7
    assert gauges(server, KV_USAGE) == {"engine": 0.5}, "of the fullest; and of models with text only"
    assert gauges(server, RUNNING).keys() == gauges(server, WAITING).keys() == {"engine", "words"}
