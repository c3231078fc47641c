"""Renders all metrics as one text, in Prometheus' or OpenMetrics format.

Threads: one at a time.
"""

from __future__ import annotations

import logging
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import prometheus_client
from prometheus_client import Metric
from prometheus_client import exposition as plain
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from conch.core.clock import Clock, monotonic_ns
from conch.core.custom_metrics import family_names
from conch.observability.metrics.metric_families import Family
from conch.observability.metrics.model_metrics import ModelMetrics

log = logging.getLogger(__name__)

TEXT_TYPE = "text/plain; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_END = b"# EOF\n"
_FAST = 1
_GZIP = zlib.MAX_WBITS | 16
_SLICE_NS = 2_000_000
_BREAK_S = 0.0005
_WHOLE_BOUND = re.compile(r'([{,]le="[0-9]+)"} ')
"""A whole bound: ``1.0`` in OpenMetrics, ``1`` in Triton."""


Source = Callable[[], list[tuple[Family, list[str]]]]
"""Returns families with their samples."""


@dataclass(frozen=True, slots=True)
class Format:
    """The format of a response: OpenMetrics or Prometheus' text, with gzip or without."""

    openmetrics: bool = False
    compressed: bool = False

    @property
    def content_type(self) -> str:
        """The media type."""
        return OPENMETRICS_TYPE if self.openmetrics else TEXT_TYPE


class GilYielder:
    """Makes a computing thread yield the GIL every 2 ms.

    Python switches from a computing thread only after 5 ms, each time another thread becomes runnable, which
    happens several times in a request. A short wait costs a scrape a few milliseconds and delays no request.
    """

    def __init__(self, clock: Clock = monotonic_ns, wait: Callable[[float], object] | None = None) -> None:
        self._clock = clock
        self._wait = threading.Event().wait if wait is None else wait
        self._since = clock()

    def begin(self) -> None:
        """Starts a computation."""
        self._since = self._clock()

    def yield_if_due(self) -> None:
        """Yields after 2 ms; call between short pieces of work."""
        if self._clock() - self._since >= _SLICE_NS:
            self._wait(_BREAK_S)
            self._since = self._clock()


class Polled:
    """Caches a source: a scrape reads it again once the last result is older than the interval."""

    def __init__(self, source: Source, interval_ns: int, clock: Clock = monotonic_ns) -> None:
        self._source = source
        self._interval_ns = interval_ns
        self._clock = clock
        self._found: list[tuple[Family, list[str]]] | None = None
        self._read_ns = 0

    def __call__(self) -> list[tuple[Family, list[str]]]:
        """The families with their samples."""
        now = self._clock()
        if self._found is None or now - self._read_ns >= self._interval_ns:
            self._found = self._source()
            self._read_ns = now
        return self._found


class Exposition:
    """Renders the metrics of models, of other sources and of prometheus_client's registry.

    That registry holds the metrics of the process and of models that use prometheus_client.
    """

    def __init__(
        self,
        models: ModelMetrics,
        sources: Sequence[Source],
        registry: Collector = prometheus_client.REGISTRY,
    ) -> None:
        self._models = models
        self._sources = sources
        self._registry = registry
        self._yielder = GilYielder()
        self._left_out: set[str] = set()

    def render(self, wanted: Format) -> list[bytes]:
        """All metrics in pieces; joining megabytes would block all threads for milliseconds."""
        self._yielder.begin()
        taken: set[str] = set()
        parts = [*self._render_own(wanted.openmetrics, taken)]
        parts.append(self._others(wanted.openmetrics, taken))
        if wanted.openmetrics:
            parts.append(_END)
        return _compressed(parts) if wanted.compressed else parts

    def _render_own(self, in_openmetrics: bool, taken: set[str]) -> Iterable[bytes]:
        found = self._models.render(self._yielder.yield_if_due, with_exemplars=in_openmetrics)
        for source in self._sources:
            try:
                found += source()
            except Exception:  # the boundary of a source: one that fails must not hide the others
                log.exception("some metrics can't be had")
        for family, pieces in found:
            taken |= family_names(family.name, family.kind)
            if pieces:
                yield _text(family, pieces, in_openmetrics)
                self._yielder.yield_if_due()

    def _others(self, in_openmetrics: bool, taken: Set[str]) -> bytes:
        generate = openmetrics.generate_latest if in_openmetrics else plain.generate_latest
        try:
            return bytes(generate(_RegistryFamilies(self._registry, taken, self._left_out))).removesuffix(
                _END
            )
        except Exception:  # user code: collectors of models
            log.exception("the metrics in prometheus_client's registry can't be had")
            return b""


class _RegistryFamilies:
    """The families of a registry without those whose name is taken by a family of conch.

    Logs each left-out family once; `left_out` remembers their names.
    """

    def __init__(self, registry: Collector, taken: Set[str], left_out: set[str]) -> None:
        self._registry = registry
        self._left_out = left_out
        self._taken = taken

    def collect(self) -> Iterator[Metric]:
        """The families."""
        for family in self._registry.collect():
            names = family_names(family.name, family.type) | {sample.name for sample in family.samples}
            if names.isdisjoint(self._taken):
                yield family
            elif family.name not in self._left_out:
                self._left_out.add(family.name)
                log.warning(
                    "'%s' in prometheus_client's registry is left out: its name is taken", family.name
                )


def _compressed(parts: Iterable[bytes]) -> list[bytes]:
    compressor = zlib.compressobj(_FAST, wbits=_GZIP)
    return [*map(compressor.compress, parts), compressor.flush()]


def _text(family: Family, pieces: Sequence[str], in_openmetrics: bool) -> bytes:
    text = "".join(pieces)
    if in_openmetrics and family.kind == "histogram":
        text = _WHOLE_BOUND.sub(r'\1.0"} ', text)
    # Help and labels of a model's metrics may not be valid text.
    return (family.header(in_openmetrics) + text).encode(errors="replace")
