"""`TraceSampling`: samples the next requests of a model, and then puts the trace settings back.

Owns: what the settings were before. Threads and locks: pool threads and the event loop; a lock guards the
state.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import InvalidArgumentError
from conch.observability.tracing.trace_settings import Fields, TraceSetting, TraceSettings

log = logging.getLogger(__name__)

_LONGEST_NS = 600 * 10**9


@dataclass(frozen=True, slots=True)
class _Sampled:
    before: Fields
    setting: TraceSetting
    ends_ns: int


class TraceSampling:
    """Borrows trace settings for a number of requests, for ten minutes at most.

    Args:
        settings: The trace settings.
        clock: Monotonic time in nanoseconds.

    Attributes:
        settings: As given.
    """

    def __init__(self, settings: TraceSettings, clock: Clock = monotonic_ns) -> None:
        self.settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._sampled: dict[str, _Sampled] = {}

    def sample_next(self, model: str, number: int) -> None:
        """Samples the next requests of a model; of all with an empty name."""
        with self._lock:
            known = self._sampled.get(model)
            before = self.settings.own(model) if known is None else known.before
            changes = {"trace_level": ["TIMESTAMPS"], "trace_rate": ["1"], "trace_count": [str(number)]}
            self.settings.update(changes, model)
            ends = self._clock() + _LONGEST_NS
            self._sampled[model] = _Sampled(before, self.settings.of(model), ends)

    def settle(self) -> None:
        """Puts back settings whose requests have come, or did not come in time."""
        with self._lock:
            for model, sampled in list(self._sampled.items()):
                replaced = self.settings.of(model) is not sampled.setting  # by a client of the RPC
                if replaced or not sampled.setting.remaining or self._clock() > sampled.ends_ns:
                    del self._sampled[model]
                    if not replaced:
                        self._restore(sampled.before, model)

    def _restore(self, before: Fields, model: str) -> None:
        try:
            self.settings.restore(before, model)
        except InvalidArgumentError as error:  # the global setting was changed meanwhile
            log.warning("trace settings of '%s' can't be put back, so they are cleared: %s", model, error)
            self.settings.restore({}, model)

    def state(self) -> dict[str, Any]:
        """Number of traces still to sample, by model; the empty name is for all models."""
        return {model: sampled.setting.remaining for model, sampled in self._sampled.items()}
