"""Steps of `conch optimize` with planted faults; each is run by itself, without the tests' packages."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


def _changed(job: Any, nodes: list[Any], constants: dict[str, Any] | None = None) -> None:
    """Saves the model with its outputs renamed, and further nodes that make them."""
    model = onnx.load(job.source)
    graph = model.graph
    outputs = {each.name for each in graph.output}
    for node in graph.node:
        node.output[:] = [f"{name}_before" if name in outputs else name for name in node.output]
    graph.node.extend(nodes)
    for name, value in (constants or {}).items():
        graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    onnx.save(model, job.folder / "model.onnx")


def _same(*names: str) -> list[Any]:
    return [helper.make_node("Identity", [f"{name}_before"], [name]) for name in names]


def swapped(job: Any) -> None:
    """Each of the two outputs is the other one."""
    pairs = (("first_before", "second"), ("second_before", "first"))
    _changed(job, [helper.make_node("Identity", [before], [after]) for before, after in pairs])


def transposed(job: Any) -> None:
    """The first output has its two dimensions exchanged and its shape kept."""
    turned = helper.make_node("Transpose", ["first_before"], ["turned"], perm=[0, 2, 1])
    shaped = helper.make_node("Reshape", ["turned", "shape"], ["first"])
    _changed(job, [turned, shaped, *_same("second")], {"shape": np.array([0, 3, 4], np.int64)})


def with_nan(job: Any) -> None:
    """The first output is NaN where it was negative."""
    root = helper.make_node("Sqrt", ["first_before"], ["root"])
    back = helper.make_node("Mul", ["root", "root"], ["first"])
    _changed(job, [root, back, *_same("second")])


def imprecise(job: Any) -> None:
    """The first output is one percent too large."""
    scaled = helper.make_node("Mul", ["first_before", "factor"], ["first"])
    _changed(job, [scaled, *_same("second")], {"factor": np.float32(1.01)})


def fixed_shape(job: Any) -> None:
    """The model's inputs and outputs have a batch of one."""
    model = onnx.load(job.source)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, job.folder / "model.onnx")


def fixed_inside(job: Any) -> None:
    """A constant inside is the largest batch, as tracers leave it."""
    shaped = helper.make_node("Reshape", ["first_before", "shape"], ["first"])
    shape = np.array([job.batch, 3, 4], np.int64)
    _changed(job, [shaped, *_same("second")], {"shape": shape})


def full_only(job: Any) -> None:
    """The last row of the largest batch is read, which other batches do not have."""
    nodes = [helper.make_node("ScatterND", ["first_before", "last", "zeros"], ["first"], reduction="add")]
    constants = {"last": np.array([[job.batch - 1]], np.int64), "zeros": np.zeros((1, 3, 4), np.float32)}
    _changed(job, [*nodes, *_same("second")], constants)


def crashing(job: Any) -> None:
    """Ends as a crash of native code does."""
    os.abort()


def hanging(job: Any) -> None:
    """Takes long."""
    time.sleep(600)


def unless_marked(job: Any) -> None:
    """Hangs after it has written a file, until the file ``go`` lies beside the model."""
    go: Path = job.source.parent / "go"
    (job.source.parent / "reached").touch()
    while not go.exists():
        time.sleep(0.05)
    onnx.save(onnx.load(job.source), job.folder / "model.onnx")
