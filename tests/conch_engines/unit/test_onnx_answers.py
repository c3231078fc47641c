"""ONNX models whose files leave open, or tell wrongly, what they answer: ranks, batches, maps of classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from tests.support.backend_harness import Harness, one_batch, rows, tensor_specs
from tests.support.onnx_graphs import I64, ML, F, S, Tensors, graph, node

from conch.core.errors import ConchError, UnsupportedError
from conch.core.spec import TensorSpec
from conch_control.config.json_format import from_json
from conch_control.config.model_spec import build_spec
from conch_engines.onnxruntime import OnnxRuntimeBackend, trial_run


@pytest.fixture(scope="module")
def backend() -> OnnxRuntimeBackend:
    return OnnxRuntimeBackend()


def completed(backend: OnnxRuntimeBackend, harness: Harness, content: bytes, **config: Any) -> dict[str, Any]:
    version = harness.directory("m", {"1/model.onnx": content}) / "1"
    groups = [{"count": 1, "kind": "KIND_CPU"}]
    return backend.complete_config({"name": "m", "instance_group": groups, **config}, version, {})


def dims_of(config: dict[str, Any]) -> dict[str, list[int]]:
    return {each["name"]: each["dims"] for each in (*config["input"], *config["output"])}


def reshaped(inputs: Tensors, outputs: Tensors, to: list[int] | None = None) -> bytes:
    """A model whose B is A in the shape `to`; without it, its input P tells the shape."""
    shape = [] if to is None else [onnx.numpy_helper.from_array(np.array(to, np.int64), "P")]
    return graph([node("Reshape", ["A", "P"], ["B"])], inputs, outputs, shape)


def linear(targets: int) -> bytes:
    """A linear model that declares [N] for what is [N, targets], as CatBoost's files do."""
    weights = {"coefficients": [1.0, 2.0] * targets, "intercepts": [0.5] * targets, "targets": targets}
    made = node("LinearRegressor", ["A"], ["B"], domain=ML, **weights)
    return graph([made], {"A": (F, ["N", 2])}, {"B": (F, ["N"])})


def classifier(labels: list[Any]) -> bytes:
    """A linear classifier of three classes, whose numbers by class are maps."""
    text = isinstance(labels[0], str)
    scores = node(
        "LinearClassifier",
        ["A"],
        ["LABEL", "SCORES"],
        domain=ML,
        coefficients=[1.0, 0, 2, 0, 3, 0],
        intercepts=[0.0] * 3,
        **{"classlabels_strings" if text else "classlabels_ints": labels},
    )
    key = "classlabels_strings" if text else "classlabels_int64s"
    maps = node("ZipMap", ["SCORES"], ["MAPS"], domain=ML, **{key: labels})
    kind = S if text else I64
    made = onnx.ModelProto.FromString(graph([scores, maps], {"A": (F, ["N", 2])}, {"LABEL": (kind, ["N"])}))
    number = onnx.helper.make_tensor_type_proto(F, [])
    rows_of_maps = onnx.helper.make_sequence_type_proto(onnx.helper.make_map_type_proto(kind, number))
    made.graph.output.append(onnx.helper.make_value_info("MAPS", rows_of_maps))
    return bytes(made.SerializeToString())


def test_outputs_of_any_rank_are_no_scalars(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    """ONNX Runtime gives them the shape of a scalar."""
    content = reshaped({"A": (F, [2, 3]), "P": (I64, ["k"])}, {"B": (F, None)})
    with pytest.raises(
        UnsupportedError, match="'B' of model 'm' has any number of dimensions in the model's"
    ):
        completed(backend, harness, content)
    inputs = tensor_specs(A=("FP32", (2, 3)), P=("INT64", (-1,)))
    for shape in ((6,), (3, 2), ()):
        dims = shape or (1,)
        given = np.arange(6, dtype=np.float32).reshape(2, 3)
        if not shape:  # of one element
            content = reshaped({"A": (F, [1]), "P": (I64, ["k"])}, {"B": (F, None)})
            harness.directory("m", {"1/model.onnx": content})
            inputs, given = (TensorSpec("A", "FP32", (1,)), inputs[1]), given[0, 1:2]
        outputs = tensor_specs(B=("FP32", dims))
        spec = harness.spec("m", inputs, outputs, "model.onnx", max_batch_size=0)
        model = harness.load(backend, spec)
        answer = harness.infer(model, {"A": given, "P": np.array(shape, np.int64)}).array("B")
        assert answer.tolist() == given.reshape(dims).tolist()


def test_inputs_of_any_rank_take_the_dims_of_the_config(
    harness: Harness, backend: OnnxRuntimeBackend
) -> None:
    content = graph([node("Shape", ["A"], ["B"])], {"A": (F, None)}, {"B": (I64, ["r"])})
    with pytest.raises(UnsupportedError, match="'A' of model 'm' has any number of dimensions"):
        completed(backend, harness, content)
    inputs, outputs = tensor_specs(A=("FP32", (1,))), tensor_specs(B=("INT64", (1,)))
    model = harness.load(backend, harness.spec("m", inputs, outputs, "model.onnx", max_batch_size=0))
    assert harness.infer(model, {"A": np.ones(1, np.float32)}).array("B").tolist() == [1]


NEGATIVE = [node("Neg", ["A"], ["B"])]
TOWERS = [node("Neg", ["A"], ["B"]), node("Neg", ["C"], ["D"])]
PAIRS = [node("Transpose", ["A"], ["T"]), node("MatMul", ["A", "T"], ["B"])]


@pytest.mark.parametrize(
    ("content", "batches"),
    [
        # Exporters give each tensor names of its own, so that other names alone prove nothing.
        (graph(NEGATIVE, {"A": (F, ["n", 2])}, {"B": (F, ["m", 2])}), True),
        (graph([node("Add", ["A", "C"], ["B"])], {k: (F, [k, 2]) for k in "AC"}, {"B": (F, ["m", 2])}), True),
        (graph(TOWERS, {"A": (F, ["n", 2]), "C": (F, ["m", 2])}, {k: (F, [k, 2]) for k in "BD"}), False),
        (reshaped({"A": (F, ["n", 2])}, {"B": (F, ["m"])}, [-1]), False),
        (reshaped({"A": (F, ["n", 2])}, {"B": (F, ["m", 1])}, [-1, 1]), False),
        (graph(PAIRS, {"A": (F, ["n", 2])}, {"B": (F, ["n", "n"])}), False),
        # Three rows of zeros don't fit, so nothing proves that it batches.
        (reshaped({"A": (F, ["n", 2])}, {"B": (F, ["m", 4])}, [-1, 4]), False),
    ],
)
def test_only_models_that_batch_are_completed_with_a_batch(
    harness: Harness, backend: OnnxRuntimeBackend, content: bytes, batches: bool
) -> None:
    config = completed(backend, harness, content)
    assert config.get("max_batch_size", 0) == (4 if batches else 0)
    assert dims_of(config)["A"] == ([2] if batches else [-1, 2])


def test_the_config_tells_that_a_model_batches(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    content = reshaped({"A": (F, ["n", 2])}, {"B": (F, ["m", 4])}, [-1, 4])
    assert completed(backend, harness, content, max_batch_size=8)["max_batch_size"] == 8


def test_a_trial_ends(harness: Harness, backend: OnnxRuntimeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_run, "MOST_S", 0.05)
    info = onnx.helper.make_tensor_value_info
    tensors = [info("i", I64, []), info("c", onnx.TensorProto.BOOL, []), info("x", F, ["n"])]
    body = onnx.helper.make_graph(
        [node("Identity", ["c"], ["more"]), node("Add", ["x", "x"], ["y"])],
        "body",
        tensors,
        [info("more", onnx.TensorProto.BOOL, []), info("y", F, ["n"])],
    )
    true = onnx.numpy_helper.from_array(np.array(True), "C")
    endless = node("Loop", ["", "C", "A"], ["B"], body=body)
    config = completed(backend, harness, graph([endless], {"A": (F, ["n"])}, {"B": (F, ["n"])}, [true]))
    assert dims_of(config) == {"A": [1], "B": [1]}


@pytest.mark.parametrize("targets", [1, 2])
def test_dims_are_those_of_the_engine(
    harness: Harness, backend: OnnxRuntimeBackend, targets: int, capfd: pytest.CaptureFixture[str]
) -> None:
    config = completed(backend, harness, linear(targets))
    assert dims_of(config) == {"A": [2], "B": [1] if targets == 1 else [-1]}
    spec = build_spec(from_json(config), harness.root / "m", 1, "model.onnx", {})
    backend.check(spec)
    model = harness.load(backend, spec)
    capfd.readouterr()
    assert harness.infer(model, {"A": rows(1, 2)}).array("B").tolist() == [[3.5] * targets, [6.5] * targets]
    assert "Expected shape" not in capfd.readouterr().err  # ONNX Runtime's warning, once per run


def test_a_config_that_is_not_what_the_engine_answers(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    harness.directory("m", {"1/model.onnx": linear(1)})
    inputs, outputs = tensor_specs(A=("FP32", (2,))), tensor_specs(B=("FP32", (1, 1)))
    with pytest.raises(ConchError, match=r"tensor 'B': the model expects 2 dimensions \(shape \[-1,1\]\)"):
        harness.load(backend, harness.spec("m", inputs, outputs, "model.onnx"))


@pytest.mark.parametrize("labels", [[7, 5, 6], ["b", "c", "a"]])
def test_numbers_by_class_are_rows(harness: Harness, backend: OnnxRuntimeBackend, labels: list[Any]) -> None:
    """In the ascending order of the classes, whatever that of the file."""
    config = completed(backend, harness, classifier(labels))
    assert dims_of(config)["MAPS"] == [-1]
    outputs = tensor_specs(MAPS=("FP32", (3,)))
    spec = harness.spec("m", tensor_specs(A=("FP32", (2,))), outputs, "model.onnx", batching=one_batch(3))
    model = harness.load(backend, spec)
    answers = harness.batch(model, [{"A": rows(1, 2)}, {"A": rows(3)}])
    ordered = [factor for _, factor in sorted(zip(labels, (1, 2, 3), strict=True))]
    expected = [[[factor * value for factor in ordered] for value in part] for part in ((1, 2), (3,))]
    assert [answer.array("MAPS").tolist() for answer in answers] == expected
    empty = np.empty((0, 2), np.float32)
    alone = harness.load(backend, harness.spec("m", spec.inputs, outputs, "model.onnx"))
    assert harness.infer(alone, {"A": empty}).array("MAPS").shape == (0, 3)
