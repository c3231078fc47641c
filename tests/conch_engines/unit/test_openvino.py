"""OpenVINO models: completion, shapes, types, parameters, errors, and runs in place and asynchronous."""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.backend_harness import Harness, HarnessAnswer, one_batch, rows, strings, tensor_specs
from tests.support.waiting import PATIENCE_S

from conch.backends import load_backend
from conch.core.backend import Backend, BackendInstance, BatchOutcome
from conch.core.errors import ConchError, InternalError, InvalidArgumentError, UnavailableError
from conch.core.execution.placement import place
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import InstanceGroup, ModelSpec, TensorSpec
from conch_engines.openvino import infer_function
from conch_engines.openvino.openvino_engine import import_openvino
from conch_engines.openvino.openvino_settings import OpenVinoSettings

ov = import_openvino()
from openvino import opset13 as op  # noqa: E402  (after the import without telemetry)
from openvino.op.util import Variable, VariableInfo  # noqa: E402

IN, OUT = tensor_specs(x=("FP32", (2,))), tensor_specs(y=("FP32", (2,)))


@pytest.fixture(scope="module")
def backend() -> Backend:
    return load_backend("openvino")


@pytest.fixture(params=["asynchronous", "in place"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs are all asynchronous, or all but the first in place."""
    monkeypatch.setattr(infer_function, "FAST_NS", 0 if request.param == "asynchronous" else 10**12)
    yield request.param


def parameter(name: str, shape: list[Any], dtype: Any = np.float32) -> Any:
    made = op.parameter(shape, dtype, name=name)
    made.output(0).set_names({name})
    return made


def named(node: Any, name: str) -> Any:
    node.output(0).set_names({name})
    return node


def doubling(shape: list[int], dtype: Any = np.float32) -> Any:
    x = parameter("x", shape, dtype)
    return ov.Model([op.result(named(op.add(x, x), "y"))], [x], "m")


def adding(shape: list[int]) -> Any:
    x, z = parameter("x", shape), parameter("z", shape)
    return ov.Model([op.result(named(op.add(x, z), "y"))], [x, z], "m")


def write(harness: Harness, model: Any, name: str = "m") -> Path:
    version = harness.directory(name, {}) / "1"
    ov.save_model(model, version / "model.xml", compress_to_fp16=False)
    return version


def spec_of(
    harness: Harness,
    inputs: tuple[TensorSpec, ...] = IN,
    outputs: tuple[TensorSpec, ...] = OUT,
    **changes: Any,
) -> ModelSpec:
    return harness.spec("m", inputs, outputs, **{"model_file": "model.xml", "backend": "openvino", **changes})


def complete(backend: Backend, version: Path, **config: Any) -> dict[str, Any]:
    return backend.complete_config({"name": "m", **config}, version, {})


def with_layouts(model: Any, layout: str) -> Any:
    for port in (*model.inputs, *model.outputs):
        ov.layout_helpers.set_layout(port, ov.Layout(layout))
    return model


def flattened() -> Any:
    """A model whose output has more rows than its input."""
    x = parameter("x", [-1, 2])
    return ov.Model([op.result(named(op.reshape(x, np.array([-1, 1]), False), "y"))], [x], "m")


def chosen() -> Any:
    """A model whose values decide on the number of its output's rows."""
    x = parameter("x", [-1, 2])
    places = op.transpose(op.non_zero(x), op.constant(np.array([1, 0])))
    return ov.Model([op.result(named(places, "y"))], [x], "m")


def fixed() -> Any:
    """A model whose operations rely on the number of rows."""
    x = parameter("x", [1, 2])
    wide = op.concat([x, op.constant(np.ones((1, 2), np.float32))], 1)
    return ov.Model([op.result(named(wide, "y"))], [x], "m")


@pytest.mark.parametrize(
    ("model", "given", "size", "dims"),
    [
        (doubling([-1, 2]), {}, 4, [2]),
        (doubling([1, 2]), {}, 0, [1, 2]),
        (doubling([1, 2]), {"max_batch_size": 8}, 8, [2]),
        (with_layouts(doubling([1, 2]), "N..."), {}, 4, [2]),
        (with_layouts(doubling([2, 1]), "CN"), {}, 0, [2, 1]),
        (with_layouts(fixed(), "N..."), {}, 0, [1, 2]),
        (flattened(), {}, 0, [-1, 2]),
        (chosen(), {}, 0, [-1, 2]),
    ],
    ids=[
        *("variable", "fixed", "fixed with a size", "layout", "layout with N elsewhere", "layout in vain"),
        *("rows that are not the batch's", "rows that values decide on"),
    ],
)
def test_completion(
    harness: Harness, backend: Backend, model: Any, given: dict[str, Any], size: int, dims: list[int]
) -> None:
    config = complete(backend, write(harness, model), **given)
    assert config.get("max_batch_size", 0) == size
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": dims}]
    assert [entry["name"] for entry in config["output"]] == ["y"]
    assert ("dynamic_batching" in config) == (size > 1)


def test_a_size_for_a_model_that_can_not_batch(harness: Harness, backend: Backend) -> None:
    version = write(harness, fixed())
    with pytest.raises(InvalidArgumentError, match="autofill failed for model 'm': model does not support"):
        complete(backend, version, max_batch_size=4)
    with pytest.raises(
        InvalidArgumentError, match=r"tensor 'y': for the model to support batching the shape"
    ):
        harness.load(backend, spec_of(harness, outputs=tensor_specs(y=("FP32", (4,)))))


@pytest.mark.parametrize("complete_it", [True, False])
def test_a_model_that_needs_full_batches_gets_padded_ones(
    harness: Harness, backend: Backend, way: str, complete_it: bool
) -> None:
    """Its operations rely on four rows: it adds the row number to each."""
    x = parameter("x", [4, 2])
    numbers = op.constant(np.arange(4, dtype=np.float32).reshape(4, 1).repeat(2, 1))
    flat = op.reshape(op.add(x, numbers), op.constant(np.array([4, 2], np.int64)), False)
    version = write(harness, ov.Model([op.result(named(flat, "y"))], [x], "m"))
    if complete_it:
        config = complete(backend, version, max_batch_size=4)
        assert (config["max_batch_size"], config["input"][0]["dims"]) == (4, [2])
    model = harness.load(backend, spec_of(harness, max_batch_size=4))
    for count in (1, 4, 3):
        expected = [[2 * row] * 2 for row in range(count)]
        assert harness.infer(model, {"x": rows(*range(count))}).array("y").tolist() == expected
    with pytest.raises(ConchError, match="batch"):
        harness.load(backend, spec_of(harness, max_batch_size=8))


def test_bounds_of_the_batch(harness: Harness, backend: Backend) -> None:
    x = parameter("x", [ov.Dimension(1, 16), 2])
    model = ov.Model([op.result(named(op.relu(x), "y"))], [x], "m")
    assert complete(backend, write(harness, model))["max_batch_size"] == 16


def test_a_model_of_one_row_runs_batches_of_any_size(harness: Harness, backend: Backend, way: str) -> None:
    write(harness, doubling([1, 2]))
    model = harness.load(backend, spec_of(harness))
    for count in (3, 1, 8, 3):
        assert harness.infer(model, {"x": rows(*range(count))}).array("y").tolist() == [
            [2 * row] * 2 for row in range(count)
        ]


def test_dims_of_the_config_replace_those_of_the_model(harness: Harness, backend: Backend) -> None:
    write(harness, doubling([1, 2]))
    specs = tensor_specs(x=("FP32", (-1,))), tensor_specs(y=("FP32", (-1,)))
    reshaping = spec_of(harness, *specs, parameters={"RESHAPE_IO_LAYERS": "yes"})
    assert harness.infer(harness.load(backend, reshaping), {"x": rows(1, width=5)}).array("y").shape == (1, 5)
    five = tensor_specs(x=("FP32", (5,))), tensor_specs(y=("FP32", (5,)))
    with pytest.raises(InvalidArgumentError, match=r"the model expects 2 dimensions \(shape \[-1,2\]\) but"):
        harness.load(backend, spec_of(harness, *five, parameters={"RESHAPE_IO_LAYERS": "no"}))


def test_the_config_imposes_datatypes(harness: Harness, backend: Backend) -> None:
    write(harness, doubling([-1, 2]))
    specs = tensor_specs(x=("UINT8", (2,))), tensor_specs(y=("FP16", (2,)))
    model = harness.load(backend, spec_of(harness, *specs))
    answer = harness.infer(model, {"x": np.array([[1, 200]], np.uint8)}).array("y")
    assert answer.dtype == np.float16 and answer.tolist() == [[2, 400]]
    text = tensor_specs(x=("BYTES", (2,)))
    with pytest.raises(
        InvalidArgumentError, match="datatype TYPE_STRING for input 'x', model provides TYPE_FP"
    ):
        harness.load(backend, spec_of(harness, text))


def test_strings_and_scalars(harness: Harness, backend: Backend) -> None:
    x, s = parameter("x", [-1, 1], ov.Type.string), parameter("s", [])
    results = [op.result(named(op.concat([x, x], 1), "y")), op.result(named(op.negative(s), "t"))]
    write(harness, ov.Model(results, [x, s], "m"))
    scalar = TensorSpec("s", "FP32", (1,), reshape=()), TensorSpec("t", "FP32", (1, 1))
    spec = spec_of(
        harness,
        (TensorSpec("x", "BYTES", (-1, 1)), scalar[0]),
        (TensorSpec("y", "BYTES", (-1, 2)), scalar[1]),
        max_batch_size=0,
    )
    model = harness.load(backend, spec)
    given = {"x": strings(b"a\0b", b"", b"\xff" * 300), "s": np.array([3], np.float32)}
    for _ in range(2):
        answer = harness.infer(model, given)
        assert answer.array("y").tolist() == [[row, row] for row in given["x"][:, 0]]
        assert answer.array("t").tolist() == [[-3]]


def test_names(harness: Harness, backend: Backend) -> None:
    """A tensor has any of its names, that of its operation, and a number."""
    x = parameter("x", [-1, 2])
    x.output(0).set_names({"x", "also:0"})
    doubled, negative = op.add(x, x), op.negative(x)
    doubled.set_friendly_name("doubled")
    version = write(harness, ov.Model([op.result(doubled), op.result(negative)], [x], "m"))
    assert complete(backend, version)["input"][0]["name"] in ("x", "also:0")
    for name in ("x", "also:0", "input_0"):
        outputs = tensor_specs(doubled=("FP32", (2,)), output_1=("FP32", (2,)))
        model = harness.load(backend, spec_of(harness, (TensorSpec(name, "FP32", (2,)),), outputs))
        answer = harness.infer(model, {name: rows(1)})
        assert answer.array("doubled").tolist() == [[2, 2]] and answer.array("output_1").tolist() == [
            [-1, -1]
        ]
    with pytest.raises(InvalidArgumentError, match="unexpected inference input 'w', allowed inputs are: "):
        harness.load(backend, spec_of(harness, tensor_specs(w=("FP32", (2,)))))


def test_large_batches_keep_their_memory(harness: Harness, backend: Backend, way: str) -> None:
    """Requests that share a batch are joined in memory that only the run has; answers outlive later runs."""
    width = 20_000
    write(harness, adding([-1, width]))
    specs = tensor_specs(x=("FP32", (width,)), z=("FP32", (width,))), tensor_specs(y=("FP32", (width,)))
    model = harness.load(backend, spec_of(harness, *specs, batching=one_batch(4)))
    answers: list[tuple[float, HarnessAnswer]] = []
    for first in range(0, 20, 4):
        inputs = [{name: rows(row, width=width) for name in "xz"} for row in range(first, first + 4)]
        answers += zip(range(first, first + 4), harness.batch(model, inputs), strict=True)
        del inputs
        np.full(8 * width, np.nan)  # uses freed memory again
    for row, answer in answers:
        assert (answer.array("y") == 2 * row).all()


def test_runs_that_fail(harness: Harness, backend: Backend, way: str) -> None:
    """Among others, on several instances; OpenVINO calls back for none that failed."""
    write(harness, adding([-1]))
    specs = tensor_specs(x=("FP32", (-1,)), z=("FP32", (-1,))), tensor_specs(y=("FP32", (-1,)))
    groups = (InstanceGroup("m_0", count=3),)
    model = harness.load(backend, spec_of(harness, *specs, max_batch_size=0, instance_groups=groups))

    def ask(seed: int) -> None:
        chance = random.Random(seed)
        for number in range(40):
            size, fails = chance.choice([2, 3, 5000]), number % 13 == 7
            x, z = np.full(size, number, np.float32), np.full(size + fails, seed, np.float32)
            answer = harness.infer(model, {"x": x, "z": z})
            if fails:
                assert answer.error.startswith(
                    "openvino error in running inference : [CPU] Add node with name "
                )
                assert "mismatch" in answer.error and ".cpp" not in answer.error
            else:
                assert (answer.array("y") == number + seed).all()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(ask, seed) for seed in range(4)]:
            done.result()


def test_requests_of_a_model_without_batching_run_in_turn(
    harness: Harness, backend: Backend, way: str
) -> None:
    write(harness, doubling([-1]))
    spec = spec_of(
        harness, tensor_specs(x=("FP32", (-1,))), tensor_specs(y=("FP32", (-1,))), max_batch_size=0
    )
    loaded = backend.load(spec)
    instance = loaded.create_instance(place(spec.instance_groups)[0])
    for _ in range(2):
        requests = [harness.request({"x": np.full(size, size, np.float32)})[0] for size in (1, 2, 3)]
        responses = run(instance, Batch(requests, 3))
        assert isinstance(responses, list)
        assert [response.outputs[0].numpy().tolist() for response in responses] == [[2], [4, 4], [6, 6, 6]]
    instance.close()
    loaded.close()


def run(instance: BackendInstance, batch: Batch) -> BatchOutcome:
    outcomes: list[BatchOutcome] = []
    arrived = threading.Event()

    def done(_: Batch, outcome: BatchOutcome) -> None:
        outcomes.append(outcome)
        arrived.set()

    outcome = instance.start(batch, done)
    if isinstance(outcome, list):
        return outcome
    assert arrived.wait(PATIENCE_S)
    return outcomes[0]


def test_models_with_variables(harness: Harness, backend: Backend) -> None:
    x = parameter("x", [1, 2])
    info = VariableInfo()
    info.data_shape, info.data_type, info.variable_id = ov.PartialShape([1, 2]), ov.Type.f32, "sum"
    variable = Variable(info)
    total = op.add(op.read_value(op.constant(np.zeros((1, 2), np.float32)), variable), x)
    model = ov.Model([op.result(named(total, "y"))], [op.assign(total, variable)], [x], [variable], "m")
    write(harness, model)
    specs = tensor_specs(x=("FP32", (1, 2))), tensor_specs(y=("FP32", (1, 2)))
    summing = harness.load(backend, spec_of(harness, *specs, max_batch_size=0))
    assert [harness.infer(summing, {"x": rows(1)}).array("y")[0, 0] for _ in range(3)] == [1, 2, 3]
    two = (InstanceGroup("m_0", count=2),)
    for spec in (spec_of(harness), spec_of(harness, *specs, max_batch_size=0, instance_groups=two)):
        with pytest.raises(InvalidArgumentError, match="ReadValue and Assign keep state in the instance"):
            backend.check(spec)


def test_only_the_cpu(harness: Harness, backend: Backend) -> None:
    write(harness, doubling([-1, 2]))
    spec = spec_of(harness, instance_groups=(InstanceGroup("m_0", "GPU", gpus=(0,)),))
    with pytest.raises(InvalidArgumentError) as caught:
        backend.load(spec)
    assert caught.value.message == (
        "unable to load model 'm', Triton OpenVINO backend supports only Kind CPU and AUTO"
    )
    assert not backend.uses_gpus


def settings(harness: Harness, options: Any = None, **parameters: Any) -> OpenVinoSettings:
    groups = (InstanceGroup("m_0", count=3),)
    return OpenVinoSettings.of(
        spec_of(harness, parameters=parameters, instance_groups=groups, backend_options=options or {})
    )


def test_properties(harness: Harness) -> None:
    properties = settings(harness).properties
    assert properties["NUM_STREAMS"] == "3" and int(properties["INFERENCE_NUM_THREADS"]) >= 1
    assert properties["INFERENCE_PRECISION_HINT"] == "f32" and "CACHE_DIR" not in properties
    assert settings(harness, HINT_BF16="Yes").properties["INFERENCE_PRECISION_HINT"] == "bf16"
    assert "NUM_STREAMS" not in settings(harness, PERFORMANCE_HINT="throughput").properties
    assert settings(harness, PERFORMANCE_HINT="throughput").properties["PERFORMANCE_HINT"] == "THROUGHPUT"
    assert settings(harness, NUM_STREAMS="Numa").properties["NUM_STREAMS"] == "-2"
    assert settings(harness, CONCH_OV_ENABLE_CPU_PINNING="YES").properties["ENABLE_CPU_PINNING"] == "YES"
    option = {"CACHE_DIR": "/option"}
    assert settings(harness, option).properties["CACHE_DIR"] == "/option"
    assert settings(harness, option, CACHE_DIR="/own").properties["CACHE_DIR"] == "/own"
    gpu = settings(harness, TARGET_DEVICE="auto:gpu,cpu")
    assert gpu.device == "AUTO:GPU,CPU" and not gpu.properties


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("PERFORMANCE_HINT", "FAST", "LATENCY/THROUGHPUT/CUMULATIVE_THROUGHPUT, got fast"),
        ("INFERENCE_NUM_THREADS", "-1", "a non-negative number, got -1"),
        ("COMPILATION_NUM_THREADS", "x", "a non-negative number, got x"),
        ("HINT_BF16", "no", "YES, got no"),
        ("NUM_STREAMS", "-1", "either AUTO/NUMA/<int_value>, got -1"),
    ],
)
def test_wrong_parameters(harness: Harness, key: str, value: str, expected: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        settings(harness, **{key: value})
    assert caught.value.message == f"expected the parameter '{key}' to be {expected}"


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"CONCH_OV_SPEED": "1"}, "Unsupported property SPEED by CPU plugin"),
        ({"INFERENCE_PRECISION_HINT": "f8"}, "Wrong value f8 for property key INFERENCE_PRECISION_HINT"),
        ({"TARGET_DEVICE": "TPU"}, 'Device with "TPU" name is not registered'),
        ({"CPU_EXTENSION_PATH": "/none.so"}, "openvino error in  loading custom CPU extensions : "),
        ({"HINT_BF16": "YES", "INFERENCE_PRECISION_HINT": "f32"}, "leave one of them out"),
    ],
)
def test_what_openvino_refuses(
    harness: Harness, backend: Backend, parameters: dict[str, str], text: str
) -> None:
    write(harness, doubling([-1, 2]))
    with pytest.raises(ConchError) as caught:
        harness.load(backend, spec_of(harness, parameters=parameters))
    assert text in caught.value.message and ".cpp" not in caught.value.message


def test_compiled_models_are_kept(harness: Harness, backend: Backend, tmp_path: Path) -> None:
    write(harness, doubling([-1, 2]))
    cache = tmp_path / "cache"
    for _ in range(2):
        model = harness.load(backend, spec_of(harness, backend_options={"CACHE_DIR": str(cache)}))
        assert harness.infer(model, {"x": rows(1)}).array("y").tolist() == [[2, 2]]
        assert len(list(cache.glob("*.blob"))) == 1


def test_files(harness: Harness, backend: Backend) -> None:
    version = harness.directory("m", {}) / "1"
    with pytest.raises(UnavailableError) as missing:
        harness.load(backend, spec_of(harness))
    assert missing.value.message == f"unable to find '{version / 'model.xml'}' for model 'm'"
    x = parameter("x", [-1, 2])
    weights = op.constant(np.arange(4, dtype=np.float32).reshape(2, 2))
    write(harness, ov.Model([op.result(named(op.matmul(x, weights, False, False), "y"))], [x], "m"))
    whole = (version / "model.bin").read_bytes()
    for content in (None, whole[:3]):
        (version / "model.bin").unlink(missing_ok=True)
        if content is not None:
            (version / "model.bin").write_bytes(content)
        with pytest.raises(InternalError) as caught:
            harness.load(backend, spec_of(harness))
        assert caught.value.message.startswith(
            f"openvino error in reading model '{version / 'model.xml'}' : "
        )
        assert ".cpp" not in caught.value.message


def test_one_network_in_three_formats(harness: Harness, backend: Backend) -> None:
    """The files of basic-pitch, as packaged; they are made by TensorFlow and by converters."""
    package = importlib.util.find_spec("basic_pitch")
    if package is None or package.origin is None:
        pytest.skip("needs basic-pitch (pip install --no-deps basic-pitch)")
    root = Path(package.origin).parent / "saved_models" / "icassp_2022"
    answers = []
    for file in ("nmp", "nmp.onnx", "nmp.tflite"):
        version = harness.directory(file, {}) / "1"
        (version / file).symlink_to(root / file)
        config = complete(backend, version, default_model_filename=file)
        inputs, outputs = (
            tuple(TensorSpec(entry["name"], "FP32", tuple(entry["dims"])) for entry in config[part])
            for part in ("input", "output")
        )
        spec = harness.spec(file, inputs, outputs, file, backend="openvino", max_batch_size=4)
        sound = np.random.default_rng(1).standard_normal((3, 43844, 1), np.float32)
        answer = harness.infer(harness.load(backend, spec), {inputs[0].name: sound})
        answers.append(sorted((answer.array(each.name) for each in outputs), key=np.sum))
    for others in answers[1:]:
        for one, other in zip(answers[0], others, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_importing_openvino_sends_nothing() -> None:
    assert "openvino" in sys.modules
    assert not any(name.startswith("openvino_telemetry") for name in sys.modules)
