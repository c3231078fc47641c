"""CUDA shared memory on a real GPU, and the same through the stand-in for the driver.

This process is the client: it allocates memory on the device and names it to the server by its handle.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tests.support.cuda import FakeCuda, build, without_gpu
from tests.support.cuda_client import CudaClient, DeviceArray
from tests.support.cuda_models import MADE
from tests.support.onnx_graphs import ADD_SUB
from tests.support.servers import client_of, copy_example, serving_process, tensor, write_model

from conch.memory.cuda_driver import LIBRARY

pytestmark = pytest.mark.process

ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.answer(request)]) for request in requests]

    def answer(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "IN")
        assert tensor.is_cpu() == ON_CPU
        BODY
"""
CONFIG = """
    backend: "python"
    max_batch_size: 8
    input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }}
    output {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}
    instance_group {{ kind: KIND_CPU }}
    dynamic_batching {{ }}
    parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value {{ string_value: "{cpu}" }} }}
"""
TORCH = """import torch
        doubled = torch.from_dlpack(tensor) * 2
        assert doubled.is_cuda
        return pb_utils.Tensor.from_dlpack("OUT", doubled)"""
CUPY = """import cupy
        doubled = cupy.from_dlpack(tensor) * 2
        return pb_utils.Tensor.from_dlpack("OUT", doubled)"""
CALLS = """given = pb_utils.Tensor.from_dlpack("IN", TENSOR)
        name = "anywhere" if tensor.is_cpu() else "near"
        response = pb_utils.InferenceRequest(
            model_name=name, requested_output_names=["OUT"], inputs=[given]
        ).exec()
        assert not response.has_error(), response.error().message()
        return pb_utils.Tensor("OUT", response.output_tensors()[0].as_numpy())"""
ANYWHERE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.answer(request.inputs()[0])]) for request in requests]

    def answer(self, tensor):
        return pb_utils.Tensor.from_dlpack("OUT", tensor)
"""
ON_GPU = """
    backend: "onnxruntime"
    max_batch_size: 8
    dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 100000 }
    instance_group { kind: KIND_GPU }
"""
VALUES = np.arange(64, dtype=np.float32).reshape(2, 32)

MODELS = [
    ("host", 2),
    ("near", 1),
    ("made", 2),
    ("pool", 1),
    ("calls", 1),
    ("gives", 1),
    ("torch", 2),
    ("cupy", 2),
]
"""Models, and what each multiplies its input by."""

REAL = [pytest.mark.gpu, pytest.mark.skipif(bool(without_gpu()), reason=without_gpu())]


class Setting(NamedTuple):
    """A driver, and a server that uses it."""

    cuda: CudaClient
    client: triton.InferenceServerClient


def write_models(repository: Path, real: bool) -> None:
    copy_example(repository, "simple")
    models = {
        "host": ("True", "yes", 'return pb_utils.Tensor("OUT", tensor.as_numpy() * 2)'),
        "near": ("False", "no", 'return pb_utils.Tensor.from_dlpack("OUT", tensor)'),
        "made": ("True", "yes", 'return pb_utils.Tensor.from_dlpack("OUT", Made(tensor.as_numpy() * 2, 0))'),
        "calls": ("False", "no", CALLS.replace("TENSOR", "tensor")),
        "gives": ("True", "yes", CALLS.replace("TENSOR", "Made(tensor.as_numpy(), 0)")),
        "pool": (
            "True",
            "yes",
            'return pb_utils.Tensor.from_dlpack("OUT", Made(tensor.as_numpy(), 0, True))',
        ),
    }
    if real and find_spec("torch"):
        models["torch"] = ("False", "no", TORCH)
    if real and find_spec("cupy"):
        models["cupy"] = ("False", "no", CUPY)
    for name, (on_cpu, cpu, body) in models.items():
        code = MADE + ECHO.replace("ON_CPU", on_cpu).replace("BODY", body)
        write_model(repository, name, CONFIG.format(cpu=cpu), {"model.py": code})
    write_model(repository, "anywhere", CONFIG.format(cpu="no"), {"model.py": ANYWHERE})
    if real and on_cuda():
        write_model(repository, "add_sub", ON_GPU, {"model.onnx": ADD_SUB})


def on_cuda() -> bool:
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


PLACEMENTS = ("in_process", "worker")


@pytest.fixture(
    scope="module",
    params=[("stand-in", each) for each in PLACEMENTS]
    + [pytest.param(("real", each), marks=REAL) for each in PLACEMENTS],
    ids="-".join,
)
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    library, environment = LIBRARY, dict[str, str]()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        driver, placement = request.param
        if driver == "stand-in":
            fake = FakeCuda(build(tmp_path_factory.mktemp("driver")), tmp_path_factory.mktemp("memory"))
            library, environment = fake.library, fake.environment
            patch.setenv("FAKE_CUDA_DIR", environment["FAKE_CUDA_DIR"])
        repository = tmp_path_factory.mktemp("models")
        write_models(repository, driver == "real")
        flags = [f"--backend-config=python,placement={placement}"]
        flags.append("--backend-config=python,pass-environment=FAKE_CUDA_*")
        server = stack.enter_context(serving_process(repository, flags=flags, environment=environment))
        client = stack.enter_context(client_of(server))
        assert client.is_server_ready()
        yield Setting(CudaClient(library), client)


class Memory:
    """Arrays on the device that are registered, for one test."""

    def __init__(self, setting: Setting, stack: ExitStack) -> None:
        self._setting = setting
        self._stack = stack

    def __call__(self, name: str, values: NDArray[Any], device: int = 0) -> DeviceArray:
        array = self._stack.enter_context(self._setting.cuda.allocated(values, device))
        handle = base64.b64encode(array.handle)
        self._setting.client.register_cuda_shared_memory(name, handle, device, array.nbytes)
        # CUDA wants memory closed by those who opened it before it is freed.
        self._stack.callback(self._setting.client.unregister_cuda_shared_memory, name)
        return array


@pytest.fixture
def memory(setting: Setting) -> Iterator[Memory]:
    with ExitStack() as stack:
        yield Memory(setting, stack)


def infer(
    setting: Setting,
    model: str,
    inputs: Mapping[str, tuple[str, NDArray[Any]]],
    outputs: Mapping[str, tuple[str, int]],
) -> triton.InferResult:
    """Infers with inputs that lie in regions, and outputs that go to some."""
    made = [triton.InferInput(name, list(values.shape), "FP32") for name, (_, values) in inputs.items()]
    for item, (region, values) in zip(made, inputs.values(), strict=True):
        item.set_shared_memory(region, values.nbytes)
    wanted = [triton.InferRequestedOutput(name) for name in outputs]
    for output, (region, size) in zip(wanted, outputs.values(), strict=True):
        output.set_shared_memory(region, size)
    return setting.client.infer(model, made, outputs=wanted or None)


def devices(setting: Setting) -> range:
    return range(min(setting.cuda.gpus, 2))


@pytest.mark.parametrize(("model", "factor"), MODELS)
def test_python_models(setting: Setting, memory: Memory, model: str, factor: int) -> None:
    if not setting.client.is_model_ready(model):
        pytest.skip(f"{model} is not installed, or there is no GPU for it")
    for device in devices(setting):
        memory(f"in{device}", VALUES + device, device)
        target = memory(f"out{device}", np.zeros_like(VALUES), device)
        region = f"in{device}"
        infer(setting, model, {"IN": (region, VALUES)}, {"OUT": (f"out{device}", VALUES.nbytes)})
        assert target.read().tolist() == ((VALUES + device) * factor).tolist()
        result = infer(setting, model, {"IN": (region, VALUES)}, {})
        assert result.as_numpy("OUT").tolist() == ((VALUES + device) * factor).tolist()


def test_from_one_device_to_another(setting: Setting, memory: Memory) -> None:
    last = devices(setting)[-1]
    memory("in", VALUES, 0)
    target = memory("out", np.zeros_like(VALUES), last)
    infer(setting, "near", {"IN": ("in", VALUES)}, {"OUT": ("out", VALUES.nbytes)})
    assert target.read().tolist() == VALUES.tolist()


def test_what_a_client_writes_later_is_what_later_requests_see(setting: Setting, memory: Memory) -> None:
    source, target = memory("in", VALUES), memory("out", np.zeros_like(VALUES))
    for round_ in range(20):
        source.write(VALUES * round_)
        infer(setting, "near", {"IN": ("in", VALUES)}, {"OUT": ("out", VALUES.nbytes)})
        assert target.read().tolist() == (VALUES * round_).tolist()


def test_a_handle_registered_twice(setting: Setting, memory: Memory) -> None:
    source = memory("one", VALUES)
    client = setting.client
    client.register_cuda_shared_memory("two", base64.b64encode(source.handle), 0, source.nbytes)
    client.unregister_cuda_shared_memory("one")
    result = infer(setting, "near", {"IN": ("two", VALUES)}, {})
    assert result.as_numpy("OUT").tolist() == VALUES.tolist()
    client.unregister_cuda_shared_memory("two")
    client.register_cuda_shared_memory("one", base64.b64encode(source.handle), 0, source.nbytes)


def test_more_than_was_allocated_can_not_be_registered(setting: Setting) -> None:
    with setting.cuda.allocated(VALUES) as array, pytest.raises(Exception, match="invalid args"):
        setting.client.register_cuda_shared_memory("n", base64.b64encode(array.handle), 0, 2**40)


def test_host_and_device_in_one_request(setting: Setting, memory: Memory) -> None:
    target = memory("out", np.zeros_like(VALUES))
    output = triton.InferRequestedOutput("OUT")
    output.set_shared_memory("out", VALUES.nbytes)
    setting.client.infer("host", [tensor("IN", VALUES)], outputs=[output])
    assert target.read().tolist() == (VALUES * 2).tolist()


def test_a_model_on_the_gpu(setting: Setting, memory: Memory) -> None:
    """Batches of one and of two requests, which are joined on the device."""
    client = setting.client
    if not client.is_model_ready("add_sub"):
        pytest.skip("no onnxruntime with CUDA, or no GPU for it")
    pairs = [np.full((1, 2), value, np.float32) for value in (5, 7)]
    targets = []
    for number, values in enumerate(pairs):
        memory(f"a{number}", values)
        memory(f"b{number}", np.ones_like(values))
        targets.append(memory(f"out{number}", np.zeros((1, 2), np.float32)))
    answers: SimpleQueue[Any] = SimpleQueue()
    for number, values in enumerate(pairs):
        inputs = [triton.InferInput(name, [1, 2], "FP32") for name in ("A", "B")]
        for item, region in zip(inputs, (f"a{number}", f"b{number}"), strict=True):
            item.set_shared_memory(region, values.nbytes)
        outputs = [triton.InferRequestedOutput(name) for name in ("SUM", "DIFF")]
        outputs[0].set_shared_memory(f"out{number}", values.nbytes)
        client.async_infer("add_sub", inputs, lambda result, error: answers.put(error), outputs=outputs)
    assert [answers.get(timeout=60) for _ in pairs] == [None, None]
    assert [target.read().tolist() for target in targets] == [[[6, 6]], [[8, 8]]]
