"""Tensors on a GPU in models: Python ones, and functions that use the GPU's memory where it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.support.backend_harness import Harness, rows, tensor_specs
from tests.support.cuda import FakeCuda
from tests.support.device_client import AB, SUM_DIFF, Client, batch_of, run

from conch.backends import device_arrays
from conch.backends.arrays import ArrayBackend, ArrayFunction
from conch.backends.device_arrays import Places
from conch.core.device import DeviceTensor, FetchedTensor
from conch.core.errors import InvalidArgumentError
from conch.core.execution.placement import Placement
from conch.core.responder_layers import ResponderLayer
from conch.core.spec import BatchInput, BatchOutput, ModelSpec, SequenceBatching
from conch.core.tensor import Array, Tensor
from conch.memory import cuda as memory
from conch.memory.cuda import CudaDevices
from conch.memory.region_bindings import PlacedTensor
from conch.workers.python_backend import PythonBackend


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
            made = wanted[0].new_memory(array.nbytes)
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
    request.wrap_responder(partial, ResponderLayer.CACHE)
    assert plain.places([request], ("SUM",)) == {}  # another layer looks at the response
    request.discard()


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
