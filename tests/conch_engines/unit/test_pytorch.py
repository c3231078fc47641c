"""PyTorch's own rules: names of arguments and results, values that are no tensors, files that hold code."""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.backend_harness import Harness, one_batch, rows, strings, tensor_specs
from tests.support.engines.torch_engines import exported

pytest.importorskip("torch")

import torch
from torch import Tensor

from conch.core.backend import ConfigNotes
from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.core.model_version import Model
from conch.core.spec import (
    ControlTensor,
    InstanceGroup,
    SequenceBatching,
    StateSpec,
    TensorSpec,
    WarmupInput,
    WarmupSample,
)
from conch_engines.pytorch.exported_model import load_program
from conch_engines.pytorch.inductor_model import PackageFolder
from conch_engines.pytorch.program_archive import RefusedProgramError, checked
from conch_engines.pytorch.program_guards import Guards
from conch_engines.pytorch.pytorch_backend import PyTorchBackend
from conch_engines.pytorch.torch_settings import ProcessSettings

Tensors = tuple[TensorSpec, ...]


class TwoArguments(torch.nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a - b, a + b


class Named(torch.nn.Module):
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return inputs["p"] - inputs["q"]


class Choosy(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor | None, factor: int = 3, shift: float = 0.5) -> Tensor:
        z = x if y is None else x + y
        return z * factor + shift


class Texts(torch.nn.Module):
    def forward(self, words: list[str]) -> tuple[list[str], Tensor]:
        return [word + "!" for word in words], torch.tensor([len(word) for word in words])


class Odd(torch.nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x, x]


class Scalar(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


class Writes(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


def add_one(x: Tensor) -> Tensor:
    return x.add_(1)


class WritesInFork(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.jit.wait(torch.jit.fork(add_one, x))


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * 0 + self.calls


class Fails(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(7)


class Sums(torch.nn.Module):
    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        return x + before, x + before


@pytest.fixture(scope="module")
def backend() -> PyTorchBackend:
    return PyTorchBackend()


@pytest.fixture(autouse=True)
def deprecated() -> Iterator[None]:
    """TorchScript is deprecated as a whole, so that making a module warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
        yield


def script(module: Any) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module.eval()), buffer)
    return buffer.getvalue()


def served(
    harness: Harness,
    backend: PyTorchBackend,
    content: bytes,
    inputs: Tensors,
    outputs: Tensors,
    **changes: Any,
) -> Model:
    file = changes.pop("model_file", "model.pt")
    samples = changes.pop("warmup", ())
    harness.directory("m", {f"1/{file}": content})
    return harness.load(backend, harness.spec("m", inputs, outputs, file, **changes), samples)


def fp32(*names: str) -> Tensors:
    return tensor_specs(**dict.fromkeys(names, ("FP32", (2,))))


def as_batch(groups: Mapping[str, int]) -> dict[str, Any]:
    return {name: rows(value) for name, value in groups.items()}


@pytest.mark.parametrize(
    ("inputs", "outputs", "given", "expected"),
    [
        pytest.param(("b", "a"), ("S__1", "D__0"), {"a": 5, "b": 3}, {"D__0": 2, "S__1": 8}, id="arguments"),
        pytest.param(("X__1", "Y__0"), ("D__0",), {"X__1": 3, "Y__0": 5}, {"D__0": 2}, id="indices"),
        pytest.param(("P", "Q"), ("D", "S"), {"P": 5, "Q": 3}, {"D": 2, "S": 8}, id="order"),
        pytest.param(("a", "Q__0"), ("D__x", "S"), {"a": 5, "Q__0": 3}, {"D__x": 2, "S": 8}, id="mixed"),
    ],
)
def test_names_of_torchscript(
    harness: Harness,
    backend: PyTorchBackend,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    given: dict[str, int],
    expected: dict[str, int],
) -> None:
    model = served(harness, backend, script(TwoArguments()), fp32(*inputs), fp32(*outputs))
    answer = harness.infer(model, as_batch(given))
    assert {name: answer.array(name)[0, 0] for name in expected} == expected


@pytest.mark.parametrize(
    ("module", "inputs", "outputs", "text"),
    [
        (TwoArguments, ("a",), ("D",), "configuration expects 1 inputs, model provides 2"),
        (TwoArguments, ("X__0", "Y__0"), ("D",), "inputs 'X__0' and 'Y__0' of model 'm' refer to the same"),
        (TwoArguments, ("X__0", "Y__5"), ("D",), "refers to argument 5, but the model has 2 arguments"),
        (Choosy, ("X__1", "Y__2"), ("D",), "no input of model 'm' refers to argument 0 \\('x'\\)"),
        (TwoArguments, ("a", "b"), (), "must contain at least one output, none were specified"),
    ],
)
def test_names_that_fit_no_argument(
    harness: Harness,
    backend: PyTorchBackend,
    module: Any,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    text: str,
) -> None:
    with pytest.raises(ConchError, match=text):
        served(harness, backend, script(module()), fp32(*inputs), fp32(*outputs))


def test_inputs_as_a_dict(harness: Harness, backend: PyTorchBackend) -> None:
    model = served(harness, backend, script(Named()), fp32("q", "p"), fp32("D"))
    assert harness.infer(model, as_batch({"p": 5, "q": 3})).array("D")[0, 0] == 2


def test_arguments_that_may_be_left_out_or_are_no_tensors(harness: Harness, backend: PyTorchBackend) -> None:
    one = TensorSpec("factor", "INT64", (1,), optional=True)
    inputs = (*fp32("x"), TensorSpec("y", "FP32", (2,), optional=True), one)
    model = served(harness, backend, script(Choosy()), inputs, fp32("Z"))
    assert harness.infer(model, as_batch({"x": 2})).array("Z")[0, 0] == 6.5
    assert harness.infer(model, as_batch({"x": 2, "y": 1})).array("Z")[0, 0] == 9.5
    factor = np.array([[10]], np.int64)
    assert harness.infer(model, {"x": rows(2), "factor": factor}).array("Z")[0, 0] == 20.5
    both = {"x": rows(2, 2), "factor": np.array([[1], [2]], np.int64)}
    assert "its input must have one element" in harness.infer(model, both).error


def test_strings(harness: Harness, backend: PyTorchBackend) -> None:
    words = TensorSpec("words", "BYTES", (1,), reshape=())
    outputs = (TensorSpec("T__0", "BYTES", (1,), reshape=()), TensorSpec("N__1", "INT64", (1,), reshape=()))
    model = served(harness, backend, script(Texts()), (words,), outputs, batching=one_batch(3))
    answers = [harness.infer(model, {"words": each}) for each in (strings(b"a"), strings("é".encode(), b""))]
    assert [answer.array("T__0").tolist() for answer in answers] == [[[b"a!"]], [["é!".encode()], [b"!"]]]
    assert answers[1].array("N__1").tolist() == [[2], [0]]  # TorchScript counts bytes
    wide = (TensorSpec("words", "BYTES", (1,)),)
    with pytest.raises(ConchError, match="only supports 1 dimensional List of String as input for 'words'"):
        served(harness, backend, script(Texts()), wide, outputs)


@pytest.mark.parametrize(
    ("module", "outputs", "text"),
    [
        (
            TwoArguments,
            fp32("D__0", "Z__3"),
            "an output index which doesn't exist. This model has 2 outputs",
        ),
        (Odd, fp32("D"), "output must be of type Tensor, List\\[str\\] or Tuple containing one of these"),
        (Scalar, fp32("D"), "output 'D' is a scalar which is not supported."),
        (
            TwoArguments,
            tensor_specs(D__0=("INT32", (2,))),
            "configuration expects datatype TYPE_INT32 for output 'D__0', model provides TYPE_FP32",
        ),
        (Fails, fp32("D"), "^PyTorch execute failure: .*shape '\\[7\\]' is invalid"),
    ],
)
def test_results_that_are_no_outputs(
    harness: Harness, backend: PyTorchBackend, module: Any, outputs: Tensors, text: str
) -> None:
    inputs = ("a", "b") if module is TwoArguments else ("x",)
    model = served(harness, backend, script(module()), fp32(*inputs), outputs)
    error = harness.infer(model, as_batch(dict.fromkeys(inputs, 1))).error
    assert re.search(text, error, re.DOTALL), error


@pytest.mark.parametrize("module", [Writes(), WritesInFork()], ids=type)
def test_a_model_that_writes_to_its_input_writes_to_a_copy(
    harness: Harness, backend: PyTorchBackend, module: Any
) -> None:
    model = served(harness, backend, script(module), fp32("x"), fp32("Y"))
    request, answer = harness.request({"x": rows(5)})
    model.submit(request)
    assert answer.array("Y")[0, 0] == 6
    assert request.inputs["x"].numpy()[0, 0] == 5


@pytest.mark.parametrize("sharing", ["true", "false"])
def test_instances_share_weights(harness: Harness, backend: PyTorchBackend, sharing: str) -> None:
    """A module that counts its calls tells whether both instances use it; warm-up runs each three times."""
    sample = WarmupSample("one", (WarmupInput("x", "FP32", (1,), "ZERO"),))
    specs = tensor_specs(x=("FP32", (1,)))
    model = served(
        harness,
        backend,
        script(Counts()),
        specs,
        tensor_specs(Y=("FP32", (1,))),
        instance_groups=(InstanceGroup("m_0", count=2),),
        parameters={"ENABLE_WEIGHT_SHARING": sharing},
        warmup=[sample],
    )
    seen = [harness.infer(model, {"x": rows(1, width=1)}).array("Y")[0, 0] for _ in range(2)]
    # Both instances warm up with three runs: of one module these are six, of two modules three each.
    assert bool(min(seen) > 6) is (sharing == "true"), seen


def test_implicit_state(harness: Harness, backend: PyTorchBackend) -> None:
    def sequence(name: str) -> SequenceBatching:
        return SequenceBatching(states=(StateSpec(name, "AFTER__1", "FP32", (2,), (2,)),))

    content = script(Sums())
    model = served(harness, backend, content, fp32("X__0"), fp32("S__0"), sequence=sequence("BEFORE__1"))
    flags: list[dict[str, Any]] = [{"sequence_start": True}, {}, {"sequence_end": True}]
    totals = [
        harness.infer(model, as_batch({"X__0": n}), correlation_id=1, **each).array("S__0")[0, 0]
        for n, each in enumerate(flags, 1)
    ]
    assert totals == [1, 3, 6]
    with pytest.raises(ConchError, match="but state 'OLD' does not follow the <name>__<index>"):
        served(harness, backend, content, fp32("X__0"), fp32("S__0"), sequence=sequence("OLD"))


@pytest.mark.parametrize("file", ["model.pt", "model.pt2"])
def test_strings_that_identify_sequences_are_refused(
    harness: Harness, backend: PyTorchBackend, file: str
) -> None:
    content = script(Sums()) if file == "model.pt" else package()
    named = SequenceBatching(controls=(ControlTensor("ID__1", "CORRID", "BYTES"),))
    with pytest.raises(InternalError, match="input 'ID__1' type 'TYPE_STRING' is not supported by PyTorch"):
        served(harness, backend, content, fp32("X__0"), fp32("S__0"), sequence=named, model_file=file)


class Nested(torch.nn.Module):
    def forward(self, x: Tensor, more: dict[str, Tensor], *, scale: Tensor) -> dict[str, Any]:
        return {"sum": x + more["y"], "pair": (x * scale, x - more["y"])}


def saved(program: Any) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def nested() -> bytes:
    x, y, scale = (torch.zeros(2, 3) for _ in range(3))  # of the same tensor, all would be one input
    batch = torch.export.Dim("batch", min=1, max=16)
    shapes = {"x": {0: batch}, "more": {"y": {0: batch}}, "scale": {0: batch}}
    return saved(exported(Nested(), (x, {"y": y}), kwargs={"scale": scale}, dynamic_shapes=shapes))


def test_an_exported_program_completes_its_config(
    harness: Harness, backend: PyTorchBackend, nested: bytes
) -> None:
    version = harness.directory("m", {"1/model.pt2": nested}) / "1"
    config = backend.complete_config({"name": "m", "default_model_filename": "model.pt2"}, version, {})
    assert config["max_batch_size"] == 16 and config["dynamic_batching"] == {}
    assert [(each["name"], each["dims"]) for each in config["input"]] == [
        ("x", [3]),
        ("more_y", [3]),
        ("scale", [3]),
    ]
    assert [(each["name"], each["data_type"]) for each in config["output"]] == [
        (f"OUTPUT__{n}", "TYPE_FP32") for n in range(3)
    ]


def test_names_and_bounds_of_an_exported_program(
    harness: Harness, backend: PyTorchBackend, nested: bytes
) -> None:
    three = ("FP32", (3,))
    inputs = tensor_specs(**{"KWARGS[scale]": three, "INPUT__0": three, "ARGS[1][y]": three})
    outputs = tensor_specs(**{"RESULT[pair][1]": three, "RESULT[sum]": three, "OUTPUT__1": three})
    model = served(harness, backend, nested, inputs, outputs, model_file="model.pt2", max_batch_size=32)

    def ask(count: int) -> Any:
        given = {"INPUT__0": 5, "ARGS[1][y]": 3, "KWARGS[scale]": 2}
        return harness.infer(model, {name: rows(*[n] * count, width=3) for name, n in given.items()})

    answer = ask(2)
    assert [answer.array(o.name)[0, 0] for o in outputs] == [2, 8, 10]
    assert ask(17).error == (
        f"input 'INPUT__0' has shape [17,3] of torch.float32, but the model was exported for "
        f"[{_symbol(ask(17).error)}: 1 to 16, 3] of torch.float32"
    )
    with pytest.raises(ConchError, match='Input "nope" for model instance "m" is not found in model'):
        served(harness, backend, nested, tensor_specs(x=three, more_y=three, nope=three), outputs,
               model_file="model.pt2")  # fmt: skip


class Paths(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1) if x.shape[1] % 2 == 0 else x.max(1).values


class Shifted(torch.nn.Module):
    def forward(self, x: Tensor, more: dict[str, list[Tensor]]) -> Tensor:
        return x[1:] + more["a b"][0]


class Products(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T


class Pairs(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0] // 2, 2, -1).sum(1)


def complete_and_load(harness: Harness, backend: PyTorchBackend, content: bytes) -> tuple[Any, Model]:
    """A model with the config that its file completes."""
    version = harness.directory("m", {"1/model.pt2": content}) / "1"
    completed = backend.complete_config({"name": "m", "default_model_filename": "model.pt2"}, version, {})
    inputs, outputs = (
        tuple(
            TensorSpec(each["name"], "FP32", tuple(each["dims"]), () if "reshape" in each else None)
            for each in completed[kind]
        )
        for kind in ("input", "output")
    )
    size = completed.get("max_batch_size", 0)
    return completed, served(
        harness, backend, content, inputs, outputs, model_file="model.pt2", max_batch_size=size
    )


DIMS = {
    "no max": lambda: torch.export.Dim("batch"),
    "min": lambda: torch.export.Dim("batch", min=1),
    "auto": lambda: torch.export.Dim.AUTO,
    "dynamic": lambda: torch.export.Dim.DYNAMIC,
    "hint": lambda: torch.export.Dim.AUTO(max=50),
}


@pytest.mark.parametrize("way", DIMS)
def test_dims_without_bounds(harness: Harness, backend: PyTorchBackend, way: str) -> None:
    content = saved(exported(Doubled(), (torch.zeros(3, 2),), dynamic_shapes=({0: DIMS[way]()},)))
    completed, model = complete_and_load(harness, backend, content)
    assert completed["max_batch_size"] == (50 if way == "hint" else 4)
    for count in (1, 3):
        answer = harness.infer(model, {"x": rows(*[3] * count)})
        assert answer.array("OUTPUT__0").tolist() == [[6, 6]] * count


def test_shapes_of_another_path_of_the_model_are_refused(harness: Harness, backend: PyTorchBackend) -> None:
    auto = torch.export.Dim.AUTO
    content = saved(exported(Paths(), (torch.zeros(2, 4),), dynamic_shapes=({0: auto, 1: auto},)))
    _, model = complete_and_load(harness, backend, content)
    assert harness.infer(model, {"x": np.array([[1, 2, 3, 6]], np.float32)}).array("OUTPUT__0") == [3]
    assert harness.infer(model, {"x": rows(1, width=5)}).error == (
        "the shapes of the inputs ('x' [1,5]) fail a guard of the exported program: (L['x'].size()[1] % 2) "
        "== 0; the export fixed a path of the model for shapes like its example's"
    )


def test_relations_of_dims(harness: Harness, backend: PyTorchBackend) -> None:
    auto, pairs = torch.export.Dim.AUTO, torch.export.Dim("pairs", min=1, max=9)
    given = torch.zeros(4, 3), {"a b": [torch.zeros(3, 3)]}
    shapes = {0: auto}, {"a b": [{0: auto}]}
    _, model = complete_and_load(harness, backend, saved(exported(Shifted(), given, dynamic_shapes=shapes)))

    def ask(x: int, y: int) -> Any:
        arrays = {"x": rows(*[1] * x, width=3), "more_a_b_0": rows(*[1] * y, width=3)}
        return harness.infer(model, arrays)

    assert ask(6, 5).array("OUTPUT__0").shape == (5, 3)
    assert "exported for" in ask(5, 5).error
    completed, model = complete_and_load(harness, backend, saved(exported(Products(), (torch.zeros(4, 3),))))
    assert "max_batch_size" not in completed  # the answer to one request depends on the rows of others
    assert harness.infer(model, {"x": rows(1, 2, width=3)}).array("OUTPUT__0").tolist() == [[3, 6], [6, 12]]
    content = saved(exported(Pairs(), (torch.zeros(4, 3),), dynamic_shapes=({0: 2 * pairs},)))
    completed, model = complete_and_load(harness, backend, content)
    assert "max_batch_size" not in completed
    answer = harness.infer(model, {"x": rows(1, 1, 1, 1, width=3)})
    assert answer.array("OUTPUT__0").tolist() == [[2, 2, 2]] * 2
    assert ": 2 to 18, 3]" in harness.infer(model, {"x": rows(1, 1, 1, width=3)}).error


@pytest.mark.parametrize(
    "text",
    [
        "exit()",
        "L['x'].data",
        "L['x'].size().__class__",
        "9**9**9",
        "(L['x'].size()[0]**8)**8 > 0",
        "L['y'].size()[0] == 1",
        "(lambda: 1)()",
    ],
)
def test_guards_that_are_no_conditions_of_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="a guard of the exported program can't be checked"):
        Guards([text], ["x"])


class WritesBelow(torch.nn.Module):
    """Writes through a view, within the graph of a branch."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, :1].add_(1)
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x,))


@pytest.mark.parametrize("module", [Writes(), WritesBelow()], ids=type)
def test_a_program_that_writes_to_its_input_writes_to_a_copy(
    harness: Harness, backend: PyTorchBackend, module: Any
) -> None:
    _, model = complete_and_load(harness, backend, saved(exported(module, (torch.zeros(3, 2),))))
    request, answer = harness.request({"x": rows(5)})
    model.submit(request)
    assert answer.array("OUTPUT__0")[0, 0] == (6 if isinstance(module, Writes) else 12)
    assert request.inputs["x"].numpy().tolist() == [[5, 5]]


def _symbol(text: str) -> str:
    return text.rpartition("[")[2].partition(":")[0]


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.write_text, (Path("exploded"), "x"))


EXPLODE = "__import__('pathlib').Path('exploded').write_text('x')"


class Doubled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two = torch.nn.Parameter(torch.full((2,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.two


def members(content: bytes) -> dict[str, bytes]:
    """The members of a PT2 archive without their common folder."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def archive_of(files: Mapping[str, bytes], outside: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"model/{name}", content)
        for name, content in outside.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def pickled(kind: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Members to add, within the archive's folder and outside of it, so that loading unpickles a bomb."""
    buffer = io.BytesIO()
    torch.save(Bomb(), buffer)
    bomb, opaque = buffer.getvalue(), pickle.dumps(Bomb())
    files = members(saved(exported(Doubled(), (torch.zeros(2, 2),))))
    program = files["models/model.json"]

    def config(**entry: Any) -> bytes:
        entry = {"is_param": False, "use_pickle": True, "tensor_meta": None} | entry
        return json.dumps({"config": {"c": entry}}).encode()

    constants = "data/constants/model_constants_config.json"
    old = {f"serialized_{name}.pt": bomb for name in ("state_dict", "constants", "example_inputs")}
    schema = json.loads(program)["schema_version"]
    version = f"{schema['major']}.{schema['minor']}".encode()
    return {
        "all weights": ({"data/weights/model.pt": bomb}, {}),
        "all constants": ({"data/constants/model.pt": bomb}, {}),
        "a constant": ({constants: config(path_name="tensor_0"), "data/constants/tensor_0": bomb}, {}),
        "an object": (
            {constants: config(path_name="opaque_obj_0"), "data/constants/opaque_obj_0": opaque},
            {},
        ),
        "another name": (
            {
                "models/a/b.json": program,
                "data/sample_inputs/a/b.pt": bomb,
                "data/weights/a/b_weights_config.json": files["data/weights/model_weights_config.json"],
                "data/constants/a/b_constants_config.json": files[constants],
            },
            {},
        ),
        "the format before": ({}, {"version": version, "serialized_exported_program.json": program, **old}),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["all weights", "all constants", "a constant", "an object", "another name", "the format before"]
)
def test_pickles_in_an_archive_do_not_run(
    harness: Harness, backend: PyTorchBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    within, outside = pickled(kind)
    files = members(saved(exported(Doubled(), (torch.zeros(2, 2),))))
    refuses_what_explodes(harness, backend, tmp_path, monkeypatch, archive_of(files | within, outside))


def refuses_what_explodes(
    harness: Harness,
    backend: PyTorchBackend,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
) -> None:
    """A file whose load or run by PyTorch itself runs code, so that the test does not pass for a dud."""
    monkeypatch.chdir(folder)
    exploded = folder / "exploded"
    version = harness.directory("m", {"1/model.pt2": content}) / "1"
    logging.disable()  # records of PyTorch's warnings would keep the file open
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        torch.export.load(version / "model.pt2").module(check_guards=False).forward(torch.zeros(2, 2))
    logging.disable(logging.NOTSET)
    assert exploded.exists(), "PyTorch runs no code of the file"
    exploded.unlink()
    config = {"name": "m", "default_model_filename": "model.pt2"}
    with pytest.raises(ConchError, match=r"could run code|unable to load exported program"):
        backend.complete_config(config, version, {})
    with pytest.raises(ConchError, match=r"could run code|unable to load exported program"):
        served(harness, backend, content, fp32("x"), fp32("OUTPUT__0"), model_file="model.pt2")
    assert not exploded.exists()


@pytest.mark.parametrize("kind", ["size", "name", "file"])
def test_code_in_the_graph_of_an_archive_does_not_run(
    harness: Harness, backend: PyTorchBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    files = members(saved(exported(Doubled(), (torch.zeros(2, 2),))))
    program = json.loads(files["models/model.json"])
    graph = program["graph_module"]["graph"]

    if kind == "size":
        graph["tensor_values"]["x"]["sizes"][0] = {"as_expr": {"expr_str": f'eval("{EXPLODE}")'}}
    elif kind == "file":
        given = {"filename": {"as_string": "exploded"}, "shared": {"as_bool": True}, "size": {"as_int": 4}}
        inputs = [{"name": name, "arg": arg, "kind": 1} for name, arg in given.items()]
        target, outputs = "torch.ops.aten.from_file.default", [{"as_tensor": {"name": "mapped"}}]
        graph["nodes"].append({"target": target, "inputs": inputs, "outputs": outputs, "metadata": {}})
        graph["tensor_values"]["mapped"] = graph["tensor_values"]["x"]
    else:
        text = json.dumps(program).replace('"x"', json.dumps(f"x={EXPLODE}"))
        program = json.loads(text)
    files["models/model.json"] = json.dumps(program).encode()
    refuses_what_explodes(harness, backend, tmp_path, monkeypatch, archive_of(files, {}))


class OddNames(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.named = torch.nn.ParameterDict({"a b-c/d": torch.nn.Parameter(torch.ones(2))})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.named["a b-c/d"]


class EachRow(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.sum())(x)


class Halved(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = x.view(x.shape[0] // 2, 2, -1).mean(1)
        return torch.cond(pairs.sum() > 0, torch.exp, torch.neg, (pairs,))


@pytest.mark.parametrize("module", [OddNames(), EachRow(), Halved(), torch.nn.LSTM(2, 3)], ids=type)
def test_programs_that_hold_no_code_run_as_in_pytorch(tmp_path: Path, module: Any) -> None:
    rows = 2 * torch.export.Dim("half", min=1, max=9) if isinstance(module, Halved) else None
    shapes = ({0: rows},) if rows is not None else None
    path = tmp_path / "model.pt2"
    path.write_bytes(saved(exported(module, (torch.ones(4, 2),), dynamic_shapes=shapes)))
    program = load_program(torch, path, allow_pickle=False).module(check_guards=False)
    given = torch.randn(4, 2)
    torch.testing.assert_close(program(given), module(given))


class Stateful(torch.nn.Module):
    """Its state is set by its own code while it is loaded."""

    @torch.jit.export
    def __getstate__(self) -> tuple[Tensor, bool]:
        return torch.zeros(1), self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[Tensor, bool]) -> None:
        self.training = state[1]

    def forward(self, x: Tensor) -> Tensor:
        return x


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Sequential(Stateful(), torch.nn.Linear(2, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    "call",
    [
        'torch.save(state, "exploded")',
        'ops.aten.save(state, "exploded")',
        'print(torch.from_file("exploded", True, 4))',  # a result that is not used would not be made
        '(torch. # no\n    save)(state, "exploded")',
        't = torch\n    t.save(state, "exploded")',
        'getattr(torch, "save")(state, "exploded")',
        'getattr(torch, "sa" "ve")(state, "exploded")',
        'getattr(torch, "s\\141ve")(state, "exploded")',
    ],
)
def test_torchscript_that_writes_files_is_refused(
    harness: Harness, backend: PyTorchBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.chdir(tmp_path)
    content = script(Outer())
    served(harness, backend, content, fp32("x"), fp32("y"))  # as it was saved
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as made:
        for name in old.namelist():
            code = old.read(name)
            if name.endswith(".py"):
                line = b"    self.training = "
                code = code.replace(line, f"    {call}\n".encode() + line)
            made.writestr(name, code)
    torch.jit.load(io.BytesIO(buffer.getvalue()))
    (tmp_path / "exploded").unlink()
    with pytest.raises(InvalidArgumentError, match=r"could write or read files of the server: 'code/__tor"):
        served(harness, backend, buffer.getvalue(), fp32("x"), fp32("y"))
    assert not (tmp_path / "exploded").exists()


def _tree(kind: str, context: Any) -> str:
    return json.dumps([1, {"type": kind, "context": context, "children_spec": []}])


FACTORY = {"default_factory_module": "os", "default_factory_name": "abort", "dict_context": []}
MEMBER = '[{"__enum__": true, "fqn": "this:X", "name": "x"}]'


@pytest.mark.parametrize(
    "part",
    [
        *({"target": f"torch.{name}"} for name in ("os.system", "hub.load", "ops.load_library", "save")),
        *({"as_operator": f"torch.ops.aten.{name}.default"} for name in ("save", "from_file")),
        {"as_operator": "torch.ops.higher_order.call_torchbind"},
        {"in_spec": _tree("collections.defaultdict", FACTORY)},
        {"out_spec": _tree("builtins.dict", MEMBER)},
        {"out_spec": _tree("builtins.dict", MEMBER.replace("_", "\\u005f"))},
        {"in_spec": _tree("builtins.dict", '["x: y"]')},
        {"range_constraints": {"u12345678": {}}},
        {"as_custom_obj": {"name": "c", "class_fqn": "C"}},
        {"as_name": "a.b"},
        {"buffer_name": 'a"b'},
        {"x y(": {}},
        *(
            {"expr_str": text}
            for text in (
                "exec('x')",
                "Symbol('x').__class__",
                "Add('exec(1)')",
                "[1 for x in (1,)]",
                "9^9^9",
                "9**9**9",
                "Pow(Pow(9, 60), 60)",
                "Pow(9, Integer(1000))",
                "'a' * 9",
                "Float('1', precision=99999)",
                "RoundDecimal(5, -99999)",
                "1" + "0" * 30,
                "(" * 999 + ")" * 999,
            )
        ),
    ],
    ids=str,
)
def test_parts_of_a_graph_that_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(RefusedProgramError):
        checked({"graph": [part]})


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Max(Integer(1), Add(Mul(Integer(-2), Symbol('s0')), Float('0.5', precision=53)))",
        "FloorDiv(Pow(Symbol('u0', integer=True), Rational(1, 2)), Integer(3))",
        "Piecewise(ExprCondPair(Integer(1), StrictLessThan(Symbol('s0'), Integer(2))))",
        "2*s0 // 3 + (s1 - 1)**2",
    ],
)
def test_symbolic_sizes_that_are_not_refused(text: str) -> None:
    assert checked({"expr_str": text}) == {"expr_str": text}


def test_a_saved_state_is_no_model(harness: Harness, backend: PyTorchBackend) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, buffer)
    with pytest.raises(InvalidArgumentError, match=r'torch\.save.*runtime: "model.py"'):
        served(harness, backend, buffer.getvalue(), fp32("x"), fp32("Y"))


def test_torchscript_without_a_config(harness: Harness, backend: PyTorchBackend) -> None:
    version = harness.directory("m", {"1/model.pt": script(TwoArguments())}) / "1"
    text = r"^unable to load model 'm', configuration expects 0 inputs, model provides 2; .* inputs are: a, b"
    with pytest.raises(InvalidArgumentError, match=text):
        backend.complete_config({"name": "m"}, version, {})
    with pytest.raises(InternalError, match=r"^model configuration must contain at least one output, none"):
        backend.complete_config({"name": "m", "input": [{"name": "a"}, {"name": "b"}]}, version, {})


def package(source: str = "", library: bytes = b"no library", /, **metadata: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/data/aotinductor/model/x.wrapper_metadata.json", json.dumps(metadata))
        archive.writestr("a/data/aotinductor/model/x.wrapper.cpp", source)
        archive.writestr("a/data/aotinductor/model/x.wrapper.so", library)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"AOTI_DEVICE_KEY": "cuda"}, "compiled for device 'cuda', but the instance is on 'cpu'.*KIND_GPU"),
        ({"AOTI_MACHINE": "riscv64"}, "was compiled for riscv64, but this machine is"),
        ({"AOTI_DEVICE_KEY": "cpu", "AOTI_CPU_ISA": "AVX9000"}, "needs AVX9000, which this processor lacks"),
        ({}, "is unreachable or inaccessible"),
    ],
)
def test_packages_for_other_machines(
    harness: Harness, backend: PyTorchBackend, metadata: dict[str, str], text: str
) -> None:
    with pytest.raises(ConchError, match=text):
        served(harness, backend, package(**metadata), fp32("ARGS[0]"), fp32("RESULT"), model_file="model.pt2")


@pytest.mark.parametrize(
    ("shapes", "contiguous"),
    [
        ({"size": {0: 2, 1: 4}, "stride": {0: 4, 1: 1}}, True),
        ({"size": {1: 4}, "stride": {0: 4, 1: 1}}, True),  # a dynamic batch
        ({"size": {0: 2, 1: 4}, "stride": {0: 1, 1: 2}}, False),
        ({"size": {0: 2}, "stride": {0: 1, 1: 2}}, False),  # [2, -1], transposed
        ({"size": {1: 4}, "stride": {1: 7}}, False),
        ({"size": {1: 1, 2: 4}, "stride": {0: 4, 1: 1, 2: 1}}, True),  # a dim of 1 has any stride
    ],
)
def test_packages_for_inputs_in_another_order_of_memory_are_refused(
    tmp_path: Path, shapes: dict[str, dict[int, int]], contiguous: bool
) -> None:
    source = "".join(
        f"if ({value} != arg0_1_{kind}[{dim}]) {{\n"
        for kind, of in shapes.items()
        for dim, value in of.items()
    )
    path = tmp_path / "model.pt2"
    path.write_bytes(package(source))
    with (
        nullcontext() if contiguous else pytest.raises(InvalidArgumentError, match=r"not contiguous .stride")
    ):
        PackageFolder().library(path, "cpu")


def test_packages_that_call_operators_outside_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(package("", b"\0aoti_torch_proxy_executor_call_function\0"))
    with pytest.raises(InternalError, match=r"calls operators outside of its library.*torch\.export\.save"):
        PackageFolder().library(path, "cpu")


def test_packages_without_their_first_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(package()[20:])  # the first member lies before the file, where seeking is an OSError
    with pytest.raises(InternalError, match=r"^unable to read AOTInductor package '.*/model\.pt2': "):
        PackageFolder().library(path, "cpu")


def test_packages_are_unpacked_once(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(package())
    folder = PackageFolder()
    first = folder.library(path, "cpu")
    assert folder.library(path, "cpu") == first
    path.write_bytes(package(AOTI_MACHINE=""))
    assert folder.library(path, "cpu") != first


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("INTRA_OP_THREAD_COUNT", "integral number"),
        ("INFERENCE_MODE", "boolean"),
        ("CONCH_WARMUP_RUNS", "integral number"),
    ],
)
def test_values_that_are_none(harness: Harness, backend: PyTorchBackend, key: str, kind: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"'{key}' must .*: failed to convert 'maybe' to {kind}"):
        served(harness, backend, script(TwoArguments()), fp32("a", "b"), fp32("D"), parameters={key: "maybe"})


def test_switches_are_logged_in_the_words_of_triton(
    harness: Harness, backend: PyTorchBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    content, group = script(Doubled()), (InstanceGroup("m_0", count=3),)
    served(harness, backend, content, fp32("x"), fp32("y"), instance_groups=group)
    assert not re.search(r"Inference Mode|Reusing", caplog.text), "the config has no parameters"
    given = {"INFERENCE_MODE": "false", "ENABLE_WEIGHT_SHARING": "on", "DISABLE_CUDNN": "1"}
    served(harness, backend, content, fp32("x"), fp32("y"), instance_groups=group, parameters=given)
    for line, count in {
        "Inference Mode is disabled for model instance 'm'": 1,
        "cuDNN is disabled for model instance 'm'": 1,
        "Weight sharing is enabled for model instance 'm'": 1,
        "Jit executor is": 0,
        "Reusing TorchScript model for instance 'm'": 2,
    }.items():
        assert caplog.text.count(line) == count, line


def test_settings_of_the_process_belong_to_the_first_model(harness: Harness) -> None:
    set_to: list[int] = []
    process = ProcessSettings(SimpleNamespace(set_num_interop_threads=set_to.append))
    first, second = ConfigNotes(), ConfigNotes()
    for name, notes, value in (("a", first, "2"), ("b", second, "3"), ("a", first, "2")):
        process.apply(harness.spec(name, parameters={"INTER_OP_THREAD_COUNT": value}), notes)
    assert set_to == [2]
    assert list(first.texts) == []
    (note,) = second.texts
    assert note == (
        "parameter 'INTER_OP_THREAD_COUNT' of model 'b' has no effect: model 'a' set it to 2 for the process"
    )
