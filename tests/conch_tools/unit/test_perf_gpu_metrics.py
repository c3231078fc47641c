"""GPU gauges that are read while a load runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.waiting import PATIENCE_S

from conch_tools.perf.gpu_metrics import GpuMetrics

_TEXT = """# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{{gpu_uuid="GPU-1"}} {0}
# TYPE nv_gpu_memory_used_bytes gauge
nv_gpu_memory_used_bytes{{gpu_uuid="GPU-1"}} {1}
# TYPE nv_gpu_memory_total_bytes gauge
nv_gpu_memory_total_bytes{{gpu_uuid="GPU-1"}} 100
# TYPE nv_energy_consumption counter
nv_energy_consumption{{gpu_uuid="GPU-1"}} 5
"""
_SEEN = [(0.5, 40), (0.25, 60), (0.75, 50)]


@contextmanager
def _port() -> Iterator[tuple[str, threading.Event]]:
    reads = iter(_SEEN)
    all_read = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            values = next(reads, None)
            if values is None:
                all_read.set()
                self.send_error(503)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(_TEXT.format(*values).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}/metrics", all_read
        server.shutdown()
        thread.join()


def test_aggregates_the_gauges_of_a_load() -> None:
    with _port() as (url, all_read), GpuMetrics(url, 0.001) as gpus:
        assert all_read.wait(PATIENCE_S)
    assert gpus.found() == {
        "gpu_utilization:GPU-1": 0.5,
        "gpu_memory_used:GPU-1": 60,
        "gpu_memory_total:GPU-1": 100,
    }


def test_a_port_that_does_not_answer_has_none() -> None:
    with GpuMetrics("http://127.0.0.1:1/metrics", 0.001) as gpus:
        pass
    assert gpus.found() == {}
