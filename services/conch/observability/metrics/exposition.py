"""All metrics as one text, in either format."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import prometheus_client
from prometheus_client import Metric
from prometheus_client import exposition as plain
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from conch.core.custom_metrics import family_names
from conch.observability.metrics.breaks import Breaks
from conch.observability.metrics.models import ModelMetrics
from conch.observability.metrics.polled import Source
from conch.observability.metrics.text import Family

log = logging.getLogger(__name__)

TEXT_TYPE = "text/plain; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_END = b"# EOF\n"
_FAST = 1
_GZIP = zlib.MAX_WBITS | 16
_WHOLE_BOUND = re.compile(r'([{,]le="[0-9]+)"} ')
"""A bound that OpenMetrics wants with a fraction (``1.0``) and Triton writes without (``1``)."""


@dataclass(frozen=True, slots=True)
class Format:
    """What a client wants the metrics as.

    Attributes:
        openmetrics: Whether in OpenMetrics; else in Prometheus' text format.
        compressed: Whether with gzip.
    """

    openmetrics: bool = False
    compressed: bool = False

    @property
    def content_type(self) -> str:
        """The media type."""
        return OPENMETRICS_TYPE if self.openmetrics else TEXT_TYPE


class Exposition:
    """Renders all metrics; one thread at a time may.

    Args:
        models: Those of models.
        sources: Others of the server.
        registry: Those of prometheus_client: of the process, and whatever models define with it.
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
        self._breaks = Breaks()
        self._left_out: set[str] = set()

    def render(self, wanted: Format) -> list[bytes]:
        """All metrics, in pieces: to join megabytes would hold up all threads for milliseconds."""
        self._breaks.begin()
        taken: set[str] = set()
        parts = [*self._own(wanted.openmetrics, taken)]
        parts.append(self._others(wanted.openmetrics, taken))
        if wanted.openmetrics:
            parts.append(_END)
        return _compressed(parts) if wanted.compressed else parts

    def _own(self, in_openmetrics: bool, taken: set[str]) -> Iterable[bytes]:
        found = self._models.render(self._breaks.step)
        for source in self._sources:
            try:
                found += source()
            except Exception:  # one that fails must not take the others with it
                log.exception("some metrics can't be had")
        for family, pieces in found:
            taken |= family_names(family.name, family.kind)
            if pieces:
                yield _text(family, pieces, in_openmetrics)
                self._breaks.step()

    def _others(self, in_openmetrics: bool, taken: Set[str]) -> bytes:
        generate = openmetrics.generate_latest if in_openmetrics else plain.generate_latest
        try:
            return bytes(generate(_Others(self._registry, taken, self._left_out))).removesuffix(_END)
        except Exception:  # a collector of a model's, for instance
            log.exception("the metrics in prometheus_client's registry can't be had")
            return b""


class _Others:
    """What there is in a registry but families that have names of ours: nobody could tell them apart.

    Args:
        registry: The registry.
        taken: Our names.
        left_out: Names of families that have been left out before; others are told of.
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
    # What a model says of its own metrics may not even be text.
    return (family.header(in_openmetrics) + text).encode(errors="replace")
