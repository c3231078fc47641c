"""An ONNX model for tests of `conch optimize`, its samples, and what it returns by numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from tests.support.onnx_graphs import F, Tensors, graph, node

from conch.core.tensor import Array

FEATURES, HIDDEN = 12, 48
STEPS = Path(__file__).with_name("optimize_steps.py")
"""Functions of steps with planted faults."""
ENVIRONMENTS = Path.home() / ".cache" / "conch-tests" / "optimize"
"""Directory in which steps have their environments built, in some minutes; make it to have that."""
OFFLINE = not ENVIRONMENTS.is_dir()


def write_two_outputs(folder: Path, rows: int = 64) -> tuple[Path, Path]:
    """A model with the outputs ``first`` and ``second``, both of [n, 3, 4], and a file of samples."""
    random = np.random.default_rng(3)

    def weights(*shape: int) -> Array:
        scale = np.float32(shape[0] ** -0.5)
        return random.standard_normal(shape, np.float32) * scale

    values = {
        "w1": weights(FEATURES, HIDDEN),
        "w2": weights(HIDDEN, 12),
        "w3": weights(HIDDEN, 12),
        "shape": np.array([0, 3, 4], np.int64),
    }
    nodes = [
        node("MatMul", ["x", "w1"], ["h0"]),
        node("Relu", ["h0"], ["h1"]),
        node("MatMul", ["h1", "w2"], ["a0"]),
        node("Reshape", ["a0", "shape"], ["first"]),
        node("MatMul", ["h1", "w3"], ["b0"]),
        node("Reshape", ["b0", "shape"], ["second"]),
    ]
    constants = [onnx.numpy_helper.from_array(value, name) for name, value in values.items()]
    inputs: Tensors = {"x": (F, ["n", FEATURES])}
    outputs: Tensors = {name: (F, ["n", 3, 4]) for name in ("first", "second")}
    folder.mkdir(parents=True, exist_ok=True)
    model, samples = folder / "two.onnx", folder / "samples.npz"
    model.write_bytes(graph(nodes, inputs, outputs, constants))
    x = random.standard_normal((rows, FEATURES)).astype(np.float32)
    hidden = np.maximum(x @ values["w1"], 0)
    np.savez(samples, x=x)
    answers = {"first": hidden @ values["w2"], "second": hidden @ values["w3"]}
    np.savez(folder / "answers.npz", **{name: each.reshape(rows, 3, 4) for name, each in answers.items()})
    return model, samples
