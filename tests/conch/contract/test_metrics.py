"""The metrics port, asked over real sockets."""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shared_memory
import yaml
from tests.support.grpc_transports import TRANSPORTS
from tests.support.hazards import write_hazards
from tests.support.http2_peer import Http2Peer
from tests.support.loading import write_number
from tests.support.metrics import Samples, families, get, of_model, samples, scrape, value
from tests.support.names import new_name
from tests.support.servers import (
    ROOT,
    WAIT_S,
    AnyServer,
    client_of,
    eventually,
    free_port,
    serving,
    serving_process,
    started,
    tensor,
    write_model,
    write_probe,
    write_steps,
)
from tritonclient.utils import InferenceServerException

from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ConnectionOptions

CACHE = "--cache-config=local,size=1000000"
EXPORTS = ("--trace-config=mode=opentelemetry", "--otlp-metrics-url=http://127.0.0.1:1")  # without a receiver
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.counted = pb_utils.MetricFamily("own_count", "what it counts", pb_utils.MetricFamily.COUNTER)
        self.spreads = pb_utils.MetricFamily("own_spread", "the spread", pb_utils.MetricFamily.HISTOGRAM)
        self.count = self.counted.Metric(labels={"model": args["model_name"]})
        self.spread = self.spreads.Metric(labels={"model": args["model_name"]}, buckets=[1, 10])

    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            self.count.increment(2)
            self.spread.observe(5)
            if tensor[0] < 0:
                responses.append(pb_utils.InferenceResponse([], pb_utils.TritonError("negative")))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor)]))
        return responses
"""
CONFIG = """
    backend: "python"
    input {{ name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }}
    output {{ name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }}
    {extra}
"""
TAGS = 'metric_tags { key: "team" value: "x" }'
METRIC_NAME = re.compile(r"\bup\b|\b(?:nv|conch|process|python)_[a-z0-9_]+")


@contextmanager
def nvml(directory: Path) -> Iterator[None]:
    """Has this process find the stand-in for NVIDIA's management library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        yield
        sys.modules.pop("pynvml", None)


@pytest.fixture(scope="module", params=["in_process", "worker"])
def everything(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AnyServer]:
    """A server with all that has metrics: cache, GPU, workers, own metrics, spans, policy, failed model."""
    directory = tmp_path_factory.mktemp("everything")
    repository, modules = directory / "models", directory / "modules"
    modules.mkdir()
    shutil.copy(ROOT / "tests" / "support" / "nvml_module.py", modules / "pynvml.py")
    apart = f'parameters {{ key: "CONCH_PLACEMENT" value {{ string_value: "{request.param}" }} }}'
    for name, extra in {
        "m": "",
        "apart": apart,
        "kept": "response_cache { enable: true }",
        "tagged": TAGS,
    }.items():
        write_model(repository, name, CONFIG.format(extra=extra), {"model.py": MODEL})
    write_probe(repository, "batches", "dynamic_batching { }")
    write_hazards(repository)
    write_model(repository, "broken", CONFIG.format(extra=""), {"model.py": "nonsense("})
    policy = directory / "access.toml"
    policy.write_text('[[principal]]\nname = "all"\nanonymous = true\ninfer = ["*"]\ncontrol = ["*"]\n')
    flags = ["--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false", CACHE, *EXPORTS]
    flags.append(f"--access-policy={policy}")
    with nvml(modules), serving(repository, flags=flags) as server:
        # gRPC and HTTP keep some file descriptors and threads from their first calls on.
        with client_of(server) as client:
            infer(client, "m", 1)
        scrape(server.metrics_url)
        yield server


@pytest.fixture
def client(everything: AnyServer) -> Iterator[triton.InferenceServerClient]:
    """A client of that server."""
    with client_of(everything) as client:
        yield client


def infer(client: triton.InferenceServerClient, model: str, number: int) -> None:
    tensor = triton.InferInput("IN", [1], "INT32")
    tensor.set_data_from_numpy(np.array([number], np.int32))
    client.infer(model, [tensor])


def gained(before: Samples, after: Samples, model: str, name: str, **labels: str) -> float:
    one, other = (of_model(found, model, name, **labels) for found in (before, after))
    assert one is not None and other is not None, name
    return other - one


@pytest.mark.parametrize("model", ["m", "apart"])
def test_requests_are_counted(
    everything: AnyServer, client: triton.InferenceServerClient, model: str
) -> None:
    before = scrape(everything.metrics_url)
    infer(client, model, 1)
    infer(client, model, 2)
    with pytest.raises(InferenceServerException, match="negative"):
        infer(client, model, -1)
    after = scrape(everything.metrics_url)
    for name in (
        "nv_inference_request_success",
        "nv_inference_count",
        "nv_inference_exec_count",
        "conch_request_duration_seconds_count",
        "conch_queue_duration_seconds_count",
        "conch_compute_infer_duration_seconds_count",
        "conch_batch_size_count",
    ):
        assert gained(before, after, model, name) == 2, name
    assert gained(before, after, model, "nv_inference_request_failure", reason="BACKEND") == 1
    assert gained(before, after, model, "nv_inference_request_failure", reason="OTHER") == 0
    assert gained(before, after, model, "nv_inference_compute_infer_duration_us") > 0
    assert gained(before, after, model, "conch_compute_infer_duration_seconds_sum") > 0
    own = [value(found, "own_count", model=model) or 0 for found in (before, after)]
    assert own[1] - own[0] == 6
    own = [value(found, "own_spread_bucket", model=model, le="10") or 0 for found in (before, after)]
    assert own[1] - own[0] == 3
    statistics = client.get_inference_statistics("m").model_stats[0].inference_stats
    assert of_model(after, "m", "nv_inference_request_success") == statistics.success.count
    assert of_model(after, "m", "nv_inference_request_duration_us") == statistics.success.ns // 1000


def test_cached_answers_are_counted(everything: AnyServer, client: triton.InferenceServerClient) -> None:
    before = scrape(everything.metrics_url)
    for _ in range(3):
        infer(client, "kept", 7)
    after = scrape(everything.metrics_url)
    expected = {
        "nv_cache_num_hits_per_model": 2,
        "nv_cache_num_misses_per_model": 1,
        "nv_inference_request_success": 3,
        "nv_inference_count": 1,
        "conch_request_duration_seconds_count": 3,
        "conch_compute_infer_duration_seconds_count": 1,
    }
    assert {name: gained(before, after, "kept", name) for name in expected} == expected
    assert value(after, "nv_cache_num_entries") == 1
    assert of_model(after, "m", "nv_cache_num_hits_per_model") is None


def test_what_waits_and_what_runs(
    everything: AnyServer, client: triton.InferenceServerClient, tmp_path: Path
) -> None:
    write_probe(tmp_path, "slow")
    begun, go = tmp_path / "begun", tmp_path / "go"
    with serving(tmp_path) as server, client_of(server) as slow:
        tensor = triton.InferInput("IN", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
        parameters = {"started": str(begun), "wait_for": str(go)}
        answers: list[Any] = []
        done = threading.Semaphore(0)

        def answered(result: Any, error: Any) -> None:
            answers.append(error)
            done.release()

        slow.async_infer("slow", [tensor], answered, parameters=parameters)
        eventually(begun.exists, "the first request runs")
        slow.async_infer("slow", [tensor], answered)

        def state() -> list[float | None]:
            found = scrape(server.metrics_url)
            names = ("nv_inference_pending_request_count", "conch_pending_requests", "conch_running_requests")
            return [of_model(found, "slow", name) for name in names]

        eventually(lambda: state() == [1, 1, 1], "one request waits, one runs")
        go.touch()
        assert done.acquire(timeout=WAIT_S) and done.acquire(timeout=WAIT_S)
        assert answers == [None, None]
        eventually(lambda: state() == [0, 0, 0], "none")


def test_series_come_and_go_with_models(everything: AnyServer, client: triton.InferenceServerClient) -> None:
    url = everything.metrics_url
    infer(client, "m", 1)
    before = scrape(url)
    assert of_model(before, "m", "nv_inference_count")
    assert of_model(before, "m", "nv_model_load_duration_secs")
    client.unload_model("m")
    eventually(lambda: not client.is_model_ready("m"), "unloaded")
    gone = eventually(
        lambda: (found := scrape(url)) and not any(("model", "m") in each for _, each in found) and found,
        "its series are gone",
    )
    assert value(gone, "nv_inference_count", model="kept", version="1") is not None
    client.load_model("m")
    after = scrape(url)
    assert of_model(after, "m", "nv_inference_count") == 0
    assert of_model(after, "m", "nv_inference_request_failure", reason="REJECTED") == 0
    assert value(after, "own_count", model="m") == 0
    infer(client, "m", 1)
    client.load_model("m", config=json.dumps({"backend": "python", "max_batch_size": 0,
        "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}],
        "parameters": {"new": {"string_value": "1"}}}))  # fmt: skip
    swapped = scrape(url)
    assert of_model(swapped, "m", "nv_inference_count") == 0, "a reload begins at 0"
    name = "conch_model_swap_duration_seconds_count"
    assert (value(swapped, name) or 0) - (value(after, name) or 0) == 1


def test_failed_loads_are_counted(everything: AnyServer, client: triton.InferenceServerClient) -> None:
    before = value(scrape(everything.metrics_url), "conch_model_load_failures_total", model="broken")
    assert before
    with pytest.raises(InferenceServerException):
        client.load_model("broken")
    with pytest.raises(InferenceServerException):
        client.load_model("nowhere")
    after = scrape(everything.metrics_url)
    assert value(after, "conch_model_load_failures_total", model="broken") == before + 1
    assert value(after, "conch_model_load_failures_total", model="nowhere") is None, "anybody can ask for any"
    assert (value(after, "conch_model_versions", state="READY") or 0) >= 3


def test_the_first_failed_load_is_an_increase_and_lasts(
    everything: AnyServer, client: triton.InferenceServerClient
) -> None:
    def of(name: str, model: str) -> float | None:
        return value(scrape(everything.metrics_url), f"conch_model_{name}", model=model)

    assert of("load_failures_total", "m") == 0 and of("load_failed", "m") == 0, (
        "there before the first failure"
    )
    assert of("load_failed", "broken") == 1, "the first scrape after a start shows it"
    failures = of("load_failures_total", "tagged")
    with pytest.raises(InferenceServerException):
        client.load_model("tagged", config='{"backend": "nonsense"}')
    assert of("load_failures_total", "tagged") == (failures or 0) + 1
    assert of("load_failed", "tagged") == 0, (
        "what is wrong with a client's config is not wrong with the model"
    )


def test_a_failed_load_is_over_when_one_succeeds(tmp_path: Path) -> None:
    code = write_model(tmp_path, "m", CONFIG.format(extra=""), {"model.py": "nonsense("}) / "1" / "model.py"
    flags = ["--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false"]
    with serving(tmp_path, flags=flags) as server, client_of(server) as client:
        found = scrape(server.metrics_url)
        assert value(found, "conch_model_load_failed", model="m") == 1
        assert value(found, "conch_ready") == 0
        code.write_text(MODEL)
        client.load_model("m")
        found = scrape(server.metrics_url)
        assert value(found, "conch_model_load_failed", model="m") == 0
        assert value(found, "conch_ready") == 1
        client.unload_model("m")
        assert value(scrape(server.metrics_url), "conch_model_load_failed", model="m") is None


def health(server: AnyServer) -> dict[str, tuple[int, bytes]]:
    """Answers to the probes of the metrics port; the REST port says the same."""
    ports = (server.metrics_url.removesuffix("/metrics"), f"http://{server.http_address}")
    own, rest = ({name: get(f"{port}/v2/health/{name}")[::2] for name in ("live", "ready")} for port in ports)
    assert own == rest
    return own


def test_probes_get_the_same_as_on_the_rest_port(tmp_path: Path) -> None:
    write_probe(tmp_path / "models", "m")
    control = f"127.0.0.1:{free_port()}"
    with (
        serving(tmp_path / "models", flags=[f"--control-port={control.rpartition(':')[2]}"]) as server,
        closing(ModelControlClient(ConnectionOptions(control), timeout_s=WAIT_S)) as client,
    ):
        assert health(server) == {"live": (200, b'{"live":true}'), "ready": (200, b'{"ready":true}')}
        client.drain()
        assert health(server) == {"live": (200, b'{"live":true}'), "ready": (400, b'{"ready":false}')}
    with serving(tmp_path / "none", flags=["--exit-on-error=false"]) as server:
        no = {"live": (400, b'{"live":false}'), "ready": (400, b'{"ready":false}')}
        assert health(server) == no, "the repository can't be read"


def test_shared_memory_of_clients(everything: AnyServer) -> None:
    key = f"/{new_name()}"
    handle = shared_memory.create_shared_memory_region("r", key, 4096)
    try:
        # Over REST: both front ends share the regions.
        url = f"http://{everything.http_address}/v2/systemsharedmemory/region/r"
        order = {"key": key, "offset": 0, "byte_size": 4096}
        assert get(f"{url}/register", "POST", json.dumps(order).encode())[0] == 200
        found = scrape(everything.metrics_url)
        assert value(found, "conch_shared_memory_region_bytes", kind="system") == 4096
        assert value(found, "conch_shared_memory_regions", kind="system") == 1
        assert value(found, "conch_shared_memory_regions", kind="cuda") == 0
        assert get(f"{url}/unregister", "POST", b"")[0] == 200
        assert value(scrape(everything.metrics_url), "conch_shared_memory_regions", kind="system") == 0
    finally:
        shared_memory.destroy_shared_memory_region(handle)


def test_tags(everything: AnyServer) -> None:
    found = scrape(everything.metrics_url)
    assert value(found, "nv_inference_count", model="tagged", version="1", _team="x") == 0


def test_formats(everything: AnyServer) -> None:
    url = everything.metrics_url
    status, headers, plain = get(url)
    assert (status, headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert int(headers["content-length"]) == len(plain)
    status, headers, compressed = get(url, Accept_Encoding="gzip")
    assert (status, headers["content-encoding"]) == (200, "gzip")
    assert families(gzip.decompress(compressed).decode()).keys() == families(plain.decode()).keys()
    status, headers, openmetrics = get(url, Accept="application/openmetrics-text; version=1.0.0")
    assert headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    names = {name for name, _ in samples(openmetrics.decode(), True)}
    assert names >= {name for name, _ in samples(plain.decode())}


def test_paths_and_methods_are_tritons(everything: AnyServer) -> None:
    url = everything.metrics_url
    for path in ("/metrics/", "/metrics?name=x"):
        assert b"nv_inference_count" in get(url.replace("/metrics", path))[2]
    for path, body in (
        ("/", b""),
        ("/other", b""),
        ("/metricsx", b""),
        ("/v2/health/live", b'{"live":true}'),
    ):
        assert get(url.replace("/metrics", path))[::2] == (200, body)
    for method in ("POST", "PUT", "DELETE"):
        assert get(url, method)[::2] == (405, b'{"error":"Method Not Allowed"}')
    assert get(url, "HEAD")[0] == 405


@pytest.mark.process
def test_curl(everything: AnyServer) -> None:
    told = subprocess.run(
        ["curl", "-sS", "--compressed", "--fail", everything.metrics_url], capture_output=True, check=True
    ).stdout.decode()
    assert of_model(samples(told), "m", "nv_inference_count") is not None


@pytest.mark.process
def test_many_at_once_and_some_who_leave(everything: AnyServer) -> None:
    url = everything.metrics_url
    bodies: list[bytes] = []

    def ask() -> None:
        bodies.append(get(url)[2])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(4):  # these do not wait for their answer
        subprocess.run(["curl", "-s", "-m", "0.001", url], capture_output=True, check=False)
    for thread in threads:
        thread.join()
    assert len(bodies) == 8
    assert all(b"nv_inference_count" in body for body in bodies)


@pytest.mark.process
def test_flags(tmp_path: Path) -> None:
    write_model(tmp_path, "m", CONFIG.format(extra=""), {"model.py": MODEL})
    with serving_process(tmp_path, flags=["--allow-metrics=false"]) as server:
        assert "Metrics" not in server.output
    flags = [
        "--allow-cpu-metrics=false",
        "--allow-gpu-metrics=false",
        "--metrics-config=counter_latencies=false",
        "--metrics-address=localhost",
    ]
    with serving_process(tmp_path, flags=flags) as server, client_of(server) as client:
        infer(client, "m", 1)
        found = scrape(server.metrics_url)
        assert "| Metrics | http://localhost:" in server.output
        assert of_model(found, "m", "nv_inference_count") == 0
        assert of_model(found, "m", "conch_request_duration_seconds_count") == 1
        assert value(found, "nv_cpu_utilization") is None
        port = server.metrics_url.split(":")[2].partition("/")[0]
        with started(f"--model-repository={tmp_path}", "--grpc-port=0", f"--metrics-port={port}") as second:
            assert second.wait() == 1
            assert f"Socket '0.0.0.0:{port}' already in use" in second.errors
    with started(f"--model-repository={tmp_path}", "--metrics-config=summary_quantiles=2:0") as refused:
        assert refused.wait() == 1
        assert "--metrics-config: summary_quantiles must be <quantile>:<error>" in refused.errors


def test_summaries(tmp_path: Path) -> None:
    write_model(tmp_path, "m", CONFIG.format(extra=""), {"model.py": MODEL})
    flags = [
        "--metrics-config=summary_latencies=true",
        "--metrics-config=summary_quantiles=0.5:0.05,0.99:0.01",
    ]
    with serving(tmp_path, flags=flags) as server, client_of(server) as client:
        found = scrape(server.metrics_url)
        assert of_model(found, "m", "nv_inference_request_summary_us_count") == 0
        empty = of_model(found, "m", "nv_inference_request_summary_us", quantile="0.5")
        assert empty is not None and math.isnan(empty)
        for _ in range(5):
            infer(client, "m", 1)
        found = scrape(server.metrics_url)
        for stage in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
            name = f"nv_inference_{stage}_summary_us"
            assert of_model(found, "m", f"{name}_count") == 5
            total = of_model(found, "m", f"{name}_sum")
            assert total == of_model(found, "m", f"nv_inference_{stage}_duration_us")
            median, most = (of_model(found, "m", name, quantile=each) for each in ("0.5", "0.99"))
            assert median is not None and most is not None and total is not None
            assert 0 <= median <= most <= 1.02 * (total + 1)
        assert value(found, "nv_cache_hit_summary_per_model_count", model="m", version="1") is None


def test_first_responses(tmp_path: Path) -> None:
    name = "nv_inference_first_response_histogram_ms"
    buckets = (
        f'model_metrics {{ metric_control {{ metric_identifier {{ family: "{name}" }} '
        f"histogram_options {{ buckets: [ 60000, 0.000001 ] }} }} }}"
    )
    for model, extra in {"m": "", "own": buckets}.items():
        write_model(tmp_path, model, CONFIG.format(extra=extra), {"model.py": MODEL})
    write_steps(tmp_path, "steps")
    flags = ["--metrics-config=histogram_latencies=true"]
    with serving(tmp_path, flags=flags) as server, client_of(server) as client:
        assert of_model(scrape(server.metrics_url), "own", f"{name}_count") == 0
        infer(client, "own", 1)
        with pytest.raises(InferenceServerException, match="negative"):
            infer(client, "own", -1)
        found = scrape(server.metrics_url)
        bounds = {
            model: [
                dict(labels)["le"]
                for sample, labels in found
                if sample == f"{name}_bucket" and ("model", model) in labels
            ]
            for model in ("m", "own", "steps")
        }
        assert bounds["m"] == bounds["steps"] == ["100", "500", "2000", "5000", "+Inf"]
        assert [of_model(found, "own", f"{name}_bucket", le=bound) for bound in bounds["own"]][1:] == [1, 1]
        assert float(of_model(found, "own", f"{name}_sum") or 0).is_integer()  # whole milliseconds
        url = f"http://{server.http_address}/v2/models/steps/generate_stream"
        for what in ("ok ok okfinal", "err final", "final", "ok final"):
            get(url, "POST", json.dumps({"IN": [1], "steps": what}).encode())
        # One for each request that has had a response which is no error.
        assert of_model(scrape(server.metrics_url), "steps", f"{name}_count") == 2


def exported(server: AnyServer) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The families that a server has, with their types and labels, but for those of the models' own."""
    text = get(server.metrics_url)[2].decode()
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        if not name.startswith(
            ("nv_", "conch_", "process_", "python_")
        ):  # models' own, also those of other tests in the process
            continue
        lines = re.findall(rf"^{name}(?:_bucket|_sum|_count)?(?:{{(.*)}})? ", text, re.MULTILINE)
        labels = {label for line in lines for label in re.findall(r'([a-z_]+)="', line)}
        found[name] = (kind, tuple(sorted(labels - {"_team", "le"})))
    return found


@pytest.mark.parametrize("everything", ["worker"], indirect=True)
def test_the_documented_families_are_those_there_are(everything: AnyServer, tmp_path: Path) -> None:
    found = exported(everything)
    write_number(tmp_path / "catalogue", "m")
    flags = ["--model-control-mode=on-demand", "--front-ends=1"]
    with serving(tmp_path / "catalogue", flags=flags) as catalogue, client_of(catalogue) as client:
        client.infer("m", [tensor("IN", np.ones(1, np.float32))])
        found = exported(catalogue) | found
    model = write_number(tmp_path / "shadowed", "m", extra="version_policy { all { } }", versions=(1, 2))
    steps = '[labels]\nstable = 1\n[rollout]\nsteps = ["shadow 100% 1h"]\n'
    (model / "rollout.toml").write_text(steps)
    with serving(tmp_path / "shadowed") as server, client_of(server) as client:

        def compared() -> bool:
            client.infer("m", [tensor("IN", np.ones(1, np.float32))])
            return "conch_shadow_max_abs" in exported(server)

        eventually(compared, "pairs are compared")
        found = exported(server) | found
    table = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| (\w+) \| ([^|]*) \|", table, re.MULTILINE)
    documented = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert documented == found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closed_connections_are_counted_by_reason(tmp_path: Path, transport: str) -> None:
    name = "conch_grpc_connections_closed_total"
    write_probe(tmp_path)
    with serving(tmp_path, flags=TRANSPORTS[transport]) as server:
        with closing(Http2Peer(server.address)) as peer:
            peer.send(b"GET / HTTP/1.1\r\nHost: conch\r\n\r\n")
            peer.wait_closed()
        if transport == "own":

            def counted() -> dict[str, float]:
                found = scrape(server.metrics_url).items()
                return {dict(labels)["reason"]: n for (each, labels), n in found if each == name}

            eventually(lambda: counted()["preface"] == 1, "a front process has told of it")
            counts = counted()
            assert counts.pop("preface") == 1
            assert counts and set(counts.values()) == {0}
        else:
            assert name.encode() not in get(server.metrics_url)[2]


@pytest.mark.parametrize("everything", ["worker"], indirect=True)
@pytest.mark.parametrize("file", ["grafana/conch.json", "prometheus/alerts.yml", "prometheus/adapter.yml"])
def test_every_query_names_metrics_that_are_exported(everything: AnyServer, file: str) -> None:
    text = (ROOT / "deploy" / "helm" / "conch" / "files" / file).read_text()
    if file.endswith(".json"):
        dashboard = json.loads(text)
        queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
        queries += [
            each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"
        ]
    elif file.endswith("adapter.yml"):
        rules = yaml.safe_load(text)["rules"]["custom"]
        queries = [rule[key] for rule in rules for key in ("seriesQuery", "metricsQuery")]
    else:
        queries = re.findall(r"^ *expr: (.*)$", text, re.MULTILINE)
    assert len(queries) >= 4
    known = {name for name, _ in scrape(everything.metrics_url)} | {"up"}  # Prometheus adds that one
    for query in queries:
        names = METRIC_NAME.findall(query)
        assert names and set(names) <= known, query
