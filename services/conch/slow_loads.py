"""Says what loads are doing that take long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from conch.core.clock import wall_seconds
from conch_control.lifecycle.version_phase import Phase
from conch_control.lifecycle.version_states import UNFINISHED
from conch_control.port import ModelStatus, VersionStatus

log = logging.getLogger(__name__)

_EVERY_S = 10.0
_DOING = {
    Phase.STAGING: "its files are fetched",
    Phase.LOADING: "its environment, backend and instances are made",
    Phase.WARMING: "its warm-up samples run",
}


class SlowLoads:
    """Logs now and then, while it is entered, which loads have not ended and what they are doing.

    Args:
        loads: Gives the models that are being loaded.
        every_s: How often, in seconds.
    """

    def __init__(self, loads: Callable[[], Iterable[ModelStatus]], every_s: float = _EVERY_S) -> None:
        self._loads = loads
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conch-slow-loads", daemon=True)

    def __enter__(self) -> SlowLoads:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            for model in self._loads():
                for version in model.versions:
                    if version.phase in UNFINISHED and not self._ended.is_set():
                        log.info(
                            "still loading '%s' version %d: %s", model.name, version.version, _doing(version)
                        )


def _doing(version: VersionStatus) -> str:
    part = ""
    if version.phase is Phase.STAGING and version.total_bytes > 0:
        part = f", {100 * version.done_bytes // version.total_bytes} % of {version.total_bytes:,} bytes"
    return f"{_DOING[version.phase]}{part}, for {max(wall_seconds() - version.seconds, 0.0):.0f} s so far"
