"""Traces in the code of Python models, in process and in workers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.servers import client_of, serving, write_model

_TENSORS = """
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
_BATCHED = f"""
backend: "python"
max_batch_size: 2
{_TENSORS}
dynamic_batching {{ preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 600000000 }}
"""
_LEAF = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        outs = [pb_utils.get_input_tensor_by_name(each, "IN").as_numpy() for each in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]) for out in outs]
"""
_MANY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            out = pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_CALLER = """
import triton_python_backend_utils as pb_utils


def call(request, model="leaf", request_id="", **trace):
    return pb_utils.InferenceRequest(
        request_id=request.request_id() + request_id, model_name=model, requested_output_names=["OUT"],
        inputs=request.inputs(), **trace
    )


class TritonPythonModel:
    async def execute(self, requests):
        assert len(requests) == 2
        try:
            call(requests[0], trace=None)
        except TypeError as error:
            assert "InferenceTrace" in str(error)
        else:
            raise AssertionError("trace=None was accepted")
        off = pb_utils.InferenceTrace()
        assert off.get_context() is None
        responses = []
        for request in requests:
            own = request.trace()
            assert call(request, trace=own).trace() is own
            call(request, request_id="-none").exec()
            call(request, request_id="-off", trace=off).exec()
            call(request, request_id="-exec", trace=own).exec()
            await call(request, request_id="-async", trace=own).async_exec()
            list(call(request, "many", "-list", trace=own).exec(decoupled=True))
            stream = call(request, "many", "-stream", trace=own).async_exec(decoupled=True)
            out = [each async for each in await stream][0].output_tensors()
            responses.append(pb_utils.InferenceResponse(out))
        return responses
"""


@pytest.mark.parametrize("placement", ["in_process", "worker"])
def test_calls_belong_to_the_request_that_the_model_names(tmp_path: Path, placement: str) -> None:
    models, file = tmp_path / "models", tmp_path / "trace.json"
    write_model(models, "leaf", f'backend: "python"\nmax_batch_size: 2\n{_TENSORS}', {"model.py": _LEAF})
    many = f'backend: "python"\nmax_batch_size: 2\n{_TENSORS}model_transaction_policy {{ decoupled: true }}'
    write_model(models, "many", many, {"model.py": _MANY})
    write_model(models, "caller", _BATCHED, {"model.py": _CALLER})
    flags = [f"--trace-config={text}" for text in ("level=TIMESTAMPS", "rate=1", f"triton,file={file}")]
    flags.append(f"--backend-config=python,placement={placement}")
    with serving(models, flags=flags) as server, client_of(server) as client:
        given = triton.InferInput("IN", [1, 1], "INT32")
        given.set_data_from_numpy(np.array([[1]], np.int32))
        with ThreadPoolExecutor(2) as pool:  # one batch
            list(pool.map(lambda name: client.infer("caller", [given], request_id=name), "ab"))
    records: list[dict[str, Any]] = [each for each in json.loads(file.read_text()) if "model_name" in each]
    names = {each["id"]: each["request_id"] for each in records}
    found = sorted(
        (names.get(each.get("parent_id")), each["request_id"]) for each in records if "parent_id" in each
    )
    assert found == [(up, f"{up}-{how}") for up in "ab" for how in ("async", "exec", "list", "stream")]
    assert sorted(each["request_id"] for each in records if "parent_id" not in each) == ["a", "b"]
