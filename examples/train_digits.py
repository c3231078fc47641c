"""Trains the `digits` model on scikit-learn's handwritten digits and writes it as ONNX.

Also writes a smaller network, which is right less often, for `hot-swap/` to begin with, and the held-out
images, which neither of them ever saw, for the clients to send.
"""

from pathlib import Path

import numpy as np
import onnx
from make_onnx import MODELS, constant, save, tensor
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

MODEL = MODELS / "digits" / "1" / "model.onnx"
SMALL = Path(__file__).resolve().parent / "hot-swap" / "small.onnx"
HELD_OUT = Path(__file__).resolve().parent / "data" / "digits_heldout.npz"
SEED = 0
PIXEL_MAX = 16.0


def to_graph(network: MLPClassifier) -> onnx.GraphProto:
    """The network as a graph that takes raw pixels: clients need not know how it was scaled."""
    nodes = [helper.make_node("Mul", ["image", "pixel_scale"], ["layer0"])]
    constants = [constant("pixel_scale", np.array([1.0 / PIXEL_MAX]))]
    last = len(network.coefs_)
    for i, (weights, bias) in enumerate(zip(network.coefs_, network.intercepts_, strict=True), start=1):
        constants += [constant(f"weights{i}", weights), constant(f"bias{i}", bias)]
        inputs = [f"layer{i - 1}", f"weights{i}", f"bias{i}"]
        if i == last:
            nodes.append(helper.make_node("Gemm", inputs, ["logits"]))
        else:
            nodes.append(helper.make_node("Gemm", inputs, [f"sum{i}"]))
            nodes.append(helper.make_node("Relu", [f"sum{i}"], [f"layer{i}"]))
    nodes.append(helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1))
    nodes.append(helper.make_node("ArgMax", ["probabilities"], ["digit"], axis=1, keepdims=1))
    return helper.make_graph(
        nodes,
        "digits",
        [tensor("image", TensorProto.FLOAT, 64)],
        [tensor("probabilities", TensorProto.FLOAT, 10), tensor("digit", TensorProto.INT64, 1)],
        constants,
    )


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.2, random_state=SEED, stratify=labels
    )
    HELD_OUT.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(HELD_OUT, images=test_x.astype(np.uint8), labels=test_y.astype(np.uint8))
    # The best of a few by cross-validation on the training images alone (98.0 %).
    best = MLPClassifier((256,), alpha=0.1, max_iter=300, random_state=SEED)
    small = MLPClassifier((3,), alpha=0.1, max_iter=5000, random_state=SEED)
    for network, path in ((best, MODEL), (small, SMALL)):
        network.fit(train_x / PIXEL_MAX, train_y)
        save(to_graph(network), path)
        # The file must say what the network says, so the accuracy is measured on the file.
        digit = ReferenceEvaluator(str(path)).run(["digit"], {"image": test_x.astype(np.float32)})[0][:, 0]
        if not np.array_equal(digit, network.predict(test_x / PIXEL_MAX)):
            raise SystemExit("the ONNX model and the trained network disagree")
        print(f"held-out accuracy: {np.mean(digit == test_y):.2%} of {len(test_y)} images")


if __name__ == "__main__":
    main()
