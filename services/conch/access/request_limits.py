"""Limits of a principal: requests and bytes per second, inference requests in flight, and cold loads.

A rate is a token bucket with the capacity of one second, kept as the time at which it is full again (GCRA);
that of loads, which are rare, has the capacity of a minute.
Bytes are taken on credit: a call is admitted while the bucket is not overdrawn, whatever its size, and the
next one waits longer.

Threads and locks: any thread; each `Limiter` has a lock, held for additions only.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from math import ceil

from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import ResourceExhaustedError

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000
_NS_PER_MINUTE = 60 * _NS_PER_S
_BUSY_RETRY_MS = 100


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one principal; None for no limit.

    Attributes:
        requests_per_second: Calls, and requests of streams.
        bytes_per_second: Bytes of requests as received.
        concurrent: Inference requests that are not completely answered.
        cold_loads_per_minute: Loads of models that are not in memory, in on-demand mode.
    """

    requests_per_second: float | None = None
    bytes_per_second: float | None = None
    concurrent: int | None = None
    cold_loads_per_minute: float | None = None


class TokenBucket:
    """A bucket with the units of one period; not thread-safe.

    Args:
        rate: Units per period.
        least: Units that must be there for a call, unless they are more than the bucket holds.
        now_ns: Monotonic time; the bucket begins full.
        period_ns: The period.
    """

    def __init__(self, rate: float, least: float, now_ns: int, period_ns: int = _NS_PER_S) -> None:
        self._ns_per_unit = period_ns / rate
        self._allowed_ns = max(period_ns - ceil(least * self._ns_per_unit), 0)
        self._full_ns = now_ns

    def wait_ns(self, now_ns: int) -> int:
        """Time until a call may take units; 0 if it may now."""
        return max(self._full_ns - now_ns - self._allowed_ns, 0)

    def take(self, units: int, now_ns: int) -> None:
        """Takes units, also more than there are."""
        self._full_ns = max(self._full_ns, now_ns) + ceil(units * self._ns_per_unit)


class Limiter:
    """Applies the limits of one principal.

    Attributes:
        requests: Admitted calls so far.
        in_flight: Inference requests that are not completely answered.
    """

    def __init__(self, name: str, limits: RequestLimits, clock: Clock = monotonic_ns) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self.requests = 0
        self.in_flight = 0
        self._set(limits)

    def change(self, limits: RequestLimits) -> None:
        """Sets other limits; buckets begin full if they differ."""
        with self._lock:
            if limits != self.limits:
                self._set(limits)

    def _set(self, limits: RequestLimits) -> None:
        self.limits = limits
        now = self._clock()
        calls, size = limits.requests_per_second, limits.bytes_per_second
        self._calls = None if calls is None else TokenBucket(calls, 1.0, now)
        self._bytes = None if size is None else TokenBucket(size, 0.0, now)
        loads = limits.cold_loads_per_minute
        self._loads = None if loads is None else TokenBucket(loads, 1.0, now, _NS_PER_MINUTE)

    def take_request(self, size: int) -> None:
        """Charges one call of `size` bytes.

        Raises:
            ResourceExhaustedError: A rate is used up; nothing was charged.
        """
        with self._lock:
            calls, data = self._calls, self._bytes
            if calls is not None or data is not None:
                now = self._clock()
                wait = 0 if calls is None else calls.wait_ns(now)
                if wait:
                    raise self._refusal(f"{self.limits.requests_per_second:g} requests per second", wait)
                wait = 0 if data is None else data.wait_ns(now)
                if wait:
                    raise self._refusal(f"{self.limits.bytes_per_second:g} bytes per second", wait)
                if calls is not None:
                    calls.take(1, now)
                if data is not None:
                    data.take(size, now)
            self.requests += 1

    def charge(self, size: int) -> None:
        """Charges bytes that were not known when the call was admitted."""
        with self._lock:
            if self._bytes is not None:
                self._bytes.take(size, self._clock())

    def take_load(self) -> None:
        """Charges the load of a model. Raises ResourceExhaustedError: there were too many."""
        with self._lock:
            if self._loads is None:
                return
            now = self._clock()
            wait = self._loads.wait_ns(now)
            if wait:
                loads = f"{self.limits.cold_loads_per_minute:g} loads of models per minute"
                raise self._refusal(f"{loads} (cold_loads_per_minute)", wait)
            self._loads.take(1, now)

    def enter(self) -> None:
        """Counts one inference request in flight; `leave` must follow.

        Raises:
            ResourceExhaustedError: There are too many.
        """
        with self._lock:
            most = self.limits.concurrent
            if most is not None and self.in_flight >= most:
                raise self._refusal(f"{most} requests at a time", _BUSY_RETRY_MS * _NS_PER_MS)
            self.in_flight += 1

    def leave(self) -> None:
        """Ends a request that has entered."""
        with self._lock:
            self.in_flight -= 1

    def _refusal(self, limit: str, wait_ns: int) -> ResourceExhaustedError:
        error = ResourceExhaustedError(f"principal '{self._name}' is over its limit of {limit}")
        error.retry_after_ms = max(-(-wait_ns // _NS_PER_MS), 1)
        return error
