"""Texts of engines' exceptions: places in the sources of the engine go, and the log has the whole."""

from __future__ import annotations

import logging

import pytest

from conch.core.engine_text import engine_text, without_places

NODE = "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code while running Add node. Status Message: "
ORT = "/onnxruntime_src/onnxruntime/core"
TEXTS = {
    "ONNX Runtime": (
        f"{NODE}{ORT}/providers/cpu/math/element_wise_ops.h:563 void onnxruntime::BroadcastIterator::Init("
        "ptrdiff_t, ptrdiff_t) axis == 1 || axis == largest was false. Attempting to broadcast an axis by a "
        "dimension other than 1. 3 by 4\n",
        f"{NODE}axis == 1 || axis == largest was false. Attempting to broadcast an axis by a dimension other "
        "than 1. 3 by 4",
    ),
    "ONNX Runtime, of a template": (
        f"{ORT}/a.cc:5 onnxruntime::common::Status onnxruntime::Foo<T>::Compute(onnxruntime::Context*) "
        "const [with T = float] rank (2) was false. sizes (a, b)",
        "rank (2) was false. sizes (a, b)",
    ),
    "ONNX Runtime, of an operator": (
        f"{ORT}/a.cc:5 onnxruntime::F::G(int)::<lambda(long int)> {ORT}/b.h:7 void onnxruntime::H::operator()"
        "(std::function<void(int)>) why",
        "why",
    ),
    "ONNX Runtime, in short": (
        f"{NODE}matmul_helper.h:59 Compute MatMul dimension mismatch",
        f"{NODE}MatMul dimension mismatch",
    ),
    "OpenVINO": (
        "Exception from src/inference/src/cpp/infer_request.cpp:224:\nException from "
        "src/plugins/intel_cpu/src/node.cpp:794:\n[CPU] MatMul node with name 'c' Check 'k_lhs == k_rhs' "
        "failed at src/plugins/intel_cpu/src/shape_inference/custom/matmul.cpp:45:\nMatmul input shapes are "
        "incompatible shape A: (2.3) shape B: (4.5)\n\n\n",
        "[CPU] MatMul node with name 'c' Check 'k_lhs == k_rhs' failed:\nMatmul input shapes are "
        "incompatible shape A: (2.3) shape B: (4.5)",
    ),
    "OpenVINO GenAI": (
        "Exception from /home/ci/b/repos/openvino.genai/src/cpp/src/utils.cpp:500:\nCould not find a model "
        "in the directory '\"/models/m\"'\n",
        "Could not find a model in the directory '\"/models/m\"'",
    ),
    "XGBoost": (
        "[12:38:54] /workspace/src/learner.cc:1289: Check failed: a >= p->b().c (3 vs. 5) : Number of "
        "columns does not match.\nStack trace:\n  [bt] (0) /venv/libxgboost.so(+0x11031e) [0x7f0c]\n\n",
        "Check failed: a >= p->b().c (3 vs. 5) : Number of columns does not match.",
    ),
    "treelite": (
        "[12:38:55] /project/src/model_loader/lightgbm.cc:282: Check failed: it != end(): Ill-formed file",
        "Check failed: it != end(): Ill-formed file",
    ),
    "LightGBM": (
        "Check failed: (left_count) > (0) at /__w/1/s/lightgbm-python/src/learner.cpp, line 846 .",
        "Check failed: (left_count) > (0) .",
    ),
    "PyTorch": (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory",
        "[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory",
    ),
    "PyTorch, an assertion": (
        't INTERNAL ASSERT FAILED at "/pytorch/aten/src/ATen/x.cpp":123, please report a bug to PyTorch. '
        "why\nException raised from f at /pytorch/c10/x.cpp:1 (most recent call first):\nframe #0: g + 0x1\n",
        "t INTERNAL ASSERT FAILED, please report a bug to PyTorch. why",
    ),
    "LiteRT": (
        "tensorflow/lite/kernels/reshape.cc:92 a != b (6 != 4)Node number 0 (RESHAPE) failed to prepare.",
        "a != b (6 != 4)Node number 0 (RESHAPE) failed to prepare.",
    ),
}
KEPT = (
    "model '/models/x.h/1/model.onnx' has (a::b(c)) at 3:4",
    'File "code/__torch__/m.py", line 7, in forward',
    "no file a.cc",
)


@pytest.mark.parametrize("engine", TEXTS)
def test_places_in_sources_go(engine: str) -> None:
    text, shown = TEXTS[engine]
    assert without_places(text) == shown
    assert without_places(shown) == shown


@pytest.mark.parametrize("text", KEPT)
def test_other_texts_stay(text: str) -> None:
    assert without_places(text) == text


def test_the_log_has_the_whole_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    text, shown = TEXTS["XGBoost"]
    assert engine_text(RuntimeError(text)) == shown
    assert text in caplog.text
    caplog.clear()
    assert (engine_text(RuntimeError("plain\n")), engine_text(ValueError())) == ("plain", "ValueError")
    assert not caplog.records


def test_a_long_text_is_searched_at_its_beginning() -> None:
    """It may have what a client has sent, in any length."""
    text, shown = TEXTS["XGBoost"]
    long = "x" * 40_000
    assert without_places(f"{text.splitlines()[0]} {long}") == f"{shown} {long}"
    assert without_places(f"{long} {text}") == f"{long} {text}".strip()
