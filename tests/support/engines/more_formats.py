"""Formats that only the test of damaged files needs, as other suites cover what their backends do."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
from tests.support.engines.engine import WIDTH, Engine
from tests.support.engines.onnx_engine import OnnxEngine
from tests.support.tree_models import labels, samples

from conch.core.tensor import Array


class _OnlyFiles(Engine):
    def opened(self, version: Path) -> Callable[[Array], dict[str, Array]]:
        raise NotImplementedError


class OpenVinoIr(_OnlyFiles):
    """The XML of OpenVINO's own format; its weights stay whole."""

    name = "openvino_ir"
    backend = "openvino"
    packages = ("onnx", "openvino")
    file = "model.xml"
    scalars = OnnxEngine.scalars

    def write(self, version: Path, level: float) -> None:
        source = OnnxEngine()
        source.write(version, level)
        self._convert(version, source)

    def write_scalar(self, version: Path, datatype: str) -> None:
        source = OnnxEngine()
        source.write_scalar(version, datatype)
        self._convert(version, source)

    def _convert(self, version: Path, source: Engine) -> None:
        from conch_engines.openvino.openvino_engine import import_openvino

        openvino = import_openvino()
        openvino.save_model(openvino.Core().read_model(version / source.file), version / self.file)
        (version / source.file).unlink()


class TfLite(_OnlyFiles):
    """A TF-Lite model of one addition, or with a signature of none."""

    name = "tflite"
    backend = "tflite"
    packages = ("ai_edge_litert", "flatbuffers")
    file = "model.tflite"
    scalars = ("FP32", "BYTES")

    def write(self, version: Path, level: float) -> None:
        self._write(version, np.full(WIDTH, level, np.float32), 1, WIDTH)

    def write_scalar(self, version: Path, datatype: str) -> None:
        self._write(version, np.zeros((), "S1" if datatype == "BYTES" else np.float32))

    def _write(self, version: Path, addend: Array, *shape: int) -> None:
        flatbuffers = importlib.import_module("flatbuffers")
        schema = importlib.import_module("ai_edge_litert.schema_py_generated")

        def tensor(name: str, buffer: int, *shape: int) -> object:
            made = schema.TensorT()
            made.name, made.buffer, made.shape = name.encode(), buffer, np.array(shape, np.int32)
            return made

        buffers = [schema.BufferT(), schema.BufferT()]
        buffers[1].data = addend.reshape(-1).view(np.uint8)
        code = schema.OperatorCodeT()  # 0 is ADD
        code.version = 1
        operator = schema.OperatorT()
        operator.inputs, operator.outputs = np.array([0, 1], np.int32), np.array([2], np.int32)
        operator.builtinOptionsType = schema.BuiltinOptions.AddOptions
        operator.builtinOptions = schema.AddOptionsT()
        graph = schema.SubGraphT()
        graph.tensors = [tensor("x", 0, *shape), tensor("w", 1, *addend.shape), tensor("y", 0, *shape)]
        graph.inputs, graph.outputs = np.array([0], np.int32), np.array([2], np.int32)
        graph.operators = [operator]
        model = schema.ModelT()
        model.version, model.buffers = 3, buffers
        if addend.dtype.kind == "S":
            graph.tensors, graph.outputs, graph.operators = graph.tensors[:1], graph.inputs, []
            graph.tensors[0].type = schema.TensorType.STRING
            signature = schema.SignatureDefT()
            signature.signatureKey = b"same"
            signature.inputs, signature.outputs = [schema.TensorMapT()], [schema.TensorMapT()]
            signature.inputs[0].name, signature.outputs[0].name = b"x", b"y"
            model.signatureDefs = [signature]
        model.subgraphs, model.operatorCodes = [graph], [code]
        builder = flatbuffers.Builder(1024)
        builder.Finish(model.Pack(builder), b"TFL3")
        (version / self.file).write_bytes(bytes(builder.Output()))


class Skops(_OnlyFiles):
    """A forest of scikit-learn."""

    name = "skops"
    backend = "fil"
    packages = ("skops", "sklearn", "treelite")
    file = "model.skops"
    input = "input__0"
    outputs: ClassVar[Mapping[str, tuple[int, ...]]] = {"output__0": (1,)}
    parameters: ClassVar[Mapping[str, str]] = {"model_type": "sklearn", "is_classifier": "false"}

    def write(self, version: Path, level: float) -> None:
        import skops.io
        from sklearn.ensemble import RandomForestRegressor

        forest = RandomForestRegressor(3, max_depth=3, random_state=1)
        skops.io.dump(forest.fit(samples(), labels("regression") + level), version / self.file)
