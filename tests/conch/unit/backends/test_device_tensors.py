"""Tensors on a GPU in models: Python ones, and functions that use the GPU's memory where it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.conch_engines.unit.test_onnxruntime import ADD_SUB, F, graph, node
from tests.support.backend_harness import Harness, one_batch, rows, tensor_specs
from tests.support.cuda import Allocation, FakeCuda

from conch.backends import device_arrays
from conch.backends.arrays import ArrayBackend, ArrayFunction
from conch.backends.device_arrays import Places
from conch.backends.python.python_backend import PythonBackend
from conch.core.device import DeviceTensor, FetchedTensor
from conch.core.errors import InvalidArgumentError
from conch.core.execution.placement import Placement
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import BatchInput, BatchOutput, ModelSpec, SequenceBatching
from conch.core.tensor import Array, Tensor
from conch.memory import cuda as memory
from conch.memory.cuda import CudaDevices
from conch.memory.cuda_regions import cuda_opener
from conch.memory.region_bindings import PlacedTensor, RegionBindings
from conch.memory.regions import Regions
from conch_engines.onnxruntime import OnnxRuntimeBackend, _DeviceFunction
from conch_engines.onnxruntime.session_signature import signature_of

AB = tensor_specs(A=("FP32", (2,)), B=("FP32", (2,)))
SUM_DIFF = tensor_specs(SUM=("FP32", (2,)), DIFF=("FP32", (2,)))


class Client:
    """Has memory on a GPU that is registered as a region, a slot of 256 bytes for each tensor."""

    def __init__(self, cuda: FakeCuda, devices: CudaDevices, device: int = 1) -> None:
        self.regions = Regions(open_cuda=cuda_opener(lambda: devices))
        self.memory: Allocation = cuda.allocate(np.zeros((32, 64), np.float32), device)
        self.regions.register_cuda("r", self.memory.handle, device, self.memory.array.nbytes)
        self.answers: list[InferenceResponse] = []
        self._slots = iter(range(32))

    def request(
        self,
        inputs: Mapping[str, Array],
        outputs: Sequence[str] = (),
        host: Mapping[str, Array] | None = None,
        shift: int = 0,
    ) -> tuple[InferenceRequest, dict[str, Array]]:
        """A request with inputs in memory of the GPU, others in the message, and outputs on the GPU.

        Returns:
            The request, and a view of each output's slot.
        """
        uses = RegionBindings(self.regions)
        tensors: dict[str, Tensor] = {}
        for name, array in inputs.items():
            slot = next(self._slots)
            start = slot * 64 + shift
            self.memory.array.reshape(-1)[start : start + array.size] = array.reshape(-1)
            tensors[name] = uses.input("r", start * 4, array.nbytes, name, "FP32", array.shape)
        for name, array in (host or {}).items():
            tensors[name] = Tensor.from_array(name, array)
        places: dict[str, Array] = {}
        for name in outputs:
            slot = next(self._slots)
            uses.output("r", slot * 256, 256, name)
            places[name] = self.memory.array[slot]
        request = InferenceRequest("m", "", tensors, self._respond, 0)
        request.batch_size = next(iter(tensors.values())).shape[0]
        uses.attach(request)
        return request, places

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        assert response is not None
        assert response.error is None, response.error
        self.answers.append(response)


@pytest.fixture
def client(cuda: FakeCuda, devices: CudaDevices) -> Client:
    return Client(cuda, devices)


def batch_of(*requests: InferenceRequest) -> Batch:
    return Batch(list(requests), sum(request.batch_size for request in requests))


class Recorder:
    """A function on device 1 that notes where its inputs are, and answers with sum and difference there."""

    device_id = 1

    def __init__(self, spec: ModelSpec) -> None:
        self.inputs: list[dict[str, bool]] = []
        self.pointers: list[int] = []
        self.places: list[dict[str, int]] = []

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> Mapping[str, Array]:
        raise AssertionError("it is asked through on_device")

    def on_device(
        self, inputs: Mapping[str, Array | DeviceTensor], outputs: tuple[str, ...], places: Places
    ) -> Mapping[str, Array | DeviceTensor]:
        self.inputs.append({name: isinstance(value, DeviceTensor) for name, value in inputs.items()})
        self.places.append({name: len(wanted) for name, wanted in places.items()})
        for value in inputs.values():
            if isinstance(value, DeviceTensor):
                self.pointers.append(value.memory.pointer)
                assert not value.memory.pointer % device_arrays.ALIGNMENT
        a, b = (value.numpy() if isinstance(value, DeviceTensor) else value for value in inputs.values())
        results: dict[str, Array | DeviceTensor] = {"SUM": a + b, "DIFF": a - b}
        for name, wanted in places.items():
            array = results[name]
            assert isinstance(array, np.ndarray)
            made = wanted[0].another(array.nbytes)
            assert made is not None
            made.write([array.tobytes()])
            results[name] = DeviceTensor(name, "FP32", array.shape, made)
        return results


class RecorderBackend(ArrayBackend):
    default_model_file = "model"

    def __init__(self) -> None:
        self.functions: list[Recorder] = []

    def open(self, spec: ModelSpec, placement: Placement) -> ArrayFunction:
        self.functions.append(Recorder(spec))
        return self.functions[-1]


def instance_of(harness: Harness, **changes: Any) -> tuple[Any, Recorder]:
    backend = RecorderBackend()
    spec = harness.spec("m", AB, SUM_DIFF, **changes)
    instance = backend.load(spec).create_instance(Placement("m_0", "GPU", 1))
    return instance, backend.functions[0]


def run(instance: Any, batch: Batch) -> None:
    for request, response in zip(batch.requests, instance.execute(batch), strict=True):
        request.respond(response)


def test_one_request_goes_through_without_a_copy(harness: Harness, client: Client) -> None:
    instance, function = instance_of(harness)
    request, places = client.request({"A": rows(5, 6), "B": rows(1, 2)}, ["SUM"])
    batch = batch_of(request)
    run(instance, batch)
    assert function.inputs == [{"A": True, "B": True}]
    inputs = request.inputs.values()
    assert function.pointers == [t.memory.pointer for t in inputs if isinstance(t, DeviceTensor)]
    assert function.places == [{"SUM": 1}]
    assert batch.bytes_copied == 0
    assert places["SUM"][:4].tolist() == [6, 6, 8, 8]
    (response,) = client.answers
    assert [type(tensor) for tensor in response.outputs] == [PlacedTensor, Tensor]
    assert response.outputs[1].numpy().tolist() == [[4, 4], [4, 4]]


def test_rows_are_joined_on_the_device(harness: Harness, client: Client) -> None:
    instance, function = instance_of(harness)
    first, one = client.request({"A": rows(5), "B": rows(1)}, ["SUM", "DIFF"])
    second, other = client.request({"A": rows(7, 8)}, ["SUM", "DIFF"], host={"B": rows(2, 3)})
    batch = batch_of(first, second)
    run(instance, batch)
    assert function.inputs == [{"A": True, "B": True}]
    assert function.places == [{"SUM": 2, "DIFF": 2}]
    assert batch.bytes_copied == 48  # rows of both inputs, once each
    assert (one["SUM"][:2].tolist(), one["DIFF"][:2].tolist()) == ([6, 6], [4, 4])
    assert (other["SUM"][:4].tolist(), other["DIFF"][:4].tolist()) == ([9, 9, 11, 11], [5, 5, 5, 5])


def test_inputs_of_odd_alignment_are_moved(harness: Harness, client: Client) -> None:
    instance, function = instance_of(harness)
    request, places = client.request({"A": rows(5), "B": rows(1)}, ["SUM"], shift=1)
    batch = batch_of(request)
    run(instance, batch)
    assert function.inputs == [{"A": True, "B": True}]
    assert batch.bytes_copied == 16
    assert places["SUM"][:2].tolist() == [6, 6]


def test_positions_are_moved_to_where_no_client_can_change_them(harness: Harness, client: Client) -> None:
    spec = harness.spec("m", tensor_specs(A=("INT32", (2,))), SUM_DIFF)
    request, _ = client.request({"A": rows(5)})
    tensor = request.inputs["A"]
    assert isinstance(tensor, DeviceTensor)
    request.inputs["A"] = DeviceTensor("A", "INT32", tensor.shape, tensor.memory)
    batch = batch_of(request)
    moved = device_arrays.DeviceGatherer(spec, 1).inputs(batch, [request])["A"]
    assert isinstance(moved, DeviceTensor)
    assert moved.memory.pointer != tensor.memory.pointer
    assert bytes(moved.data) == bytes(tensor.data)
    assert batch.bytes_copied == 8
    request.discard()


def test_what_is_all_in_host_memory_stays_there(harness: Harness, client: Client) -> None:
    instance, function = instance_of(harness)
    request, _ = client.request({}, host={"A": rows(5), "B": rows(1)})
    run(instance, batch_of(request))
    assert function.inputs == [{"A": False, "B": False}]
    assert function.places == [{}]


def test_outputs_that_not_all_want_on_the_device_are_not_left_there(harness: Harness, client: Client) -> None:
    instance, function = instance_of(harness)
    first, places = client.request({"A": rows(5), "B": rows(1)}, ["SUM"])
    second, _ = client.request({"A": rows(7), "B": rows(2)}, ["DIFF"])
    run(instance, batch_of(first, second))
    assert function.places == [{}]
    assert places["SUM"][:2].tolist() == [6, 6]


def test_another_device_is_as_far_as_the_host(harness: Harness, cuda: FakeCuda, devices: CudaDevices) -> None:
    client = Client(cuda, devices, device=0)
    instance, function = instance_of(harness)
    request, places = client.request({"A": rows(5), "B": rows(1)}, ["SUM"])
    batch = batch_of(request)
    run(instance, batch)
    assert function.inputs == [{"A": False, "B": False}]
    assert function.places == [{}]
    assert batch.bytes_copied == 16
    assert places["SUM"][:2].tolist() == [6, 6]


def test_a_device_without_pools_joins_on_the_host(
    harness: Harness, cuda: FakeCuda, devices: CudaDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_POOLS", "0")
    client = Client(cuda, devices)
    instance, function = instance_of(harness)
    first, _ = client.request({"A": rows(5), "B": rows(1)})
    second, _ = client.request({"A": rows(7), "B": rows(2)})
    batch = batch_of(first, second)
    run(instance, batch)
    assert function.inputs == [{"A": False, "B": False}]
    assert batch.bytes_copied == 64  # from the device, and into one array
    assert [r.outputs[0].numpy().tolist() for r in client.answers] == [[[6, 6]], [[9, 9]]]


class Plain:
    """A function that knows nothing of devices."""

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> Mapping[str, Array]:
        return {"SUM": inputs["A"] + inputs["B"], "DIFF": inputs["A"] - inputs["B"]}


class PlainBackend(ArrayBackend):
    default_model_file = "model"

    def open(self, spec: ModelSpec, placement: Placement) -> ArrayFunction:
        return Plain()


@pytest.mark.parametrize("count", [1, 3])
def test_functions_of_arrays_get_copies_that_are_counted(
    harness: Harness, client: Client, count: int
) -> None:
    spec = harness.spec("m", AB, SUM_DIFF)
    instance = PlainBackend().load(spec).create_instance(Placement("m_0", "CPU"))
    made = [client.request({"A": rows(n)}, ["SUM"], host={"B": rows(1)}) for n in range(count)]
    batch = batch_of(*(request for request, _ in made))
    run(instance, batch)
    assert [places["SUM"][:2].tolist() for _, places in made] == [[n + 1, n + 1] for n in range(count)]
    assert batch.bytes_copied == (8 if count == 1 else count * 8 + count * 16)


# ONNX Runtime


def binding_function(spec: ModelSpec, model: bytes) -> _DeviceFunction:
    """A function whose device is the host as ONNX Runtime sees it: there the memory really is."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    function = _DeviceFunction(session, onnxruntime.RunOptions(), spec, signature_of(session, "m"), "cpu", 0)
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
    request = InferenceRequest("m", "", {"A": tensor}, client._respond, 0)
    uses.attach(request)
    run(instance, batch_of(request))
    assert client.memory.array[0, :width].tolist() == values[0, ::-1].tolist()


def test_outputs_over_each_other_are_written_one_after_the_other(bound: Any, client: Client) -> None:
    """What the client gets is the second one, whole."""
    request, _ = client.request({"A": rows(5), "B": rows(1)})
    uses = RegionBindings(client.regions)
    for name in ("SUM", "DIFF"):
        uses.output("r", 31 * 256, 256, name)
    other = InferenceRequest("m", "", dict(request.inputs), client._respond, 0)
    uses.attach(other)
    run(bound, batch_of(other))
    assert client.memory.array[31, :2].tolist() == [4, 4]
    request.discard()


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence": SequenceBatching()},
        {"batch_outputs": (BatchOutput("BATCH_SCATTER_WITH_INPUT_SHAPE", ("SUM",), "A"),)},
        {"batch_inputs": (BatchInput("BATCH_ELEMENT_COUNT", ("N",), "FP32", "A"),)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_outputs_that_are_not_as_clients_get_them_do_not_stay_on_the_device(
    harness: Harness, client: Client, changes: dict[str, Any]
) -> None:
    spec = harness.spec("m", AB, SUM_DIFF)
    request, _ = client.request({"A": rows(5), "B": rows(1)}, ["SUM"])
    plain = device_arrays.DeviceGatherer(spec, 1)
    assert list(plain.places([request], ("SUM", "DIFF"))) == ["SUM"]
    changed = device_arrays.DeviceGatherer(dataclasses.replace(spec, **changes), 1)
    assert changed.places([request], ("SUM", "DIFF")) == {}
    request.wrap_responder(partial)
    assert plain.places([request], ("SUM",)) == {}  # somebody else looks at the response
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
    assert isinstance(on_gpu, _DeviceFunction)
    assert on_gpu.device_id == 1
    assert not hasattr(backend.open(spec, Placement("m_0", "CPU")), "device_id")


# Python models

MODEL = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse(self.outputs(request)) for request in requests]

        def outputs(self, request):
            a = pb_utils.get_input_tensor_by_name(request, "A")
            {body}
"""


def python_instance(harness: Harness, body: str, **parameters: str) -> Any:
    harness.directory("m", {"1/model.py": MODEL.replace("{body}", body)})
    spec = harness.spec("m", AB[:1], tensor_specs(SUM=("FP32", (2,))), parameters=parameters)
    return PythonBackend().load(spec).create_instance(Placement("m_0", "CPU"))


ON_GPU = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}


def test_python_models_get_inputs_in_host_memory(harness: Harness, client: Client) -> None:
    instance = python_instance(
        harness,
        "assert a.is_cpu() and a.__dlpack_device__() == (1, 0); array = a.as_numpy(); array += 1; "
        "return [pb_utils.Tensor('SUM', array)]",
    )
    request, places = client.request({"A": rows(5)}, ["SUM"])
    batch = batch_of(request)
    run(instance, batch)
    assert places["SUM"][:2].tolist() == [6, 6]
    assert client.memory.array[0, :2].tolist() == [5, 5]
    assert batch.bytes_copied == 16  # from the device, and for the model to write to
    instance.close()


def test_an_input_that_nobody_looks_at_is_not_copied(
    harness: Harness, client: Client, cuda: FakeCuda
) -> None:
    instance = python_instance(harness, "return [pb_utils.Tensor('SUM', np.zeros((1, 2), np.float32))]")
    request, _ = client.request({"A": rows(5)})
    batch = batch_of(request)
    with cuda.failing("cuMemcpyAsync", 700):
        run(instance, batch)
    assert batch.bytes_copied == 0
    instance.close()


def test_python_models_that_want_it_get_inputs_where_they_are(
    harness: Harness, client: Client, cuda: FakeCuda, devices: CudaDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "cuda_devices", lambda: devices)
    instance = python_instance(
        harness,
        "assert not a.is_cpu() and a.__dlpack_device__() == (2, 1) and a.shape() == [1, 2]; "
        "b = pb_utils.Tensor.from_dlpack('SUM', a.to_dlpack()); assert not b.is_cpu(); return [b]",
        **ON_GPU,
    )
    request, places = client.request({"A": rows(5)}, ["SUM"])
    batch = batch_of(request)
    run(instance, batch)
    assert places["SUM"][:2].tolist() == [5, 5]
    assert batch.bytes_copied == 0
    instance.close()


def test_an_output_on_the_device_reaches_clients_without_one(
    harness: Harness, client: Client, devices: CudaDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "cuda_devices", lambda: devices)
    instance = python_instance(harness, "return [pb_utils.Tensor.from_dlpack('SUM', a)]", **ON_GPU)
    request, _ = client.request({"A": rows(5)})
    run(instance, batch_of(request))
    (response,) = client.answers
    assert isinstance(response.outputs[0], DeviceTensor)
    assert np.frombuffer(response.outputs[0].data, np.float32).tolist() == [5, 5]
    instance.close()


def test_tensors_on_a_gpu_have_no_array(harness: Harness, client: Client) -> None:
    instance = python_instance(harness, "a.as_numpy()", **ON_GPU)
    request, _ = client.request({"A": rows(5)})
    with pytest.raises(Exception, match=r"Tensor is stored in GPU and cannot be converted to NumPy\."):
        instance.execute(batch_of(request))
    request.discard()
    instance.close()


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    from conch.backends.python.api import pb_utils
    from conch.backends.python.api.pb_errors import TritonModelException
    from conch.backends.python.api.pb_tensor import Tensor as ModelTensor

    assert pb_utils
    monkeypatch.setattr(memory, "cuda_devices", lambda: CudaDevices("libno-such-driver.so.1"))
    request, _ = client.request({"A": rows(5)})
    with pytest.raises(
        TritonModelException, match=r"^tensor 'X' cannot be imported from DLPack: the CUDA driver"
    ):
        ModelTensor.from_dlpack("X", request.inputs["A"])
    request.discard()


def test_whether_inputs_are_wanted_on_the_gpu_is_said_with_yes_or_no(harness: Harness) -> None:
    with pytest.raises(
        InvalidArgumentError,
        match="parameter 'FORCE_CPU_ONLY_INPUT_TENSORS' must be 'yes' or 'no', not 'maybe'",
    ):
        python_instance(harness, "pass", FORCE_CPU_ONLY_INPUT_TENSORS="maybe")
    python_instance(harness, "pass", FORCE_CPU_ONLY_INPUT_TENSORS="yes").close()


def test_fetched_tensors_are_counted_once(client: Client) -> None:
    request, _ = client.request({"A": rows(5)})
    tensor = request.inputs["A"]
    assert isinstance(tensor, DeviceTensor)
    batch = batch_of(request)
    fetched = FetchedTensor(tensor, batch)
    assert not fetched.on_device
    assert bytes(fetched.data) == bytes(fetched.data) == rows(5).tobytes()
    assert fetched.numpy().tolist() == [[5, 5]]
    assert batch.bytes_copied == 8
    request.discard()


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
