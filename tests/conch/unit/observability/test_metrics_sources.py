"""Processors, memory and GPUs, what is read how often, and what clients ask for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.metrics import samples, value

from conch.core.errors import InvalidArgumentError
from conch.core.load_statistics import LoadStatistics
from conch.core.registry import Registry
from conch.core.response_cache.local_cache import LocalCache
from conch.observability.metrics.gpu_metrics import open_gpus
from conch.observability.metrics.machine_metrics import (
    CpuTimes,
    MachineMetrics,
    parse_cpu_times,
    parse_memory,
)
from conch.observability.metrics.metrics_app import wanted_format
from conch.observability.metrics.metrics_exposition import Format, Polled, Source
from conch.observability.metrics.metrics_options import LatencyMetrics, MetricsOptions, read_latency_metrics
from conch.observability.metrics.server_metrics import StateMetrics

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


def told(source: Source) -> dict[Any, float]:
    return samples("".join(f.header(False) + "".join(pieces) for f, pieces in source()))


def test_cpu_and_memory(tmp_path: Path) -> None:
    stat, meminfo = tmp_path / "stat", tmp_path / "meminfo"
    stat.write_text("cpu  10 0 10 70 10 0 0 0 5 5\ncpu0 1 2 3 4 5 6 7 8\n")
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n")
    source = MachineMetrics(tmp_path)
    stat.write_text("cpu  40 0 10 120 30 0 0 0 25 5\n")
    found = told(source)
    assert value(found, "nv_cpu_utilization") == pytest.approx(0.3)
    assert value(found, "nv_cpu_memory_total_bytes") == 1_024_000
    assert value(found, "nv_cpu_memory_used_bytes") == 614_400
    assert value(told(source), "nv_cpu_utilization") == 0, "no time has passed"


@pytest.mark.parametrize("text", ["", "cpu", "cpu 1 2", "intr 1 2 3 4 5 6", "cpu a b c d e"])
def test_what_cannot_be_read_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "stat").write_text(text)
    with pytest.raises(ValueError):
        parse_cpu_times(text)
    with pytest.raises(ValueError):
        parse_memory("MemTotal: 1000 kB\n")
    assert MachineMetrics(tmp_path)() == []


def test_a_counter_that_goes_back_is_no_load() -> None:
    assert CpuTimes(5, 10).utilization_since(CpuTimes(4, 12)) == 0
    assert CpuTimes(1, 20).utilization_since(CpuTimes(4, 12)) == 1


class FakeNvml(SimpleNamespace):
    """A management library with two GPUs, the second of which tells little."""

    class NVMLError(Exception):
        """Error of the real module."""

    def __init__(self, works: bool = True) -> None:
        super().__init__(works=works, joules=5_000_000, open=0)

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetUUID(self, gpu: int) -> str | bytes:
        return b"GPU-b" if gpu else "GPU-a"

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return SimpleNamespace(gpu=25 + gpu)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(total=1000, used=100)

    def _only_of_the_first(self, gpu: int, number: int) -> int:
        if gpu:
            raise self.NVMLError("Not Supported")
        return number

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return self._only_of_the_first(gpu, 50_500)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: int) -> int:
        return self._only_of_the_first(gpu, 300_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:
        return self._only_of_the_first(gpu, self.joules)


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpus = open_gpus()
    assert gpus is not None
    nvml.joules += 7_500
    found = told(gpus)
    first = {
        "nv_gpu_utilization": 0.25,
        "nv_gpu_memory_total_bytes": 1000,
        "nv_gpu_memory_used_bytes": 100,
        "nv_gpu_power_usage": 50.5,
        "nv_gpu_power_limit": 300,
        "nv_energy_consumption": 7.5,
    }
    assert {name: value(found, name, gpu_uuid="GPU-a") for name in first} == first
    assert value(found, "nv_gpu_utilization", gpu_uuid="GPU-b") == 0.26
    assert value(found, "nv_gpu_power_usage", gpu_uuid="GPU-b") is None
    assert gpus.loads() == [
        {"uuid": "GPU-a", "use": 0.25, "used": 100, "total": 1000},
        {"uuid": "GPU-b", "use": 0.26, "used": 100, "total": 1000},
    ]
    gpus.close()
    assert nvml.open == 0


def test_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(works=False))
    assert open_gpus() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ImportError):
        importlib.import_module("pynvml")
    assert open_gpus() is None


def test_nothing_is_read_more_often_than_the_interval() -> None:
    now, reads = 0, 0

    def source() -> list[Any]:
        nonlocal reads
        reads += 1
        return [reads]

    polled: Any = Polled(source, 100, lambda: now)
    assert reads == 0, "nothing is read for nobody"
    assert [polled(), polled()] == [[1], [1]]
    now = 99
    assert polled() == [1]
    now = 100
    assert polled() == [2]


def test_cache_and_regions() -> None:
    cache = LocalCache(10_000, clock=iter(range(0, 10**9, 1_000)).__next__)
    cache.insert(b"k", b"v", 0)
    cache.lookup(b"k")
    cache.lookup(b"other")
    regions: dict[str, list[int]] = {
        "system": [10, 5],
        "cuda": [],
    }
    found = told(StateMetrics(Registry(), LoadStatistics().snapshot, cache.snapshot, lambda: regions))
    expected = {
        "nv_cache_num_entries": 1,
        "nv_cache_num_lookups": 2,
        "nv_cache_num_hits": 1,
        "nv_cache_num_misses": 1,
        "nv_cache_lookup_duration": 2,
        "nv_cache_insertion_duration": 1,
        "conch_cache_capacity_bytes": 10_000,
    }
    assert {name: value(found, name) for name in expected} == expected
    assert value(found, "nv_cache_util") == cache.snapshot().utilization
    assert value(found, "conch_shared_memory_region_bytes", kind="system") == 15
    assert value(found, "conch_shared_memory_regions", kind="system") == 2
    assert value(found, "conch_shared_memory_region_bytes", kind="cuda") == 0


@pytest.mark.parametrize(
    ("accept", "coding", "expected"),
    [
        ("", "", Format()),
        ("*/*", "identity", Format()),
        ("text/plain", "gzip, deflate", Format(compressed=True)),
        (PROMETHEUS, "gzip", Format(True, True)),
        ("application/openmetrics-text", "gzip;q=0", Format(True)),
        ("text/plain, application/openmetrics-text;q=0.9", "*", Format(compressed=True)),
        ("application/openmetrics-text; version=1.0.0; q=0", "br", Format()),
        ("application/openmetrics-text;q=no, */*;q=0.1", "gzip;q=x", Format()),
        (",;,", ";", Format()),
    ],
)
def test_the_format_that_clients_ask_for(accept: str, coding: str, expected: Format) -> None:
    assert wanted_format(accept, coding) == expected


def test_metrics_config() -> None:
    assert read_latency_metrics([]) == LatencyMetrics(True, False, ())
    settings = ["counter_latencies=on", "summary_latencies=false", "summary_quantiles=0.5:0.05"]
    assert read_latency_metrics(settings) == LatencyMetrics(True, False, ())
    off = ["counter_latencies=false", "histogram_latencies=0"]
    assert read_latency_metrics(off) == LatencyMetrics(False, False, ())
    assert read_latency_metrics(["histogram_latencies=on"]) == LatencyMetrics(True, True, ())
    assert read_latency_metrics(["summary_latencies=true"]).quantiles == (0.5, 0.9, 0.95, 0.99, 0.999)
    chosen = ["summary_quantiles=0.9:0.01,0.25:0.5", "summary_latencies=1"]
    assert read_latency_metrics(chosen).quantiles == (0.25, 0.9)
    as_triton_tests = ["summary_latencies=true", "summary_quantiles=0.1:0.0.1,0.7:0.01,0.75:0.01"]
    assert read_latency_metrics(as_triton_tests).quantiles == (0.1, 0.7, 0.75)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("x", "--metrics-config option format is '<setting>=<value>'. Got x"),
        ("=1", "--metrics-config option format is '<setting>=<value>'. Got =1"),
        ("prometheus,a=1", "--metrics-config option format is '<setting>=<value>'. Got prometheus,a=1"),
        ("summaries=true", "--metrics-config: unknown setting 'summaries'; there are counter_latencies, "),
        ("counter_latencies=2", "--metrics-config: counter_latencies must be true or false, got '2'"),
        (
            "summary_quantiles=0.5",
            "--metrics-config: summary_quantiles must be <quantile>:<error>,..., both ",
        ),
        ("summary_quantiles=1.5:0.1", "--metrics-config: summary_quantiles must be <quantile>:<error>,..., "),
        ("summary_quantiles=nan:0.1", "--metrics-config: summary_quantiles must be <quantile>:<error>,..., "),
    ],
)
def test_metrics_config_that_cannot_be(setting: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read_latency_metrics([setting])
    assert str(caught.value).startswith(text)


def test_target() -> None:
    assert (
        MetricsOptions(address="::1", port=1).target
        == MetricsOptions(address="[::1]", port=1).target
        == "[::1]:1"
    )
    assert MetricsOptions().target == "0.0.0.0:8002"
