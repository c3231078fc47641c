"""Triton's backend ``repeat``: one response for each element of ``IN``, each after its delay.

A model that is not decoupled takes one element.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_INPUTS = (
    ("first", "IN", "TYPE_INT32"),
    ("second", "DELAY", "TYPE_UINT32"),
    ("third", "WAIT", "TYPE_UINT32"),
)
_OUTPUTS = (("first", "OUT", "TYPE_INT32"), ("second", "IDX", "TYPE_UINT32"))


class TritonPythonModel:
    """One instance; its loop sends the responses of all requests."""

    def initialize(self, args: dict[str, str]) -> None:
        """Checks the config."""
        config = json.loads(args["model_config"])
        for kind, expected in (("input", _INPUTS), ("output", _OUTPUTS)):
            tensors = config.get(kind, [])
            if len(tensors) != len(expected):
                raise pb_utils.TritonModelException(f"expected {len(expected)} {kind}s, got {len(tensors)}")
            for (place, name, datatype), tensor in zip(expected, tensors, strict=True):
                if tensor["name"] != name:
                    raise pb_utils.TritonModelException(
                        f"expected {place} {kind} tensor name to be {name}, got {tensor['name']}"
                    )
                if tensor["data_type"] != datatype:
                    raise pb_utils.TritonModelException(
                        f"expected {name} datatype to be {datatype.removeprefix('TYPE_')}, got "
                        f"{tensor['data_type']}"
                    )
        self._decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self._sending: set[asyncio.Task[None]] = set()

    async def execute(self, requests: Sequence[Any]) -> list[None] | None:
        """Begins to send, and returns once the longest ``WAIT`` of the requests has passed."""
        longest, begun = 0, []
        for request in requests:
            values, delays, waits = (_array(request, name) for _, name, _ in _INPUTS)
            sender = request.get_response_sender()
            if values.shape != delays.shape:
                shapes = f"{list(values.shape)} and {list(delays.shape)}"
                _fail(sender, f"expected IN and DELAY shape to match, got {shapes}")
                continue
            if values.size != 1 and not self._decoupled:
                _fail(
                    sender, f"expected IN with one element, as the model is not decoupled, got {values.size}"
                )
                continue
            longest = max(longest, int(waits.reshape(-1)[0]))
            # Kept here, as the loop itself holds tasks weakly.
            task = asyncio.create_task(_send(sender, values.reshape(-1), delays.reshape(-1), values.ndim))
            begun.append(task)
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        if longest:
            await asyncio.sleep(longest / 1000)
        else:
            # Without a wait the request is done with its responses.
            await asyncio.gather(*begun)
        return None if self._decoupled else [None] * len(requests)


async def _send(sender: Any, values: Any, delays: Any, rank: int) -> None:
    shape = (1,) * rank
    for index, (value, delay) in enumerate(zip(values, delays, strict=True)):
        await asyncio.sleep(int(delay) / 1000)
        if sender.is_cancelled():
            break
        outputs = [
            pb_utils.Tensor("OUT", np.full(shape, value, np.int32)),
            pb_utils.Tensor("IDX", np.full(shape, index, np.uint32)),
        ]
        sender.send(pb_utils.InferenceResponse(outputs))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _array(request: Any, name: str) -> Any:
    tensor: Any = pb_utils.get_input_tensor_by_name(request, name)
    return tensor.as_numpy()


def _fail(sender: Any, text: str) -> None:
    error = pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG)
    response = pb_utils.InferenceResponse(error=error)
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
