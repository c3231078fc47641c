"""`MetricsExport`: hands what a scrape would show to an exporter, at intervals."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from conch.observability.exporters import EXPORT_REASONS, DropCounter, Exporter, ExportOptions, Scrape

log = logging.getLogger(__name__)


class MetricsExport:
    """Exports metrics on the thread ``conch-metrics-export``; `start` and `close` are for one thread.

    Args:
        options: Interval and exporter.
        scrape: Gives Prometheus' text; may raise.

    Attributes:
        exporter: Sends them.

    Raises:
        ConchError: The exporter can't be opened.
    """

    def __init__(self, options: ExportOptions, scrape: Callable[[], str]) -> None:
        self.exporter: Exporter[Scrape] = options.open_exporter(DropCounter(EXPORT_REASONS))
        self._interval_s = options.interval_s
        self._scrape = scrape
        self._start_ns = time.time_ns()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conch-metrics-export", daemon=True)

    def start(self) -> None:
        """Begins to export."""
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Makes the last export, as long as the models are there."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def close(self, deadline_s: float) -> None:
        """Sends what waits until a monotonic time, and ends."""
        self.finish(max(deadline_s - time.monotonic(), 0.0))
        self.exporter.close(deadline_s)

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        try:
            text = self._scrape()
            self.exporter.export([Scrape(text, self._start_ns, time.time_ns())])
        except Exception:  # the top of the thread, which has to go on
            log.exception("the metrics can't be exported")
