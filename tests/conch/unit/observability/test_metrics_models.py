"""The metrics of models, from their statistics."""

from __future__ import annotations

import ast
import gc
import gzip
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from tests.support.core import make_request, make_spec
from tests.support.metrics import Samples, families, of_model, samples, value
from tests.support.servers import ROOT

from conch.core.load_statistics import LoadStatistics
from conch.core.model_statistics import ModelStatistics, RequestEnd
from conch.core.registry import Entry, Registry, VersionState
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import WorkerStatus
from conch.core.spec import InstanceGroup
from conch.core.statistics_snapshot import Gauges
from conch.observability import metrics
from conch.observability.metrics.load_meter import LoadMeter
from conch.observability.metrics.metric_families import Family, sample
from conch.observability.metrics.metrics_exposition import Exposition, Format, GilYielder, Source
from conch.observability.metrics.model_metrics import ModelMetrics
from conch.observability.metrics.server_metrics import StateMetrics


class Served:
    """As much of a model as its metrics look at."""

    def __init__(self, name: str, cached: bool = False, namespace: str = "", **config: object) -> None:
        self.spec = replace(make_spec(8, name=name), cached=cached, namespace=namespace, config=config)
        self.statistics = ModelStatistics(lambda: Gauges(99, 2))
        self.statistics.keep_latencies()
        self.pending = 3
        self.workers: list[WorkerStatus] = []
        self.readiness = ()

    def run(self, size: int = 1) -> None:
        batch = Batch([make_request(batch_size=size, received_ns=0, queued_ns=1_000)], size)
        batch.compute_start_ns = 4_000
        batch.compute_input_end_ns = 10_000
        batch.compute_output_start_ns = 1_000_000
        batch.compute_end_ns = 2_000_000
        batch.bytes_copied = 10
        self.statistics.record_batch(batch, [RequestEnd.SUCCEEDED])


class Site:
    """Metrics of some models."""

    def __init__(
        self,
        *models: Served,
        counters: bool = True,
        gpu_uuids: tuple[str, ...] = (),
        sources: Sequence[Source] = (),
    ) -> None:
        self.registry = Registry()
        self.loads = LoadStatistics()
        self.others = CollectorRegistry()
        for model in models:
            self.publish(model)
        meter = LoadMeter(self.registry)
        self.models = ModelMetrics(self.registry, self.loads.snapshot, meter, counters, gpu_uuids=gpu_uuids)
        state = StateMetrics(self.registry, self.loads.snapshot)
        self.exposition = Exposition(self.models, [*sources, state], self.others)

    def publish(self, model: Served) -> None:
        entry = Entry({1: model}, {1: VersionState("READY")})  # type: ignore[dict-item]
        self.registry.publish(model.spec.identifier, entry)

    def text(self, wanted: Format | None = None) -> bytes:
        return b"".join(self.exposition.render(wanted or Format()))

    def samples(self) -> Samples:
        return samples(self.text().decode())


def test_everything_is_there_with_0_before_the_first_request() -> None:
    site = Site(Served("m"), Served("kept", cached=True))
    found = site.samples()
    for name in ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count"):
        assert of_model(found, "m", name) == 0
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        assert of_model(found, "m", "nv_inference_request_failure", reason=reason) == 0
    assert of_model(found, "m", "conch_request_duration_seconds_count") == 0
    assert of_model(found, "m", "conch_requests_rejected_total", reason="timeout") == 0
    assert of_model(found, "kept", "nv_cache_num_hits_per_model") == 0
    assert of_model(found, "m", "nv_cache_num_hits_per_model") is None
    assert of_model(found, "m", "nv_model_load_duration_secs") is None, "nobody has measured it"


def test_workers_by_state_and_their_restarts() -> None:
    model = Served("m")
    model.workers = [
        WorkerStatus("serving", 2, 17, ""),
        WorkerStatus("waiting", 5, None, "it died"),
        WorkerStatus("serving", 0, 18, ""),
    ]
    found = Site(model, Served("none")).samples()
    told = {
        state: of_model(found, "m", "conch_workers", state=state)
        for state in ("serving", "starting", "waiting")
    }
    assert told == {"serving": 2, "starting": 0, "waiting": 1}
    assert of_model(found, "m", "conch_worker_restarts_total") == 7
    assert of_model(found, "none", "conch_worker_restarts_total") is None


def test_what_is_counted_is_told() -> None:
    model = Served("m", cached=True)
    site = Site(model)
    site.samples()
    site.loads.loaded("m", 1, 1_500_000_000)
    model.run(4)
    model.statistics.record_rejection(1, "timeout")
    model.statistics.record_rejection(1, "queue_full")
    model.statistics.record_cancellation(1, "running")
    model.statistics.record_failure(1, True)
    model.statistics.record_failure(1)
    model.statistics.record_hit(2_000, 1_000, 5_000)
    model.statistics.record_miss(7_000)
    found = site.samples()
    expected = {
        "nv_inference_request_success": 2,
        "nv_inference_count": 4,
        "nv_inference_exec_count": 1,
        "nv_inference_request_duration_us": 2_005,
        "nv_inference_queue_duration_us": 4,
        "nv_inference_compute_input_duration_us": 6,
        "nv_inference_compute_infer_duration_us": 990,
        "nv_inference_compute_output_duration_us": 1_000,
        "nv_cache_num_hits_per_model": 1,
        "nv_cache_hit_duration_per_model": 2,
        "nv_cache_num_misses_per_model": 1,
        "nv_cache_miss_duration_per_model": 7,
        "nv_inference_pending_request_count": 3,
        "nv_model_load_duration_secs": 1.5,
        "conch_pending_requests": 3,
        "conch_running_requests": 2,
        "conch_copied_bytes_total": 10,
        "conch_request_duration_seconds_count": 2,
        "conch_request_duration_seconds_sum": 0.002005,
        "conch_queue_duration_seconds_count": 2,
        "conch_compute_infer_duration_seconds_count": 1,
        "conch_batch_size_sum": 4,
        "conch_batch_size_count": 1,
    }
    assert {name: of_model(found, "m", name) for name in expected} == expected
    failures = {"REJECTED": 2, "CANCELED": 1, "BACKEND": 1, "OTHER": 1}
    for reason, count in failures.items():
        assert of_model(found, "m", "nv_inference_request_failure", reason=reason) == count
    assert of_model(found, "m", "conch_requests_rejected_total", reason="queue_full") == 1
    assert of_model(found, "m", "conch_requests_cancelled_total", stage="running") == 1
    assert of_model(found, "m", "conch_batch_size_bucket", le="2") == 0
    assert of_model(found, "m", "conch_batch_size_bucket", le="4") == 1
    in_openmetrics = samples(site.text(Format(True)).decode(), True)
    assert of_model(in_openmetrics, "m", "conch_batch_size_bucket", le="4.0") == 1
    assert value(found, "conch_model_load_duration_seconds_count") == 1


def test_a_model_that_goes_takes_its_series_and_a_new_load_begins_at_0() -> None:
    model = Served("m")
    site = Site(model)
    model.run()
    assert of_model(site.samples(), "m", "nv_inference_count") == 1
    site.publish(Served("m"))
    assert of_model(site.samples(), "m", "nv_inference_count") == 0
    site.registry.publish("m", Entry({}, {1: VersionState("UNAVAILABLE", "unloaded")}))
    found = site.samples()
    assert not [name for name, labels in found if ("model", "m") in labels]
    assert value(found, "conch_model_versions", state="UNAVAILABLE") == 1


def test_text_that_was_kept_is_made_again_when_something_is_counted() -> None:
    models = [Served("a"), Served("b")]
    site = Site(*models)
    for count in (1, 2):
        models[0].run()
        for _ in range(2):
            found = site.samples()
            assert of_model(found, "a", "nv_inference_count") == count
            assert of_model(found, "b", "nv_inference_count") == 0


def test_tags_are_labels() -> None:
    site = Site(Served("m", metric_tags={"team": 'a "b"', "a-b": "1"}))
    found = value(site.samples(), "nv_inference_count", model="m", version="1", _team='a "b"', _a_b="1")
    assert found == 0


def test_models_of_one_name_are_told_apart_by_their_namespaces() -> None:
    models = [Served("m", namespace=namespace) for namespace in ("/a", "/b")]
    site = Site(*models)
    site.registry.add_namespaces("/a", "/b")
    models[1].run()
    site.loads.loaded("/b::m", 1, 2_000_000_000)
    site.loads.failed("/a::m")
    site.loads.failed("/b::lost")
    found = site.samples()
    for namespace, count in (("/a", 0), ("/b", 1)):
        assert of_model(found, "m", "nv_inference_count", namespace=namespace) == count
        assert of_model(found, "m", "conch_batch_size_count", namespace=namespace) == count
    text = 'nv_inference_request_failure{model="m",namespace="/a",reason="BACKEND",version="1"} 0'
    assert text in site.text().decode(), "the labels are in Triton's order"
    assert of_model(found, "m", "nv_model_load_duration_secs", namespace="/b") == 2
    failures = "conch_model_load_failures_total"
    assert value(found, failures, model="m", namespace="/a") == 1
    assert value(found, failures, model="lost", namespace="/b") == 1


def test_tritons_counters_can_be_stopped() -> None:
    model = Served("m", cached=True)
    site = Site(model, counters=False)
    model.run()
    found = site.samples()
    durations = [name for name in ("request", "queue", "compute_input", "compute_infer", "compute_output")]
    left_out = {*(f"nv_inference_{name}_duration_us" for name in durations), "nv_cache_num_hits_per_model"}
    assert left_out <= families(Site(model).text().decode()).keys()
    assert left_out.isdisjoint(families(site.text().decode()))
    assert of_model(found, "m", "nv_inference_request_success") == 0
    assert of_model(found, "m", "nv_inference_pending_request_count") == 3
    assert of_model(found, "m", "conch_request_duration_seconds_count") == 1


@pytest.mark.parametrize("openmetrics", [False, True])
def test_metrics_that_models_make_with_prometheus_client_are_there_too(openmetrics: bool) -> None:
    site = Site(Served("m"))
    Counter("theirs", "told", registry=site.others).inc(5)
    text = site.text(Format(openmetrics)).decode()
    found = samples(text, openmetrics)
    assert value(found, "theirs_total") == 5
    assert of_model(found, "m", "nv_inference_count") == 0
    assert text.endswith("# EOF\n") == openmetrics
    assert len(families(text, openmetrics)) > 20


def test_one_source_that_fails_does_not_take_the_others_with_it(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("no")

    class Broken:
        collect: Callable[[], None] = staticmethod(broken)

    site = Site(Served("m"), sources=[broken])  # type: ignore[list-item]
    site.others.register(Broken())  # type: ignore[arg-type]
    found = site.samples()
    assert of_model(found, "m", "nv_inference_count") == 0
    assert value(found, "conch_model_versions", state="READY") == 1
    assert len(caplog.records) == 2


def test_what_is_no_text_does_not_take_the_others_with_it() -> None:
    strange = Family("strange", "gauge", "half a \ud800 character")
    site = Site(Served("m"), sources=[lambda: [(strange, [sample("strange", 1, {"a": "\udfff"})])]])
    found = site.samples()
    assert value(found, "strange", a="?") == 1
    assert of_model(found, "m", "nv_inference_count") == 0


def test_compressed() -> None:
    site = Site(Served("m"))
    assert gzip.decompress(site.text(Format(compressed=True))) == site.text()


def test_a_thread_that_renders_steps_back_now_and_then() -> None:
    now, waits = 0, []

    def wait(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += 500_000

    yielder = GilYielder(lambda: now, wait)
    now = 10**9
    yielder.begin()
    yielder.yield_if_due()
    assert waits == []
    for _ in range(10):
        now += 700_000
        yielder.yield_if_due()
    assert len(waits) == 3, "each time after 2 ms of work"


def test_every_model_is_an_occasion_to_step_back() -> None:
    site = Site(*(Served(f"m{number}") for number in range(20)))
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    site.models.render(step)
    assert steps == 20


def test_no_model_is_kept_until_the_next_scrape() -> None:
    model = Served("m")
    site = Site(model)
    model.run()
    site.samples()
    gone = weakref.ref(model)
    site.registry.remove("m")
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("openmetrics", [False, True])
def test_metrics_of_others_with_our_names_are_left_out(
    openmetrics: bool, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(Served("m"))
    Counter("nv_inference_count", "not ours", registry=site.others).inc(5)
    Histogram("conch_requests_rejected", "not ours", registry=site.others).observe(1)
    Gauge("conch_batch_size_sum", "not ours", registry=site.others).set(7)
    Counter("theirs", "told", registry=site.others).inc(5)
    for _ in range(2):
        text = site.text(Format(openmetrics)).decode()
    assert "not ours" not in text and "theirs_total 5.0" in text
    families(text, openmetrics)
    assert len(caplog.messages) == 3


def test_models_on_one_gpu_say_which() -> None:
    def on(name: str, *groups: tuple[int, ...]) -> Served:
        model = Served(name)
        made = [InstanceGroup("g", "GPU" if gpus else "CPU", 1, gpus) for gpus in groups]
        model.spec = replace(model.spec, instance_groups=tuple(made))
        return model

    models = on("one", (1,), (1,)), on("two", (0, 1)), on("both", (1,), ()), on("none", ()), on("new", (7,))
    site = Site(*models, gpu_uuids=("GPU-a", "GPU-b"))
    found = site.samples()
    name = "nv_inference_request_success"
    assert of_model(found, "one", name, gpu_uuid="GPU-b") == 0
    assert f'{name}{{gpu_uuid="GPU-b",model="one",version="1"}} 0\n' in site.text().decode()
    assert [of_model(found, model.spec.name, name) for model in models] == [None, 0, 0, 0, 0]
    models[0].spec = replace(models[0].spec, instance_groups=(InstanceGroup("g", "GPU", 1, (0,)),))
    assert of_model(site.samples(), "one", name, gpu_uuid="GPU-a") == 0


def test_each_family_is_documented() -> None:
    """Also those that only some servers have; their types and labels are compared on a server."""
    (package,) = metrics.__path__
    texts = {
        node.value
        for path in (*Path(package).glob("*.py"), *ROOT.glob("control/**/*_metrics.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    named = {text for text in texts if re.fullmatch("(?:conch|nv)_[a-z0-9_]+", text)}
    documented = set(re.findall("`((?:conch|nv)_[a-z0-9_]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert len(named) > 60
    assert named - documented == set(), "docs/metrics.md lacks them"
    assert documented - named == set(), "there are no such metrics"
