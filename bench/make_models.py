"""Writes the ONNX models of the benchmark repositories.

The results are a few hundred bytes and tracked, so a benchmark does not need the onnx package; this script
is how they were made: `python -m bench.make_models`.
"""

from __future__ import annotations

from pathlib import Path

ONNX_REPOSITORY = Path(__file__).parent / "repositories" / "onnx"


def identity_model() -> bytes:
    """An FP32 identity over [batch, length], in an old IR version that every onnxruntime in range reads."""
    from onnx import TensorProto, checker, helper

    shape = ["batch", "length"]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])],
        "identity",
        [helper.make_tensor_value_info("INPUT0", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("OUTPUT0", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    checker.check_model(model)
    return bytes(model.SerializeToString())


def main() -> None:
    """Write every model to its place."""
    target = ONNX_REPOSITORY / "identity_onnx" / "1" / "model.onnx"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(identity_model())
    print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
