"""Writes TensorFlow models and what they answer; run by the interpreter that has TensorFlow.

Arguments: the directory to write to. `answers.npz` there has the inputs and outputs of each model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf


class Affine(tf.Module):
    """Two outputs from rows of four numbers."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self.weights = tf.Variable(np.arange(16, dtype=np.float32).reshape(4, 4) / 7)
        self.level = tf.Variable(level)

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, "x")])
    def call(self, x: Any) -> dict[str, Any]:
        """Runs it."""
        product = x @ self.weights
        return {"y": product + self.level, "total": tf.reduce_sum(product, axis=1)}


class Same(tf.Module):
    """Returns what it gets, of several types."""

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, None], tf.string, "text"),
            tf.TensorSpec([None, None], tf.float16, "half"),
            tf.TensorSpec([None, None], tf.uint16, "number"),
        ]
    )
    def call(self, text: Any, half: Any, number: Any) -> dict[str, Any]:
        """Runs it."""
        return {"TEXT": text, "HALF": tf.identity(half), "NUMBER": tf.identity(number)}


class Scalars(tf.Module):
    """Returns values of rank 0."""

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32, "x"), tf.TensorSpec([], tf.string, "text")])
    def call(self, x: Any, text: Any) -> dict[str, Any]:
        """Runs it."""
        return {"y": x * 2, "TEXT": tf.strings.join([text, text])}


class AnyRank(tf.Module):
    """Doubles a tensor of any shape."""

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32, "x")])
    def call(self, x: Any) -> dict[str, Any]:
        """Runs it."""
        return {"y": x * 2}


def write(root: Path) -> None:
    """Writes all models."""
    rows = np.random.default_rng(5).standard_normal((8, 4), np.float32)
    answers: dict[str, Any] = {"rows": rows}
    for name, level in (("affine", 0.0), ("other", 10.0)):
        model = Affine(level)
        tf.saved_model.save(model, str(root / name), signatures={"serving_default": model.call})
        for key, value in model.call(tf.constant(rows)).items():
            answers[f"{name}.{key}"] = value.numpy()
    converter = tf.lite.TFLiteConverter.from_saved_model(str(root / "affine"))
    (root / "model.tflite").write_bytes(converter.convert())
    for name, made in (("scalars", Scalars()), ("any", AnyRank())):
        tf.saved_model.save(made, str(root / name), signatures={"serving_default": made.call})
    same = Same()
    tf.saved_model.save(same, str(root / "same"), signatures={"second": same.call})
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4], "IN")
        tf.add(x * 2, 1, name="OUT")
        (root / "model.graphdef").write_bytes(graph.as_graph_def().SerializeToString())
    np.savez(str(root / "answers.npz"), allow_pickle=False, **answers)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
