"""ONNX graphs for tests of engines and of what runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

F, S = onnx.TensorProto.FLOAT, onnx.TensorProto.STRING
I32, I64 = onnx.TensorProto.INT32, onnx.TensorProto.INT64
ML = "ai.onnx.ml"
"""The domain of operators of trees, linear models and the like."""
Tensors = dict[str, tuple[int, list[Any] | None]]


def graph(
    nodes: list[Any],
    inputs: Tensors,
    outputs: Tensors,
    initializers: list[Any] | None = None,
    domains: Sequence[str] = (),
) -> bytes:
    """The file of a model; `domains` are those of its nodes beside ONNX's own."""
    info = onnx.helper.make_tensor_value_info
    made = onnx.helper.make_graph(
        nodes,
        "g",
        [info(name, *kind) for name, kind in inputs.items()],
        [info(name, *kind) for name, kind in outputs.items()],
        initializers or [],
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid(ML, 2)]
    opsets += [onnx.helper.make_opsetid(each, 1) for each in domains]
    model = onnx.helper.make_model(made, opset_imports=opsets, ir_version=8)
    return bytes(model.SerializeToString())


def node(kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return onnx.helper.make_node(kind, inputs, outputs, **attributes)


ADD_SUB = graph(
    [node("Add", ["A", "B"], ["SUM"]), node("Sub", ["A", "B"], ["DIFF"])],
    {"A": (F, ["n", 2]), "B": (F, ["n", 2])},
    {"SUM": (F, ["n", 2]), "DIFF": (F, ["n", 2])},
)
RAGGED = graph(
    [
        node("Cast", ["COUNTS"], ["REALS"], to=F),
        node("Unsqueeze", ["REALS", "ONE"], ["COLUMN"]),
        node("Add", ["A", "A"], ["DOUBLE"]),
    ],
    {"A": (F, ["elements"]), "COUNTS": (I32, ["n"])},
    {"COLUMN": (F, ["n", 1]), "DOUBLE": (F, ["elements"])},
    [onnx.numpy_helper.from_array(np.array([1], np.int64), "ONE")],
)
MEAN = graph(
    [
        node("Cast", ["MASK"], ["WEIGHTS"], to=F),
        node("Mul", ["A", "WEIGHTS"], ["KEPT"]),
        node("ReduceSum", ["KEPT", "ONE"], ["SUM"]),
        node("Cast", ["LENGTHS"], ["COUNT"], to=F),
        node("Div", ["SUM", "COUNT"], ["MEAN"]),
        node("Sub", ["A", "MEAN"], ["CENTRED"]),
    ],
    {"A": (F, ["n", "length"]), "MASK": (I64, ["n", "length"]), "LENGTHS": (I64, ["n", 1])},
    {"MEAN": (F, ["n", 1]), "CENTRED": (F, ["n", "length"])},
    [onnx.numpy_helper.from_array(np.array([1], np.int64), "ONE")],
)
