"""The GPU gauges of a server's metrics port while a load runs."""

from __future__ import annotations

import http.client
import threading
import urllib.error
import urllib.request
from types import TracebackType

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 5.0
_MEANS = {"nv_gpu_utilization": "gpu_utilization", "nv_gpu_power_usage": "gpu_power"}
_HIGHEST = {"nv_gpu_memory_used_bytes": "gpu_memory_used"}
_FIRST = {"nv_gpu_memory_total_bytes": "gpu_memory_total"}


class GpuMetrics:
    """Reads the gauges on a thread, as long as it is entered.

    Unreadable gauges are left out: a server without GPUs has none.

    Args:
        url: Address of the metrics port, with http:// or without.
        interval_s: Seconds between two reads.
    """

    def __init__(self, url: str, interval_s: float) -> None:
        self._url = url if "://" in url else f"http://{url}"
        self._interval_s = interval_s
        self._samples: dict[tuple[str, str], list[float]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-metrics")

    def __enter__(self) -> GpuMetrics:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def found(self) -> dict[str, float]:
        """Mean utilization and power, highest memory in use and all memory, by ``name:UUID``."""
        found = {}
        for (gauge, gpu), values in self._samples.items():
            if gauge in _MEANS:
                found[f"{_MEANS[gauge]}:{gpu}"] = sum(values) / len(values)
            elif gauge in _HIGHEST:
                found[f"{_HIGHEST[gauge]}:{gpu}"] = max(values)
            else:
                found[f"{_FIRST[gauge]}:{gpu}"] = values[0]
        return found

    def _run(self) -> None:
        while True:
            self._read()
            if self._over.wait(self._interval_s):
                return

    def _read(self) -> None:
        try:
            with urllib.request.urlopen(self._url, timeout=_TIMEOUT_S) as response:
                families = list(text_string_to_metric_families(response.read().decode()))
        except urllib.error.HTTPError as error:
            error.close()  # it has the connection
            return
        except (OSError, http.client.HTTPException, ValueError):
            return
        for family in families:
            if family.name in _MEANS or family.name in _HIGHEST or family.name in _FIRST:
                for sample in family.samples:
                    values = self._samples.setdefault((family.name, sample.labels.get("gpu_uuid", "")), [])
                    values.append(sample.value)
