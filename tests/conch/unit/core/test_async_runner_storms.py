"""Instances that begin batches, in any order of events: one answer each, nothing hangs, the books add up."""

from __future__ import annotations

import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conch.unit.core.sequences import sequence_request, sequence_spec
from tests.support.async_instance import Begins, BeginsModel, Elsewhere, Whim
from tests.support.core import WAIT_S, Answers, make_spec
from tests.support.profiles import scaled

from conch.core.errors import ConchError
from conch.core.execution.rate_limiter import RateLimiter
from conch.core.model_version import Model
from conch.core.request import InferenceRequest
from conch.core.servable import ClosedError
from conch.core.spec import DynamicBatching, InstanceGroup, ModelSpec, QueuePolicy, Resource

MS = 1_000_000
HANGS_S = 4 * WAIT_S
"""Only what hangs takes so long, on a busy machine too: the threads switch every 10 µs."""

POLICY = QueuePolicy(timeout_ns=2 * MS, allow_override=True)
SPECS: dict[str, ModelSpec] = {
    "default": make_spec(4),
    "dynamic": make_spec(4, batching=DynamicBatching()),
    "delay": make_spec(4, batching=DynamicBatching((3,), MS, (POLICY,))),
    "in order": make_spec(4, batching=DynamicBatching(preserve_ordering=True)),
    "decoupled": make_spec(4, decoupled=True),
    "direct": sequence_spec(strategy="DIRECT"),
    "oldest": sequence_spec(strategy="OLDEST", max_candidates=2),
}


@pytest.fixture(autouse=True)
def fast_switching(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(logging.getLogger("conch.core.execution.executor"), "disabled", True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Storm:
    """Threads submit, run inline, release and cancel; instances go, come back, are added or leave."""

    def __init__(
        self, kind: str, seed: int, instances: int, limited: bool, failing: float, most: int = 1
    ) -> None:
        self.seed = seed
        self.kind = kind
        self.elsewhere = Elsewhere(seed)
        resources = (Resource("R", 1),) if limited else ()
        self.limiter = RateLimiter()
        whim = Whim(seed, self.elsewhere, kind == "decoupled", failing)
        alone = limited or SPECS[kind].sequence is not None
        self.loaded = BeginsModel(lambda: Begins(whim, 1 if alone else most))
        spec = replace(
            SPECS[kind], instance_groups=(InstanceGroup("g", count=instances, resources=resources),)
        )
        self.model = Model.create(spec, self.loaded, limiter=self.limiter)
        self.answers = Answers()
        self.sent: list[InferenceRequest] = []
        self.refused = 0

    def client(self, number: int, requests: int) -> None:
        chance = random.Random(self.seed * 100 + number)
        for index in range(requests):
            if chance.random() < 0.2:
                chance.choice(list(self.loaded.instances)).go()
            if chance.random() < 0.2:
                chance.choice(list(self.loaded.instances)).come_back()
            request = self.request(chance, number * 1000 + index // 3, ("S", "", "E")[index % 3])
            try:
                claim = self.model.submit(request, may_claim=chance.random() < 0.5)
            except (ClosedError, ConchError):
                self.refused += 1
                continue
            self.sent.append(request)
            if claim is not None:
                if chance.random() < 0.3:
                    claim.release()
                else:
                    while claim.run_inline(chance.choice([0, 50_000, None])):
                        pass
            if chance.random() < 0.3:
                self.model.cancel(request)
                if chance.random() < 0.3:
                    self.model.cancel(request)

    def request(self, chance: random.Random, sequence: int, flags: str) -> InferenceRequest:
        if self.kind in ("direct", "oldest"):
            return sequence_request(sequence + 1, flags, self.answers)
        request = sequence_request(0, "", self.answers, rows=chance.choice((1, 1, 2)))
        request.batch_size = request.inputs["IN"].shape[0]
        return request

    def all_back(self) -> None:
        for instance in list(self.loaded.instances):
            instance.come_back()

    def resize(self, times: int) -> None:
        chance = random.Random(self.seed + 2)
        for _ in range(times):
            group = self.model.spec.instance_groups[0]
            spec = replace(self.model.spec, instance_groups=(replace(group, count=chance.randint(1, 4)),))
            made = self.model.prepare_resize(spec)
            made.commit()
            made.finish()

    def run(self, requests: int, resizes: int, close_early: bool = False) -> None:
        work: list[Callable[[], None]] = [partial(self.client, number, requests) for number in range(3)]
        if self.model.spec.sequence is None:
            work.append(partial(self.resize, resizes))
        with ThreadPoolExecutor(len(work)) as pool:
            running = [pool.submit(each) for each in work]
            if close_early:
                self.model.close(0.0)
            for future in running:
                future.result(HANGS_S)
        for instance in list(self.loaded.instances):
            instance.go()
        self.client(4, 3)  # all instances may be away now
        self.all_back()
        if not close_early and self.model.spec.sequence is None:
            assert self.answers.wait(len(self.sent), HANGS_S), (
                f"{len(self.sent) - self.answers.finals} wait for ever"
            )
        assert self.model.close(HANGS_S), "something is left"
        self.elsewhere.close()
        self.check()

    def check(self) -> None:
        assert self.loaded.problems == []
        finals = Counter(id(request) for request, _, final in self.answers.calls if final)
        assert finals == Counter(map(id, self.sent)), "not one final answer each"
        assert all(instance.closed == 1 for instance in self.loaded.instances)
        counted = self.model.statistics.snapshot()
        assert (counted.pending, counted.running) == (0, 0)
        assert counted.success.count + counted.fail.count == len(self.sent)
        assert self.limiter.units_in_use == 0


@settings(max_examples=scaled(80))
@given(
    kind=st.sampled_from(sorted(SPECS)),
    seed=st.integers(0, 10_000),
    instances=st.integers(1, 3),
    limited=st.booleans(),
    failing=st.sampled_from([0.0, 0.3, 1.0]),
    close_early=st.booleans(),
    most=st.sampled_from([1, 1, 2, 5]),
)
def test_whatever_instances_do_everything_is_answered_once(
    kind: str, seed: int, instances: int, limited: bool, failing: float, close_early: bool, most: int
) -> None:
    Storm(kind, seed, instances, limited, failing, most).run(24, 4, close_early)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kind", sorted(SPECS))
def test_whatever_instances_do_for_long(kind: str, seed: int) -> None:
    Storm(kind, seed, 1 + seed % 3, bool(seed % 2), 0.2, 1 + seed % 4).run(300, 50)
