"""ONNX Runtime for the contract suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.engines.engine import WIDTH, Engine

from conch.core.tensor import NUMPY_DTYPES, Array


class OnnxEngine(Engine):
    """ONNX Runtime."""

    name = "onnxruntime"
    backend = "onnxruntime"
    packages = ("onnx", "onnxruntime")
    file = "model.onnx"
    platform = "onnxruntime_onnx"
    datatypes = (*NUMPY_DTYPES, "BF16")
    allocates = True
    scalars = ("FP32", "BOOL", "BYTES")

    def write(self, version: Path, level: float) -> None:
        import onnx

        weights = np.random.default_rng(1).standard_normal((WIDTH, WIDTH), np.float32)
        nodes = [
            onnx.helper.make_node("MatMul", ["x", "w"], ["product"]),
            onnx.helper.make_node("Add", ["product", "level"], ["y"]),
        ]
        initializers = [
            onnx.numpy_helper.from_array(weights, "w"),
            onnx.numpy_helper.from_array(np.array([level], np.float32), "level"),
        ]
        self._save(version, nodes, onnx.TensorProto.FLOAT, ["n", WIDTH], initializers)

    def write_identity(self, version: Path, datatype: str) -> None:
        import onnx

        dtype = NUMPY_DTYPES.get(datatype)
        kind = onnx.helper.np_dtype_to_tensor_dtype(dtype) if dtype else onnx.TensorProto.BFLOAT16
        node = onnx.helper.make_node("Identity", ["x"], ["y"])
        self._save(version, [node], kind, ["n"] if datatype == "BYTES" else ["n", "k"], [])

    def write_scalar(self, version: Path, datatype: str) -> None:
        import onnx

        kind = onnx.helper.np_dtype_to_tensor_dtype(NUMPY_DTYPES[datatype])
        self._save(version, [onnx.helper.make_node("Identity", ["x"], ["y"])], kind, [], [])

    def write_allocating(self, version: Path) -> None:
        import onnx

        node = onnx.helper.make_node
        one = onnx.helper.make_tensor("one", onnx.TensorProto.FLOAT, [1], [1.0])
        nodes = [
            node("Squeeze", ["x", "axes"], ["row"]),
            node("Cast", ["row"], ["dims"], to=onnx.TensorProto.INT64),
            node("ConstantOfShape", ["dims"], ["ones"], value=one),
            node("ReduceSum", ["ones"], ["sum"], keepdims=0),
            node("Mul", ["x", "zero"], ["zeros"]),
            node("Add", ["zeros", "sum"], ["y"]),
        ]
        constants = [
            onnx.numpy_helper.from_array(np.array([0]), "axes"),
            onnx.numpy_helper.from_array(np.array([0], np.float32), "zero"),
        ]
        self._save(version, nodes, onnx.TensorProto.FLOAT, ["n", WIDTH], constants)

    def opened(self, version: Path) -> Callable[[Array], dict[str, Array]]:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(version / self.file), providers=["CPUExecutionProvider"])
        return lambda rows: {"y": session.run(["y"], {"x": rows})[0]}

    def _save(self, version: Path, nodes: list[Any], kind: int, shape: list[Any], weights: list[Any]) -> None:
        import onnx

        info = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph(
            nodes, "g", [info("x", kind, shape)], [info("y", kind, shape)], weights
        )
        opsets = [onnx.helper.make_opsetid("", 17)]
        onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), version / self.file)
