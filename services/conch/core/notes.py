"""What a model version does against its config, though it is served: logged once, shown in the index."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

log = logging.getLogger(__name__)

_MOST = 64
_MOST_CHARACTERS = 1_000


class Notes:
    """The notes of one model version; any thread may use them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: list[str] = []

    @property
    def texts(self) -> Sequence[str]:
        """The notes, in the order in which they came."""
        with self._lock:
            return tuple(self._texts)

    def add(self, text: str) -> None:
        """Logs and keeps a note, unless it is known."""
        text = text[:_MOST_CHARACTERS]
        with self._lock:
            if text in self._texts or len(self._texts) >= _MOST:
                return
            self._texts.append(text)
        log.warning("%s", text)
