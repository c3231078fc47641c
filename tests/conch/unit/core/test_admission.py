"""The way to a model: sequences stay with the version that began them while it is being replaced."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.conch.unit.core.sequences import MS, sequence_request, sequence_spec
from tests.support.core import WAIT_S, Answers, make_model, make_request, make_spec

from conch.core.admission import Admission
from conch.core.errors import CancelledError, InvalidArgumentError, NotFoundError
from conch.core.model_version import Model
from conch.core.registry import Entry, Registry, VersionState
from conch.core.spec import DynamicBatching

HOUR_NS = 3_600_000 * MS


def sequence_model(version: int = 1) -> Model:
    return make_model(replace(sequence_spec(2, max_idle_ns=HOUR_NS), version=version), allows_inline=False)


class Swap:
    """A model with a live sequence, 1, that has been replaced by another one."""

    def __init__(self, version: int = 1) -> None:
        self.registry = Registry()
        self.admission = Admission(self.registry)
        self.answers = Answers()
        self.sent = 0
        self.old = sequence_model()
        self.registry.publish("m", Entry({1: self.old}))
        self.send(1, "S")
        assert self.answers.wait(1)
        self.new = sequence_model(version)
        self.registry.begin_draining("m", self.old)
        self.registry.publish("m", Entry({version: self.new}, {1: VersionState("UNLOADING")}))
        assert not self.old.close(0.001)

    def send(self, correlation_id: int, flags: str = "", version: str = "") -> Model:
        request = sequence_request(correlation_id, flags, self.answers, version=version)
        self.admission.admit(request)
        self.sent += 1
        assert isinstance(request.model, Model)
        return request.model

    def finish(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(self.old.close, WAIT_S)
            assert self.send(1, "E") is self.old
            assert closing.result(WAIT_S)
        self.registry.end_draining("m", self.old)
        assert not self.registry.draining
        with pytest.raises(InvalidArgumentError, match="START flag"):
            self.send(1)
        assert self.answers.wait(self.sent, WAIT_S)
        self.new.fail_queued(NotFoundError(""))
        assert self.new.close(WAIT_S)
        assert all(response is not None and response.error is None for _, response, _ in self.answers.calls)


@pytest.mark.parametrize("version", ["", "1"])
def test_a_sequence_goes_on_where_it_began(version: str) -> None:
    swap = Swap()
    assert swap.send(1, "", version) is swap.old
    assert swap.send(2, "S", version) is swap.new
    assert swap.send(2, "", version) is swap.new
    swap.finish()


def test_the_newest_version_is_not_the_one_that_began_it() -> None:
    swap = Swap(version=2)
    assert swap.send(1) is swap.old
    assert swap.send(1, "", "1") is swap.old, "also where its version is served no more"
    with pytest.raises(InvalidArgumentError, match="START flag"):
        swap.send(1, "", "2")
    swap.finish()


def test_a_start_goes_to_the_new_version_and_takes_its_id_along() -> None:
    swap = Swap()
    assert swap.send(1, "S") is swap.new
    assert swap.send(1) is swap.new
    assert swap.send(1, "E") is swap.new
    swap.finish()


def test_a_sequence_of_an_unloaded_model_can_be_ended() -> None:
    swap = Swap()
    swap.registry.publish("m", Entry({}, {1: VersionState("UNLOADING")}))
    assert swap.send(1) is swap.old
    with pytest.raises(NotFoundError):
        swap.send(2, "S")
    swap.registry.publish("m", Entry({1: swap.new}))
    swap.finish()


def test_what_has_ended_meanwhile_goes_to_the_new_version() -> None:
    swap = Swap()
    request = sequence_request(1)
    assert swap.admission.resolve(request) is swap.old
    swap.old.fail_queued(NotFoundError(""))  # forgets the sequence
    assert swap.old.close(WAIT_S)
    with pytest.raises(InvalidArgumentError, match="START flag"):
        swap.admission.admit(request, model=swap.old)
    assert request.model is swap.new
    assert swap.new.close(WAIT_S)


def test_a_request_cancelled_before_it_is_admitted_leaves_the_queue() -> None:
    model = make_model(make_spec(8, batching=DynamicBatching((8,), HOUR_NS)))
    registry = Registry()
    registry.publish("m", Entry({1: model}))
    answers = Answers()
    request = make_request(answers, 1, cancelled=True)
    Admission(registry).admit(request)
    assert isinstance(answers.response(request).error, CancelledError)
    assert model.pending == 0
    assert model.close(WAIT_S)


def test_other_requests_do_not_look_at_what_is_drained() -> None:
    swap = Swap()
    plain = sequence_request(0)
    assert swap.admission.resolve(plain) is swap.new
    other = sequence_request(1, name="other")
    with pytest.raises(NotFoundError):
        swap.admission.resolve(other)
    swap.finish()
