"""Threads of a connection for what may block."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


def run_on_thread(name: str, work: Callable[[], object]) -> bool:
    """Runs work of an instance on a thread of its own; False if none can be started."""

    def run() -> None:
        try:
            work()
        except Exception:  # boundary: the top of a thread
            log.exception("work for the worker of '%s' failed", name)

    try:
        threading.Thread(target=run, name=f"conch-{name}-blocking", daemon=True).start()
    except RuntimeError as error:  # there are too many
        log.warning("a thread for the worker of '%s': %s", name, error)
        return False
    return True
