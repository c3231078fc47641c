"""TensorRT plans, with stand-ins for the engine's bindings and for cupy: the host is their GPU."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.backend_harness import Harness, one_batch, rows
from tests.support.cuda import FakeCuda
from tests.support.device_client import AB, SUM_DIFF, Client, batch_of, run
from tests.support.tensorrt_stand_in import STAND_INS, FakeCupy, FakeTensorRT, plan

from conch.core.errors import ConchError, InvalidArgumentError, UnavailableError
from conch.core.execution.placement import Placement
from conch.core.spec import InstanceGroup, ModelSpec, TensorSpec
from conch.core.tensor import Tensor
from conch.memory.cuda import CudaDevices
from conch_control.config.json_format import from_json
from conch_control.config.validate import check_supported
from conch_engines.tensorrt.optimization_profiles import DimsRange, OptimizationProfile, choose
from conch_engines.tensorrt.tensorrt_backend import TensorRTBackend

DEVICE = 1
GROUPS = (InstanceGroup("m_0", "GPU", 1, (DEVICE,)),)


def tensor(name: str, *dims: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "dims": dims, **more}


def profile(least: int, optimum: int, most: int, *names: str, width: int = 2) -> dict[str, Any]:
    return {name: [[least, width], [optimum, width], [most, width]] for name in names}


SUM_PLAN = plan(
    [tensor("A", -1, 2), tensor("B", -1, 2), tensor("SUM", -1, 2, output=1), tensor("DIFF", -1, 2, output=1)],
    "sum_diff",
    [profile(1, 4, 8, "A", "B"), profile(1, 1, 2, "A", "B")],
)
SHAPE_PLAN = plan(
    [
        tensor("shape", 2, dtype="INT32", shape=1),
        tensor("x", -1, 2),
        tensor("y", -1, -1, output=1),
        tensor("shape_out", 2, dtype="INT32", shape=1, output=1),
    ],
    "zeros",
    [{"shape": [[1, 1], [4, 4], [8, 16]], **profile(1, 4, 8, "x")}],
)


@pytest.fixture
def cupy() -> FakeCupy:
    return FakeCupy()


@pytest.fixture
def trt(cupy: FakeCupy) -> FakeTensorRT:
    return FakeTensorRT(cupy)


@pytest.fixture
def backend(cupy: FakeCupy, trt: FakeTensorRT) -> TensorRTBackend:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib, "import_module", {"tensorrt": trt, "cupy": cupy}.__getitem__)
        return TensorRTBackend()


@pytest.fixture
def sum_spec(harness: Harness) -> ModelSpec:
    harness.directory("m", {"1/model.plan": SUM_PLAN})
    return harness.spec("m", AB, SUM_DIFF, "model.plan", instance_groups=GROUPS)


def changed(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return dataclasses.replace(spec, **changes)


def completed(backend: TensorRTBackend, directory: Path, content: bytes, **config: Any) -> dict[str, Any]:
    (directory / "model.plan").write_bytes(content)
    return backend.complete_config({"name": "m", **config}, directory, {})


ranges = st.tuples(*[st.integers(1, 12)] * 3).map(
    lambda three: DimsRange(*((each, 2 * each) for each in sorted(three)))
)


@given(st.lists(ranges, min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 24))
def test_the_nearest_profile_that_holds_the_batch_is_chosen(
    given_ranges: list[DimsRange], first: int, second: int
) -> None:
    profiles = [OptimizationProfile(n, {"x": each}, {}) for n, each in enumerate(given_ranges)]
    dims = (first, second)
    distances = {
        n: abs(first - each.optimum[0]) + abs(second - each.optimum[1])
        for n, each in enumerate(given_ranges)
        if each.least[0] <= first <= each.most[0] and each.least[1] <= second <= each.most[1]
    }
    if distances:
        assert choose(profiles, {"x": dims}, {}, "m_0").index == min(distances, key=lambda n: distances[n])
    else:
        with pytest.raises(
            InvalidArgumentError, match=r"input 'x' for m_0.*to be between \d+ and \d+ but re"
        ):
            choose(profiles, {"x": dims}, {}, "m_0")


@pytest.mark.parametrize("split", [(1,), (8,), (1, 3, 2), (2, 2, 2, 2)])
def test_answers_are_those_of_the_rows(
    harness: Harness, backend: TensorRTBackend, sum_spec: ModelSpec, split: tuple[int, ...]
) -> None:
    model = harness.load(backend, changed(sum_spec, batching=one_batch(sum(split))))
    inputs = [{"A": rows(*range(n, n + count)), "B": rows(*[n] * count)} for n, count in enumerate(split)]
    for _ in range(2):  # the second batch reuses buffers while answers of the first are still there
        answers = harness.batch(model, inputs)
        for given_arrays, answer in zip(inputs, answers, strict=True):
            assert np.array_equal(answer.array("SUM"), given_arrays["A"] + given_arrays["B"])
            assert np.array_equal(answer.array("DIFF"), given_arrays["A"] - given_arrays["B"])


def test_instances_share_an_engine_and_set_only_what_changes(
    harness: Harness, backend: TensorRTBackend, sum_spec: ModelSpec, trt: FakeTensorRT, cupy: FakeCupy
) -> None:
    groups = (InstanceGroup("m_0", "GPU", 2, (0, DEVICE), profiles=("0", "1")),)
    model = harness.load(backend, changed(sum_spec, instance_groups=groups))
    assert trt.engines == 2  # one for each device
    assert [context.profile for context in trt.contexts] == [0, 1] * 4
    harness.infer(model, {"A": rows(1), "B": rows(2)}).array("SUM")
    used = next(context for context in trt.contexts if context.runs)
    assert used.profile == 1  # nearer to its optimum
    others = [context for context in trt.contexts if context is not used]
    while used.runs < 3:
        for _ in others:
            harness.infer(model, {"A": rows(3), "B": rows(4)}).array("SUM")
    assert (used.set_shapes, used.set_addresses) == (2, 4)
    harness.close()
    del model, used, others
    trt.contexts.clear()
    gc.collect()
    assert cupy.live == 0


def test_tensors_of_a_client_stay_on_the_device(
    harness: Harness,
    backend: TensorRTBackend,
    sum_spec: ModelSpec,
    cuda: FakeCuda,
    devices: CudaDevices,
    cupy: FakeCupy,
) -> None:
    loaded = backend.load(sum_spec)
    instance = loaded.create_instance(Placement("m_0_0", "GPU", DEVICE))
    client = Client(cuda, devices, DEVICE)
    request, places = client.request({"A": rows(5, 6), "B": rows(1, 2)}, ["SUM", "DIFF"])
    batch = batch_of(request)
    with cuda.failing("cuMemcpyAsync", 700):  # the server copies nothing, so nothing fails
        run(instance, batch)
    assert (places["SUM"][:4].tolist(), places["DIFF"][:4].tolist()) == ([6, 6, 8, 8], [4, 4, 4, 4])
    assert (batch.bytes_copied, cupy.copied) == (0, 0)
    # Of a batch of two, one with an input in its message.
    made = [
        client.request({"A": rows(5 + n)}, ["SUM"], host={"B": rows(n)})
        if n
        else client.request({"A": rows(5), "B": rows(0)}, ["SUM"])
        for n in range(2)
    ]
    run(instance, batch_of(*(request for request, _ in made)))
    assert [places["SUM"][:2].tolist() for _, places in made] == [[5, 5], [7, 7]]
    instance.close()
    loaded.close()


def graphs(harness: Harness, spec: ModelSpec, **cuda: Any) -> ModelSpec:
    config = {**spec.config, "optimization": {"cuda": {"graphs": True, **cuda}}}
    return changed(spec, config=config)


def test_cuda_graphs_run_batches_that_they_fit(
    harness: Harness, backend: TensorRTBackend, sum_spec: ModelSpec, trt: FakeTensorRT, cupy: FakeCupy
) -> None:
    bounds = [
        {"batch_size": 2},
        {"batch_size": 8, "graph_lower_bound": {"batch_size": 5}, "input": {"A": {"dim": ["2"]}}},
    ]
    model = harness.load(backend, graphs(harness, sum_spec, graph_spec=bounds))
    for count, launches in ((2, 1), (3, 0), (6, 1), (8, 1), (2, 1)):
        before = cupy.launched
        answer = harness.infer(model, {"A": rows(*range(count)), "B": rows(*[count] * count)})
        assert np.array_equal(answer.array("SUM"), rows(*range(count, 2 * count)))
        assert cupy.launched - before == launches
    assert [context.strategy.name for context in trt.contexts[:3]] == ["STATIC", *["USER_MANAGED"] * 2]
    loaded = backend.load(graphs(harness, sum_spec))
    trt.contexts.clear()
    instance = loaded.create_instance(Placement("m_0_0", "GPU", DEVICE))
    assert len(trt.contexts) == 1 + len((1, 2, 3, 4, 6, 8))
    instance.close()
    loaded.close()


def test_a_graph_that_cannot_be_captured_is_left_out(
    harness: Harness, backend: TensorRTBackend, sum_spec: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    groups = (InstanceGroup("m_0", "GPU", 1, (DEVICE,), profiles=("1",)),)
    with caplog.at_level(logging.WARNING):
        model = harness.load(backend, graphs(harness, changed(sum_spec, instance_groups=groups)))
    assert "no CUDA graph for batch size 8 with profile 1: input 'A'" in caplog.text
    assert harness.infer(model, {"A": rows(1), "B": rows(2)}).array("SUM").tolist() == [[3, 3]]
    assert (
        "to be between 1 and 2 but received 3"
        in harness.infer(model, {"A": rows(1, 2, 3), "B": rows(1, 2, 3)}).error
    )


@pytest.mark.parametrize(
    ("dtype", "datatype", "data"),
    [
        ("BF16", "BF16", b"\x80\x3f\xc0\xff"),
        ("HALF", "FP16", b"\x00\x3c\x01\x02"),
        ("INT64", "INT64", bytes(range(16))),
        ("BOOL", "BOOL", b"\x01\x00"),
    ],
)
def test_elements_keep_their_bits(
    harness: Harness, backend: TensorRTBackend, dtype: str, datatype: str, data: bytes
) -> None:
    content = plan(
        [tensor("x", -1, 2, dtype=dtype), tensor("y", -1, 2, dtype=dtype, output=1)],
        "copy",
        [profile(1, 1, 8, "x")],
    )
    harness.directory("m", {"1/model.plan": content})
    both = (TensorSpec("x", datatype, (2,)),), (TensorSpec("y", datatype, (2,)),)
    loaded = backend.load(harness.spec("m", *both, "model.plan", instance_groups=GROUPS))
    instance = loaded.create_instance(Placement("m_0_0", "GPU", DEVICE))
    request, _ = harness.request({})
    request.inputs = {"x": Tensor("x", datatype, (1, 2), data)}
    responses = instance.execute(batch_of(request))
    assert responses is not None and responses[0] is not None
    (output,) = responses[0].outputs
    assert (output.datatype, output.shape, bytes(output.data)) == (datatype, (1, 2), data)


def test_outputs_whose_shape_depends_on_data(harness: Harness, backend: TensorRTBackend) -> None:
    content = plan(
        [tensor("x", -1), tensor("y", -1, output=1, data_dependent=1)], "nonzero", [{"x": [[0], [2], [9]]}]
    )
    harness.directory("m", {"1/model.plan": content})
    dims = (TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),)
    spec = harness.spec("m", *dims, "model.plan", instance_groups=GROUPS, max_batch_size=0)
    model = harness.load(backend, spec)
    answers = [
        (harness.infer(model, {"x": np.array(each, np.float32)}), [value for value in each if value])
        for each in ([1, 0, 2], [0, 0], [5, 6, 7, 0])
    ]
    for answer, expected in answers:
        assert answer.array("y").tolist() == expected


def test_shape_tensors_have_the_batch_size_in_front(
    harness: Harness, backend: TensorRTBackend, trt: FakeTensorRT
) -> None:
    config = completed(backend, harness.directory("m", {}) / "1", SHAPE_PLAN)
    assert config["max_batch_size"] == 8
    shapes = {
        each["name"]: (each["dims"], each.get("is_shape_tensor"))
        for each in (*config["input"], *config["output"])
    }
    assert shapes == {"shape": ([1], True), "x": ([2], None), "y": ([-1], None), "shape_out": ([1], True)}
    check_supported(from_json({**config, "backend": "tensorrt"}))
    spec = harness.spec(
        "m",
        (TensorSpec("shape", "INT32", (1,), is_shape=True), TensorSpec("x", "FP32", (2,))),
        (TensorSpec("y", "FP32", (-1,)), TensorSpec("shape_out", "INT32", (1,), is_shape=True)),
        "model.plan",
        instance_groups=GROUPS,
        batching=one_batch(3),
    )
    model = harness.load(backend, spec)
    # Two share a batch of three rows; the others have other values and run alone.
    given_values = [(4, 1), (4, 2), (7, 3), (5, 3)]
    answers = [
        # As a front end marks requests that differ only in their bytes.
        harness.infer(
            model, {"shape": np.array([width], np.int32), "x": rows(*[width] * count)}, signature=count
        )
        for width, count in given_values
    ]
    for answer, (width, count) in zip(answers, given_values, strict=True):
        assert answer.array("y").tolist() == [[width] * width] * count
        assert answer.array("shape_out").tolist() == [100 + width]
    assert trt.contexts[0].runs == 3
    refused = harness.infer(model, {"shape": np.array([99], np.int32), "x": rows(1, 2, 3)})
    assert "expected the value of element 1 to be between 1 and 16 but received 99" in refused.error


def test_a_config_is_completed_from_the_engine(backend: TensorRTBackend, tmp_path: Path) -> None:
    config = completed(backend, tmp_path, SUM_PLAN)
    assert (config["max_batch_size"], config["dynamic_batching"]) == (8, {})
    assert config["input"][0] == {"name": "A", "data_type": "TYPE_FP32", "dims": [2]}
    small = completed(backend, tmp_path, SUM_PLAN, instance_group=[{"profile": ["1"]}])
    assert small["max_batch_size"] == 2
    fixed = plan([tensor("x", 3), tensor("y", output=1)], "double")
    config = completed(backend, tmp_path, fixed)
    assert config["max_batch_size"] == 0
    assert config["output"] == [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"max_batch_size": 16},
            "autofill failed for model 'm': configuration specified max-batch 16 but TensorRT engine only "
            "supports max-batch 8",
        ),
        (
            {"input": [{"name": "A", "dims": [2]}, {"name": "B", "dims": [-1, 2]}]},
            "unable to autofill for 'm', model tensor configurations are contradicting each other in terms "
            "of whether batching is supported",
        ),
    ],
)
def test_configs_that_contradict_the_engine(
    backend: TensorRTBackend, tmp_path: Path, config: Mapping[str, Any], text: str
) -> None:
    with pytest.raises(ConchError, match=re.escape(text)):
        completed(backend, tmp_path, SUM_PLAN, **config)


def test_hints_for_batching_need_an_engine_that_batches(backend: TensorRTBackend, tmp_path: Path) -> None:
    fixed = plan([tensor("x", 4, 3), tensor("y", 4, 3, output=1)], "double")
    with pytest.raises(ConchError, match="hints for dynamic batching but the underlying engine doesn't"):
        completed(backend, tmp_path, fixed, input=[{"name": "x", "dims": [3]}])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"instance_groups": (InstanceGroup("m_0"),)},
            "unable to load model 'm', TensorRT backend supports only GPU device",
        ),
        (
            {"parameters": {"execution_context_allocation_strategy": "x"}},
            "Invalid value for 'execution_context_allocation_strategy': 'x' for model instance 'm'. "
            "Supported values are 'STATIC' and 'ON_PROFILE_CHANGE'.",
        ),
        (
            {"instance_groups": (InstanceGroup("m_0", "GPU", 1, (0,), profiles=("7",)),)},
            "Can not set the specified optimization profile 7[7] for m_0_0. Expected optimization profile "
            "index range 0-1",
        ),
        (
            {"instance_groups": (InstanceGroup("m_0", "GPU", 1, (0,), profiles=("x",)),)},
            "unable to parse 'x': ",
        ),
        ({"inputs": AB[:1]}, "configuration expects 1 inputs, model provides at most 2"),
        ({"parameters": {"enable_multi_device": "1"}}, "an engine runs on one GPU"),
        ({"instance_groups": (InstanceGroup("m_0", "GPU", 1, (7,)),)}, "on GPU 7: cudaErrorInvalidDevice"),
        (
            {"config": {"optimization": {"cuda": {"graphs": True, "graph_spec": [{"batch_size": 9}]}}}},
            "graph spec expects 'batch_size' to be >= 1 and <= 8",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(
    harness: Harness, backend: TensorRTBackend, sum_spec: ModelSpec, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConchError, match=re.escape(text)):
        harness.load(backend, changed(sum_spec, **changes))


def test_a_plan_of_another_version_names_both(
    harness: Harness, backend: TensorRTBackend, sum_spec: ModelSpec
) -> None:
    old = SUM_PLAN[:24] + bytes((10, 3, 0, 26)) + SUM_PLAN[28:]
    harness.directory("m", {"1/model.plan": old})
    with pytest.raises(ConchError) as raised:
        harness.load(backend, sum_spec)
    for part in (
        "built with TensorRT 10.3.0.26 and this server has TensorRT 11.4.0.106",
        "trtexec",
        "Version tag",
    ):
        assert part in raised.value.message
    harness.directory("m", {"1/model.plan": b"version https://git-lfs.github.com/spec/v1\n"})
    with pytest.raises(ConchError, match="git lfs pull"):
        harness.load(backend, sum_spec)


def test_the_compute_capability_names_the_plan(
    harness: Harness, backend: TensorRTBackend, sum_spec: ModelSpec
) -> None:
    config = {"cc_model_filenames": {"9.0": "h100.plan", "8.0": "a100.plan"}}
    check_supported(
        from_json({"name": "m", "backend": "tensorrt", "instance_group": [{"kind": "KIND_GPU"}], **config})
    )
    harness.directory("m", {"1/h100.plan": SUM_PLAN, "1/model.plan": b""})
    spec = changed(sum_spec, config=config)
    model = harness.load(backend, spec)
    assert harness.infer(model, {"A": rows(1), "B": rows(2)}).array("SUM").tolist() == [[3, 3]]
    with pytest.raises(UnavailableError, match=r"unable to find .*a100.plan' for model instance 'm'"):
        backend.check(spec)
    assert not list(backend.warnings(spec))
    assert "only GPU" in next(iter(backend.warnings(changed(spec, instance_groups=(InstanceGroup("m_0"),)))))


def test_an_engine_that_fails_says_why(
    harness: Harness, backend: TensorRTBackend, sum_spec: ModelSpec, trt: FakeTensorRT
) -> None:
    model = harness.load(backend, sum_spec)
    trt.contexts[0].fails = True
    assert "unable to enqueue for inference m_0_0" in harness.infer(model, {"A": rows(1), "B": rows(2)}).error
    trt.contexts[0].fails = False
    assert harness.infer(model, {"A": rows(1), "B": rows(2)}).array("DIFF").tolist() == [[-1, -1]]


def test_formats_other_than_linear_are_refused(backend: TensorRTBackend, tmp_path: Path) -> None:
    layout = "Two wide channel vectorized row major FP16 format"
    content = plan([tensor("x", 2, format=layout), tensor("y", 2, output=1)], "double")
    with pytest.raises(ConchError, match=r"tensor 'x' has the format 'Two wide.*--inputIOFormats=fp16:chw"):
        completed(backend, tmp_path, content)


def test_the_stand_in_has_the_names_of_the_bindings() -> None:
    real = pytest.importorskip("tensorrt_lean_bindings", reason="the package tensorrt-lean-cu13-bindings")
    for name, stand_in in STAND_INS.items():
        public = {each for each in vars(stand_in) if not each.startswith("_")}
        assert public <= set(dir(getattr(real, name))), name
