"""Requests that wait in their admission for a model that is not in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.core import Answers, make_request, make_spec
from tests.support.profiles import scaled

from conch.core.admission import Admission
from conch.core.cold_models import ColdModelError, ColdWait, Payer
from conch.core.errors import NotFoundError, ResourceExhaustedError
from conch.core.registry import Entry, Registry
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.servable import ClosedError
from conch.core.spec import ModelSpec
from conch.core.statistics_snapshot import VersionStatistics

MOST = 4


class Catalogue:
    """One model, in memory or not, and the requests that wait for it."""

    def __init__(self) -> None:
        self.registry = Registry(lambda: self)
        self.waiting: list[ColdWait] = []
        self.closed = False  # while it is published: an eviction between resolving and submitting

    spec = make_spec()
    version_text = "1"
    workers = readiness = ()

    def missed(self, name: str) -> None:
        raise ColdModelError(name, self)

    def begin(self, name: str, payer: Payer | None) -> None:
        raise AssertionError("requests wait")

    def describe(self, name: str) -> Mapping[int, ModelSpec]:
        return {}

    def kept_statistics(self, name: str) -> list[VersionStatistics]:
        return []

    def wait(self, wait: ColdWait) -> None:
        if len(self.waiting) == MOST:
            raise ResourceExhaustedError("too many")
        self.waiting.append(wait)

    def leave(self, wait: ColdWait) -> bool:
        self.waiting.remove(wait)
        return True

    def submit(self, request: InferenceRequest, may_claim: bool) -> None:
        if self.closed:
            self.registry.publish("m", Entry())
            raise ClosedError
        request.respond(InferenceResponse([]))

    def end(self, loaded: bool) -> None:
        if loaded:
            self.registry.publish("m", Entry({1: self}))  # type: ignore[dict-item]
        waiting, self.waiting = self.waiting, []
        for wait in waiting:
            wait.end(None if loaded else NotFoundError("no such file"))


class Observer:
    """Counts waits."""

    waits = 0

    def wait_began(self) -> None:
        self.waits += 1

    def wait_ended(self) -> None:
        self.waits -= 1


@example(["load", "close", "send", "load"])
@settings(max_examples=scaled(200))
@given(st.lists(st.sampled_from(["send", "cancel", "load", "fail", "evict", "close"]), max_size=20))
def test_each_request_is_answered_once_and_none_is_left(actions: list[str]) -> None:
    catalogue, answers = Catalogue(), Answers()
    admission = Admission(catalogue.registry)
    sent: list[tuple[InferenceRequest, Observer]] = []
    fitted: list[str] = []

    def fit(request: InferenceRequest, spec: ModelSpec) -> None:
        fitted.append(request.id)

    def open_requests() -> list[InferenceRequest]:
        return [request for request, _ in sent if not request.completed]

    refused = 0
    for number, action in enumerate(actions):
        match action:
            case "send":
                request = make_request(answers)
                request.id = str(number)
                observer = Observer()
                try:
                    admission.admit(request, fit=fit, observer=observer)
                    sent.append((request, observer))
                except ResourceExhaustedError:
                    refused += 1
            case "cancel" if open_requests():
                admission.cancel(open_requests()[0])
            case "load" | "fail":
                catalogue.end(loaded=action == "load")
                catalogue.closed = False
            case "evict":
                catalogue.registry.publish("m", Entry())
            case "close":
                catalogue.closed = True
        assert len(open_requests()) == len(catalogue.waiting) <= MOST
        assert all(observer.waits == (not request.completed) for request, observer in sent)
    catalogue.closed = False
    catalogue.end(loaded=True)
    finals: list[Any] = [request for request, _, final in answers.calls if final]
    assert finals.count(None) == 0 and sorted(map(id, finals)) == sorted(id(each) for each, _ in sent)
    assert len(fitted) == len(set(fitted)), "a request is fitted to its model once"


def test_requests_go_on_in_the_order_in_which_they_came() -> None:
    catalogue, answers = Catalogue(), Answers()
    admission = Admission(catalogue.registry)
    requests = [make_request(answers) for _ in range(MOST)]
    for request in requests:
        admission.admit(request)
    catalogue.end(loaded=True)
    assert [request for request, _, _ in answers.calls] == requests


def test_a_request_that_is_cancelled_while_its_wait_is_refused_is_answered_once() -> None:
    catalogue, answers = Catalogue(), Answers()
    admission = Admission(catalogue.registry)
    request, observer = make_request(answers), Observer()

    def cancelled_and_refused(wait: ColdWait) -> None:
        catalogue.waiting.append(wait)
        admission.cancel(request)
        raise ResourceExhaustedError("too many")

    catalogue.wait = cancelled_and_refused  # type: ignore[method-assign]
    assert admission.admit(request, observer=observer) is None
    assert answers.finals_of(request) == 1
    assert observer.waits == 0
