"""`OtlpOptions`: how spans are exported, out of ``--trace-config opentelemetry,...`` and ``OTEL_*``.

No state. Used by: `open_tracing`, `otlp_exporter`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conch.observability.otlp.endpoint import (
    KEYS,
    TRACES,
    Given,
    OtlpEndpoint,
    QueueLimits,
    bad_option,
    pair,
    read_endpoint,
    server_resource,
    whole,
)

TRITON_LAYOUT, SEMCONV_LAYOUT = "triton", "semconv"

_BSP = {"bsp_max_queue_size": 2048, "bsp_schedule_delay": 5000, "bsp_max_export_batch_size": 512}
_KEYS = (
    *KEYS,
    *_BSP,
    "resource",
    "layout",
    "parent",
    "batch-spans",
    "return-header",
    "ratio",
)


@dataclass(frozen=True, slots=True)
class OtlpOptions:
    """How spans are exported.

    Attributes:
        endpoint: Where they go.
        limits: Of the queue of spans.
        resource: Attributes of the server.
        layout: ``triton`` for the span names and kinds of Triton, ``semconv`` for those of OpenTelemetry.
        follows_unsampled: Whether the span of a caller that is not sampled traces the request.
        batch_spans: Whether a batch of several requests has a span of its own.
        returns_traceparent: Whether responses name the root span of their request.
        ratio: The share of trace ids that are sampled in place of a rate; 0 for none.
        shown: The settings as Triton's trace setting RPC shows them.
    """

    endpoint: OtlpEndpoint
    limits: QueueLimits
    resource: Mapping[str, str | int]
    layout: str
    follows_unsampled: bool
    batch_spans: bool
    returns_traceparent: bool
    ratio: float
    shown: Mapping[str, tuple[str, ...]]


def otlp_options(
    pairs: Sequence[tuple[str, str]], environment: Mapping[str, str] = os.environ
) -> OtlpOptions:
    """The options of settings and variables.

    Args:
        pairs: Keys and values of ``--trace-config opentelemetry,<key>=<value>``.
        environment: Variables; empty ones count as not set.

    Raises:
        InvalidArgumentError: A setting or variable is wrong; the text names it.
    """
    given = Given("--trace-config opentelemetry,", pairs, _KEYS, environment)
    endpoint = read_endpoint(TRACES, given)
    numbers = {key: _number(given, key, default) for key, default in _BSP.items()}
    queue_size, batch_size = numbers["bsp_max_queue_size"], numbers["bsp_max_export_batch_size"]
    if batch_size > queue_size:
        found = given.find("bsp_max_export_batch_size", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE")
        if found is not None:
            reason = f"it must not be above bsp_max_queue_size ({queue_size}), got: {batch_size}"
            raise bad_option(found[0], reason)
        batch_size = numbers["bsp_max_export_batch_size"] = queue_size
    if not numbers["bsp_schedule_delay"]:
        batch_size = 1  # spans that wait for no others are exported one by one
    pick = given.pick
    resources = [pair(f"{given.name('resource')}={text}", text) for text in given.all("resource")]
    shown: dict[str, tuple[str, ...]] = {"url": (endpoint.url.geturl(),)}
    if resources:
        shown["resource"] = tuple(given.all("resource"))
    if ratio := given.all("ratio"):
        shown["ratio"] = (ratio[-1],)
    return OtlpOptions(
        endpoint=endpoint,
        limits=QueueLimits(queue_size, batch_size, numbers["bsp_schedule_delay"] / 1000),
        resource={**server_resource(environment), **dict(resources)},
        layout=pick("layout", (), TRITON_LAYOUT, (TRITON_LAYOUT, SEMCONV_LAYOUT)),
        follows_unsampled=pick("parent", (), "sampled", ("sampled", "always")) == "always",
        batch_spans=pick("batch-spans", (), "false", ("true", "false")) == "true",
        returns_traceparent=pick("return-header", (), "false", ("true", "false")) == "true",
        ratio=given.convert("ratio", (), 0.0, _share),
        shown={**shown, **{key: (str(number),) for key, number in numbers.items()}},
    )


def _number(given: Given, key: str, default: int) -> int:
    least = 0 if key == "bsp_schedule_delay" else 1
    return given.convert(key, (f"OTEL_{key.upper()}",), default, whole(least))


def _share(text: str) -> float:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?(e-[0-9]+)?", text, re.ASCII) or float(text) > 1:
        raise ValueError("it must be a number from 0 to 1, such as 0.01")
    return float(text)
