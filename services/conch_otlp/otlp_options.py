"""Reads how a signal is exported, out of flags and ``OTEL_*``; has the entry point of ``conch.exporters``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from conch.core.errors import UnavailableError
from conch.observability.exporters import METRICS, TRACES, DropCounter, ExportOptions, SpanOptions
from conch_otlp.endpoint import (
    GRPC,
    KEYS,
    Given,
    OtlpEndpoint,
    QueueLimits,
    bad_option,
    pair,
    read_endpoint,
    server_resource,
    whole,
)

if TYPE_CHECKING:
    from conch_otlp.otlp_exporter import OtlpExporter

FIRST_PAUSE_S = 1.0
"""Before the second try of an export."""

_TRITON, _SEMCONV = "triton", "semconv"
_BSP = {"bsp_max_queue_size": 2048, "bsp_schedule_delay": 5000, "bsp_max_export_batch_size": 512}
_TRACE_KEYS = (*KEYS, *_BSP, "resource", "layout", "parent", "batch-spans", "return-header", "ratio")
# So many data points are far below the limit of bytes.
_METRICS_LIMITS = QueueLimits(queue_size=200_000, batch_size=5000, delay_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpOptions(ExportOptions):
    """Options of a signal's export.

    Attributes:
        endpoint: Address of the collector.
        limits: Limits of the queue.
        attributes: Attributes of the server that were given by flags.
        environment: Environment variables, which have further attributes.
        semconv: True if spans have the names and kinds of OpenTelemetry's conventions, else Triton's.
    """

    endpoint: OtlpEndpoint
    limits: QueueLimits
    attributes: Mapping[str, str]
    environment: Mapping[str, str]
    semconv: bool = False

    @property
    def resource(self) -> dict[str, str | int]:
        """All attributes of the server. Raises InvalidArgumentError: a variable is wrong."""
        return {**server_resource(self.environment), **self.attributes}

    def open_exporter(
        self, drops: DropCounter, first_pause_s: float = FIRST_PAUSE_S
    ) -> OtlpExporter[Any, Any]:
        """Opens the exporter; it connects with the first export.

        Args:
            drops: Counts lost items.
            first_pause_s: Before the second try of an export; it doubles with each further one.

        Raises:
            UnavailableError: The package of the messages is missing.
            InvalidArgumentError: The certificate or a variable can't be used.
        """
        signal = self.endpoint.signal
        resource = self.resource
        encoder: Any
        try:  # the package of the messages is an extra
            from conch_otlp.otlp_exporter import OtlpExporter

            if signal == TRACES:
                from conch_otlp.span_encoder import SpanEncoder

                encoder = SpanEncoder(resource, self.semconv)
            elif signal == METRICS:
                from conch_otlp.metric_encoder import MetricEncoder

                encoder = MetricEncoder(resource)
            else:
                from conch_otlp.log_encoder import LogEncoder

                encoder = LogEncoder(resource)
        except ModuleNotFoundError as error:
            raise UnavailableError(
                f"the export of {signal} needs a package that is missing ({error.name}): "
                "pip install 'conch[opentelemetry]'"
            ) from None
        return OtlpExporter(self.endpoint, self.limits, encoder, drops, first_pause_s)


def otlp_options(
    signal: str, settings: Sequence[tuple[str, str]], environment: Mapping[str, str] = os.environ
) -> OtlpOptions:
    """Checks the settings of the export of a signal; `conch.observability.exporters.read_export` calls it.

    Args:
        signal: One of the signals of `exporters`.
        settings: Keys and values of ``--trace-config opentelemetry,<key>=<value>``, or ``url`` with the value
            of ``--otlp-<signal>-url``.
        environment: Variables; empty ones count as not set.

    Raises:
        InvalidArgumentError: A setting or variable is wrong; the text names it.
    """
    if signal == TRACES:
        return _trace_options(Given("--trace-config opentelemetry,", settings, _TRACE_KEYS, environment))
    given = Given(f"--otlp-{signal}-", settings, KEYS, environment)
    endpoint = read_endpoint(signal, given)
    if endpoint.protocol != GRPC and endpoint.url.path in ("", "/"):
        endpoint = replace(endpoint, url=endpoint.url._replace(path=f"/v1/{signal}"))
    options = OtlpOptions(endpoint=endpoint, limits=QueueLimits(), attributes={}, environment=environment)
    if signal == METRICS:
        interval_ms = given.convert("interval", ("OTEL_METRIC_EXPORT_INTERVAL",), 60_000, whole(1))
        options = replace(options, limits=_METRICS_LIMITS, interval_s=interval_ms / 1000)
    return options


def _trace_options(given: Given) -> OtlpOptions:
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
    shown: dict[str, tuple[str, ...]] = {"url": ((given.all("url") or [endpoint.url.geturl()])[-1],)}
    if resources:
        shown["resource"] = tuple(given.all("resource"))
    if ratio := given.all("ratio"):
        shown["ratio"] = (ratio[-1],)
    return OtlpOptions(
        endpoint=endpoint,
        limits=QueueLimits(queue_size, batch_size, numbers["bsp_schedule_delay"] / 1000),
        attributes=dict(resources),
        environment=given.environment,
        semconv=pick("layout", (), _TRITON, (_TRITON, _SEMCONV)) == _SEMCONV,
        spans=SpanOptions(
            follows_unsampled=pick("parent", (), "sampled", ("sampled", "always")) == "always",
            batch_spans=pick("batch-spans", (), "false", ("true", "false")) == "true",
            returns_traceparent=pick("return-header", (), "false", ("true", "false")) == "true",
            ratio=given.convert("ratio", (), 0.0, _share),
            shown={**shown, **{key: (str(number),) for key, number in numbers.items()}},
        ),
    )


def _number(given: Given, key: str, default: int) -> int:
    least = 0 if key == "bsp_schedule_delay" else 1
    return given.convert(key, (f"OTEL_{key.upper()}",), default, whole(least))


def _share(text: str) -> float:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?(e-[0-9]+)?", text, re.ASCII) or float(text) > 1:
        raise ValueError("it must be a number from 0 to 1, such as 0.01")
    return float(text)
