"""Any order of registering, using, answering and unregistering, against a model of what should be there."""

from __future__ import annotations

import os

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.profiles import scaled
from tests.support.sharing import SharedObject

from conch.core.errors import AlreadyExistsError, ConchError, NotFoundError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.tensor import Tensor
from conch.memory.region_bindings import RegionBindings
from conch.memory.regions import Regions
from conch.memory.sigbus_guard import process_guard

SIZE = 4096
NAMES = st.sampled_from("abc")


class Machine(RuleBasedStateMachine):
    """Requests read a number from one region, and write another one to another, while regions come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = [SharedObject(SIZE) for _ in range(2)]
        for number, memory in enumerate(self.objects):
            memory.write(np.full(SIZE // 8, number, np.int64))
        self.regions = Regions()
        self.before = len(os.listdir("/proc/self/fd"))
        self.there: dict[str, int] = {}
        self.open: list[tuple[InferenceRequest, int, int | None]] = []
        self.answers: list[InferenceResponse | None] = []
        self.written = 100

    def teardown(self) -> None:
        while self.open:
            self.open.pop()[0].fail(NotFoundError("over"))
        self.regions.close()
        assert not process_guard().installed
        assert len(os.listdir("/proc/self/fd")) <= self.before
        for memory in self.objects:
            memory.close()

    def respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        self.answers.append(response)

    @rule(name=NAMES, number=st.integers(0, 1))
    def register(self, name: str, number: int) -> None:
        try:
            self.regions.register_system(name, self.objects[number].key, 0, SIZE)
        except AlreadyExistsError:
            assert name in self.there
        else:
            assert name not in self.there
            self.there[name] = number

    @rule(name=st.one_of(NAMES, st.just("")))
    def unregister(self, name: str) -> None:
        self.regions.unregister_system(name)
        for each in [name] if name else [*self.there]:
            self.there.pop(each, None)

    @rule(source=NAMES, goal=st.one_of(st.none(), NAMES), submit=st.booleans())
    def use(self, source: str, goal: str | None, submit: bool) -> None:
        uses = RegionBindings(self.regions)
        try:
            tensor = uses.input(source, 8, 8, "x", "INT64", (1,))
            if goal is not None:
                uses.output(goal, 16, 8, "y")
        except ConchError as error:
            assert isinstance(error, NotFoundError)
            assert source not in self.there or goal not in self.there
            uses.release()
            return
        request = InferenceRequest("m", "", {"x": tensor}, self.respond, 0)
        uses.attach(request)
        if submit:
            where = None if goal is None else self.there[goal]
            self.open.append((request, self.there[source], where))
        else:
            request.discard()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), final=st.booleans())
    def answer(self, data: st.DataObject, final: bool) -> None:
        place = data.draw(st.integers(0, len(self.open) - 1))
        request, read, where = self.open[place]
        assert request.inputs["x"].numpy().tolist() == [read]
        self.written += 1
        request.respond(InferenceResponse([Tensor.from_array("y", np.array([self.written]))]), final)
        response = self.answers[-1]
        assert response is not None and response.error is None
        if where is not None:
            assert self.objects[where].read(1, 16, np.int64).tolist() == [self.written]
            assert response.outputs[0].data == b""
        if final:
            del self.open[place]

    @invariant()
    def names_are_as_expected(self) -> None:
        assert [region.name for region in self.regions.system_regions()] == sorted(self.there)
        assert process_guard().installed == bool(self.there or self.open)


Machine.TestCase.settings = settings(max_examples=scaled(60), stateful_step_count=25, deadline=None)
TestMachine = Machine.TestCase
