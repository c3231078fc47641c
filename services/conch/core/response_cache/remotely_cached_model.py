"""A model behind a cache that blocks, such as one behind a network."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

from conch.core.clock import Clock
from conch.core.errors import CancelledError, ConchError, without_details
from conch.core.model_statistics import QUEUED
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_cache.base import ResponseCache
from conch.core.response_cache.cache_key import KeyMaker
from conch.core.response_cache.cache_threads import CacheThreads
from conch.core.response_cache.cached_model import CachedModel, Use, take_copies, use_of
from conch.core.servable import ClosedError, InlineClaim, Servable

log = logging.getLogger(__name__)


class RemotelyCachedModel(CachedModel):
    """One version of a model behind a blocking cache.

    A lookup runs on a thread of the cache:

        ==========  ======================  ===========================================
        state       event                   next
        ==========  ======================  ===========================================
        looking up  the lookup ends         forwarding
        looking up  cancelled, or shutdown  completed
        forwarding  a hit                   completed
        forwarding  a miss, or no lookup    submitted to the model
        ==========  ======================  ===========================================

    A request leaves `_lookups` under the lock, so exactly one thread takes it. The version closes once no
    request is looking up or forwarding. The model's response is sent first, then stored.

    Args:
        model: The model.
        cache: The cache, shared with other models.
        keys: Makes the keys of this load of the model.
        clock: Monotonic time in nanoseconds.
        threads: The cache's threads.
    """

    def __init__(
        self, model: Servable, cache: ResponseCache, keys: KeyMaker, clock: Clock, threads: CacheThreads
    ) -> None:
        super().__init__(model, cache, keys, clock)
        self._threads = threads
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._lookups: set[InferenceRequest] = set()
        self._forwarding = 0  # taken out of there, and neither completed nor submitted
        self._closing = False

    @property
    def pending(self) -> int:
        """Requests accepted and not yet executing."""
        return len(self._lookups) + self.model.pending

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> InlineClaim | None:
        """Queues a lookup; without one, submits the request to the model."""
        use = use_of(request)
        if use is Use.BYPASS or not self._threads.healthy:
            return self.model.submit(request, may_claim)
        take_copies(request)
        if use is Use.REFRESH:
            return self._run(request, self._key(request), None, may_claim)
        with self._lock:
            if self._closing:
                raise ClosedError
            self._lookups.add(request)
            request.model = self
        if self._threads.submit(partial(self._look_up, request, self._clock())):
            return None
        if not self._take(request):
            return None  # cancelled and completed
        request.model = None
        claim = self.model.submit(request, may_claim)
        self._recall(request)
        return claim

    def cancel(self, request: InferenceRequest) -> bool:
        """Cancels a request: completes it at once if it is queued, else marks it for the model."""
        request.cancelled = True
        if not self._take(request):
            return self.model.cancel(request)
        self.statistics.record_cancellation(self._clock() - request.received_ns, QUEUED)
        request.fail(CancelledError(""))
        return True

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests, finishes accepted ones, and closes the model; see `Servable.close`."""
        start = time.monotonic()
        with self._lock:
            self._closing = True
            if not self._empty.wait_for(lambda: not (self._lookups or self._forwarding), timeout_s):
                return False
        if timeout_s is not None:
            timeout_s = max(timeout_s - (time.monotonic() - start), 0.0)
        return self.model.close(timeout_s)

    def fail_queued(self, error: ConchError) -> int:
        """Fails all requests that wait for a lookup or are queued; returns their number."""
        with self._lock:
            taken = [*self._lookups]
            self._lookups.clear()
            self._check_empty()
        for request in taken:
            self.statistics.record_failure(self._clock() - request.received_ns)
            request.fail(error)
        return len(taken) + self.model.fail_queued(error)

    def _take(self, request: InferenceRequest, forward: bool = False) -> bool:
        """Takes a request out of the lookups; False if another thread has.

        With `forward` the version does not close until `_forwarded` is called.
        """
        with self._lock:
            if request not in self._lookups:
                return False
            self._lookups.remove(request)
            self._forwarding += forward
            self._check_empty()
            return True

    def _forwarded(self) -> None:
        with self._lock:
            self._forwarding -= 1
            self._check_empty()

    def _check_empty(self) -> None:
        if not (self._lookups or self._forwarding):
            self._empty.notify_all()

    def _recall(self, request: InferenceRequest) -> None:
        """Cancels a request in the model that was cancelled while it was forwarded."""
        if request.cancelled:
            self.model.cancel(request)

    def _look_up(self, request: InferenceRequest, queued: int) -> None:
        """Looks up a request, and completes it or submits it to the model; on a thread of the cache."""
        key = response = None
        start = self._clock()
        if start - queued <= self._cache.patience_ns:
            try:
                key = self._key(request)
                entry = self._threads.lookup(key)
                response = None if entry is None else self._read(entry)
            except Exception:  # boundary: caches; as good as a miss, and the model validates the request
                log.exception("model '%s' could not look for a cached response", self.spec.name)
        missed_ns = self._clock() - start
        if not self._take(request, forward=True):
            return
        try:
            if response is not None:
                self._answer(request, response, start, queued)
                return
            if key is not None:
                self._run(request, key, missed_ns, False)
            else:
                self.model.submit(request)
            self._recall(request)
        except Exception as error:  # boundary: top of a thread of the cache
            if not isinstance(error, ConchError):
                log.exception("a request to model '%s' could not be handled", self.spec.name)
            sentence = f"{request.log_prefix}the request could not be handled"
            request.fail(without_details(error, sentence))
        finally:
            self._forwarded()

    def _keep(self, key: bytes, response: InferenceResponse) -> None:
        if self._threads.healthy:
            super()._keep(key, response)

    def _insert(self, key: bytes, entry: bytes) -> None:
        # If the queue is full the entry is not stored: the next request with its key tries again.
        self._threads.submit(partial(self._insert_now, key, entry), len(entry))

    def _insert_now(self, key: bytes, entry: bytes) -> None:
        start = self._clock()
        if not self._threads.insert(key, entry, self._ttl_ns):
            self._log_rejection(key, f"the cache has no room for {len(entry)} bytes")
        self.statistics.record_miss(self._clock() - start, 0)
