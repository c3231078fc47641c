"""What a model's config says of its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

_FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
_USUAL_MS = (100.0, 500.0, 2000.0, 5000.0)


def first_response_buckets(config: Mapping[str, Any]) -> tuple[float, ...]:
    """Upper bounds in milliseconds of the buckets of Triton's histogram of first responses.

    Args:
        config: A model's config in JSON; ``model_metrics`` may have others than the usual ones.
    """
    for control in config.get("model_metrics", {}).get("metric_control", ()):
        if control.get("metric_identifier", {}).get("family") == _FIRST_RESPONSE:
            buckets = control["histogram_options"]["buckets"]
            return tuple(sorted({value for bucket in buckets if isfinite(value := float(bucket))}))
    return _USUAL_MS
