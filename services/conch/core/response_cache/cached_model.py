"""A model or ensemble whose responses are cached.

`CachedModel` stands before the model and passes on, unchanged, what is not found. So models without a cache
pay nothing for it.
"""

from __future__ import annotations

import logging
from enum import Enum

from conch.core.clock import Clock
from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.responder_layers import ResponderLayer
from conch.core.response_cache.base import ResponseCache
from conch.core.response_cache.cache_entry import EntryError, decode_entry, encode_entry
from conch.core.response_cache.cache_key import ORDER, KeyMaker
from conch.core.servable import InlineClaim, Servable
from conch.core.servable_wrapper import ServableWrapper

log = logging.getLogger(__name__)


class Use(Enum):
    """Use of the cache by a request; the values of its parameter.

    Attributes:
        NORMAL: Served from the cache if possible; else the model's response is stored.
        BYPASS: Neither.
        REFRESH: Served by the model, whose response replaces an older one.
    """

    NORMAL = ""
    BYPASS = "bypass"
    REFRESH = "refresh"


def use_of(request: InferenceRequest) -> Use:
    """Reads the parameter of a request. Raises InvalidArgumentError: its value is not one of `Use`."""
    if not request.parameters or ORDER not in request.parameters:
        return Use.NORMAL
    value = request.parameters[ORDER]
    if value in (Use.BYPASS.value, Use.REFRESH.value):
        return Use(value)
    raise InvalidArgumentError(
        f"{request.log_prefix}request parameter '{ORDER}' must be '{Use.BYPASS.value}' or "
        f"'{Use.REFRESH.value}', got '{value}'"
    )


def take_copies(request: InferenceRequest) -> None:
    """Copies inputs in memory that their client may write to at any time.

    Or a client could have the response to one input stored under the key of another.
    """
    inputs = request.inputs
    for name, tensor in inputs.items():
        if tensor.shared:
            inputs[name] = tensor.detached(name)


class CachedModel(ServableWrapper):
    """One version of a model behind a cache that does not block.

    Args:
        model: The model.
        cache: The cache, shared with other models.
        keys: Makes the keys of this load of the model.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, model: Servable, cache: ResponseCache, keys: KeyMaker, clock: Clock) -> None:
        super().__init__(model)
        self._cache = cache
        self._key = keys
        self._clock = clock
        self._ttl_ns = self.spec.cache_ttl_ns or cache.ttl_ns
        self._logged = False

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> InlineClaim | None:
        """Serves a request from the cache or by the model; see `Servable.submit`."""
        use = use_of(request)
        if use is Use.BYPASS:
            return self.model.submit(request, may_claim)
        start = self._clock()
        take_copies(request)
        key = self._key(request)
        if use is Use.REFRESH:
            return self._run(request, key, None, may_claim)
        entry = self._cache.lookup(key)
        if entry is not None and (response := self._read(entry)) is not None:
            request.model = self
            self._answer(request, response, start, start)
            return None
        return self._run(request, key, self._clock() - start, may_claim)

    def _answer(
        self, request: InferenceRequest, response: InferenceResponse, start: int, queued: int
    ) -> None:
        """Counts and sends a hit; `start` is the time of the lookup, `queued` when it was queued."""
        now = self._clock()
        # Counted before it is sent: a client that has its response finds it in the statistics.
        self.statistics.record_hit(now - start, start - queued, now - request.received_ns)
        request.respond(response, True)

    def _run(
        self, request: InferenceRequest, key: bytes, missed_ns: int | None, may_claim: bool
    ) -> InlineClaim | None:
        """Submits a request to the model, to store the response; `missed_ns` is the time of its lookup."""
        keeper = _Keeper(self, key, missed_ns)
        request.wrap_responder(keeper.before, ResponderLayer.CACHE)
        try:
            return self.model.submit(request, may_claim)
        except BaseException:
            # `Admission` may submit the request to a successor.
            request.wrap_responder(lambda _: keeper.responder, ResponderLayer.CACHE)
            raise

    def _read(self, entry: bytes | bytearray | memoryview) -> InferenceResponse | None:
        try:
            return decode_entry(entry)
        except EntryError as error:
            log.warning("model '%s' version %d: %s", self.spec.name, self.spec.version, error)
            return None

    def _keep(self, key: bytes, response: InferenceResponse) -> None:
        """Stores a response; errors must not affect it."""
        try:
            self._insert(key, encode_entry(response))
        except Exception as error:  # boundary: outputs of models, caches of add-ons
            self._log_rejection(key, error)

    def _insert(self, key: bytes, entry: bytes) -> None:
        if not self._cache.insert(key, entry, self._ttl_ns):
            self._log_rejection(
                key, f"a response of {len(entry)} bytes is larger than the cache has room for"
            )

    def _log_rejection(self, key: bytes, why: object) -> None:
        """Logs, as a warning once for each load, that a response can't be stored."""
        level = logging.DEBUG if self._logged else logging.WARNING
        self._logged = True
        log.log(
            level,
            "model '%s' version %d: Failed to insert key [%s] into response cache: %s",
            self.spec.name,
            self.spec.version,
            key.hex(),
            why,
        )


class _Keeper:
    """Wraps a responder to store the model's response."""

    __slots__ = ("_key", "_missed_ns", "_model", "_partial", "responder")

    responder: Responder

    def __init__(self, model: CachedModel, key: bytes, missed_ns: int | None) -> None:
        self._model = model
        self._key = key
        self._missed_ns = missed_ns
        self._partial = False

    def before(self, responder: Responder) -> _Keeper:
        """Sets the wrapped responder; returns itself."""
        self.responder = responder
        return self

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        model = self._model
        start = model._clock()
        if not final:
            self._partial = True  # only single responses are stored
        elif response is not None and response.error is None and not self._partial:
            model._keep(self._key, response)
        if final and self._missed_ns is not None:
            model.statistics.record_miss(self._missed_ns + model._clock() - start)
        self.responder(request, response, final)
