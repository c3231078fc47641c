"""Models for tests of `conch optimize`, with their samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.support.onnx_graphs import F, Tensors, graph, node

from conch.core.tensor import Array

FEATURES, HIDDEN = 12, 48
STEPS = Path(__file__).with_name("optimize_steps.py")
"""Functions of steps with planted faults."""
ENVIRONMENTS = Path.home() / ".cache" / "conch-tests" / "optimize"
"""Directory in which steps have their environments built, in some minutes; make it to have that."""
OFFLINE = not ENVIRONMENTS.is_dir()
_NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x, scale):
        found = self.out(torch.relu(self.hidden(x)))
        return found * scale, found.sum(1, keepdim=True)


def make():
    torch.manual_seed(1)
    return Net(), (torch.zeros(3, 6), torch.ones(3, 1))


def alone():
    return make()[0]
"""


def keep_environments(patch: pytest.MonkeyPatch) -> None:
    """Has steps use `ENVIRONMENTS`, if it exists; does not make it, which would change later runs."""
    if not OFFLINE:
        patch.setenv("XDG_CACHE_HOME", str(ENVIRONMENTS))


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


def write_torch_module(folder: Path) -> tuple[str, Path]:
    """A function of a module with two inputs and two outputs, as ``file.py:make``, and its samples."""
    random = np.random.default_rng(2)
    arrays = {"x": random.standard_normal((40, 6)), "scale": random.uniform(0.5, 2, (40, 1))}
    net, rows = folder / "net.py", folder / "rows.npz"
    net.write_text(_NET)
    np.savez(rows, **{name: array.astype(np.float32) for name, array in arrays.items()})  # type: ignore[arg-type]
    return f"{net}:make", rows
