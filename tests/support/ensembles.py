"""Ensembles of Python models that say what they see, for conch and for a real Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.servers import write_model
from tritonclient.grpc import service_pb2

SPY = '''
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers IN with OUT; SEEN tells of the request. Does what parameters that end in its name say."""

    def initialize(self, args):
        self.name = args["model_name"]
        self.batches = json.loads(args["model_config"])["max_batch_size"] > 0

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        orders = json.loads(request.parameters())
        if code := orders.get("error_" + self.name):
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError("told to", getattr(pb_utils.TritonError, code))
            )
        if orders.get("raise_" + self.name):
            raise ValueError("told to")
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        seen = {
            "id": request.request_id(),
            "sequence": [request.correlation_id(), request.flags()],
            "timeout": request.timeout(),
            "parameters": orders,
            "shapes": {name: list(value.shape) for name, value in sorted(inputs.items())},
        }
        value = inputs["IN"]
        rows = (len(value), 1) if self.batches else (1,)
        outputs = [pb_utils.Tensor("OUT", value + 1)]
        if not orders.get("drop_" + self.name):
            seen = json.dumps(seen, sort_keys=True).encode()
            outputs.append(pb_utils.Tensor("SEEN", np.full(rows, seen, np.object_)))
        said = {key[4:]: value for key, value in orders.items() if key.startswith("say_")}
        if said and self.name == "spy":
            return pb_utils.InferenceResponse(outputs, parameters=said)
        return pb_utils.InferenceResponse(outputs)
'''
MANY = '''
import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with each element of IN by itself, twice, as ONE and TWO."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            orders = json.loads(request.parameters())
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            for number in range(value.size):
                if orders.get("error_many") == number:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("told to")))
                    break
                part = value.ravel()[number : number + 1].reshape((1,) * value.ndim)
                outputs = [pb_utils.Tensor("ONE", part)]
                if not orders.get("part"):
                    outputs.append(pb_utils.Tensor("TWO", part))
                sender.send(pb_utils.InferenceResponse(outputs))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
JOIN = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", sum(tensor.as_numpy() for tensor in request.inputs()))]
            )
            for request in requests
        ]
"""

Steps = Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]]


def tensor_config(kind: str, name: str, dims: str = "-1", datatype: str = "FP32", more: str = "") -> str:
    """An input or output of a config."""
    return f'{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dims} ] {more} }}\n'


def python_config(batch: int = 8, dims: str = "-1", more: str = "") -> str:
    """The start of a spy's config, or of one like it."""
    return (
        f'backend: "python"\nmax_batch_size: {batch}\n{more}\n'
        + tensor_config("input", "IN", dims)
        + tensor_config("input", "OPT", dims, more="optional: true")
        + tensor_config("output", "OUT", dims)
        + tensor_config("output", "SEEN", "1", "STRING")
    )


def ensemble_config(
    steps: Steps,
    outputs: Sequence[str] = ("Y",),
    inputs: Sequence[str] = ("X",),
    batch: int = 8,
    dims: str = "-1",
    extra: str = "",
    settings: str = "",
) -> str:
    """An ensemble's config; outputs that begin with S are what spies have seen, inputs with O optional."""
    config = f'platform: "ensemble"\nmax_batch_size: {batch}\n{extra}\n'
    for name in inputs:
        config += tensor_config("input", name, dims, more="optional: true" if name[0] == "O" else "")
    for name in outputs:
        seen = name[0] == "S"
        config += tensor_config("output", name, "1" if seen else dims, "STRING" if seen else "FP32")
    config += f"ensemble_scheduling {{ {settings}\n"
    for model, sources, targets in steps:
        config += f'step {{ model_name: "{model}" model_version: -1\n'
        for kind, pairs in (("input_map", sources), ("output_map", targets)):
            for end, name in pairs.items():
                config += f'{kind} {{ key: "{end}" value: "{name}" }}\n'
        config += "}\n"
    return config + "}\n"


def spied(model: str, source: str, target: str, seen: str, **more: str) -> Any:
    """A step of a spy."""
    return model, {"IN": source, **more}, {"OUT": target, "SEEN": seen}


def plain(model: str, source: str, target: str) -> Any:
    """A step of a spy whose sights are not requested."""
    return model, {"IN": source}, {"OUT": target}


ENSEMBLES = {
    "chain": ensemble_config(
        [spied("spy", "X", "t", "S1"), spied("spy2", "t", "Y", "S2")], ["Y", "S1", "S2"]
    ),
    "diamond": ensemble_config(
        [
            plain("spy", "X", "a"),
            plain("spy2", "a", "b"),
            plain("spy", "a", "c"),
            ("join", {"A": "b", "B": "c"}, {"OUT": "Y"}),
            plain("spy2", "c", "Z"),
        ],
        ["Y", "Z"],
    ),
    "outer": ensemble_config(
        [("chain", {"X": "X"}, {"Y": "t", "S1": "S1"}), spied("spy2", "t", "Y", "S2")], ["Y", "S1", "S2"]
    ),
    "optional": ensemble_config([spied("spy", "X", "Y", "S1", OPT="O")], ["Y", "S1"], ["X", "O"]),
    "needed": ensemble_config([plain("spy", "O", "Y")], inputs=["O"]),
    "each": ensemble_config([("many", {"IN": "X"}, {"ONE": "t"}), spied("spy", "t", "Y", "S1")], ["Y", "S1"]),
    "all": ensemble_config([("many", {"IN": "X"}, {"ONE": "Y", "TWO": "Z"})], ["Y", "Z"]),
    "twice": ensemble_config([("many", {"IN": "X"}, {"ONE": "t"}), ("many", {"IN": "t"}, {"ONE": "Y"})]),
    "both": ensemble_config(
        [("many", {"IN": "X"}, {"ONE": "a", "TWO": "b"}), ("join", {"A": "a", "B": "b"}, {"OUT": "Y"})]
    ),
    "one without": ensemble_config([plain("flat", "X", "Y")]),
    "one with dims": ensemble_config([plain("square", "X", "Y")]),
    "without then with": ensemble_config([plain("flat", "X", "t"), plain("spy", "t", "Y")]),
    "with then without": ensemble_config([plain("spy", "X", "t"), plain("square", "t", "Y")]),
    "none over one": ensemble_config([plain("spy", "X", "Y")], batch=0),
    "none over dims": ensemble_config([plain("spy", "X", "Y")], batch=0, dims="-1, -1"),
    "reshaped": """
        platform: "ensemble"
        max_batch_size: 8
        input { name: "X" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } }
        output { name: "Y" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } }
        ensemble_scheduling { step {
            model_name: "spy" model_version: -1
            input_map { key: "IN" value: "X" } output_map { key: "OUT" value: "Y" }
        } }
    """,
    "labelled": ensemble_config([plain("labels", "X", "Y")], dims="3"),
}


def write_ensembles(repository: Path) -> None:
    """Writes all ensembles of `ENSEMBLES`, with the models they are made of."""
    write_model(repository, "spy", python_config(), {"model.py": SPY})
    write_model(repository, "spy2", python_config(), {"model.py": SPY})
    write_model(repository, "flat", python_config(0), {"model.py": SPY})
    write_model(repository, "square", python_config(0, "-1, -1"), {"model.py": SPY})
    labelled = tensor_config("output", "OUT", "3", more='label_filename: "labels.txt"')
    config = python_config(8, "3").replace(tensor_config("output", "OUT", "3"), labelled)
    (write_model(repository, "labels", config, {"model.py": SPY}) / "labels.txt").write_text("a\nb\nc\n")
    many = "model_transaction_policy { decoupled: true }"
    ends = [("input", "IN"), ("output", "ONE"), ("output", "TWO")]
    config = f'backend: "python"\nmax_batch_size: 8\n{many}\n' + "".join(tensor_config(*end) for end in ends)
    write_model(repository, "many", config, {"model.py": MANY})
    ends = [("input", "A"), ("input", "B"), ("output", "OUT")]
    config = 'backend: "python"\nmax_batch_size: 8\n' + "".join(tensor_config(*end) for end in ends)
    write_model(repository, "join", config, {"model.py": JOIN})
    for name, text in ENSEMBLES.items():
        write_model(repository, name, text)


def request(model: str, values: Any, outputs: Sequence[str] = (), **parameters: Any) -> Any:
    """A request with X, or with inputs by name; outputs are ``name`` or ``name:classes``."""

    message = service_pb2.ModelInferRequest(model_name=model, id="an id")
    for name, value in (values if isinstance(values, dict) else {"X": values}).items():
        array = np.array(value, np.float32)
        message.inputs.add(name=name, datatype="FP32", shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    for output in outputs:
        name, _, classes = output.partition(":")
        asked = message.outputs.add(name=name)
        if classes:
            asked.parameters["classification"].int64_param = int(classes)
    for key, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(message.parameters[key], kind, value)
    return message
