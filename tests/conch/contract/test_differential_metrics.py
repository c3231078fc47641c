"""The same requests to Triton and to conch: the same series with the same counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.metrics import Samples, get, samples
from tests.support.peers import NEEDS_TRITON, TRITON, triton_serving
from tests.support.servers import RawClient, eventually, free_port, serving, write_model
from tritonclient.grpc import service_pb2

pytestmark = NEEDS_TRITON

MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily("own_count", "what it counts", pb_utils.MetricFamily.COUNTER)
        self.count = self.family.Metric(labels={"model": args["model_name"]})

    def execute(self, requests):
        self.count.increment(0.5)
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor)]))
        return responses
"""
CONFIG = """
    backend: "python"
    max_batch_size: 4
    input {{ name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }}
    output {{ name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }}
    instance_group {{ kind: KIND_CPU count: 1 }}
    {extra}
"""
ENSEMBLE = """
    platform: "ensemble"
    max_batch_size: 4
    input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
    ensemble_scheduling { step {
        model_name: "plain" model_version: -1
        input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" }
    } }
"""
NEWER = frozenset({"nv_model_load_duration_secs"})
"""Families that Triton 2.51 does not have yet."""


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URLs of the metrics of Triton and conch, after the same requests."""
    repository = tmp_path_factory.mktemp("both")
    write_model(repository, "plain", CONFIG.format(extra='metric_tags { key: "team" value: "x" }'),
                {"model.py": MODEL})  # fmt: skip
    write_model(
        repository, "kept", CONFIG.format(extra="response_cache { enable: true }"), {"model.py": MODEL}
    )
    write_model(repository, "both", ENSEMBLE, {"empty": ""})
    cache = "--cache-config=local,size=1000000"
    port = free_port()
    flags = [
        "--allow-metrics=true",
        f"--metrics-port={port}",
        f"--cache-directory={TRITON / 'caches'}",
        cache,
    ]
    with (
        serving(repository, flags=[cache]) as server,
        closing(RawClient(server.address)) as ours,
        triton_serving(repository, *flags) as theirs,
    ):
        for client in (theirs, ours):
            send(client)
        yield f"http://127.0.0.1:{port}/metrics", server.metrics_url


def send(client: RawClient) -> None:
    for model, rows in (("plain", 1), ("plain", 3), ("kept", 1), ("kept", 1), ("both", 2)):
        request = service_pb2.ModelInferRequest(model_name=model)
        request.inputs.add(name="IN", datatype="FP32", shape=[rows, 1])
        request.raw_input_contents.append(np.ones(rows, np.float32).tobytes())
        client("ModelInfer", request)
    with pytest.raises(grpc.RpcError):  # refused before it is a request of the model's
        client("ModelInfer", service_pb2.ModelInferRequest(model_name="plain"))


def counted(url: str) -> Samples:
    """Everything that does not depend on time or on the machine."""
    found = samples(get(url)[2].decode())
    unlike = ("duration", "cpu", "pinned", "cache_util", "load")
    return {
        key: value
        for key, value in found.items()
        if key[0].startswith(("nv_", "own_")) and not any(part in key[0] for part in unlike)
    }


def described(url: str) -> dict[str, tuple[str, str]]:
    families: Any = text_string_to_metric_families(get(url)[2].decode())
    return {family.name: (family.type, family.documentation) for family in families}


def test_the_counts_are_tritons(urls: tuple[str, str]) -> None:
    def same() -> bool:
        return counted(urls[1]) == counted(urls[0])

    eventually(lambda: counted(urls[0]).get(("nv_cache_num_hits", frozenset())), "Triton reads its cache")
    if not same():
        assert counted(urls[1]) == counted(urls[0])


def test_names_types_and_helps_are_tritons(urls: tuple[str, str]) -> None:
    theirs, ours = described(urls[0]), described(urls[1])
    assert {name: ours.get(name) for name in theirs} == theirs
    assert {name for name in ours if name.startswith("nv_")} - NEWER == {
        name for name in theirs if name.startswith("nv_")
    }


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/metrics?x", "/", "/other"])
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_answers_are_tritons(urls: tuple[str, str], path: str, method: str) -> None:
    def outcome(url: str) -> Any:
        status, headers, body = get(url.replace("/metrics", path), method)
        return status, headers.get("content-type", headers.get("Content-Type")), bool(body)

    assert outcome(urls[1]) == outcome(urls[0])
