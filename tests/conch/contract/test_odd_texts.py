"""Texts no protocol can carry as they are: half characters, very long ones, numbers of 5000 digits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.grpc_transports import each_transport
from tests.support.servers import (
    WAIT_S,
    RawClient,
    ServerProcess,
    check_simple,
    client_of,
    copy_example,
    eventually,
    probe_inputs,
    serving_process,
    simple_inputs,
    write_model,
)
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.process  # logs that are no UTF-8 cannot be in reports of xdist

LONG = 32_000
HALF = b"half \xff\xed\xa0\x80 text"
ESCAPED = r"half \udcff\udced\udca0\udc80 text"
_CONFIG = """
    backend: "python"
    max_batch_size: 8
    input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
_MODEL = f"""
import json
import os
import triton_python_backend_utils as pb_utils

TEXTS = {{"half": os.fsdecode({HALF!r}), "long": "äöü" * {LONG // 6}, "plain": "x" * {LONG}}}


class TritonPythonModel:
    def execute(self, requests):
        orders = json.loads(requests[0].parameters())
        text = TEXTS[orders["text"]]
        if orders["how"] == "raise":
            raise ValueError(text)
        error = pb_utils.TritonError(text, pb_utils.TritonError.INTERNAL)
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""
_UNLOADABLE = f"""
import os

raise ValueError(os.fsdecode({HALF!r}))
"""

grpc_transport = each_transport()


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, grpc_transport: str) -> Iterator[ServerProcess]:
    """A server whose models fail with odd texts."""
    repository = tmp_path_factory.mktemp("odd")
    copy_example(repository, "simple")
    write_model(repository, "odd", _CONFIG, {"model.py": _MODEL})
    write_model(repository, "unloadable", _CONFIG, {"model.py": _UNLOADABLE})
    flags = ["--model-control-mode=explicit", "--load-model=odd", "--load-model=simple"]
    with serving_process(repository, flags=flags) as server:
        yield server


@pytest.mark.parametrize("how", ["raise", "answer"])
@pytest.mark.parametrize("stream", [False, True])
def test_half_characters_of_a_model_reach_the_client_as_text(
    odd: ServerProcess, how: str, stream: bool
) -> None:
    text = error_of(odd, {"how": how, "text": "half"}, stream)[1]
    assert ESCAPED in text
    with client_of(odd) as client:
        check_simple(client.infer("simple", simple_inputs(), client_timeout=WAIT_S))


@pytest.mark.parametrize(("text", "start"), [("plain", "x" * 1000), ("long", "äöü" * 200)])
@pytest.mark.parametrize("how", ["raise", "answer"])
def test_a_very_long_error_is_cut(odd: ServerProcess, how: str, text: str, start: str) -> None:
    """Clients refuse trailers of more than some kilobytes, and then show no status but their own."""
    status, shown = error_of(odd, {"how": how, "text": text}, stream=False)
    assert status == "StatusCode.INTERNAL"
    assert start in shown
    assert shown.endswith(" …")
    assert 1200 < len(shown.encode()) < 6000


def test_a_very_long_error_travels_whole_in_a_message(odd: ServerProcess) -> None:
    assert error_of(odd, {"how": "answer", "text": "plain"}, stream=True)[1] == "x" * LONG


def test_a_very_long_error_that_closes_its_stream_is_cut(odd: ServerProcess) -> None:
    with closing(RawClient(odd.address)) as raw:
        request = odd_request({"how": "answer", "text": "plain"})
        method = raw.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        call = method(iter([request]), timeout=WAIT_S, metadata=[("triton_grpc_error", "true")])
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() is grpc.StatusCode.INTERNAL
        assert call.details().startswith("x" * 1000) and call.details().endswith(" …")


def test_a_load_that_fails_with_half_characters_is_answered(odd: ServerProcess) -> None:
    with client_of(odd) as client:
        for _ in range(2):
            with pytest.raises(InferenceServerException) as raised:
                client.load_model("unloadable", client_timeout=WAIT_S)
            assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
            assert ESCAPED in str(raised.value.message())
            models = client.get_model_repository_index(client_timeout=WAIT_S).models
            (line,) = [line for line in models if line.name == "unloadable"]
            assert (line.version, line.state) == ("1", "UNAVAILABLE")
            assert ESCAPED in line.reason


def test_a_directory_whose_name_is_no_text_is_passed_over(tmp_path: Path, grpc_transport: str) -> None:
    repository = tmp_path / "models"
    copy_example(repository, "simple")
    for directory in (b"/no\xfftext", b"/no\xfftext/1", b"/simple/\xff"):
        os.mkdir(os.fsencode(repository) + directory)
    Path(os.fsdecode(os.fsencode(repository) + b"/simple/1/\xfe")).write_text("a file")
    flags = ["--model-control-mode=explicit", "--load-model=*"]
    with serving_process(repository, flags=flags) as server, client_of(server) as client:
        index = client.get_model_repository_index(client_timeout=WAIT_S).models
        assert [(line.name, line.state) for line in index] == [("simple", "READY")]
        client.unload_model("simple", client_timeout=WAIT_S)
        client.load_model("simple", client_timeout=WAIT_S)
        check_simple(client.infer("simple", simple_inputs(), client_timeout=WAIT_S))
        with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
            client.load_model("no\ufffdtext", client_timeout=WAIT_S)
        eventually(server.logs, "it logs")


@pytest.mark.parametrize(
    "version", ["9" * 5000, "-" + "9" * 5000, "9" * 19, str(2**63), "0" * 5000], ids=lambda text: text[:3]
)
@pytest.mark.parametrize(
    "call", ["ModelInfer", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "stream"]
)
def test_huge_versions(raw: RawClient, call: str, version: str) -> None:
    if call == "stream":
        request = service_pb2.ModelInferRequest(model_name="simple", model_version=version)
        method = raw.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answer = service_pb2.ModelStreamInferResponse.FromString(
            next(method(iter([request.SerializeToString()]), timeout=WAIT_S))
        )
        text = answer.error_message
    else:
        kind = getattr(service_pb2, f"{call}Request")
        names = ("model_name", "model_version") if call == "ModelInfer" else ("name", "version")
        with pytest.raises(grpc.RpcError) as raised:
            raw(call, kind(**dict(zip(names, ("simple", version), strict=True))))
        error: Any = raised.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        text = error.details()
    shown = version[:50]
    assert text.startswith(f"failed to get model version from specified version string '{shown}"), text
    assert text.endswith("' (details: stol), version should be an integral value > 0")
    assert len(text) < 1000


def odd_request(orders: dict[str, str]) -> bytes:
    """A request for the model with the odd texts."""
    request = service_pb2.ModelInferRequest(model_name="odd", raw_input_contents=[b"\0" * 4])
    request.inputs.add(name="IN", datatype="FP32", shape=[1, 1])
    for key, value in orders.items():
        request.parameters[key].string_param = value
    return bytes(request.SerializeToString())


def error_of(server: ServerProcess, orders: dict[str, str], stream: bool) -> tuple[str, str]:
    """Status and text of the error a request ends in; on a stream the status is empty."""
    if not stream:
        with client_of(server) as client, pytest.raises(InferenceServerException) as raised:
            client.infer("odd", probe_inputs(), parameters=orders, client_timeout=WAIT_S)
        return str(raised.value.status()), str(raised.value.message())
    with closing(RawClient(server.address)) as raw:
        method = raw.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        call = method(iter([odd_request(orders)]), timeout=WAIT_S)
        (message,) = call
        return "", str(service_pb2.ModelStreamInferResponse.FromString(message).error_message)
