"""TF-Lite's signatures, each of which may have a graph of its own."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from tests.support.backend_harness import Harness, rows, tensor_specs

pytest.importorskip("ai_edge_litert")

from conch_engines.tensorflow.tflite_backend import TfLiteBackend

LEVELS = {"add_ten": 10.0, "add_two": 2.0}


def model_of_signatures() -> bytes:
    """A model with a signature for each level, which adds it to rows of any number."""
    flatbuffers = importlib.import_module("flatbuffers")
    schema = importlib.import_module("ai_edge_litert.schema_py_generated")

    def tensor(name: str, buffer: int, *shape: int) -> Any:
        made = schema.TensorT()
        made.name, made.buffer, made.shape = name.encode(), buffer, np.array(np.abs(shape), np.int32)
        made.shapeSignature = np.array(shape, np.int32)
        return made

    def named(name: str, place: int) -> Any:
        made = schema.TensorMapT()
        made.name, made.tensorIndex = name.encode(), place
        return made

    code = schema.OperatorCodeT()  # 0 is ADD
    code.version = 1
    model = schema.ModelT()
    model.version, model.operatorCodes = 3, [code]
    model.buffers, model.subgraphs, model.signatureDefs = [schema.BufferT()], [], []
    for number, (key, level) in enumerate(LEVELS.items()):
        buffer = schema.BufferT()
        buffer.data = np.full(2, level, np.float32).view(np.uint8)
        model.buffers.append(buffer)
        operator = schema.OperatorT()
        operator.inputs, operator.outputs = np.array([0, 1], np.int32), np.array([2], np.int32)
        operator.builtinOptionsType = schema.BuiltinOptions.AddOptions
        operator.builtinOptions = schema.AddOptionsT()
        graph = schema.SubGraphT()
        graph.tensors = [tensor("x", 0, -1, 2), tensor("w", number + 1, 2), tensor("y", 0, -1, 2)]
        graph.inputs, graph.outputs = np.array([0], np.int32), np.array([2], np.int32)
        graph.operators = [operator]
        model.subgraphs.append(graph)
        signature = schema.SignatureDefT()
        signature.signatureKey, signature.subgraphIndex = key.encode(), number
        signature.inputs, signature.outputs = [named("x", 0)], [named(key, 2)]
        model.signatureDefs.append(signature)
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


@pytest.mark.parametrize("chosen", ["", *LEVELS])
def test_the_chosen_signature_is_run(harness: Harness, chosen: str) -> None:
    version = harness.directory("m", {"1/model.tflite": model_of_signatures()}) / "1"
    backend = TfLiteBackend()
    config = {"name": "m", "parameters": {"SIGNATURE": {"string_value": chosen}}}
    output = chosen or "add_ten"
    completed = backend.complete_config(config, version, {})
    assert [(each["name"], each["dims"]) for each in completed["output"]] == [(output, [2])]
    inputs, outputs = tensor_specs(x=("FP32", (2,))), tensor_specs(**{output: ("FP32", (2,))})
    spec = harness.spec("m", inputs, outputs, "model.tflite", parameters={"SIGNATURE": chosen})
    model = harness.load(backend, spec)
    for count in (1, 3, 2):
        answer = harness.infer(model, {"x": rows(*range(count))}).array(output)
        assert answer.tolist() == (rows(*range(count)) + LEVELS[output]).tolist()
