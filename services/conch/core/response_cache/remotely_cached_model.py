"""A model behind a cache that takes time to answer."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

from conch.core.clock import Clock
from conch.core.errors import CancelledError, ConchError, as_conch_error
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

    A request is here until a thread of the cache has looked for its answer; then it is answered, or with the
    model, for good. While it is here it can be cancelled, and the version can't close. The model's answer is
    sent first, then kept.

    Args:
        model: The model.
        cache: The cache; others may use it too.
        keys: Makes the keys of this load of the model.
        clock: Monotonic time in nanoseconds.
        workers: The cache's threads.
    """

    def __init__(
        self, model: Servable, cache: ResponseCache, keys: KeyMaker, clock: Clock, workers: CacheThreads
    ) -> None:
        super().__init__(model, cache, keys, clock)
        self._workers = workers
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._here: set[InferenceRequest] = set()
        self._passing = 0  # taken out of there, and not yet answered or with the model
        self._closing = False

    @property
    def pending(self) -> int:
        """Requests accepted and not yet executing."""
        return len(self._here) + self.model.pending

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> InlineClaim | None:
        """Has the cache's threads look for an answer; where they can't, the model answers."""
        use = use_of(request)
        if use is Use.BYPASS or not self._workers.healthy:
            return self.model.submit(request, may_claim)
        take_copies(request)
        if use is Use.REFRESH:
            return self._run(request, self._key(request), None, may_claim)
        with self._lock:
            if self._closing:
                raise ClosedError
            self._here.add(request)
            request.model = self
        if self._workers.submit(partial(self._look_up, request, self._clock())):
            return None
        if not self._take(request):
            return None  # cancelled, and answered
        request.model = None
        claim = self.model.submit(request, may_claim)
        self._recall(request)
        return claim

    def cancel(self, request: InferenceRequest) -> bool:
        """Cancels a request: answers it at once if it is here or queued, else marks it for the model."""
        request.cancelled = True
        if not self._take(request):
            return self.model.cancel(request)
        self.statistics.record_cancellation(self._clock() - request.received_ns, QUEUED)
        request.fail(CancelledError(""))
        return True

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests, finishes those it has, and frees the model; see `Servable.close`."""
        start = time.monotonic()
        with self._lock:
            self._closing = True
            if not self._empty.wait_for(lambda: not (self._here or self._passing), timeout_s):
                return False
        if timeout_s is not None:
            timeout_s = max(timeout_s - (time.monotonic() - start), 0.0)
        return self.model.close(timeout_s)

    def fail_queued(self, error: ConchError) -> int:
        """Answers everything that is here or queued with an error; returns how many requests that were."""
        with self._lock:
            taken = [*self._here]
            self._here.clear()
            self._check_empty()
        for request in taken:
            self.statistics.record_failure(self._clock() - request.received_ns)
            request.fail(error)
        return len(taken) + self.model.fail_queued(error)

    def _take(self, request: InferenceRequest, to_pass: bool = False) -> bool:
        """Takes a request out of here; False if somebody else has done so, and sees to it.

        Args:
            request: The request.
            to_pass: Whether the version may not close until `_passed` is called.
        """
        with self._lock:
            if request not in self._here:
                return False
            self._here.remove(request)
            self._passing += to_pass
            self._check_empty()
            return True

    def _passed(self) -> None:
        with self._lock:
            self._passing -= 1
            self._check_empty()

    def _check_empty(self) -> None:
        if not (self._here or self._passing):
            self._empty.notify_all()

    def _recall(self, request: InferenceRequest) -> None:
        """Cancels what was cancelled while it was neither here any more nor with the model yet."""
        if request.cancelled:
            self.model.cancel(request)

    def _look_up(self, request: InferenceRequest, queued: int) -> None:
        """Looks for a request's answer, or has the model answer it; on a thread of the cache."""
        key = response = None
        start = self._clock()
        if start - queued <= self._cache.patience_ns:
            try:
                key = self._key(request)
                entry = self._workers.lookup(key)
                response = None if entry is None else self._read(entry)
            except Exception:  # as good as no answer; if it is the request that is wrong, the model says so
                log.exception("model '%s' could not look for a cached response", self.spec.name)
        missed_ns = self._clock() - start
        if not self._take(request, to_pass=True):
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
        except Exception as error:  # nobody else is there to be told
            request.fail(as_conch_error(error))
        finally:
            self._passed()

    def _keep(self, key: bytes, response: InferenceResponse) -> None:
        if self._workers.healthy:
            super()._keep(key, response)

    def _insert(self, key: bytes, entry: bytes) -> None:
        # What finds no place among what waits is not kept: the next request with its key brings it again.
        self._workers.submit(partial(self._insert_now, key, entry), len(entry))

    def _insert_now(self, key: bytes, entry: bytes) -> None:
        start = self._clock()
        if not self._workers.insert(key, entry, self._ttl_ns):
            self._tell(key, f"the cache has no room for {len(entry)} bytes")
        self.statistics.record_miss(self._clock() - start, 0)
