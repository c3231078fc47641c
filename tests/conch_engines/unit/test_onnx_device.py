"""ONNX models whose tensors are on a GPU: there the function reads and writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.support.backend_harness import Harness, one_batch, rows, tensor_specs
from tests.support.cuda import FakeCuda
from tests.support.device_client import AB, SUM_DIFF, Client, batch_of, run
from tests.support.onnx_graphs import ADD_SUB, F, graph, node

from conch.core.execution.placement import Placement
from conch.core.request import InferenceRequest
from conch.core.spec import ModelSpec
from conch.memory.region_bindings import RegionBindings
from conch_engines.onnxruntime import OnnxRuntimeBackend, signature_of
from conch_engines.onnxruntime.session_function import DeviceSessionFunction


def binding_function(spec: ModelSpec, model: bytes) -> DeviceSessionFunction:
    """A function whose device is the host as ONNX Runtime sees it: there the memory really is."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    function = DeviceSessionFunction(
        session, onnxruntime.RunOptions(), spec, signature_of(session, "m"), "cpu", 0
    )
    function.device_id = 1
    return function


@pytest.fixture
def bound(harness: Harness) -> Any:
    from conch.backends.arrays import ArrayInstance

    spec = harness.spec("m", AB, SUM_DIFF)
    return ArrayInstance(spec, binding_function(spec, ADD_SUB))


def test_a_session_reads_and_writes_in_place(bound: Any, client: Client, cuda: FakeCuda) -> None:
    request, places = client.request({"A": rows(5, 6)}, ["SUM"], host={"B": rows(1, 2)})
    batch = batch_of(request)
    with cuda.failing("cuMemcpyAsync", 700):  # nothing is copied, so nothing fails
        run(bound, batch)
    assert batch.bytes_copied == 0
    assert places["SUM"][:4].tolist() == [6, 6, 8, 8]
    (response,) = client.answers
    assert response.outputs[1].numpy().tolist() == [[4, 4], [4, 4]]
    bound.close()


def test_outputs_of_a_batch_are_copied_to_their_places(bound: Any, client: Client) -> None:
    made = [client.request({"A": rows(5 + n), "B": rows(n)}, ["SUM", "DIFF"]) for n in range(3)]
    run(bound, batch_of(*(request for request, _ in made)))
    assert [p["SUM"][:2].tolist() for _, p in made] == [[5 + 2 * n] * 2 for n in range(3)]
    assert [p["DIFF"][:2].tolist() for _, p in made] == [[5, 5]] * 3


def test_an_output_over_an_input_is_written_when_the_input_has_been_read(
    harness: Harness, client: Client
) -> None:
    from conch.backends.arrays import ArrayInstance

    width = 32
    spec = harness.spec("m", tensor_specs(A=("FP32", (width,))), tensor_specs(Z=("FP32", (width,))))
    reverse = graph(
        [node("Slice", ["A", "start", "end", "axis", "step"], ["Z"])],
        {"A": (F, ["n", width])},
        {"Z": (F, ["n", width])},
        [
            onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [1], [value])
            for name, value in {"start": -1, "end": -1000, "axis": 1, "step": -1}.items()
        ],
    )
    instance = ArrayInstance(spec, binding_function(spec, reverse))
    values = np.arange(width, dtype=np.float32)[None]
    client.memory.array[0, :width] = values
    uses = RegionBindings(client.regions)
    tensor = uses.input("r", 0, width * 4, "A", "FP32", (1, width))
    uses.output("r", 0, width * 4, "Z")
    request = InferenceRequest("m", "", {"A": tensor}, client.respond, 0)
    uses.attach(request)
    run(instance, batch_of(request))
    assert client.memory.array[0, :width].tolist() == values[0, ::-1].tolist()


def test_brain_floats_go_through_host_memory(harness: Harness, client: Client) -> None:
    from conch.backends.arrays import ArrayInstance

    brain = onnx.TensorProto.BFLOAT16
    nodes = [
        node("Cast", ["A"], ["F"], to=F),
        node("Add", ["F", "F"], ["G"]),
        node("Cast", ["G"], ["Z"], to=brain),
    ]
    model = graph(nodes, {"A": (brain, ["n", 2])}, {"Z": (brain, ["n", 2])})
    spec = harness.spec("m", tensor_specs(A=("BF16", (2,))), tensor_specs(Z=("BF16", (2,))))
    instance = ArrayInstance(spec, binding_function(spec, model))
    memory = client.memory.array.view(np.uint16)
    memory[0, :2] = 0x3F80, 0xC080
    uses = RegionBindings(client.regions)
    tensor = uses.input("r", 0, 4, "A", "BF16", (1, 2))
    uses.output("r", 256, 4, "Z")
    request = InferenceRequest("m", "", {"A": tensor}, client.respond, 0)
    uses.attach(request)
    run(instance, batch_of(request))
    assert memory.reshape(-1)[128:130].tolist() == [0x4000, 0xC100]


def test_outputs_over_each_other_are_written_one_after_the_other(bound: Any, client: Client) -> None:
    """The client gets the second output, whole."""
    request, _ = client.request({"A": rows(5), "B": rows(1)})
    uses = RegionBindings(client.regions)
    for name in ("SUM", "DIFF"):
        uses.output("r", 31 * 256, 256, name)
    other = InferenceRequest("m", "", dict(request.inputs), client.respond, 0)
    uses.attach(other)
    run(bound, batch_of(other))
    assert client.memory.array[31, :2].tolist() == [4, 4]
    request.discard()


def test_an_output_of_open_dims_is_copied_to_its_place(harness: Harness, client: Client) -> None:
    from conch.backends.arrays import ArrayInstance

    spec = harness.spec("m", AB, tensor_specs(SUM=("FP32", (-1,)), DIFF=("FP32", (-1,))))
    instance = ArrayInstance(spec, binding_function(spec, ADD_SUB))
    request, places = client.request({"A": rows(5), "B": rows(1)}, ["SUM"])
    run(instance, batch_of(request))
    assert places["SUM"][:2].tolist() == [6, 6]


def test_which_sessions_use_their_device(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = OnnxRuntimeBackend()
    path = harness.directory("m", {"1/model.onnx": ADD_SUB}) / "1" / "model.onnx"
    spec = harness.spec("m", AB, SUM_DIFF, model_file=path.name)
    monkeypatch.setattr(
        "conch_engines.onnxruntime.execution_providers", lambda *arguments: [("CPUExecutionProvider", {})]
    )
    on_cpu = backend.open(spec, Placement("m_0", "GPU", 1))  # as its parameters may say
    assert not hasattr(on_cpu, "device_id")
    real = onnxruntime.InferenceSession.get_providers
    monkeypatch.setattr(
        onnxruntime.InferenceSession, "get_providers", lambda self: ["CUDAExecutionProvider", *real(self)]
    )
    on_gpu = backend.open(spec, Placement("m_0", "GPU", 1))
    assert isinstance(on_gpu, DeviceSessionFunction)
    assert on_gpu.device_id == 1
    assert not hasattr(backend.open(spec, Placement("m_0", "CPU")), "device_id")


def test_models_run_through_the_scheduler_as_ever(harness: Harness, client: Client) -> None:
    harness.directory("m", {"1/model.onnx": ADD_SUB})
    spec = harness.spec(
        "m", AB, SUM_DIFF, model_file="model.onnx", backend="onnxruntime", batching=one_batch(2)
    )
    model = harness.load(OnnxRuntimeBackend(), spec)
    made = [client.request({"A": rows(n), "B": rows(1)}, ["SUM"]) for n in range(2)]
    for request, _ in made:
        model.submit(request)
    harness.close()
    assert [places["SUM"][:2].tolist() for _, places in made] == [[1, 1], [2, 2]]
