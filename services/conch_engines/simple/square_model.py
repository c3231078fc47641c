"""Triton's backend ``square``, decoupled: n gets n responses of n, some failed or empty if asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from conch.backends.python.api.response_sender import begin_output


class TritonPythonModel:
    """One instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Reads the parameters; malformed ones count as 0, as in Triton."""
        config = json.loads(args["model_config"])
        for kind, name in (("input", "IN"), ("output", "OUT")):
            tensors = [(tensor["name"], tensor["data_type"]) for tensor in config.get(kind, [])]
            if tensors != [(name, "TYPE_INT32")]:
                raise pb_utils.TritonModelException(
                    f"expected one {kind} {name} of datatype INT32, got {tensors}"
                )
        texts = {key: str(value["string_value"]) for key, value in config.get("parameters", {}).items()}

        def number(key: str) -> int:
            text = texts.get(f"CUSTOM_{key}", "0")
            return int(text) if text.isdecimal() else 0

        self._infer_delay_s = number("INFER_DELAY_NS") / 1e9
        self._output_delay_s = number("OUTPUT_DELAY_NS") / 1e9
        self._cancel_delay_s = number("CANCEL_DELAY_NS") / 1e9
        self._failing, self._empty = number("FAIL_COUNT"), number("EMPTY_COUNT")

    async def execute(self, requests: Sequence[Any]) -> None:
        """Sends the responses of each request."""
        await asyncio.gather(*[self._answer(request) for request in requests])

    async def _answer(self, request: Any) -> None:
        sender = request.get_response_sender()
        tensor: Any = pb_utils.get_input_tensor_by_name(request, "IN")
        array = tensor.as_numpy()
        if array.size != 1:
            error = pb_utils.TritonError("square backend only supports batch-1 requests")
            _end(sender, pb_utils.InferenceResponse(error=error))
            return
        count = int(array.reshape(-1)[0])
        for left in range(count, 0, -1):
            if sender.is_cancelled():  # as in Triton, which finishes the response in work
                await asyncio.sleep(self._cancel_delay_s)
                error = pb_utils.TritonError("request has been cancelled", pb_utils.TritonError.CANCELLED)
                _end(sender, pb_utils.InferenceResponse(error=error))
                return
            await asyncio.sleep(self._infer_delay_s)
            if left > self._empty:
                begin_output(sender)
                await asyncio.sleep(self._output_delay_s)
                if left <= self._empty + self._failing:
                    error = pb_utils.TritonError("simulated failure", pb_utils.TritonError.UNKNOWN)
                    sender.send(pb_utils.InferenceResponse(error=error))
                else:
                    output = pb_utils.Tensor("OUT", np.full_like(array, count))
                    sender.send(pb_utils.InferenceResponse([output]))
            elif left > 1:  # the final flag is the last empty response
                sender.send(pb_utils.InferenceResponse([]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _end(sender: Any, response: Any) -> None:
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
