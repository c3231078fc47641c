"""Writes the hand-made ONNX models: `simple` (add and subtract), `autocomplete_onnx` and `anomaly`."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MODELS = Path(__file__).resolve().parent / "models" / "basic"

# Neither is the newest: an onnxruntime refuses a model whose IR or opset is newer than itself,
# and these two are understood by every release since 1.12.
OPSET = 17
IR_VERSION = 8


def tensor(name: str, dtype: int, *dims: int) -> onnx.ValueInfoProto:
    """A graph input or output whose first dimension is the batch, of any size."""
    return helper.make_tensor_value_info(name, dtype, ["batch", *dims])


def constant(name: str, value: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(value, dtype=np.float32), name)


def save(graph: onnx.GraphProto, path: Path) -> None:
    """Checks the graph and writes it as a model."""
    model = helper.make_model(
        graph,
        producer_name="conch-examples",
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    onnx.checker.check_model(model, full_check=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString(deterministic=True))
    print(f"{path.relative_to(MODELS)}: {path.stat().st_size} bytes")


def add_sub() -> onnx.GraphProto:
    return helper.make_graph(
        [
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
        ],
        "simple",
        [tensor(name, TensorProto.INT32, 16) for name in ("INPUT0", "INPUT1")],
        [tensor(name, TensorProto.INT32, 16) for name in ("OUTPUT0", "OUTPUT1")],
    )


def fahrenheit() -> onnx.GraphProto:
    return helper.make_graph(
        [
            helper.make_node("Mul", ["celsius", "ratio"], ["scaled"]),
            helper.make_node("Add", ["scaled", "offset"], ["fahrenheit"]),
        ],
        "autocomplete_onnx",
        [tensor("celsius", TensorProto.FLOAT, 1)],
        [tensor("fahrenheit", TensorProto.FLOAT, 1)],
        [constant("ratio", np.array([1.8])), constant("offset", np.array([32.0]))],
    )


def anomaly() -> onnx.GraphProto:
    """Compares each value with the exponentially weighted mean and variance of those before it."""
    return helper.make_graph(
        [
            # The first value of a sequence has nothing before it, so it is what was expected.
            helper.make_node("Where", ["start", "value", "mean_before"], ["expected"]),
            helper.make_node("Sub", ["value", "expected"], ["difference"]),
            helper.make_node("Sqrt", ["variance_before"], ["deviation"]),
            helper.make_node("Div", ["difference", "deviation"], ["score"]),
            helper.make_node("Mul", ["difference", "weight"], ["step"]),
            helper.make_node("Add", ["expected", "step"], ["mean"]),
            helper.make_node("Mul", ["difference", "step"], ["spread"]),
            helper.make_node("Add", ["variance_before", "spread"], ["sum"]),
            helper.make_node("Mul", ["sum", "rest"], ["shrunk"]),
            helper.make_node("Max", ["shrunk", "floor"], ["variance"]),
        ],
        "anomaly",
        [
            tensor("value", TensorProto.FLOAT, 1),
            tensor("start", TensorProto.BOOL, 1),
            tensor("mean_before", TensorProto.FLOAT, 1),
            tensor("variance_before", TensorProto.FLOAT, 1),
        ],
        [tensor(name, TensorProto.FLOAT, 1) for name in ("score", "expected", "mean", "variance")],
        [
            constant("weight", np.array([0.1])),
            constant("rest", np.array([0.9])),
            constant("floor", np.array([1e-4])),  # a series that never changes must not divide by zero
        ],
    )


if __name__ == "__main__":
    save(add_sub(), MODELS / "simple" / "1" / "model.onnx")
    save(fahrenheit(), MODELS / "autocomplete_onnx" / "1" / "model.onnx")
    save(anomaly(), MODELS / "anomaly" / "1" / "model.onnx")
    variance = MODELS / "anomaly" / "initial_state" / "variance"
    variance.parent.mkdir(exist_ok=True)
    variance.write_bytes(np.array([1.0], dtype="<f4").tobytes())
