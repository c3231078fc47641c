"""Every RPC that is not inference."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tests.support.calls import refused
from tests.support.cases import check
from tests.support.cases.repository_cases import CALLS
from tests.support.servers import (
    WAIT_S,
    AnyServer,
    RawClient,
    client_of,
    copy_example,
    eventually,
    probe,
    probe_inputs,
    serving,
    simple_inputs,
    write_model,
    write_probe,
)
from tritonclient.grpc import InferenceServerClient as Client
from tritonclient.grpc import model_config_pb2, service_pb2


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AnyServer, Path]]:
    """A server in explicit mode, and its repository."""
    repository = tmp_path_factory.mktemp("explicit")
    write_probe(repository)
    copy_example(repository, "simple")
    flags = ["--model-control-mode=explicit", "--load-model=simple"]
    with serving(repository, flags=flags) as server:
        yield server, repository


@pytest.fixture
def manager(explicit: tuple[AnyServer, Path]) -> Iterator[Client]:
    """A client of the server in explicit mode; leaves the probe unloaded."""
    with client_of(explicit[0]) as client:
        yield client
        client.unload_model("probe")
        eventually(lambda: index(client).get("probe", {}).get("1") != "UNLOADING", "the probe is unloaded")


def index(client: Client) -> dict[str, dict[str, str]]:
    """The repository index: name to version to state."""
    lines: dict[str, dict[str, str]] = {}
    for line in client.get_model_repository_index().models:
        lines.setdefault(line.name, {})[line.version] = line.state
    return lines


@pytest.mark.parametrize("name", CALLS)
def test_calls(raw: RawClient, name: str) -> None:
    check(raw, CALLS[name])


def test_health(client: Client) -> None:
    assert client.is_server_live() is True
    assert client.is_server_ready() is True
    assert client.is_model_ready("simple") is True
    assert client.is_model_ready("simple", "2") is False


def test_server_metadata(client: Client) -> None:
    metadata = client.get_server_metadata()
    assert (metadata.name, metadata.version) == ("triton", version("conch"))
    assert list(metadata.extensions) == [
        "classification",
        "sequence",
        "model_repository",
        "model_repository(unload_dependents)",
        "schedule_policy",
        "model_configuration",
        "system_shared_memory",
        "cuda_shared_memory",
        "binary_tensor_data",
        "parameters",
        "statistics",
        "trace",
        "logging",
    ]


def test_model_metadata(client: Client) -> None:
    metadata = client.get_model_metadata("simple")
    assert (metadata.name, list(metadata.versions), metadata.platform) == (
        "simple",
        ["1"],
        "onnxruntime_onnx",
    )
    assert [(i.name, i.datatype, list(i.shape)) for i in metadata.inputs] == [
        ("INPUT0", "INT32", [-1, 16]),
        ("INPUT1", "INT32", [-1, 16]),
    ]
    assert [output.name for output in metadata.outputs] == ["OUTPUT0", "OUTPUT1"]
    assert list(client.get_model_metadata("versions").versions) == ["1", "3"]
    assert list(client.get_model_metadata("versions", "1").versions) == ["1"]
    assert client.get_model_metadata("versions").platform == "python"
    assert [list(i.shape) for i in client.get_model_metadata("repeater").inputs] == [[-1]]


def test_model_config(client: Client) -> None:
    config = client.get_model_config("simple").config
    assert (config.name, config.backend, config.max_batch_size) == ("simple", "onnxruntime", 8)
    assert config.platform == "onnxruntime_onnx"
    assert [group.count for group in config.instance_group] == [2]
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
    assert config.version_policy.latest.num_versions == 1
    completed = client.get_model_config("strings").config
    assert completed.WhichOneof("scheduling_choice") == "dynamic_batching"
    assert completed.input[0].data_type == model_config_pb2.TYPE_STRING


def test_statistics(client: Client) -> None:
    def now() -> Any:
        (stats,) = client.get_inference_statistics("versions", "1").model_stats
        return stats

    before = now()
    started_ms = time.time_ns() // 1_000_000 - 1
    for rows in (1, 1, 3):
        client.infer("versions", probe_inputs(shape=(rows, 4)), model_version="1")
    assert refused(
        client.infer, "versions", probe_inputs(), model_version="1", parameters={"error": "INTERNAL"}
    ) == ("INTERNAL", "told to")
    refused(client.infer, "versions", probe_inputs(shape=(9, 4)), model_version="1")  # never reaches it
    after = now()
    assert (after.name, after.version) == ("versions", "1")
    assert after.inference_count - before.inference_count == 5
    assert after.execution_count - before.execution_count == 3
    stats, old = after.inference_stats, before.inference_stats
    assert stats.success.count - old.success.count == 3
    assert stats.fail.count - old.fail.count == 1
    for part in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert getattr(stats, part).count == stats.success.count, part
    parts = stats.queue.ns + stats.compute_input.ns + stats.compute_infer.ns + stats.compute_output.ns
    assert 0 < parts <= stats.success.ns
    assert (stats.cache_hit.count, stats.cache_miss.count) == (0, 0)
    rows_of = {row.batch_size: row.compute_infer.count for row in after.batch_stats}
    rows_before = {row.batch_size: row.compute_infer.count for row in before.batch_stats}
    assert {size: count - rows_before.get(size, 0) for size, count in rows_of.items()} == {1: 2, 3: 1}
    assert started_ms <= after.last_inference <= time.time_ns() // 1_000_000 + 1


def test_statistics_of_all_models(client: Client) -> None:
    found = {(stats.name, stats.version) for stats in client.get_inference_statistics().model_stats}
    assert {("simple", "1"), ("versions", "1"), ("versions", "3")} <= found


def test_index(client: Client) -> None:
    lines = client.get_model_repository_index().models
    assert [line.name for line in lines] == sorted(line.name for line in lines)
    assert {line.state for line in lines} == {"READY"}
    assert [line.version for line in lines if line.name == "versions"] == ["1", "3"]


def test_load_and_unload(manager: Client) -> None:
    lines = manager.get_model_repository_index()
    states = {line.name: (line.version, line.state) for line in lines.models}
    assert states["simple"] == ("1", "READY")
    assert states["probe"][1] in ("", "UNAVAILABLE")
    manager.load_model("probe")
    probe(manager)
    manager.unload_model("probe")
    eventually(lambda: index(manager)["probe"]["1"] == "UNAVAILABLE", "the probe is unloaded")
    (line,) = [line for line in manager.get_model_repository_index().models if line.name == "probe"]
    assert line.reason == "unloaded"
    assert manager.is_model_ready("probe") is False
    assert manager.is_server_ready() is True
    text = "Request for unknown model: 'probe' has no available versions"
    assert refused(manager.infer, "probe", probe_inputs()) == ("NOT_FOUND", text)
    text = "Request for unknown model: 'probe' version 1 is not at ready state"
    assert refused(manager.infer, "probe", probe_inputs(), model_version="1") == ("UNAVAILABLE", text)
    manager.infer("simple", simple_inputs())


def test_unload_finishes_what_runs(manager: Client, signal_files: tuple[Path, Path]) -> None:
    started, go = signal_files
    manager.load_model("probe")
    said: list[Any] = []
    orders = {"started": str(started), "wait_for": str(go)}
    thread = threading.Thread(target=lambda: said.append(probe(manager, parameters=orders)))
    thread.start()
    eventually(started.exists, "the model runs")
    manager.unload_model("probe")
    assert index(manager)["probe"] == {"1": "UNLOADING"}
    assert refused(manager.infer, "probe", probe_inputs())[0] == "NOT_FOUND"
    go.touch()
    thread.join(WAIT_S)
    assert said and said[0]["config"] == "probe"


def test_config_override(manager: Client) -> None:
    manager.load_model("probe")
    config = json.loads(
        '{"backend": "python", "max_batch_size": 2, "input": [{"name": "IN", "data_type": "TYPE_FP32",'
        '"dims": [-1]}], "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]},'
        '{"name": "SEEN", "data_type": "TYPE_STRING", "dims": [1]}]}'
    )
    manager.load_model("probe", config=json.dumps(config))
    assert manager.get_model_config("probe").config.max_batch_size == 2
    text = "[request id: x] inference request batch-size must be <= 2 for 'probe', got 3"
    assert refused(manager.infer, "probe", probe_inputs(shape=(3, 4)), request_id="x") == (
        "INVALID_ARGUMENT",
        text,
    )
    manager.load_model("probe")  # nothing has changed, so the override stays
    assert manager.get_model_config("probe").config.max_batch_size == 2
    poll = "failed to load 'probe', failed to poll from model repository"
    wrong = {
        "{": "Expected an object key",
        '{"parameters": {"key": "a"}}': 'parameters["key"]: expected an object',
    }
    for config, reason in wrong.items():
        code, text = refused(manager.load_model, "probe", config=config)
        assert (code, text.startswith(f"{poll}: Invalid config override: {reason}")) == ("INTERNAL", True), (
            text
        )
    probe(manager)  # what served before still does
    manager.unload_model("probe")
    manager.load_model("probe")
    assert manager.get_model_config("probe").config.max_batch_size == 8


def test_unload_with_dependents(manager: Client) -> None:
    manager.unload_model("simple", unload_dependents=True)
    manager.load_model("simple")
    assert manager.is_model_ready("simple")


def test_failed_reload_keeps_the_old_version(manager: Client, explicit: tuple[AnyServer, Path]) -> None:
    repository = explicit[1]
    manager.load_model("probe")
    good = (repository / "probe" / "1" / "model.py").read_text()
    try:
        write_model(repository, "probe", files={"model.py": "raise OSError('no disk')\n"})
        code, text = refused(manager.load_model, "probe")
        assert code == "INVALID_ARGUMENT"
        assert text.startswith(
            "load failed for model 'probe': version 1 is at UNAVAILABLE state: Internal: OSError: no disk"
        )
        probe(manager)
    finally:
        write_model(repository, "probe", files={"model.py": good})
    manager.load_model("probe")
    probe(manager)


@pytest.mark.parametrize(
    "method",
    [
        "/inference.GRPCInferenceService/Nope",
        "/nope.Service/ModelInfer",
        "/grpc.health.v1.Health/Nope",
        "/",
    ],
)
def test_unknown_methods(raw: RawClient, method: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        raw(method, b"")
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert raised.value.details() == f"Method not found: {method}"
    raw("ServerLive", service_pb2.ServerLiveRequest())


def test_health_service(raw: RawClient) -> None:
    stub = health_pb2_grpc.HealthStub(raw.channel)
    for service in ("", "inference.GRPCInferenceService"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as raised:
        stub.Check(health_pb2.HealthCheckRequest(service="whatever"), timeout=WAIT_S)
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    assert raised.value.details() == "unknown service 'whatever'"


def test_a_watch_of_a_service_that_there_is_not_stays_open(raw: RawClient) -> None:
    stub = health_pb2_grpc.HealthStub(raw.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="whatever"), timeout=WAIT_S)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    assert watch.is_active()
    watch.cancel()


@pytest.mark.parametrize("method", ["ServerLive", "LogSettings", "ModelConfig", "SystemSharedMemoryRegister"])
def test_requests_that_carry_names_and_settings_are_short(raw: RawClient, method: str) -> None:
    unknown = b"\xfa\x06" + b"\x80\x80\x04" + bytes(1 << 16)
    with pytest.raises(grpc.RpcError) as raised:
        raw(f"/inference.GRPCInferenceService/{method}", unknown)
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert raised.value.details() == "the request message has 65541 bytes, of which this RPC takes 65536"


def test_reflection(raw: RawClient) -> None:
    database = ProtoReflectionDescriptorDatabase(raw.channel)
    assert set(database.get_services()) == {
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    file = database.FindFileContainingSymbol("inference.GRPCInferenceService")
    (service,) = file.service
    ours = {(method.name, method.server_streaming) for method in service.method}
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    assert ours == {(method.name, method.name == "ModelStreamInfer") for method in theirs}
    assert database.FindFileByName(file.dependency[0]).message_type
    with pytest.raises(KeyError):
        database.FindFileContainingSymbol("inference.Nope")


@pytest.mark.parametrize("method", ["ServerLive", "ModelConfig", "RepositoryIndex", "ModelInfer"])
def test_garbage_instead_of_a_message(raw: RawClient, method: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        raw(f"/inference.GRPCInferenceService/{method}", b"\xff\xff\xff\xff")
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details().startswith("the request message is malformed")
    assert raw("ServerLive", service_pb2.ServerLiveRequest()).live
