"""The names, values and texts of `triton_python_backend_utils`."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.backend_harness import Harness, rows, tensor_specs

from conch.backends.python.api import pb_utils
from conch.backends.python.api.pb_request import ReceivedRequest
from conch.backends.python.api.pb_response import Converter
from conch.backends.python.api.pb_tensor import Tensor
from conch.backends.python.api.response_sender import SenderContext
from conch.core.execution.shaping import Shaper
from conch.core.request import InferenceRequest
from conch.core.scheduling.scheduler import Batch
from conch.core.tensor import Tensor as CoreTensor
from conch.ipc.tensors import ReceivedTensor


def received(
    harness: Harness, core: InferenceRequest | None = None, batch: Batch | None = None
) -> ReceivedRequest:
    spec = harness.spec(inputs=tensor_specs(A=("FP32", (2,))), outputs=tensor_specs(B=("FP32", (2,))))
    context = SenderContext(Converter(spec), Shaper(spec), False, "m_0_0", ("B",))
    request = core or harness.request({"A": rows(1)})[0]
    return ReceivedRequest(request, batch or Batch([request], 1), context)


def received_tensor(harness: Harness, core: CoreTensor, batch: Batch) -> Tensor:
    request, _ = harness.request({})
    request.inputs = {core.name: core}
    (tensor,) = received(harness, request, batch).inputs()
    return tensor


def sent(harness: Harness, tensor: Tensor, waits: bool = False) -> bytes:
    """The bytes of a tensor in a response, which may be held before it is sent."""
    request, _ = harness.request({}, requested=(tensor.name(),), responses_wait=waits)
    response = Converter(harness.spec()).convert(request, pb_utils.InferenceResponse([tensor]))
    return bytes(response.outputs[0].data)


def test_received_request(harness: Harness) -> None:
    core, _ = harness.request(
        {"A": rows(1)},
        id="7",
        correlation_id="seq",
        sequence_start=True,
        sequence_end=True,
        timeout_us=5,
        parameters={"a": 1, "b": "x"},
    )
    batch = Batch([core], 1)
    request = received(harness, core, batch)
    assert request.request_id() == "7"
    assert request.correlation_id() == "seq"
    assert request.flags() == (
        pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START | pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
    )
    assert request.timeout() == 5
    assert json.loads(request.parameters()) == {"a": 1, "b": "x"}
    assert request.requested_output_names() == {"B"}
    assert request.preferred_memory().preferred_memory_type() == pb_utils.TRITONSERVER_MEMORY_CPU
    assert request.preferred_memory().preferred_device_id() == 0
    assert request.trace().get_context() is None
    assert not request.is_cancelled()
    assert [tensor.name() for tensor in request.inputs()] == ["A"]
    assert pb_utils.get_input_tensor_by_name(request, "A") is request.inputs()[0]
    assert pb_utils.get_input_tensor_by_name(request, "X") is None
    for flags, again in (
        (pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, True),
        (pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL, False),
    ):
        request.set_release_flags(flags)
        assert core.rescheduled is again
    batch.compute_output_start_ns = 1
    with pytest.raises(pb_utils.TritonModelException, match="after 'execute' has returned"):
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
    with pytest.raises(pb_utils.TritonModelException, match="Unknown request release flags 8"):
        request.set_release_flags(8)
    request.set_flags(0)
    assert request.flags() == 0 and core.sequence_start  # as it was, for the scheduler


def test_nobody_but_a_model_calls_the_server() -> None:
    request = pb_utils.InferenceRequest(
        "", 0, [pb_utils.Tensor("A", rows(1))], ["B"], "m", parameters={"a": 1}
    )
    assert request.requested_output_names() == {"B"}
    assert request.inputs()[0].name() == "A" and json.loads(request.parameters()) == {"a": 1}
    assert pb_utils.get_input_tensor_by_name(request, "A") is request.inputs()[0]
    request.set_flags(1)
    assert (request.flags(), request.timeout(), request.correlation_id()) == (1, 0, 0)
    calls: list[Callable[[], Any]] = [
        request.exec,
        request.async_exec,
        lambda: pb_utils.load_model("m"),
        lambda: pb_utils.unload_model("m"),
        lambda: pb_utils.is_model_ready("m"),
    ]
    for call in calls:
        with pytest.raises(pb_utils.TritonModelException, match="BLS is only supported during"):
            call()
    for call in (request.get_response_sender, lambda: request.set_release_flags(1)):
        with pytest.raises(pb_utils.TritonModelException, match="Only a request that was received"):
            call()
    with pytest.raises(pb_utils.TritonModelException, match="must be called from a model"):
        pb_utils.get_model_dir()


def test_tensor() -> None:
    tensor = pb_utils.Tensor("A", np.arange(6, dtype=np.int64).reshape(2, 3))
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype()) == ("A", [2, 3], "TYPE_INT64")
    assert tensor.is_cpu()
    assert pb_utils.Tensor("A", np.float32(1)).shape() == []
    assert pb_utils.Tensor("A", np.array([b"x"])).triton_dtype() == "TYPE_STRING"
    with pytest.raises(pb_utils.TritonModelException, match=r"Tensor name cannot be an empty string\."):
        pb_utils.Tensor("", rows(1))


def test_received_tensor_copies_when_looked_at(harness: Harness) -> None:
    batch = Batch([], 1)
    core = CoreTensor("A", "FP32", (1, 2), bytes(8))
    tensor = received_tensor(harness, core, batch)
    assert tensor.shape() == [1, 2] and batch.bytes_copied == 0
    array = tensor.as_numpy()
    array[:] = 1
    assert tensor.as_numpy() is array and batch.bytes_copied == 8
    assert core.numpy().tolist() == [[0, 0]]
    texts = received_tensor(harness, CoreTensor("S", "BYTES", (1,), b"\1\0\0\0x"), batch)
    texts.as_numpy()[0] = b"y"
    assert texts.as_numpy().tolist() == [b"y"]
    floats = received_tensor(harness, CoreTensor("H", "BF16", (1, 2), b"\xc0\x3f\0\xc0"), batch)
    halves = floats.as_numpy()
    halves[0, 0] *= 3
    assert floats.as_numpy().tolist() == [[4.5, -2]] and halves.dtype == np.float32
    assert (floats.triton_dtype(), sent(harness, floats)) == ("TYPE_BF16", b"\xc0\x3f\0\xc0")


@pytest.mark.parametrize(
    ("datatype", "data", "written", "wanted"),
    [("UINT8", b"\1\2", 3, b"\3\2"), ("BYTES", b"\1\0\0\0x\0\0\0\0", b"yz", b"\2\0\0\0yz\0\0\0\0")],
)
def test_what_a_model_writes_to_its_input_in_a_worker_is_what_it_returns(
    harness: Harness, datatype: str, data: bytes, written: Any, wanted: bytes
) -> None:
    batch = Batch([], 1)
    core = ReceivedTensor("A", datatype, (2,), memoryview(bytearray(data)))
    tensor = received_tensor(harness, core, batch)
    array = tensor.as_numpy()
    array[0] = written
    assert tensor.as_numpy() is array and batch.bytes_copied == 0
    assert sent(harness, tensor) == sent(harness, tensor, waits=True) == wanted


def test_dlpack() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = pb_utils.Tensor("A", array)
    assert tensor.__dlpack_device__() == (1, 0)
    assert np.shares_memory(np.from_dlpack(tensor), array)
    copied = pb_utils.Tensor.from_dlpack("B", tensor.to_dlpack())
    assert copied.name() == "B" and copied.as_numpy().tolist() == array.tolist()
    assert pb_utils.Tensor.from_dlpack("B", array).shape() == [2, 3]
    with pytest.raises(pb_utils.TritonModelException, match="DLPack tensor is not contiguous"):
        pb_utils.Tensor.from_dlpack("B", array.T)
    with pytest.raises(
        pb_utils.TritonModelException, match="DLPack does not have support for string tensors"
    ):
        pb_utils.Tensor("S", np.array([b"x"], dtype=object)).to_dlpack()

    class Elsewhere:
        def __dlpack__(self) -> None: ...

        def __dlpack_device__(self) -> tuple[int, int]:
            return (8, 0)

    with pytest.raises(pb_utils.TritonModelException, match="kind 8, which is neither the host nor CUDA"):
        pb_utils.Tensor.from_dlpack("B", Elsewhere())
    with pytest.raises(pb_utils.TritonModelException, match="PyCapsule"):
        pb_utils.Tensor.from_dlpack("B", "no capsule")
    with pytest.raises(pb_utils.TritonModelException, match="complex64 have no datatype in the protocol"):
        pb_utils.Tensor.from_dlpack("B", np.zeros(2, np.complex64).__dlpack__())
    with pytest.raises(pb_utils.TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        pb_utils.Tensor.from_dlpack("", array)


def test_brain_floats_go_through_dlpack(harness: Harness) -> None:
    batch = Batch([], 0)
    received = received_tensor(harness, CoreTensor("H", "BF16", (2, 1), b"abcd"), batch)
    assert received.__dlpack_device__() == (1, 0)
    tensor = pb_utils.Tensor.from_dlpack("I", received.to_dlpack())
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype()) == ("I", [2, 1], "TYPE_BF16")
    assert batch.bytes_copied == 4
    assert sent(harness, tensor) == b"abcd"


@pytest.mark.parametrize(
    "call",
    [
        lambda: pb_utils.Tensor("", None),
        lambda: pb_utils.InferenceRequest("", None, [], [], "m"),  # type: ignore[arg-type]
        lambda: pb_utils.Logger.log(None),  # type: ignore[arg-type]
        lambda: pb_utils.Logger.log("what", 5),  # type: ignore[arg-type]
        lambda: pb_utils.Logger.log("what", None),  # type: ignore[arg-type]
        lambda: pb_utils.Logger.log_info(5),  # type: ignore[arg-type]
        lambda: pb_utils.Logger.log_warn(None),  # type: ignore[arg-type]
        lambda: pb_utils.Logger.log_error(None),  # type: ignore[arg-type]
        lambda: pb_utils.Logger.log_verbose(None),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_a_wrong_type(call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        call()


def test_bytes_can_be_logged(caplog: pytest.LogCaptureFixture) -> None:
    pb_utils.Logger.log(b"caf\xc3\xa9 \xff", pb_utils.Logger.WARNING)  # type: ignore[arg-type]
    assert caplog.messages == ["café \\xff"]


def test_response() -> None:
    response = pb_utils.InferenceResponse([pb_utils.Tensor("A", rows(1))], parameters={"a": True})
    assert not response.has_error() and response.error() is None
    assert response.parameters() == '{"a":true}'
    assert pb_utils.get_output_tensor_by_name(response, "A") is response.output_tensors()[0]
    assert pb_utils.get_output_tensor_by_name(response, "B") is None
    failed = pb_utils.InferenceResponse(error=pb_utils.TritonError("no"))
    error = failed.error()
    assert failed.has_error() and error is not None
    assert (error.message(), error.code(), str(error)) == ("no", pb_utils.TritonError.INTERNAL, "no")
    assert pb_utils.get_output_tensor_by_name(failed, "A") is None
    assert failed.parameters() == "{}"
    nothing: Any = None
    # Triton's texts, or as much as its bindings say, at the line of the model that is wrong.
    with pytest.raises(
        pb_utils.TritonModelException, match=r"^Output tensor for inference response should not be empty\.$"
    ):
        pb_utils.InferenceResponse([pb_utils.Tensor("A", rows(1)), nothing])
    assert pb_utils.InferenceResponse(nothing, pb_utils.TritonError("no")).output_tensors() == []


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({1: "x"}, "Expect parameters keys to have type str, found type <class 'int'>"),
        ({"x": 0.5}, "Expect parameters values to have type bool/int/str, found type <class 'float'>"),
        ([], "Expect dict, got <class 'list'>"),
    ],
)
def test_response_parameters(parameters: Any, message: str) -> None:
    with pytest.raises(pb_utils.TritonModelException) as caught:
        pb_utils.InferenceResponse([], parameters=parameters)
    assert caught.value.message() == message


def test_datatypes() -> None:
    assert pb_utils.triton_string_to_numpy("TYPE_FP16") is np.float16
    assert pb_utils.triton_string_to_numpy("TYPE_BOOL") is bool
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    for number in range(1, 14):
        assert pb_utils.numpy_to_triton_type(pb_utils.triton_to_numpy_type(number)) == number
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13
    assert pb_utils.numpy_to_triton_type(np.dtype(np.float32)) == 11
    assert pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.numpy_to_triton_type("no such type") is None
    assert pb_utils.triton_to_numpy_type(99) is None


def test_byte_tensors() -> None:
    encoded = pb_utils.serialize_byte_tensor(np.array([b"a\0", "é"], dtype=object))
    assert encoded == b"\x02\0\0\0a\0\x02\0\0\0\xc3\xa9"
    assert pb_utils.deserialize_bytes_tensor(encoded).tolist() == [b"a\0", "é".encode()]
    for dtype in (np.object_, np.float32):
        assert pb_utils.serialize_byte_tensor(np.zeros((2, 0), dtype)) == ()
    with pytest.raises(struct.error, match="ends inside an element"):
        pb_utils.deserialize_bytes_tensor(b"\5\0\0\0a")
    assert pb_utils.serialize_byte_tensor(np.zeros(1)) is None


def test_configs() -> None:
    config = {
        "input": [{"name": "A"}],
        "output": [{"name": "B"}],
        "model_transaction_policy": {"decoupled": True},
    }
    assert pb_utils.get_input_config_by_name(config, "A") == {"name": "A"}
    assert pb_utils.get_output_config_by_name(config, "B") == {"name": "B"}
    assert pb_utils.get_output_config_by_name(config, "A") is None
    assert pb_utils.using_decoupled_model_transaction_policy(config)
    assert not pb_utils.using_decoupled_model_transaction_policy({})


def test_logger(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    logger = pb_utils.Logger
    logger.log("one")
    logger.log("two", logger.WARNING)
    logger.log_info("100%")
    logger.log_warn("four")
    logger.log_error("five")
    logger.log_verbose("six")
    levels = [(record.levelname, record.getMessage(), record.filename) for record in caplog.records]
    here = "test_python_utils.py"
    assert levels == [
        ("INFO", "one", here),
        ("WARNING", "two", here),
        ("INFO", "100%", here),
        ("WARNING", "four", here),
        ("ERROR", "five", here),
        ("DEBUG", "six", here),
    ]


@pytest.mark.parametrize(
    ("given", "taken"), [(0, 0), (7, 7), (True, 1), ((1 << 64) - 1, (1 << 64) - 1), ("", ""), ("seq", "seq")]
)
def test_correlation_ids_of_requests_that_models_make(given: Any, taken: int | str) -> None:
    request = pb_utils.InferenceRequest(
        correlation_id=given, inputs=[], requested_output_names=("B",), model_name="m"
    )
    assert request.correlation_id() == taken and type(request.correlation_id()) is type(taken)
    assert request.requested_output_names() == {"B"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (np.int64(7), "must be integer or string"),
        (-1, "not below 0, not -1"),
        (1 << 64, "an integer of 64 bits"),
    ],
)
def test_what_is_no_correlation_id(given: Any, text: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=text):
        pb_utils.InferenceRequest(
            correlation_id=given, inputs=[], requested_output_names=["B"], model_name="m"
        )
