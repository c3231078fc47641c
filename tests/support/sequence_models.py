"""Models with sequences, for tests over sockets: Python code, ONNX graphs and their configs."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper
from tests.support.servers import write_model

IO = """
    input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""
SEEN = 'output { name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] }\n'
CONTROLS = """
    control_input { name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
    control_input { name: "E" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] } }
    control_input { name: "R" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
"""
CORRELATION = 'control_input {{ name: "C" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: {} }} }}\n'
LONG = "max_sequence_idle_microseconds: 600000000\n"

SUMS = '''
"""Sums of each sequence, by its id. An input of -1 raises; SEEN says what every request of the batch had."""
import json

import numpy as np
import triton_python_backend_utils as pb_utils


def plain(tensor):
    values = tensor.as_numpy().ravel().tolist()
    return [value.decode() if isinstance(value, bytes) else value for value in values]


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}
        self.runs = 0

    def execute(self, requests):
        self.runs += 1
        rows = [
            {
                "id": request.correlation_id(),
                "flags": request.flags(),
                "shapes": sorted(list(tensor.shape()) for tensor in request.inputs()),
                **{tensor.name(): plain(tensor) for tensor in request.inputs() if tensor.name() != "IN"},
            }
            for request in requests
        ]
        seen = json.dumps({"run": self.runs, "rows": rows}, sort_keys=True).encode()
        return [self.answer(request, seen) for request in requests]

    def answer(self, request, seen):
        key = request.correlation_id()
        value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        if (value == -1).any():
            raise ValueError("told to")
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.sums[key] = 0
        self.sums[key] = self.sums.get(key, 0) + value
        outputs = [
            pb_utils.Tensor("OUT", self.sums[key]),
            pb_utils.Tensor("SEEN", np.array([[seen]], dtype=object)),
        ]
        return pb_utils.InferenceResponse(outputs)
'''

COUNTDOWN = '''
"""One request, many runs: each takes one off what is left, and says so where the model is decoupled."""
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self.left = {}
        self.senders = {}

    def execute(self, requests):
        returned = []
        for request in requests:
            key = request.correlation_id()
            if not key:
                returned.append(None)  # a row without a request
                continue
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
                self.left[key] = int(value.ravel()[0])
                if self.decoupled:
                    self.senders[key] = request.get_response_sender()
            self.left[key] -= 1
            left = self.left[key]
            if left < 0:
                raise ValueError("told to")
            output = pb_utils.Tensor("OUT", np.full((1, 1), left, np.float32))
            response = pb_utils.InferenceResponse([output])
            if left:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            if self.decoupled:
                final = 0 if left else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                self.senders[key].send(response, final)
            returned.append(None if left else response)
        return None if self.decoupled else returned
'''
WRONG_COUNTDOWN = COUNTDOWN.replace("None if left else response", "response")

ECHOES = '''
"""Answers each request of a sequence with its running sum, twice."""
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        for request in requests:
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.sums[request.correlation_id()] = 0
            self.sums[request.correlation_id()] += pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            sender = request.get_response_sender()
            for _ in range(2):
                output = pb_utils.Tensor("OUT", self.sums[request.correlation_id()])
                sender.send(pb_utils.InferenceResponse([output]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''

HISTORY = '''
"""Keeps everything that a sequence has sent as its implicit state, and answers with the sum."""
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            before = pb_utils.get_input_tensor_by_name(request, "BEFORE").as_numpy()
            after = np.concatenate([before, given], axis=1)
            outputs = [
                pb_utils.Tensor("OUT", after.sum(axis=1, keepdims=True)),
                pb_utils.Tensor("AFTER", after),
            ]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
'''


def python_config(
    strategy: str, *, more: str = "", io: str = IO + SEEN, batch: int = 4, extra: str = ""
) -> str:
    """The config of a Python model with sequences."""
    return (
        f'backend: "python"\nmax_batch_size: {batch}\n{io}\n{extra}\n'
        f"sequence_batching {{ {strategy} {{ }} {more} }}\n"
    )


def write_sums(
    repository: Path, name: str, strategy: str, correlation: str = "TYPE_UINT64", *, batch: int = 4
) -> None:
    """Writes a model that answers with the sums of its sequences, and with the controls that it gets."""
    more = LONG + CONTROLS + CORRELATION.format(correlation)
    write_model(repository, name, python_config(strategy, more=more, batch=batch), {"model.py": SUMS})


def accumulator() -> bytes:
    """An ONNX model that adds its input to its state, and shows its controls."""
    number, batch = TensorProto.FLOAT, "batch"
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["IN", "BEFORE"], ["AFTER"]),
            helper.make_node("Identity", ["AFTER"], ["OUT"]),
            helper.make_node("Cast", ["S"], ["start"], to=number),
            helper.make_node("Cast", ["R"], ["ready"], to=number),
            helper.make_node("Cast", ["C"], ["id"], to=number),
            helper.make_node("Concat", ["start", "E", "ready", "id"], ["TOLD"], axis=1),
        ],
        "accumulator",
        [
            info("IN", number, [batch, 1]),
            info("BEFORE", number, [batch, 1]),
            info("S", TensorProto.INT32, [batch, 1]),
            info("E", number, [batch, 1]),
            info("R", TensorProto.BOOL, [batch, 1]),
            info("C", TensorProto.UINT64, [batch, 1]),
        ],
        [
            info("OUT", number, [batch, 1]),
            info("AFTER", number, [batch, 1]),
            info("TOLD", number, [batch, 4]),
        ],
    )
    return _model(graph)


def concatenator() -> bytes:
    """An ONNX model that appends its input to its state, which has a dim of any size."""
    number = TensorProto.FLOAT
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Concat", ["BEFORE", "IN"], ["AFTER"], axis=1),
            helper.make_node("ReduceSum", ["AFTER", "axes"], ["OUT"], keepdims=1),
        ],
        "concatenator",
        [info("IN", number, ["batch", 1]), info("BEFORE", number, ["batch", "past"])],
        [info("OUT", number, ["batch", 1]), info("AFTER", number, ["batch", "all"])],
        [helper.make_tensor("axes", TensorProto.INT64, [1], [1])],
    )
    return _model(graph)


def _model(graph: onnx.GraphProto) -> bytes:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


STATE = """
    state { input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_FP32 dims: [ 1 ] }
"""
GROWING = """
    state {
        input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_FP32 dims: [ -1 ]
        initial_state { name: "start" data_type: TYPE_FP32 dims: [ 2 ] data_file: "start.bin" }
    }
"""


def write_accumulator(repository: Path, name: str, strategy: str) -> None:
    """Writes the ONNX model that adds up."""
    config = f"""
        backend: "onnxruntime" max_batch_size: 4 instance_group {{ count: 1 kind: KIND_CPU }}
        sequence_batching {{
            {strategy} {{ }} {LONG} {STATE} {CONTROLS} {CORRELATION.format("TYPE_UINT64")}
        }}
    """
    write_model(repository, name, config, {"model.onnx": accumulator()})
