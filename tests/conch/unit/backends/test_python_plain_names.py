"""Modules beside a model's file, for imports and pickles that are no import statements of the model."""

from __future__ import annotations

import gc
import itertools
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.backend_harness import Harness, rows, tensor_specs

import conch.testing
from conch.core.model_version import Model
from conch.core.spec import InstanceGroup
from conch.workers.python_backend import PythonBackend

HELPER = """
from __future__ import annotations

WHO = {who!r}
served = 0

class Thing:
    class Part:
        who = WHO
    def __init__(self):
        self.value = 5
        self.part = self.Part()
    def who(self):
        return WHO

class Typed:
    thing: Thing

def function():
    return WHO
"""

MODEL = """
import importlib
import json
import pickle
import pydoc
import sys
import typing
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import triton_python_backend_utils as pb_utils

def by_statement():
    import helper
    return helper.WHO

def told(ask):
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def elsewhere(function, *arguments):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()

def round_trip(dumps, loads):
    import helper
    data = dumps([helper.Thing(), helper.function])
    thing, function = loads(data)
    assert type(thing) is helper.Thing and type(thing.part) is helper.Thing.Part
    assert thing.value == 5 and b"conch_model" not in data
    return function()

def hints():
    import helper
    assert typing.get_type_hints(helper.Typed) == {"thing": helper.Thing}
    return helper.WHO

PICKLED = b"chelper\\nfunction\\n."

ASK = {
    "import_module": lambda: importlib.import_module("helper").WHO,
    "pickle": lambda: pickle.loads(PICKLED)(),
    "pickle in Python": lambda: pickle._loads(PICKLED)(),
    "library": lambda: pydoc.locate("helper.WHO"),
    "inner": lambda: importlib.import_module("shared.inner").WHO,
    "pickled inner": lambda: pickle.loads(b"cshared.inner\\nfunction\\n.")(),
    "statement": by_statement,
    "round trip": lambda: round_trip(pickle.dumps, pickle.loads),
    "round trip in Python": lambda: round_trip(pickle._dumps, pickle._loads),
    "hints": hints,
    "in modules": lambda: sys.modules["helper"].WHO,
    "thread": lambda: elsewhere(pickle.loads, PICKLED)(),
    "thread in Python": lambda: elsewhere(pickle._loads, PICKLED)(),
    "thread by name": lambda: elsewhere(lambda: importlib.import_module("helper").WHO),
}

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(json.loads(request.parameters())["ask"]) for request in requests]

    def answer(self, asked):
        found = {ask: told(ASK[ask]) for ask in asked.split(",")}
        return pb_utils.InferenceResponse([], parameters={"found": json.dumps(found)})
"""

IN_THREADS = ("thread", "thread in Python")
ALL = (
    "import_module",
    "pickle",
    "pickle in Python",
    "library",
    "inner",
    "pickled inner",
    "statement",
    "round trip",
    "round trip in Python",
    "hints",
    "in modules",
    "thread by name",
)


@pytest.fixture(params=["in_process", "worker"])
def placement(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def files(who: str) -> dict[str, str]:
    inner = f"WHO = {who!r}\ndef function():\n    return WHO\n"
    return {"1/helper.py": HELPER.format(who=who), "shared/__init__.py": "", "shared/inner.py": inner}


def load(harness: Harness, name: str, beside: dict[str, str], **changes: Any) -> Model:
    harness.directory(name, {"1/model.py": MODEL, **beside})
    spec = harness.spec(
        name,
        inputs=tensor_specs(A=("FP32", (2,))),
        outputs=tensor_specs(B=("FP32", (2,))),
        **changes,
    )
    return harness.load(PythonBackend(), spec)


def ask(harness: Harness, model: Model, *asked: str) -> dict[str, str]:
    answer = harness.infer(model, {"A": rows(1)}, parameters={"ask": ",".join(asked)})
    assert answer.one.error is None, answer.one.error
    assert answer.one.parameters is not None
    found: dict[str, str] = json.loads(str(answer.one.parameters["found"]))
    return found


@pytest.mark.parametrize(
    "first", ["import_module", "pickle", "pickle in Python", "library", "pickled inner", "round trip"]
)
def test_each_model_has_its_own(harness: Harness, first: str) -> None:
    """Whatever it is that asks first: what it leaves behind is there for the others."""
    models = {name: load(harness, name, files(name)) for name in ("a", "b")}
    order = (first, *ALL, *reversed(ALL))
    for name, model in models.items():
        assert ask(harness, model, *order) == dict.fromkeys(order, name)
    assert ask(harness, models["a"], *ALL) == dict.fromkeys(ALL, "a")
    harness.close()
    assert not {"helper", "shared", "shared.inner"} & set(sys.modules)


def test_a_model_without_it_does_not_get_anothers(harness: Harness) -> None:
    model, other = load(harness, "a", files("a")), load(harness, "b", {})
    for _ in range(2):
        assert ask(harness, model, "statement", "import_module") == {"statement": "a", "import_module": "a"}
        found = ask(harness, other, *ALL, *IN_THREADS)
        assert "a" not in found.values()
        assert (
            found["statement"] == found["import_module"] == ("ModuleNotFoundError: No module named 'helper'")
        )


def test_the_only_model_is_known_on_threads_of_libraries(harness: Harness) -> None:
    model = load(harness, "a", files("a"))
    assert ask(harness, model, *IN_THREADS) == dict.fromkeys(IN_THREADS, "a")


def test_threads_of_libraries_get_no_other_models(harness: Harness) -> None:
    models = [load(harness, name, files(name)) for name in ("a", "b")]
    ask(harness, models[1], *ALL)
    found = ask(harness, models[0], *IN_THREADS)
    if harness.placement == "worker":
        assert found == dict.fromkeys(IN_THREADS, "a")
    else:
        text = "Can't get attribute 'function' on <module 'helper' of whichever model asks>"
        if sys.version_info >= (3, 14):
            text = (
                "it is not known which of 2 instances of models asks for 'helper': let a function in a "
                "module of the model ask, or run the model in a worker process"
            )
        assert found["thread"] == f"AttributeError: {text}"
        assert found["thread in Python"].startswith("AttributeError: ")


def test_loads_take_turns(harness: Harness) -> None:
    """A model that is loaded again finds the files as they are then, while others go on."""
    other = load(harness, "b", files("other"))
    for who in ("one", "two"):
        again = Harness(harness.root / who, harness.placement)
        model = load(again, "a", files(who))
        assert ask(again, model, *ALL) == dict.fromkeys(ALL, who)
        assert ask(harness, other, *ALL) == dict.fromkeys(ALL, "other")
        again.close()
        assert ask(harness, other, *ALL) == dict.fromkeys(ALL, "other")


def test_instances_have_their_own(harness: Harness) -> None:
    beside = {
        **files("a"),
        "1/helper.py": files("a")["1/helper.py"] + "import os\nWHO = str(os.urandom(8))\n",
    }
    model = load(harness, "a", beside, instance_groups=(InstanceGroup("a_0", count=2),))
    seen = set()
    for _ in range(8):
        found = ask(harness, model, "import_module", "pickle", "statement", "round trip")
        assert len(set(found.values())) == 1
        seen |= set(found.values())
    assert len(seen) <= 2


def test_beside_a_model_under_test(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "helper.py").write_text(HELPER.format(who="m"))
    (directory / "1" / "obj.pkl").write_bytes(b"chelper\nThing\n)R.")
    (directory / "config.pbtxt").write_text(
        'backend: "python"\ninput { name: "A" data_type: TYPE_FP32 dims: 1 }\n'
        'output { name: "B" data_type: TYPE_STRING dims: 1 }\n'
    )
    (directory / "1" / "model.py").write_text("""
import pickle
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        with open(pb_utils.get_model_dir() + "/obj.pkl", "rb") as file:
            self.thing = pickle.load(file)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("B", np.array([self.thing.who()], object))])]
""")
    before = dict(sys.modules)
    assert conch.testing.run(directory, {"A": np.zeros(1, np.float32)})["B"].tolist() == [b"m"]
    assert "helper" not in sys.modules and "helper" not in before
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(b"chelper\nThing\n)R.")


@pytest.mark.parametrize("placement", ["in_process"])
def test_a_collection_that_imports_disturbs_no_load(harness: Harness) -> None:
    """The import system may get to know a directory while a load has it read all of them again."""
    numbers = itertools.count()

    def import_something(phase: str, _: object) -> None:
        if phase == "stop":
            sys.path_importer_cache[f"/nowhere/{next(numbers)}"] = None

    threshold = gc.get_threshold()
    gc.callbacks.append(import_something)
    gc.set_threshold(1)
    try:
        load(harness, "a", {})
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(import_something)
        for number in range(next(numbers)):
            del sys.path_importer_cache[f"/nowhere/{number}"]
