"""Makes a warm-up sample of a scoring request. Pure."""

from __future__ import annotations

import orjson

from conch.core.spec import ModelSpec, WarmupInput, WarmupSample
from conch.core.tensor import Tensor
from conch_frames.invocations.request_body import JSON_TYPE, read_request
from conch_frames.invocations.request_inputs import request_tensors
from conch_mlflow.scoring.signature_interface import signature_interface
from conch_mlflow.signature import Signature, parse_signature


def example_sample(spec: ModelSpec, body: bytes, signature: bytes) -> WarmupSample:
    """The sample of an example; of a model with batches its first row.

    Raises:
        InvalidArgumentError: The example does not fit the model.
        ValueError: The signature can't be read.
    """
    parsed = parse_signature(orjson.loads(signature)) or Signature((), ())
    interface = signature_interface(spec, parsed)
    request = read_request(body, JSON_TYPE, len(body), interface.columns.wants)
    tensors = request_tensors(request, interface)
    inputs = tuple(_input(tensor, spec.max_batch_size > 0) for tensor in tensors.values())
    return WarmupSample("input example", inputs, optional=True)


def _input(tensor: Tensor, batches: bool) -> WarmupInput:
    array = tensor.numpy()
    row = Tensor(tensor.name, tensor.datatype, array.shape[1:], None, array[0]) if batches else tensor
    return WarmupInput(tensor.name, tensor.datatype, row.shape, "FILE", bytes(row.data))
