"""Pairs of a shadow, whose threads run by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.core import Answers, make_request, make_spec

from conch.core.errors import ConchError, QueueTimeoutError, UnavailableError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.spec import DynamicBatching, ModelSpec, QueuePolicy
from conch.core.tensor import Tensor
from conch_rollout.shadows import shadow as shadow_module
from conch_rollout.shadows.shadow import Shadow, ShadowPolicy

OUT = Tensor.from_array("OUT", np.zeros(16, np.float32))


class Model:
    """A version that answers copies when they come."""

    version_text = "2"

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.copies: list[InferenceRequest] = []

    def submit(self, copy: InferenceRequest) -> None:
        self.copies.append(copy)
        copy.respond(InferenceResponse([OUT]))


class Site:
    """A shadow and its threads, whose work runs when the test says so."""

    compares = True

    def __init__(self, spec: ModelSpec, policy: ShadowPolicy) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self.submit_soon = self.compare_soon = self._work.append
        self.candidate: Any = Model(spec)
        self._stable: Any = Model(make_spec())
        self.shadow = Shadow("m", 2, policy, self, lambda: 0)

    def serve(self, error: ConchError | None = None) -> None:
        """Serves a request, with its copy to the end."""
        request = make_request()
        pair = self.shadow.begin(request, self._stable, self.candidate)
        assert pair is not None, self.shadow.counts().dropped
        pair.before(Answers())(request, InferenceResponse([] if error else [OUT], error), True)
        while self._work:
            self._work.popleft()()


def test_places_and_bytes_of_pairs_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of requests that stable has not run, which are not copied."""
    monkeypatch.setattr(shadow_module, "MOST_HELD_BYTES", 200)
    site = Site(make_spec(version=2), ShadowPolicy(inflight=1))
    for _ in range(5):
        site.serve()
        site.serve(UnavailableError("the worker has died"))
        site.serve(QueueTimeoutError("Request timeout expired"))
    counts = site.shadow.counts()
    assert (counts.requests, counts.compared, counts.mismatches, counts.dropped) == (5, 5, 0, {})


def test_copies_come_behind_the_requests_of_clients() -> None:
    levels = DynamicBatching(policies=(QueuePolicy(),) * 3)
    site = Site(make_spec(version=2, batching=levels), ShadowPolicy())
    site.serve()
    assert [copy.priority for copy in site.candidate.copies] == [3]
