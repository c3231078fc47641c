"""Records of requests from what the load processes have kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from conch.protocol import inference_pb2
from conch_tools.perf.load.input_data import flat
from conch_tools.perf.load.ready_requests import InputTensor, tensor_values
from conch_tools.perf.measure.records import CallRecord, KeptResponse, RequestRecord, Value

ResponseKind = Literal["grpc", "stream", "http", "text"]
"""Kind of a kept body: a ModelInferResponse, a ModelStreamInferResponse, an HTTP body, or any text."""


def request_record(
    call: CallRecord, inputs: Sequence[InputTensor] | bytes, kind: ResponseKind, offset_ns: int
) -> RequestRecord:
    """The record of a request; `offset_ns` leads from monotonic times to those of the wall clock.

    Inputs and outputs of kind ``text`` are named ``payload`` and ``response``.
    """
    return RequestRecord(
        call.sent_ns + offset_ns,
        call.sequence_id or None,
        inputs={"payload": inputs.decode()} if isinstance(inputs, bytes) else _values(inputs),
        response_timestamps=tuple(response.at_ns + offset_ns for response in call.responses),
        outputs=tuple(_outputs(response, kind) for response in call.responses),
    )


def _outputs(response: KeptResponse, kind: ResponseKind) -> Mapping[str, Value]:
    if kind == "text":
        return {"response": response.body.decode(errors="replace")}
    if kind == "http":
        return _http_outputs(response)
    if kind == "stream":
        message = inference_pb2.ModelStreamInferResponse.FromString(response.body).infer_response
    else:
        message = inference_pb2.ModelInferResponse.FromString(response.body)
    # Outputs in shared memory have no contents, or empty ones.
    return _values(
        InputTensor(output.name, output.datatype, tuple(output.shape), data)
        for output, data in zip(message.outputs, message.raw_output_contents, strict=False)
        if data or 0 in output.shape
    )


def _http_outputs(response: KeptResponse) -> Mapping[str, Value]:
    at = response.head_bytes or len(response.body)
    found: dict[str, Value] = {}
    for output in json.loads(response.body[:at])["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            if "data" in output:  # else it is in shared memory
                found[output["name"]] = _value(list(flat(output["data"])))
            continue
        tensor = InputTensor(output["name"], output["datatype"], (), response.body[at : at + size])
        found |= _values([tensor])
        at += size
    return found


def _values(tensors: Iterable[InputTensor]) -> dict[str, Value]:
    return {tensor.name: _value(tensor_values(tensor, "replace")) for tensor in tensors}


def _value(values: list[Any]) -> Value:
    found: Value = values[0] if len(values) == 1 else values
    return found
