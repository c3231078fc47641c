"""ONNX models: completion, validation, batching and errors, with graphs made on the spot."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from tests.support.backend_harness import Harness, one_batch, rows, strings, tensor_specs
from tests.support.native_builds import ROOT, run_compiler
from tests.support.onnx_graphs import ADD_SUB, I64, MEAN, RAGGED, F, S, Tensors, graph, node
from tests.support.other_roots import linked_from_another_root

from conch.backends import load_backend
from conch.backends.arrays import WritesInPlace
from conch.core.errors import (
    ConchError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
    UnsupportedError,
)
from conch.core.execution.placement import Placement, place
from conch.core.padding import MadeInput, PaddedInput, PaddedOutput, Padding
from conch.core.spec import BatchInput, BatchOutput, InstanceGroup, ModelSpec, TensorSpec
from conch.core.tensor import Tensor
from conch_engines.model_config import threads_per_instance
from conch_engines.onnxruntime import OnnxRuntimeBackend
from conch_engines.onnxruntime.ort_providers import CUDA, Plugins, Providers, execution_providers
from conch_engines.onnxruntime.session_options import run_options, session_options

INPUTS = tensor_specs(A=("FP32", (2,)), B=("FP32", (2,)))
OUTPUTS = tensor_specs(SUM=("FP32", (2,)), DIFF=("FP32", (2,)))


@pytest.fixture(scope="module")
def backend() -> OnnxRuntimeBackend:
    return OnnxRuntimeBackend()


def write(harness: Harness, content: bytes, name: str = "m") -> Path:
    return harness.directory(name, {"1/model.onnx": content}) / "1"


def complete(
    backend: OnnxRuntimeBackend, directory: Path, options: Any = None, **config: Any
) -> dict[str, Any]:
    return backend.complete_config({"name": "m", **config}, directory, options or {})


def test_completes_a_config_from_the_model(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    config = complete(backend, write(harness, ADD_SUB))
    assert config == {
        "name": "m",
        "max_batch_size": 4,
        "dynamic_batching": {},
        "input": [
            {"name": "A", "data_type": "TYPE_FP32", "dims": [2]},
            {"name": "B", "data_type": "TYPE_FP32", "dims": [2]},
        ],
        "output": [
            {"name": "SUM", "data_type": "TYPE_FP32", "dims": [2]},
            {"name": "DIFF", "data_type": "TYPE_FP32", "dims": [2]},
        ],
    }


def test_completion_respects_what_is_given(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    directory = write(harness, ADD_SUB)
    given = complete(backend, directory, max_batch_size=7, sequence_batching={})
    assert given["max_batch_size"] == 7 and "dynamic_batching" not in given
    assert complete(backend, directory, {"default-max-batch-size": "16"})["max_batch_size"] == 16
    one = complete(backend, directory, {"default-max-batch-size": "1"})
    assert one["max_batch_size"] == 1 and "dynamic_batching" not in one
    whole = complete(backend, directory, {"default-max-batch-size": "0"})
    assert whole["input"][0]["dims"] == [-1, 2] and "dynamic_batching" not in whole
    with pytest.raises(InvalidArgumentError, match="must be a whole number, got 'many'"):
        complete(backend, directory, {"default-max-batch-size": "many"})


def test_completion_is_skipped_for_a_full_config(
    harness: Harness, backend: OnnxRuntimeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = {"name": "m", "input": [{"name": "A"}], "output": [{"name": "SUM"}]}
    assert backend.complete_config(dict(config), harness.root, {}) == config
    assert (
        "skipping model configuration auto-complete for 'm': inputs and outputs already specified"
        in caplog.text
    )


def test_model_with_a_fixed_batch_does_not_batch(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    directory = write(harness, graph([node("Neg", ["A"], ["B"])], {"A": (F, [1, 2])}, {"B": (F, [1, 2])}))
    config = complete(backend, directory)
    assert config["input"][0]["dims"] == [1, 2] and not config.get("max_batch_size")
    with pytest.raises(InvalidArgumentError) as caught:
        complete(backend, directory, max_batch_size=2)
    assert caught.value.message == (
        "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is "
        "specified"
    )


def test_scalars_get_dims_of_one_and_a_reshape(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    content = graph([node("Neg", ["A"], ["B"])], {"A": (F, ["n"])}, {"B": (F, ["n"])})
    config = complete(backend, write(harness, content))
    entry = {"data_type": "TYPE_FP32", "dims": [1], "reshape": {"shape": []}}
    assert config["input"] == [{"name": "A", **entry}]
    model = harness.load(
        backend,
        harness.spec(
            inputs=(TensorSpec("A", "FP32", (1,), reshape=()),),
            outputs=(TensorSpec("B", "FP32", (1,), reshape=()),),
            model_file="model.onnx",
        ),
    )
    assert harness.infer(model, {"A": rows(1, 2, width=1)}).array("B").tolist() == [[-1], [-2]]


@pytest.mark.parametrize(("dims", "inside"), [((1,), ()), ((1,), None), ((1, 1), None), ((2,), None)])
def test_scalars_of_a_model_without_a_batch(
    harness: Harness, backend: OnnxRuntimeBackend, dims: tuple[int, ...], inside: tuple[int, ...] | None
) -> None:
    """A config can't have empty dims: with or without a reshape, dims of 1 stand for a scalar."""
    content = graph(
        [node("Neg", ["A"], ["B"]), node("Neg", ["C"], ["D"])],
        {"A": (F, []), "C": (F, ["n"])},
        {"B": (F, []), "D": (F, ["n"])},
    )
    write(harness, content)
    spec = harness.spec(
        inputs=(TensorSpec("A", "FP32", dims, reshape=inside), *tensor_specs(C=("FP32", (-1,)))),
        outputs=(TensorSpec("B", "FP32", dims, reshape=inside), *tensor_specs(D=("FP32", (-1,)))),
        model_file="model.onnx",
        max_batch_size=0,
    )
    if 2 in dims:
        with pytest.raises(InvalidArgumentError, match="the model expects 0 dimensions"):
            harness.load(backend, spec)
        return
    answer = harness.infer(harness.load(backend, spec), {"A": np.ones(dims, np.float32), "C": rows(1)[0]})
    assert (answer.array("B").tolist(), answer.array("D").tolist()) == ((-np.ones(dims)).tolist(), [-1, -1])


def test_initializers_that_are_inputs(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    """A config may name those that a request may replace, and need not."""
    weights = onnx.numpy_helper.from_array(np.ones((1, 2), np.float32), "W")
    tensors: Tensors = {"A": (F, [1, 2]), "W": (F, [1, 2])}
    write(harness, graph([node("Add", ["A", "W"], ["B"])], tensors, {"B": (F, [1, 2])}, [weights]))
    a, w = tensor_specs(A=("FP32", (1, 2)), W=("FP32", (1, 2)))
    more: dict[str, Any] = {
        "outputs": tensor_specs(B=("FP32", (1, 2))),
        "model_file": "model.onnx",
        "max_batch_size": 0,
    }
    optional = dataclasses.replace(w, optional=True)
    model = harness.load(backend, harness.spec(inputs=(a, optional), **more))
    assert harness.infer(model, {"A": rows(1)}).array("B").tolist() == [[2, 2]]
    assert harness.infer(model, {"A": rows(1), "W": rows(5)}).array("B").tolist() == [[6, 6]]
    model = harness.load(backend, harness.spec(inputs=(a,), **more))
    assert harness.infer(model, {"A": rows(1)}).array("B").tolist() == [[2, 2]]
    with pytest.raises(ConchError, match="configuration expects 1 inputs, model provides 2"):
        harness.load(backend, harness.spec(inputs=(w,), **more))


def test_batches_across_two_instances(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    write(harness, ADD_SUB)
    model = harness.load(
        backend,
        harness.spec(
            inputs=INPUTS,
            outputs=OUTPUTS,
            model_file="model.onnx",
            batching=one_batch(4),
            instance_groups=(InstanceGroup("m_0", count=2),),
        ),
    )
    answers = harness.batch(model, [{"A": rows(n, n + 10), "B": rows(1, 1)} for n in range(2)])
    assert [answer.array("SUM")[:, 0].tolist() for answer in answers] == [[1, 11], [2, 12]]
    assert [answer.array("DIFF")[:, 0].tolist() for answer in answers] == [[-1, 9], [0, 10]]
    assert model.statistics.snapshot().execution_count == 1
    only = harness.infer(model, {"A": rows(1, 1, 1, 1), "B": rows(2, 2, 2, 2)}, requested=("DIFF",))
    assert [tensor.name for tensor in only.one.outputs] == ["DIFF"]


def test_config_may_leave_outputs_out(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    write(harness, ADD_SUB)
    model = harness.load(backend, harness.spec(inputs=INPUTS, outputs=OUTPUTS[:1], model_file="model.onnx"))
    answer = harness.infer(model, {"A": rows(1), "B": rows(2)})
    assert [tensor.name for tensor in answer.one.outputs] == ["SUM"]


def test_strings_and_half_floats(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    half = onnx.TensorProto.FLOAT16
    write(
        harness,
        graph(
            [node("Identity", ["S"], ["T"]), node("Neg", ["H"], ["K"])],
            {"S": (S, ["n", 1]), "H": (half, ["n", 2])},
            {"T": (S, ["n", 1]), "K": (half, ["n", 2])},
        ),
    )
    model = harness.load(
        backend,
        harness.spec(
            inputs=tensor_specs(S=("BYTES", (1,)), H=("FP16", (2,))),
            outputs=tensor_specs(T=("BYTES", (1,)), K=("FP16", (2,))),
            model_file="model.onnx",
            batching=one_batch(2),
        ),
    )
    halves = rows(1).astype(np.float16)
    answers = harness.batch(model, [{"S": strings(text), "H": halves} for text in (b"a\0b", "é".encode())])
    texts = [[tensor.data for tensor in answer.one.outputs if tensor.name == "T"] for answer in answers]
    assert texts == [[b"\x03\0\0\0a\0b"], [b"\x02\0\0\0\xc3\xa9"]]
    assert answers[0].array("K").tolist() == [[-1, -1]]
    bad = harness.batch(model, [{"S": strings(b"\xff"), "H": halves}] * 2)[0]
    assert bad.error.startswith("input 'S' has an element that is not UTF-8")


def spec_errors() -> list[tuple[dict[str, Any], str]]:
    return [
        (
            {"inputs": (*INPUTS, TensorSpec("C", "FP32", (2,)))},
            "unable to load model 'm', configuration expects 3 inputs, model provides 2",
        ),
        (
            {"inputs": tensor_specs(A=("FP32", (2,)), X=("FP32", (2,)))},
            "unexpected inference input 'X', allowed inputs are: A, B",
        ),
        (
            {"outputs": tensor_specs(X=("FP32", (2,)))},
            "unexpected inference output 'X', allowed outputs are: DIFF, SUM",
        ),
        (
            {"inputs": tensor_specs(A=("INT32", (2,)), B=("FP32", (2,)))},
            "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'A', model "
            "provides TYPE_FP32",
        ),
        (
            {"inputs": tensor_specs(A=("FP32", (1, 2)), B=("FP32", (2,)))},
            "model 'm', tensor 'A': the model expects 2 dimensions (shape [-1,2]) but the model "
            "configuration specifies 3 dimensions (an initial batch dimension because max_batch_size > 0 "
            "followed by the explicit tensor shape, making complete shape [-1,1,2])",
        ),
        (
            {"max_batch_size": 0, "inputs": tensor_specs(A=("FP32", (2,)), B=("FP32", (2,)))},
            "model 'm', tensor 'A': the model expects 2 dimensions (shape [-1,2]) but the model "
            "configuration specifies 1 dimensions (shape [2])",
        ),
        (
            {"inputs": tensor_specs(A=("BF16", (2,)), B=("FP32", (2,)))},
            "unable to load model 'm', configuration expects datatype TYPE_BF16 for input 'A', model "
            "provides TYPE_FP32",
        ),
        (
            {"parameters": {"execution_mode": "2"}},
            "Invalid configuration value provided. Expected values for execution_mode are 0 or 1 but got 2.",
        ),
        (
            {"parameters": {"intra_op_thread_count": "all"}},
            "parameter 'intra_op_thread_count' must be a whole number: failed to convert 'all' to integral "
            "number",
        ),
        (
            {"parameters": {"enable_mem_arena": "maybe"}},
            "parameter 'enable_mem_arena' must be 'true' or 'false': failed to convert 'maybe' to boolean",
        ),
    ]


@pytest.mark.parametrize(("changes", "message"), spec_errors())
def test_config_that_does_not_fit(
    harness: Harness, backend: OnnxRuntimeBackend, changes: dict[str, Any], message: str
) -> None:
    write(harness, ADD_SUB)
    spec = harness.spec(**{"inputs": INPUTS, "outputs": OUTPUTS, "model_file": "model.onnx", **changes})
    with pytest.raises(ConchError) as caught:
        harness.load(backend, spec)
    assert caught.value.message == message


def test_batching_config_for_a_model_that_can_not(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    write(harness, graph([node("Neg", ["A"], ["B"])], {"A": (F, [1, 2])}, {"B": (F, [1, 2])}))
    with pytest.raises(
        InvalidArgumentError, match="first dimension must be -1; but shape expected"
    ) as caught:
        harness.load(
            backend,
            harness.spec(inputs=INPUTS[:1], outputs=tensor_specs(B=("FP32", (2,))), model_file="model.onnx"),
        )
    assert caught.value.message.endswith("by the model is [1,2]")


def test_file_that_is_not_onnx_is_named(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    directory = write(harness, b"this is not a model")
    path = directory / "model.onnx"
    with pytest.raises(InternalError) as caught:
        complete(backend, directory)
    assert caught.value.message.startswith(f"unable to load ONNX model '{path}': onnx runtime error 7: ")
    with pytest.raises(InternalError, match="unable to load ONNX model"):
        harness.load(backend, harness.spec(inputs=INPUTS, outputs=OUTPUTS, model_file="model.onnx"))
    path.unlink()
    with pytest.raises(ConchError, match=r"unable to find '.*model\.onnx' for model 'm'"):
        complete(backend, directory)


def test_types_without_a_protocol_datatype(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    shapes: tuple[Tensors, Tensors] = {"A": (onnx.TensorProto.FLOAT8E4M3FN, ["n", 2])}, {"B": (F, ["n", 2])}
    scale = onnx.numpy_helper.from_array(np.array(1, np.float32), "S")
    model = onnx.load_model_from_string(
        graph([node("DequantizeLinear", ["A", "S"], ["B"])], *shapes, [scale])
    )
    model.opset_import[0].version = 19
    with pytest.raises(UnsupportedError) as caught:
        complete(backend, write(harness, model.SerializeToString()))
    assert caught.value.message == (
        "unsupported ONNX type 'tensor(float8e4m3fn)' for I/O 'A' of model 'm': expected a tensor of a type "
        "the protocol has; export the model with a Cast of it, for example to FP32"
    )


def test_brain_floats(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    brain = onnx.TensorProto.BFLOAT16
    write(
        harness,
        graph(
            [
                node("Cast", ["A"], ["FLOATS"], to=F),
                node("Add", ["FLOATS", "B"], ["SUM"]),
                node("Cast", ["SUM"], ["C"], to=brain),
                node("Cast", ["B"], ["T"], to=S),
            ],
            {"A": (brain, ["n", 2]), "B": (F, ["n", 2])},
            {"C": (brain, ["n", 2]), "SUM": (F, ["n", 2]), "T": (S, ["n", 2])},
        ),
    )
    config = complete(backend, harness.root / "m" / "1")
    assert [config[key][0]["data_type"] for key in ("input", "output")] == ["TYPE_BF16"] * 2
    spec = harness.spec(
        inputs=tensor_specs(A=("BF16", (2,)), B=("FP32", (2,))),
        outputs=tensor_specs(C=("BF16", (2,)), SUM=("FP32", (2,)), T=("BYTES", (2,))),
        model_file="model.onnx",
        batching=one_batch(2),
    )
    model = harness.load(backend, spec)
    requests = []
    for row, bits in enumerate((b"\x80\x3f\x00\x40", b"\x40\x40\x80\xc0")):  # 1 and 2, 3 and -4
        request, answer = harness.request({"B": rows(row)})
        request.inputs["A"] = Tensor("A", "BF16", (1, 2), bits)
        requests.append(answer)
        model.submit(request)
    assert [answer.one.error for answer in requests] == [None, None]
    found = [{tensor.name: tensor for tensor in answer.one.outputs} for answer in requests]
    assert [each["C"].data for each in found] == [b"\x80\x3f\x00\x40", b"\x80\x40\x40\xc0"]
    assert [each["SUM"].numpy().tolist() for each in found] == [[[1, 2]], [[4, -3]]]
    assert [each["T"].numpy().tolist() for each in found] == [[[b"0", b"0"]], [[b"1", b"1"]]]


def test_brain_floats_and_strings_are_refused(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    brain = onnx.TensorProto.BFLOAT16
    nodes = [node("Identity", ["A"], ["B"]), node("Identity", ["S"], ["T"])]
    directory = write(
        harness, graph(nodes, {"A": (brain, [2]), "S": (S, [1])}, {"B": (brain, [2]), "T": (S, [1])})
    )
    with pytest.raises(UnsupportedError, match="model 'm' has BF16 tensors and inputs of strings"):
        complete(backend, directory)


def test_brain_floats_beside_outputs_in_place(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    brain = onnx.TensorProto.BFLOAT16
    write(harness, graph([node("Cast", ["A"], ["B"], to=F)], {"A": (brain, [2])}, {"B": (F, [2])}))
    spec = harness.spec(
        inputs=tensor_specs(A=("BF16", (2,))),
        outputs=tensor_specs(B=("FP32", (2,))),
        model_file="model.onnx",
        max_batch_size=0,
    )
    function: object = backend.open(spec, Placement("m_0", "CPU"))
    assert isinstance(function, WritesInPlace)
    place = np.zeros(2, np.float32)
    function.run_into({"A": np.array([0x3F80, 0xC080], np.uint16)}, {"B": place})
    assert place.tolist() == [1, -4]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_error_at_run_time_leaves_the_model_well(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    write(
        harness,
        graph(
            [node("Reshape", ["A", "SHAPE"], ["B"])],
            {"A": (F, [-1]), "SHAPE": (I64, [2])},
            {"B": (F, [-1, -1])},
        ),
    )
    model = harness.load(
        backend,
        harness.spec(
            inputs=tensor_specs(A=("FP32", (-1,)), SHAPE=("INT64", (2,))),
            outputs=tensor_specs(B=("FP32", (-1, -1))),
            model_file="model.onnx",
            max_batch_size=0,
            parameters={"session.log_severity_level": "4"},
        ),
    )
    values = np.arange(4, dtype=np.float32)
    assert harness.infer(model, {"A": values, "SHAPE": np.array([2, 2])}).array("B").shape == (2, 2)
    error = harness.infer(model, {"A": values, "SHAPE": np.array([3, 3])}).one.error
    assert isinstance(error, InternalError) and error.message.startswith("onnx runtime error 1: Non-zero")
    assert harness.infer(model, {"A": values, "SHAPE": np.array([4, 1])}).array("B").shape == (4, 1)


def save_with_weights(directory: Path, location: str) -> dict[str, Any]:
    """Saves a model that adds 0 to 255 from a file beside it; returns what its spec has."""
    weights = onnx.numpy_helper.from_array(np.arange(256, dtype=np.float32).reshape(1, 256), "W")
    content = graph(
        [node("Add", ["A", "W"], ["B"])], {"A": (F, ["n", 256])}, {"B": (F, ["n", 256])}, [weights]
    )
    model = onnx.load_model_from_string(content)
    path = directory / "model.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location=location, size_threshold=0)
    return {
        "inputs": tensor_specs(A=("FP32", (256,))),
        "outputs": tensor_specs(B=("FP32", (256,))),
        "model_file": "model.onnx",
        "instance_groups": (InstanceGroup("m_0", count=2),),
    }


def test_weights_in_a_file_beside_the_model(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    directory = harness.directory("m", {"1/model.onnx/weights.bin": b""}) / "1" / "model.onnx"
    loaded = harness.load(backend, harness.spec(**save_with_weights(directory, "weights.bin")))
    assert harness.infer(loaded, {"A": rows(1, width=256)}).array("B")[0, 255] == 256


@pytest.mark.process
@pytest.mark.parametrize("location", ["parts/weights.bin", "link"])
def test_weights_whose_path_opens_and_does_not_resolve(
    harness: Harness, backend: OnnxRuntimeBackend, tmp_path: Path, location: str
) -> None:
    directory = tmp_path / "files" / "m" / "1"
    (directory / "parts").mkdir(parents=True)
    settings = save_with_weights(directory, location)
    if location == "link":
        (directory / "link").rename(tmp_path / "secret.bin")
        (directory / "link").symlink_to(tmp_path / "secret.bin")
    models = tmp_path / "models"
    with linked_from_another_root(tmp_path / "files", models):
        spec = harness.spec(**settings, directory=models / "m", version_directory=models / "m" / "1")
        if location == "link":
            with pytest.raises(InternalError, match="External file: link not found"):
                backend.check(spec)
            return
        backend.check(spec)
        loaded = harness.load(backend, spec)
        with pytest.raises(InternalError, match=r"canonical path.*: save the model in OpenVINO's own format"):
            load_backend("openvino").check(spec)
    assert harness.infer(loaded, {"A": rows(1, width=256)}).array("B")[0, 255] == 256


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("location", ["../secret.bin", "link", "/secret.bin"])
def test_weights_in_a_file_elsewhere_are_not_read(harness: Harness, engine: str, location: str) -> None:
    directory = harness.directory("m", {"secret.bin": bytes(16)}) / "1"
    (directory / "link").symlink_to("../secret.bin")
    weights = onnx.TensorProto(name="W", data_type=F, dims=[1, 4], data_location="EXTERNAL")
    outside = str(directory.parent / "secret.bin") if location.startswith("/") else location
    for key, value in (("location", outside), ("length", "16")):
        weights.external_data.add(key=key, value=value)
    content = graph([node("Add", ["A", "W"], ["B"])], {"A": (F, ["n", 4])}, {"B": (F, ["n", 4])}, [weights])
    (directory / "model.onnx").write_bytes(content)
    a, b = tensor_specs(A=("FP32", (4,))), tensor_specs(B=("FP32", (4,)))
    with pytest.raises(InternalError, match=r"outside the base dir|escapes model dir|[Aa]bsolute path"):
        harness.load(load_backend(engine), harness.spec("m", a, b, "model.onnx", backend=engine))


def test_session_options(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    import onnxruntime as ort

    cores = len(os.sched_getaffinity(0))
    spec = harness.spec(instance_groups=(InstanceGroup("m_0", count=2), InstanceGroup("m_1", "GPU", 1, (0,))))
    assert threads_per_instance(spec) == max(cores // 2, 1)
    options = session_options(ort, spec)
    assert options.intra_op_num_threads == max(cores // 2, 1)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    tuned = harness.spec(
        parameters={
            "intra_op_thread_count": "3",
            "inter_op_thread_count": "2",
            "execution_mode": "1",
            "enable_mem_pattern": "false",
            "session.intra_op.allow_spinning": "1",
        },
        config={"optimization": {"graph": {"level": 1}}},
    )
    options = session_options(ort, tuned)
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert options.execution_mode == ort.ExecutionMode.ORT_PARALLEL
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    assert not options.enable_mem_pattern


class FakeOrt:
    """An ONNX Runtime with providers this machine's does not have."""

    names = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")
    __version__ = "1.0"

    def get_available_providers(self) -> list[str]:
        return list(self.names)

    def get_all_providers(self) -> list[str]:
        return [*self.names, "OpenVINOExecutionProvider"]


def chosen(ort: Any, spec: ModelSpec, placement: Placement) -> Providers:
    return execution_providers(ort, spec, placement, Plugins(ort))


def test_execution_providers(harness: Harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu, gpu = Placement("m_0", "CPU"), Placement("m_1", "GPU", 3)
    fake = FakeOrt()
    plain = harness.spec()
    assert chosen(fake, plain, cpu) == [("CPUExecutionProvider", {})]
    assert chosen(fake, plain, gpu) == [
        ("CUDAExecutionProvider", {"device_id": "3"}),
        ("CPUExecutionProvider", {}),
    ]
    named = harness.spec(parameters={"CONCH_ORT_PROVIDERS": "cuda, CPUExecutionProvider"})
    assert [name for name, _ in chosen(fake, named, cpu)] == [
        "CUDAExecutionProvider",
        "CPUExecutionProvider",
    ]
    tensorrt = {
        "name": "tensorrt",
        "parameters": {
            "precision_mode": "FP16",
            "max_workspace_size_bytes": "1024",
            "trt_cuda_graph_enable": "on",
        },
    }
    accelerated = harness.spec(
        config={"optimization": {"execution_accelerators": {"gpu_execution_accelerator": [tensorrt]}}}
    )
    first, *others = chosen(fake, accelerated, gpu)
    folder = first[1].pop("trt_engine_cache_path")
    assert Path(folder).is_dir() and folder.startswith(str(tmp_path / "conch" / "onnxruntime-tensorrt"))
    assert first == (
        "TensorrtExecutionProvider",
        {
            "trt_fp16_enable": "1",
            "trt_max_workspace_size": "1024",
            "trt_cuda_graph_enable": "1",
            "trt_engine_cache_enable": "1",
            "device_id": "3",
        },
    )
    assert others == [("CUDAExecutionProvider", {"device_id": "3"}), ("CPUExecutionProvider", {})]
    tuned = harness.spec(
        parameters={
            "cudnn_conv_algo_search": "1",
            "arena_extend_strategy": "1",
            "gpu_mem_limit": "4096",
            "do_copy_in_default_stream": "false",
        }
    )
    assert chosen(fake, tuned, gpu)[0][1] == {
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "gpu_mem_limit": "4096",
        "do_copy_in_default_stream": "0",
        "device_id": "3",
    }


class FakePlugin:
    """The package of a plug-in, and an ONNX Runtime that may register it, if the machine has a device."""

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self.libraries: list[tuple[str, str]] = []
        self.added: list[tuple[int, dict[str, str]]] = []

    @staticmethod
    def get_library_path() -> str:
        return "/plugin.so"

    @staticmethod
    def get_ep_name() -> str:
        return "TheirName"

    def get_available_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]

    def register_execution_provider_library(self, name: str, path: str) -> None:
        self.libraries.append((name, path))

    def get_ep_devices(self) -> list[Any]:
        names = ["CPUExecutionProvider", *["TheirName"] * self._devices]
        return [SimpleNamespace(ep_name=name) for name in names]

    def add_provider_for_devices(self, devices: list[Any], settings: dict[str, str]) -> None:
        self.added.append((len(devices), settings))


@pytest.mark.parametrize("devices", [0, 2])
def test_a_provider_that_is_a_plug_in(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    plugin = FakePlugin(devices)
    plugins = Plugins(plugin)
    accelerators = {"cpu_execution_accelerator": [{"name": "openvino"}]}
    spec = harness.spec(config={"optimization": {"execution_accelerators": accelerators}})
    cpu = Placement("m_0", "CPU")
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_openvino", None)
    with pytest.raises(InvalidArgumentError, match="`pip install onnxruntime-ep-openvino` adds it"):
        execution_providers(plugin, spec, cpu, plugins)
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_openvino", plugin)
    if not devices:
        with pytest.raises(InvalidArgumentError, match="supports no device of this machine"):
            execution_providers(plugin, spec, cpu, plugins)
        return
    providers = [execution_providers(plugin, spec, cpu, plugins) for _ in range(2)][-1]
    assert plugin.libraries == [("OpenVINOExecutionProvider", "/plugin.so")]
    assert plugins.add(plugin, providers) is None
    ((count, settings),) = plugin.added
    assert count == 1
    assert json.loads(settings["load_config"])["CPU"]["INFERENCE_NUM_THREADS"] >= 1


def test_sessions_may_share_threads(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    sizes: list[tuple[int, ...]] = []
    monkeypatch.setattr(onnxruntime, "set_global_thread_pool_sizes", lambda *given: sizes.append(given))
    backend = OnnxRuntimeBackend()
    write(harness, ADD_SUB)
    shared = {"enable-global-threadpool": "1", "intra_op_thread_count": "3"}
    options: list[Any] = []
    real = onnxruntime.InferenceSession

    def opened(source: Any, given: Any, **more: Any) -> Any:
        options.append(given.use_per_session_threads)
        given.use_per_session_threads = True  # the pool is not really there
        return real(source, given, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", opened)
    for backend_options in (shared, shared, {}):
        spec = harness.spec("m", INPUTS, OUTPUTS, "model.onnx", backend_options=backend_options)
        backend.open(spec, Placement("m_0", "CPU"))
    assert (sizes, options) == ([(3, 0)], [False, False, True])


def test_model_operations_and_shrinking_arenas(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    import onnxruntime

    spec = harness.spec(parameters={"memory.enable_memory_arena_shrinkage": "cpu:0"})
    key = "memory.enable_memory_arena_shrinkage"
    assert run_options(onnxruntime, spec).get_run_config_entry(key) == "cpu:0"
    write(harness, ADD_SUB)
    for text in ("unable to find 'ops.so' of model_operations", "'ops.so' of model 'm' can't be loaded"):
        config = {"model_operations": {"op_library_filename": ["ops.so"]}}
        with pytest.raises(InvalidArgumentError, match=text):
            session_options(onnxruntime, harness.spec(config=config))
        (harness.root / "m" / "ops.so").write_bytes(b"no library")


@pytest.mark.process
def test_custom_operators_are_known_before_the_load(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    shapes: tuple[Tensors, Tensors] = {"A": (F, ["n", 2])}, {"B": (F, ["n", 2])}
    directory = write(harness, graph([node("Foo", ["A"], ["B"], domain="tests")], *shapes, domains=["tests"]))
    source = str(ROOT / "tests/support/custom_operator.c")
    run_compiler("-fPIC", "-shared", "-o", str(directory.parent / "ops.so"), source)
    operations = {"op_library_filename": ["ops.so"]}
    config = complete(backend, directory, model_operations=operations)
    assert [config[key][0]["dims"] for key in ("input", "output")] == [[2], [2]]
    spec = harness.spec(
        inputs=tensor_specs(A=("FP32", (2,))),
        outputs=tensor_specs(B=("FP32", (2,))),
        model_file="model.onnx",
        config={"model_operations": operations},
    )
    backend.check(spec)
    backend.open(spec, Placement("m_0", "CPU"))


def test_a_format_is_known_before_the_load(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    """A load finds out by itself, unless the config names another one."""
    import onnxruntime

    path = write(harness, b"") / "model.onnx"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path.with_suffix(".ort"))
    onnxruntime.InferenceSession(ADD_SUB, options, providers=["CPUExecutionProvider"])
    path.with_suffix(".ort").rename(path)
    spec = harness.spec(inputs=INPUTS, outputs=OUTPUTS, model_file="model.onnx")
    assert len(complete(backend, path.parent)["input"]) == 2
    backend.check(spec)
    harness.load(backend, spec)
    key, told = "session.load_model_format", "ONNX"
    with pytest.raises(InternalError, match="unable to load ONNX model"):
        complete(backend, path.parent, parameters={key: {"string_value": told}})
    with pytest.raises(InternalError, match="unable to load ONNX model"):
        backend.check(dataclasses.replace(spec, parameters={key: told}))


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_a_check_needs_the_operators_of_the_cpu_only_there(
    harness: Harness, backend: OnnxRuntimeBackend, kind: str
) -> None:
    """ONNX Runtime has this operator on GPUs alone."""
    shapes: tuple[Tensors, Tensors] = {"A": (F, ["n", 2, 2, 1])}, {"B": (F, ["n", 2, 2, 1])}
    weights = onnx.numpy_helper.from_array(np.ones((1, 1, 1, 1), np.float32), "W")
    domain = "com.microsoft"
    convolution = node("NhwcConv", ["A", "W"], ["B"], domain=domain, kernel_shape=[1, 1])
    directory = write(harness, graph([convolution], *shapes, [weights], [domain]))
    group = {"name": "m_0", "kind": f"KIND_{kind}"}
    assert complete(backend, directory, instance_group=[group])["input"][0]["dims"] == [2, 2, 1]
    spec = harness.spec(
        inputs=tensor_specs(A=("FP32", (2, 2, 1))),
        outputs=tensor_specs(B=("FP32", (2, 2, 1))),
        model_file="model.onnx",
        instance_groups=(InstanceGroup("m_0", kind, 1, (0,) if kind == "GPU" else ()),),
    )
    if kind == "GPU":
        backend.check(spec)
        return
    with pytest.raises(InternalError, match="Could not find an implementation for NhwcConv"):
        backend.check(spec)


@pytest.mark.parametrize(
    ("parameters", "accelerator", "message"),
    [
        ({"CONCH_ORT_PROVIDERS": "warp"}, None, "unknown execution provider 'warp' in parameter"),
        (
            {"CONCH_ORT_PROVIDERS": "openvino"},
            None,
            "which the installed onnxruntime does not have; it has: T",
        ),
        ({}, {"name": "warp"}, "unknown Execution Accelerator 'warp' is requested"),
        (
            {},
            {"name": "tensorrt", "parameters": {"precision_mode": "FP1"}},
            "unsupported precision mode 'FP1' is requested",
        ),
        (
            {},
            {"name": "tensorrt", "parameters": {"trt_warp": "1"}},
            "unknown parameter 'trt_warp' is provided for TensorRT Execution Accelerator",
        ),
        (
            {"CONCH_ORT_PROVIDERS": "cuda", "arena_extend_strategy": "2"},
            None,
            "unsupported arena_extend_strategy value '2' is requested",
        ),
    ],
)
def test_execution_providers_that_can_not_be(
    harness: Harness, parameters: dict[str, str], accelerator: dict[str, Any] | None, message: str
) -> None:
    accelerators = {"cpu_execution_accelerator": [accelerator] if accelerator else []}
    spec = harness.spec(
        parameters=parameters, config={"optimization": {"execution_accelerators": accelerators}}
    )
    with pytest.raises(InvalidArgumentError, match=message):
        chosen(FakeOrt(), spec, Placement("m_0", "CPU"))


RAGGED_SPEC: dict[str, Any] = {
    "inputs": (TensorSpec("A", "FP32", (-1,), ragged=True),),
    "outputs": tensor_specs(COLUMN=("FP32", (1,)), DOUBLE=("FP32", (-1,))),
    "batch_inputs": (BatchInput("BATCH_ELEMENT_COUNT", ("COUNTS",), "INT32", "A"),),
    "batch_outputs": (BatchOutput("BATCH_SCATTER_WITH_INPUT_SHAPE", ("DOUBLE",), "A"),),
    "model_file": "model.onnx",
}


def test_ragged_requests_of_a_model(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    write(harness, RAGGED)
    model = harness.load(backend, harness.spec(batching=one_batch(3), **RAGGED_SPEC))
    inputs: list[list[float]] = [[1], [2, 3], [4, 5, 6]]
    answers = harness.batch(model, [{"A": np.array([values], np.float32)} for values in inputs])
    assert [answer.array("COLUMN").tolist() for answer in answers] == [[[1]], [[2]], [[3]]]
    assert [answer.array("DOUBLE").tolist() for answer in answers] == [[[2]], [[4, 6]], [[8, 10, 12]]]
    assert model.statistics.snapshot().execution_count == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_inputs": ()}, "unable to load model 'm', configuration expects 1 inputs, model provides 2"),
        (
            {"batch_inputs": (BatchInput("BATCH_ELEMENT_COUNT", ("X",), "INT32", "A"),)},
            "unexpected inference input 'X', allowed inputs are: A, COUNTS",
        ),
        (
            {"batch_inputs": (BatchInput("BATCH_ELEMENT_COUNT", ("COUNTS",), "FP32", "A"),)},
            "unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'COUNTS', model "
            "provides TYPE_INT32",
        ),
        (
            {"batch_inputs": (BatchInput("BATCH_ITEM_SHAPE", ("COUNTS",), "INT32", "A"),)},
            "unable to load model 'm', the server makes input 'COUNTS' with 2 dimensions, model provides "
            "[-1]",
        ),
        (
            {"inputs": (TensorSpec("A", "FP32", (-1,), ragged=True, optional=True),)},
            "unable to load model 'm', configuration expects model provides input with shape [-1] for ragged "
            "input 'A', which is not supported for optional input",
        ),
    ],
)
def test_ragged_configs_that_do_not_fit(
    harness: Harness, backend: OnnxRuntimeBackend, changes: dict[str, Any], message: str
) -> None:
    write(harness, RAGGED)
    with pytest.raises(InvalidArgumentError) as raised:
        harness.load(backend, harness.spec(**{**RAGGED_SPEC, **changes}))
    assert raised.value.message == message


def test_a_model_that_is_not_ragged(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    write(harness, ADD_SUB)
    inputs = (TensorSpec("A", "FP32", (-1,), ragged=True), INPUTS[1])
    with pytest.raises(InvalidArgumentError) as raised:
        harness.load(backend, harness.spec(inputs=inputs, outputs=OUTPUTS, model_file="model.onnx"))
    assert raised.value.message == (
        "unable to load model 'm', configuration expects model provides input with shape [-1]  for ragged "
        "input 'A', model provides [-1,2]"
    )


def test_padded_requests_of_a_model(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    write(harness, MEAN)
    rule = PaddedInput("A", 0, (4, 16), 0, 100.0, MadeInput("LENGTHS", column=True), MadeInput("MASK"))
    spec = harness.spec(
        inputs=tensor_specs(A=("FP32", (-1,))),
        outputs=tensor_specs(MEAN=("FP32", (1,)), CENTRED=("FP32", (-1,))),
        padding=Padding((rule,), (PaddedOutput("CENTRED", 0, "A", 0),)),
        model_file="model.onnx",
        batching=one_batch(3),
    )
    model = harness.load(backend, spec)
    inputs: list[list[float]] = [[1], [2, 4], [3, 4, 5]]
    answers = harness.batch(model, [{"A": np.array([values], np.float32)} for values in inputs])
    assert [answer.array("MEAN").tolist() for answer in answers] == [[[1]], [[3]], [[4]]]
    assert [answer.array("CENTRED").tolist() for answer in answers] == [[[0]], [[-1, 1]], [[-1, 0, 1]]]
    assert model.statistics.snapshot().execution_count == 1
    with pytest.raises(InvalidArgumentError, match="input 'A' for model 'm' is too long"):
        harness.infer(model, {"A": np.zeros((1, 17), np.float32)})


def test_completion_leaves_out_what_the_server_makes(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    padding = '{"inputs": {"A": {"axis": 0, "to": "pow2", "mask": "MASK"}}}'
    config = complete(
        backend,
        write(harness, MEAN),
        batch_input=[{"target_name": ["LENGTHS"]}],
        parameters={"CONCH_PADDING": {"string_value": padding}},
    )
    assert [tensor["name"] for tensor in config["input"]] == ["A"]
    wrong = complete(backend, write(harness, MEAN), parameters={"CONCH_PADDING": {"string_value": "{"}})
    assert [tensor["name"] for tensor in wrong["input"]] == ["A", "MASK", "LENGTHS"]


def test_what_a_gpu_needs(harness: Harness, backend: OnnxRuntimeBackend) -> None:
    import onnxruntime

    assert backend.uses_gpus is ("CUDAExecutionProvider" in onnxruntime.get_available_providers())

    plain = SimpleNamespace(get_available_providers=lambda: ["CPUExecutionProvider"])
    with pytest.raises(InvalidArgumentError) as raised:
        chosen(plain, harness.spec(), Placement("m_0", "GPU"))
    assert raised.value.message == (
        "model 'm' needs the execution provider 'CUDAExecutionProvider', which the installed onnxruntime "
        "does not have; it has: CPUExecutionProvider"
    )


def test_a_provider_that_can_not_start_is_refused(
    harness: Harness, backend: OnnxRuntimeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime leaves out a provider whose libraries are missing, and would run on the CPU unnoticed."""
    import onnxruntime

    real = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, "CPUExecutionProvider"])
    monkeypatch.setattr(
        onnxruntime,
        "InferenceSession",
        lambda source, options, **more: real(source, options, providers=["CPUExecutionProvider"]),
    )
    write(harness, ADD_SUB)
    spec = harness.spec(inputs=INPUTS, outputs=OUTPUTS, model_file="model.onnx")
    with pytest.raises(UnavailableError, match=f"needs the execution provider '{CUDA}', .* can't start"):
        backend.open(spec, Placement("m_0_gpu0", "GPU", 0))


def test_models_with_strings_do_not_write_in_place(harness: Harness) -> None:
    backend = OnnxRuntimeBackend()
    content = graph([node("Identity", ["IN"], ["OUT"])], {"IN": (S, ["n", 1])}, {"OUT": (S, ["n", 1])})
    harness.directory("m", {"1/model.onnx": content})
    spec = harness.spec(
        inputs=tensor_specs(IN=("BYTES", (1,))),
        outputs=tensor_specs(OUT=("BYTES", (1,))),
        model_file="model.onnx",
    )
    harness.load(backend, spec)
    function: object = backend.open(spec, place(spec.instance_groups)[0])
    assert not isinstance(function, WritesInPlace)
