"""Triton's backend ``identity``: copies inputs to outputs, with delays, response parameters and a metric."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from conch.backends.python.api.pb_response import set_parameters

_NAME = re.compile(r"(INPUT|OUTPUT)(\d+)")
_TRUE = frozenset({"true", "on", "1"})
_PARAMETERS: dict[str, bool | int | float | str] = {
    "param0": "an example string parameter",
    "param1": 42,
    "param2": False,
    "param3": 123.123,
}
_COUNTER = "input_byte_size_counter"
_COUNTED = "Cumulative input byte size of all requests received by the model"


class TritonPythonModel:
    """One instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Checks the config, and waits as long as it says."""
        config = json.loads(args["model_config"])
        self._pairs = _pairs(config)
        texts = {key: str(value["string_value"]) for key, value in config.get("parameters", {}).items()}
        if texts.get("enable_custom_tracing", "false").lower() in _TRUE:
            raise pb_utils.TritonModelException(
                "parameter 'enable_custom_tracing' has no effect: traces have no activities of backends; set "
                "it to 'false'"
            )
        delay_ms = _number(texts, "execute_delay_ms")
        multiplier = _number(texts, "instance_wise_delay_multiplier")
        # Instances are numbered behind the last underscore of their names.
        number = int(args["model_instance_name"].rpartition("_")[2])
        self._delay_s = delay_ms / 1000 * (max(number, 1) * multiplier if multiplier else 1)
        threading.Event().wait(_number(texts, "creation_delay_sec"))
        # Kept, as its metrics end with it.
        self._family = pb_utils.MetricFamily(
            name=_COUNTER, description=_COUNTED, kind=pb_utils.MetricFamily.COUNTER
        )
        labels = {"model": config["name"], "version": args["model_version"]}
        self._counter = self._family.Metric(labels=labels)

    async def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Copies the inputs of each request; those that were left out have no outputs."""
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        return [self._response(request) for request in requests]

    def _response(self, request: Any) -> Any:
        wanted = set(request.requested_output_names())
        outputs = []
        for tensor in request.inputs():
            array = tensor.as_numpy()
            self._counter.increment(_bytes_of(array))
            output = self._pairs[tensor.name()]
            if output in wanted:
                outputs.append(pb_utils.Tensor(output, array))
        response: Any = pb_utils.InferenceResponse(outputs)
        set_parameters(response, _PARAMETERS)
        return response


def _pairs(config: dict[str, Any]) -> dict[str, str]:
    """The output of each input. Raises TritonModelException: the config is not that of an identity model."""
    inputs, outputs = config.get("input", []), config.get("output", [])
    if len(inputs) != len(outputs):
        raise pb_utils.TritonModelException("model configuration must have equal input/output pairs")
    named: dict[str, dict[int, Any]] = {"INPUT": {}, "OUTPUT": {}}
    for kind, tensors in (("INPUT", inputs), ("OUTPUT", outputs)):
        for tensor in tensors:
            found = _NAME.fullmatch(tensor["name"])
            if found is None or found[1] != kind:
                raise pb_utils.TritonModelException(
                    f"expected {kind.lower()} name to follow {kind}<index> pattern, got '{tensor['name']}'"
                )
            named[kind][int(found[2])] = tensor
    if named["INPUT"].keys() != named["OUTPUT"].keys():
        raise pb_utils.TritonModelException("expected input and output indices to match")
    for index, tensor in named["INPUT"].items():
        other = named["OUTPUT"][index]
        for what, described in (("datatype", lambda each: each["data_type"]), ("shape", _shape)):
            if described(tensor) != described(other):
                raise pb_utils.TritonModelException(
                    f"expected input and output {what} to match, got {described(tensor)} and "
                    f"{described(other)}"
                )
    return {tensor["name"]: named["OUTPUT"][index]["name"] for index, tensor in named["INPUT"].items()}


def _shape(tensor: dict[str, Any]) -> str:
    """The shape that the model sees."""
    dims = tensor["reshape"].get("shape", []) if "reshape" in tensor else tensor["dims"]
    return f"[{','.join(map(str, dims))}]"


def _bytes_of(array: Any) -> int:
    """Size as the client sent it: strings have their length before them."""
    return int(sum(len(element) + 4 for element in array.flat) if array.dtype.hasobject else array.nbytes)


def _number(texts: dict[str, str], key: str) -> float:
    """A number that is not negative; 0 where it is none, as in Triton."""
    try:
        return max(float(texts.get(key, "0")), 0.0)
    except ValueError:
        return 0.0
