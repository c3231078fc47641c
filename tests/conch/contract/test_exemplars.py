"""Buckets of histograms name a traced request that they counted."""

from __future__ import annotations

from pathlib import Path

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests.support.servers import eventually, free_port, serving
from tests.support.traced_models import write_models

_OPENMETRICS = {"Accept": "application/openmetrics-text"}
_BODY = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}]}
_DURATIONS = ("request", "queue", "compute_input", "compute_infer", "compute_output")


def test_exemplars_are_in_their_bucket_and_name_the_last_trace(tmp_path: Path) -> None:
    flags = [
        "--trace-config=mode=opentelemetry",
        f"--trace-config=opentelemetry,url=localhost:{free_port()}",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=1000000",
    ]
    with serving(write_models(tmp_path), flags=flags) as server:
        address = server.metrics_url
        ids = [f"{number:032x}" for number in range(1, 9)]
        for trace_id in ids:
            parent = {"traceparent": f"00-{trace_id}-00000000000000ab-01"}
            asked = httpx.post(
                f"http://{server.http_address}/v2/models/ensemble/infer", json=_BODY, headers=parent
            )
            assert asked.status_code == 200

        def found() -> set[tuple[str, str]]:
            """Families and models that name the last trace; each exemplar is in its bucket."""
            names = set()
            text = httpx.get(address, headers=_OPENMETRICS).text
            for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
                lower = 0.0
                for sample in family.samples:
                    if not sample.name.endswith("_bucket"):
                        lower = 0.0
                    elif sample.exemplar is not None:
                        assert lower <= sample.exemplar.value <= float(sample.labels["le"])
                        assert sample.value >= 1
                        assert sample.exemplar.labels["trace_id"] in ids
                        if sample.exemplar.labels["trace_id"] == ids[-1]:
                            names.add((family.name, sample.labels["model"]))
                    if sample.name.endswith("_bucket"):
                        lower = float(sample.labels["le"])
            return names

        wanted = {(f"conch_{name}_duration_seconds", "leaf") for name in _DURATIONS}
        wanted.add(("conch_request_duration_seconds", "ensemble"))
        eventually(lambda: found() >= wanted, "all histograms name the last trace")
        assert found() == wanted
        assert "trace_id" not in httpx.get(address).text
