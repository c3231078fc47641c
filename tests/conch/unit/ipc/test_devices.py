"""Tensors on a GPU between the server and a worker, with a driver whose devices' memory is files."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.conch.unit.ipc.test_blocks import exchanges
from tests.support.cuda import Allocation, FakeCuda
from tests.support.cuda_models import MADE
from tests.support.servers import eventually
from tests.support.workers import NoCalls, Running, arrived, batch_of, model_spec, placed, worker

from conch.core.bls import ServerCalls
from conch.core.device import DeviceTensor
from conch.core.errors import InternalError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.responder_layers import ResponderLayer
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Array, Tensor
from conch.ipc.blocks import Mappings
from conch.ipc.channel import RETURNED, Kind, WireError, encode, encode_texts
from conch.ipc.devices import MOST_KEPT, ServerDevices, WorkerDevices
from conch.ipc.tensors import ON_DEVICE, Place, TensorLayout, UnreachableError
from conch.memory.cuda import CudaDevices
from conch.memory.cuda_regions import cuda_opener
from conch.memory.region_bindings import RegionBindings
from conch.memory.regions import Regions

pytestmark = pytest.mark.process

SOURCE = f"""
import numpy as np
import triton_python_backend_utils as pb_utils
{MADE}

class TritonPythonModel:
    kept = []

    def execute(self, requests):
        outputs = [self.one(request) for request in requests]
        return [None if output is None else pb_utils.InferenceResponse([output]) for output in outputs]

    def one(self, request):
        a = pb_utils.get_input_tensor_by_name(request, "IN")
        BODY
"""
PASS = "return pb_utils.Tensor.from_dlpack('OUT', a.to_dlpack())"
WHERE = "return pb_utils.Tensor('OUT', np.array([a.is_cpu(), a.__dlpack_device__()[1]], np.float32))"
MAKE = "return pb_utils.Tensor.from_dlpack('OUT', Made(a.as_numpy() + 1, 1))"
VALUES = np.arange(8, dtype=np.float32)


def spec_of(directory: Path, body: str, cpu_only: bool = False) -> ModelSpec:
    spec = model_spec(
        directory,
        SOURCE.replace("BODY", body),
        inputs=(TensorSpec("IN", "FP32", (-1,)),),
        outputs=(TensorSpec("OUT", "FP32", (-1,)),),
    )
    return replace(spec, parameters={"FORCE_CPU_ONLY_INPUT_TENSORS": "yes" if cpu_only else "no"})


class Setting:
    """A server with a client's regions, and workers that find the driver."""

    def __init__(self, cuda: FakeCuda, devices: CudaDevices, folder: Path) -> None:
        self.cuda = cuda
        self.devices = devices
        self.folder = folder
        self.regions = Regions(open_cuda=cuda_opener(lambda: devices))
        self.workers: list[Running] = []

    def region(self, name: str, values: Array, device: int = 1) -> Allocation:
        allocation = self.cuda.allocate(values, device)
        self.regions.register_cuda(name, allocation.handle, device, values.nbytes)
        return allocation

    def worker(self, body: str, cpu_only: bool = False, calls: ServerCalls | None = None) -> Running:
        folder = self.folder / str(len(self.workers))
        running = Running(spec_of(folder, body, cpu_only), calls or NoCalls(), gpus=self.devices)
        self.workers.append(running)
        running.load()
        return running

    def request(self, where: str | Array, to: str = "") -> InferenceRequest:
        """A request with its input in a region, or in the message, and its output in one, or anywhere."""
        uses = RegionBindings(self.regions)
        if isinstance(where, str):
            tensor = uses.input(where, 0, VALUES.nbytes, "IN", "FP32", VALUES.shape)
        else:
            tensor = Tensor.from_array("IN", where)
        request = InferenceRequest("m", "", {"IN": tensor}, _nobody, 0)
        if to:
            uses.output(to, 0, VALUES.nbytes, "OUT")
        uses.attach(request)
        return request

    def infer(self, running: Running, where: str | Array, to: str = "") -> Tensor:
        """Runs a request; returns its output, which is in its place if it has one."""
        request = self.request(where, to)
        batch = batch_of(request)
        (response,) = running.start(batch).result()
        self.bytes_copied = batch.bytes_copied
        assert response is not None
        assert response.error is None, response.error
        (output,) = response.outputs
        request.respond(response)
        return output

    def open_in(self, running: Running) -> int:
        return len(self.cuda.opened_by(running.process.pid))

    @property
    def open_here(self) -> int:
        return len(self.cuda.opened_by(os.getpid()))


def _nobody(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """Takes a response."""


@pytest.fixture
def setting(
    cuda: FakeCuda, devices: CudaDevices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Setting]:
    monkeypatch.setenv("LD_LIBRARY_PATH", cuda.environment["LD_LIBRARY_PATH"])
    made = Setting(cuda, devices, tmp_path)
    yield made
    for running in made.workers:
        running.end()


def values(tensor: Tensor) -> list[float]:
    return list(np.frombuffer(tensor.data, np.float32))


def test_an_input_is_seen_where_it_is(setting: Setting) -> None:
    setting.region("in", VALUES)
    running = setting.worker(WHERE)
    with setting.cuda.failing("cuMemcpyAsync", 700):
        assert values(setting.infer(running, "in")) == [0, 1]
    assert setting.bytes_copied == 0
    assert setting.open_in(running) == 1


def test_an_input_goes_to_another_region_without_the_host(setting: Setting) -> None:
    setting.region("in", VALUES)
    target = setting.region("out", np.zeros(8, np.float32), device=0)
    running = setting.worker(PASS)
    for round_ in range(3):
        output = setting.infer(running, "in", "out")
        assert isinstance(output, DeviceTensor)
        assert not output.has_data  # never fetched
        assert target.array.tolist() == VALUES.tolist()
        target.array[:] = round_
    assert setting.bytes_copied == 0
    assert setting.open_in(running) == 1
    assert setting.open_here == 2


def test_a_region_is_closed_in_the_worker_when_it_is_gone(setting: Setting) -> None:
    setting.region("in", VALUES)
    running = setting.worker(WHERE)
    setting.infer(running, "in")
    setting.regions.unregister_cuda("in")
    assert setting.open_here == 0
    eventually(lambda: setting.open_in(running) == 0, "the region is closed")
    setting.region("in", VALUES + 1)
    setting.infer(running, "in")
    assert setting.open_in(running) == 1


def test_regions_come_and_go_while_they_are_used(setting: Setting) -> None:
    target = setting.region("out", np.zeros(8, np.float32))
    allocation = setting.region("in", VALUES)
    running = setting.worker(PASS)
    for round_ in range(50):
        allocation.array[:] = round_
        request = setting.request("in", "out")
        begun = running.start(batch_of(request))
        setting.regions.unregister_cuda("in")
        setting.regions.register_cuda("in", allocation.handle, 1, VALUES.nbytes)
        (response,) = begun.result()
        request.respond(response)
        assert target.array.tolist() == [round_] * 8
        if round_ % 3 == 0:
            del request, response, begun
            setting.regions.unregister_cuda("in")
            setting.regions.register_cuda("in", allocation.handle, 1, VALUES.nbytes)
    del request, response, begun
    setting.regions.unregister_cuda("in")
    eventually(lambda: setting.open_in(running) == 0, "the region is closed")


def test_what_a_model_keeps_of_a_region_stays_open(setting: Setting) -> None:
    setting.region("in", VALUES)
    running = setting.worker(f"self.kept.clear() if len(self.kept) == 2 else self.kept.append(a); {WHERE}")
    setting.infer(running, "in")
    setting.regions.unregister_cuda("in")
    setting.infer(running, VALUES)  # the worker has read the earlier message first
    assert setting.open_in(running) == 1
    setting.infer(running, VALUES)
    eventually(lambda: setting.open_in(running) == 0, "the region is closed")


def test_models_that_do_not_ask_for_it_get_copies(setting: Setting) -> None:
    setting.region("in", VALUES)
    running = setting.worker("return pb_utils.Tensor('OUT', a.as_numpy() * 2)", cpu_only=True)
    assert values(setting.infer(running, "in")) == (VALUES * 2).tolist()
    assert setting.open_in(running) == 0


def test_an_output_that_a_model_makes_is_opened_by_the_server(setting: Setting) -> None:
    target = setting.region("out", np.zeros(8, np.float32))
    running = setting.worker(MAKE, cpu_only=True)
    output = setting.infer(running, VALUES, "out")
    assert isinstance(output, DeviceTensor)
    assert not output.has_data
    assert target.array.tolist() == (VALUES + 1).tolist()
    del output
    assert setting.open_here == 2  # kept for the next one in the same allocation
    for _ in range(2):
        running.link.tidy()
    assert setting.open_here == 1


def test_an_output_reaches_clients_without_a_gpu(setting: Setting) -> None:
    setting.region("any", VALUES)  # so that the server uses the GPU
    running = setting.worker(MAKE)
    output = setting.infer(running, VALUES)
    assert isinstance(output, DeviceTensor)
    assert values(output) == (VALUES + 1).tolist()


def test_a_server_that_uses_no_gpu_gets_outputs_in_host_memory(setting: Setting) -> None:
    running = setting.worker(MAKE)
    output = setting.infer(running, VALUES)
    assert not isinstance(output, DeviceTensor)
    assert values(output) == (VALUES + 1).tolist()
    assert not setting.devices.in_use


def test_a_worker_has_its_outputs_back(setting: Setting) -> None:
    body = (
        "if a.as_numpy()[0] < 0: return pb_utils.Tensor('OUT', np.array([Made.freed], np.float32))\n"
        f"        {MAKE}"
    )
    setting.region("any", VALUES)
    running = setting.worker(body)
    for _ in range(MOST_KEPT + 4):
        assert values(setting.infer(running, VALUES)) == (VALUES + 1).tolist()
    gc.collect()
    assert setting.open_here == 1 + MOST_KEPT
    ask = np.array([-1], np.float32)
    eventually(lambda: values(setting.infer(running, ask)) == [4], "four are back")
    for _ in range(2):
        running.link.tidy()
    assert setting.open_here == 1
    eventually(lambda: values(setting.infer(running, ask)) == [MOST_KEPT + 4], "all are back")


def test_large_outputs_are_not_kept(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conch.ipc.devices.MOST_KEPT_BYTES", 8)
    setting.region("any", VALUES)
    running = setting.worker(MAKE)
    output = setting.infer(running, VALUES)
    assert setting.open_here == 2
    del output
    assert setting.open_here == 1
    eventually(lambda: not list(setting.cuda.directory.glob("own-*")), "the model has freed it")


def test_memory_is_closed_before_its_worker_has_it_back(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conch.ipc.devices.MOST_KEPT_BYTES", 8)
    setting.region("any", VALUES)
    running = setting.worker(MAKE)
    queue_release, found = Mappings.queue_release, list[int]()

    def note(mappings: Mappings, number: int, at_once: bool) -> None:
        found.append(setting.open_here)
        queue_release(mappings, number, at_once)

    monkeypatch.setattr(Mappings, "queue_release", note)
    setting.infer(running, VALUES)
    assert found == [1]


def test_memory_of_a_pool_comes_through_the_host(setting: Setting) -> None:
    target = setting.region("out", np.zeros(8, np.float32))
    running = setting.worker("return pb_utils.Tensor.from_dlpack('OUT', Made(a.as_numpy() + 1, 1, True))")
    output = setting.infer(running, VALUES, "out")
    assert target.array.tolist() == (VALUES + 1).tolist()
    assert not isinstance(output, DeviceTensor)


def test_a_sent_response_comes_through_the_host(setting: Setting) -> None:
    body = (
        "out = pb_utils.Tensor.from_dlpack('OUT', Made(a.as_numpy() + 1, 1)); "
        "request.get_response_sender().send(pb_utils.InferenceResponse([out]), flags=1)"
    )
    setting.region("any", VALUES)
    running = setting.worker(body)
    request = setting.request(VALUES)
    answers: list[InferenceResponse | None] = []
    request.wrap_responder(
        lambda _: lambda request, response, final: answers.append(response), ResponderLayer.CACHE
    )
    running.run(request)
    eventually(lambda: bool(answers), "an answer")
    assert answers[0] is not None
    (output,) = answers[0].outputs
    assert not isinstance(output, DeviceTensor)
    assert values(output) == (VALUES + 1).tolist()
    request.discard()


def test_answers_that_wait_are_copied(setting: Setting) -> None:
    setting.region("any", VALUES)
    running = setting.worker(MAKE)
    request = setting.request(VALUES)
    request.responses_wait = True
    (response,) = running.run(request)
    assert response is not None
    assert not response.outputs[0].on_device
    assert values(response.outputs[0]) == (VALUES + 1).tolist()
    request.discard()


def test_a_worker_that_can_not_open_a_region_gets_copies(setting: Setting) -> None:
    setting.region("in", VALUES)
    running = setting.worker("return pb_utils.Tensor('OUT', a.as_numpy() * 2)")
    with setting.cuda.failing("cuIpcOpenMemHandle_v2", 217):
        for _ in range(2):
            assert values(setting.infer(running, "in")) == (VALUES * 2).tolist()
    assert values(setting.infer(running, "in")) == (VALUES * 2).tolist()
    assert setting.open_in(running) == 0


def test_all_that_is_on_its_way_to_such_a_worker_is_sent_again(setting: Setting) -> None:
    setting.region("in", VALUES)
    running = setting.worker("return pb_utils.Tensor('OUT', a.as_numpy() * 2)")
    with setting.cuda.failing("cuIpcOpenMemHandle_v2", 217):
        os.kill(running.process.pid, signal.SIGSTOP)
        requests = [setting.request("in") for _ in range(3)]
        begun = [running.start(batch_of(request)) for request in requests]
        os.kill(running.process.pid, signal.SIGCONT)
        for each, request in zip(begun, requests, strict=True):
            (response,) = each.result()
            assert response is not None
            assert values(response.outputs[0]) == (VALUES * 2).tolist()
            request.respond(response)


def test_gpus_that_the_other_side_does_not_see_are_not_described(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.region("in", VALUES)
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_CUDA_MACHINE", "OTHER")
        running = setting.worker("return pb_utils.Tensor.from_dlpack('OUT', Made(a.as_numpy() + 1, 1))")
    output = setting.infer(running, "in")
    assert not isinstance(output, DeviceTensor)
    assert values(output) == (VALUES + 1).tolist()


def test_an_output_that_the_server_can_not_open_is_an_error_and_the_next_one_a_copy(setting: Setting) -> None:
    setting.region("any", VALUES)
    running = setting.worker(MAKE)
    with setting.cuda.failing("cuIpcOpenMemHandle_v2", 217):
        (response,) = running.run(setting.request(VALUES))
        assert response is not None
        assert isinstance(response.error, InternalError)
        assert "memory on a GPU can't be opened in another process" in response.error.message
        assert values(setting.infer(running, VALUES)) == (VALUES + 1).tolist()
    assert not running.lost


def test_what_a_model_has_not_finished_fails_its_batch(setting: Setting) -> None:
    setting.region("any", VALUES)
    running = setting.worker(MAKE)
    setting.infer(running, VALUES)
    with setting.cuda.failing("cuStreamSynchronize", 700), pytest.raises(InternalError):
        running.run(setting.request(VALUES))
    assert values(setting.infer(running, VALUES)) == (VALUES + 1).tolist()


def test_one_tensor_may_be_in_several_responses(setting: Setting) -> None:
    setting.region("any", VALUES)
    running = setting.worker(
        "self.kept.append(pb_utils.Tensor.from_dlpack('OUT', Made(VALUES, 1))); return self.kept[0]".replace(
            "VALUES", "a.as_numpy()"
        )
    )
    responses = running.run(*(setting.request(VALUES) for _ in range(3)))
    assert [values(r.outputs[0]) for r in responses if r is not None] == [VALUES.tolist()] * 3
    del responses
    assert values(setting.infer(running, VALUES)) == VALUES.tolist()
    assert not running.lost


def test_all_is_closed_at_the_end(setting: Setting) -> None:
    setting.region("in", VALUES)
    running = setting.worker(PASS)
    setting.infer(running, "in")
    made = setting.worker(MAKE)
    setting.infer(made, VALUES)
    for each in (running, made):
        each.end()
        assert setting.open_in(each) == 0
    setting.regions.unregister_cuda("in")
    assert setting.open_here == 0
    assert not setting.devices.open_handles


def test_a_killed_worker_leaves_nothing_open_here(setting: Setting) -> None:
    setting.region("any", VALUES)
    running = setting.worker(MAKE)
    setting.infer(running, VALUES)
    running.process.kill()
    running.wait_lost()
    assert setting.open_here == 1


class Called(NoCalls):
    """A server with one model, which notes where its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.on_device: list[bool] = []

    def find(self, request: InferenceRequest) -> Any:
        return SimpleNamespace(spec=SimpleNamespace(name="other", version=1, decoupled=False))

    def submit(
        self, request: InferenceRequest, may_claim: bool = False, model: Any = None, parent: Any = None
    ) -> Any:
        (tensor,) = request.inputs.values()
        self.on_device.append(tensor.on_device)
        data = np.frombuffer(tensor.data, np.float32)
        request.respond(InferenceResponse([Tensor.from_array("OUT", data)]), True)


CALL = """given = pb_utils.Tensor.from_dlpack("IN", TENSOR)
        answer = pb_utils.InferenceRequest("", 0, [given], ["OUT"], "other").exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        return answer.output_tensors()[0]"""


@pytest.mark.parametrize("given", ["a", "Made(np.arange(8, dtype=np.float32), 0)"])
def test_other_models_get_tensors_where_they_are(setting: Setting, given: str) -> None:
    setting.region("in", VALUES)
    calls = Called()
    running = setting.worker(CALL.replace("TENSOR", given), calls=calls)
    assert values(setting.infer(running, "in")) == VALUES.tolist()
    assert calls.on_device == [True]


def test_a_call_with_what_can_not_be_opened_fails_and_the_next_has_a_copy(setting: Setting) -> None:
    setting.region("in", VALUES)
    calls = Called()
    running = setting.worker(CALL.replace("TENSOR", "Made(np.arange(8, dtype=np.float32), 0)"), calls=calls)
    with setting.cuda.failing("cuIpcOpenMemHandle_v2", 217):
        with pytest.raises(InternalError, match="memory on a GPU can't be opened in another process"):
            setting.infer(running, VALUES)
        assert values(setting.infer(running, VALUES)) == VALUES.tolist()
    assert calls.on_device == [False]


def test_workers_load_nothing_for_gpus_unless_they_are_used(tmp_path: Path) -> None:
    body = """import sys
        names = ("conch.memory.cuda", "conch.ipc.devices", "torch", "cupy")
        return pb_utils.Tensor("OUT", np.array([name in sys.modules for name in names], np.float32))"""
    spec = spec_of(tmp_path, body)
    path = (spec.version_directory or tmp_path) / "model.py"
    path.write_text(path.read_text().replace(MADE, ""))
    with worker(spec) as running:
        assert running.infer(IN=VALUES)["OUT"].tolist() == [0, 0, 0, 0]


# What can't be


LAYOUT = TensorLayout("OUT", "FP32", (8,), 32)


def test_places_are_checked(setting: Setting) -> None:
    allocation = setting.region("in", VALUES)
    device = setting.devices.uuids()[1] + allocation.handle
    with exchanges() as (server, _):
        for side in (ServerDevices(server, setting.devices, True), WorkerDevices(setting.devices)):
            tensor = side.received(LAYOUT, Place(ON_DEVICE, 0, 32, device))
            assert values(tensor) == VALUES.tolist()
            with pytest.raises(WireError, match=r"^tensor 'OUT' ends at 36, but there are 32 bytes$"):
                side.received(LAYOUT, Place(ON_DEVICE, 4, 32, device))
            with pytest.raises(UnreachableError, match="there is no GPU 0000"):
                side.received(LAYOUT, Place(ON_DEVICE, 0, 32, bytes(80)))
            with pytest.raises(WireError, match=r"^tensor 7 is given back, but is not lent$"):
                side.return_memory(7)
            side.close()


def test_strings_are_never_on_a_gpu() -> None:
    key = (("IN", "BYTES", (1,)),)
    payload = placed(key, [Place(ON_DEVICE, 0, 8, bytes(80))])
    message = arrived(encode(Kind.DONE, fields=payload.fields, texts=encode_texts(payload.texts)))
    with pytest.raises(WireError, match="can't be on a GPU"):
        message.lists(1)


def test_a_message_that_is_not_sent_lends_nothing(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    allocation = setting.region("in", VALUES)
    tensor = DeviceTensor("OUT", "FP32", VALUES.shape, setting.devices.open(allocation.handle, 1))
    # As if the model had made it.
    monkeypatch.setattr(setting.devices, "opened_at", lambda memory: None)
    monkeypatch.setattr(setting.devices.device(1), "export", lambda pointer: (allocation.handle, 0))
    with exchanges() as (_, worker):
        devices = WorkerDevices(setting.devices)
        worker.use_devices(devices)
        devices.reachable = frozenset(setting.devices.uuids())
        payload = worker.pack([[tensor]], on_device=True)
        (number,) = payload.lent
        worker.discard_payload(payload)
        worker.discard_payload(payload)
        with pytest.raises(WireError, match="not lent"):
            devices.return_memory(number)


def test_a_worker_that_gives_back_what_it_has_not_is_given_up(setting: Setting) -> None:
    with exchanges() as (server, worker):
        worker.mappings.queue_release(RETURNED | 1, False)
        worker.send(Kind.DONE)
        with pytest.raises(WireError, match="tensor 1 is given back, but is not lent"):
            server.receive()
