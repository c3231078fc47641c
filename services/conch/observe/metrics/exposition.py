"""All metrics as one text, in either format."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import prometheus_client
from prometheus_client import exposition as plain
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from conch.observe.metrics.breaks import Breaks
from conch.observe.metrics.models import ModelMetrics
from conch.observe.metrics.polled import Source
from conch.observe.metrics.text import Family

log = logging.getLogger(__name__)

TEXT_TYPE = "text/plain; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_END = b"# EOF\n"
_FAST = 1
_GZIP = zlib.MAX_WBITS | 16


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

    def render(self, wanted: Format) -> list[bytes]:
        """All metrics, in pieces: to join megabytes would hold up all threads for milliseconds."""
        self._breaks.begin()
        parts = [*self._own(wanted.openmetrics), self._others(wanted.openmetrics)]
        if wanted.openmetrics:
            parts.append(_END)
        return _compressed(parts) if wanted.compressed else parts

    def _own(self, in_openmetrics: bool) -> Iterable[bytes]:
        found = self._models.render(self._breaks.step)
        for source in self._sources:
            try:
                found += source()
            except Exception:  # one that fails must not take the others with it
                log.exception("some metrics can't be had")
        for family, pieces in found:
            if pieces:
                yield _text(family, pieces, in_openmetrics)
                self._breaks.step()

    def _others(self, in_openmetrics: bool) -> bytes:
        generate = openmetrics.generate_latest if in_openmetrics else plain.generate_latest
        try:
            return bytes(generate(self._registry)).removesuffix(_END)
        except Exception:  # a collector of a model's, for instance
            log.exception("the metrics in prometheus_client's registry can't be had")
            return b""


def _compressed(parts: Iterable[bytes]) -> list[bytes]:
    compressor = zlib.compressobj(_FAST, wbits=_GZIP)
    return [*map(compressor.compress, parts), compressor.flush()]


def _text(family: Family, pieces: Sequence[str], in_openmetrics: bool) -> bytes:
    # What a model says of its own metrics may not even be text.
    return (family.header(in_openmetrics) + "".join(pieces)).encode(errors="replace")
