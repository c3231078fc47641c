"""Requests to models with Triton's tensors for texts, and their responses."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.servers import AnyServer, RawClient
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor

RESPONSE_S = 300.0
"""For an engine on a busy machine."""

_FORMATS = {"FP32": "f", "UINT32": "I"}


@dataclass(frozen=True, slots=True)
class Said:
    """One response: outputs and parameters by name, or an error's text."""

    outputs: Mapping[str, list[Any]]
    parameters: Mapping[str, Any]
    error: str = ""

    @property
    def text(self) -> str:
        """The only text."""
        (text,) = self.outputs["text_output"]
        return bytes(text).decode()


class Asked:
    """The responses of a request while it runs."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def next(self) -> Said:
        """The next response."""
        return _said(next(self._call))

    def rest(self) -> Iterator[Said]:
        """All further responses; an empty final one is left out."""
        for response in self._call:
            said = _said(response)
            if said.outputs or said.error:
                yield said

    def cancel(self) -> None:
        """Leaves."""
        self._call.cancel()


@contextmanager
def asking(
    server: AnyServer, model: str, parameters: Mapping[str, Any] | None = None, **inputs: Any
) -> Iterator[Asked]:
    """A request on a stream of its own; inputs are texts, lists of texts, or booleans."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, value in (parameters or {}).items():
        kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
        setattr(request.parameters[name], kinds[type(value)], value)
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        boolean = isinstance(value, bool)
        request.inputs.add(name=name, datatype="BOOL" if boolean else "BYTES", shape=[len(values)])
        texts = [] if boolean else [each.encode() for each in values]
        packed = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        request.raw_input_contents.append(bytes(values) if boolean else packed)
    with closing(RawClient(server.address)) as client:
        call = client.stream([request], RESPONSE_S)
        try:
            yield Asked(call)
        finally:
            call.cancel()


def ask(
    server: AnyServer, model: str, parameters: Mapping[str, Any] | None = None, **inputs: Any
) -> list[Said]:
    """All responses to a request."""
    with asking(server, model, parameters, **inputs) as asked:
        return list(asked.rest())


def _said(message: Any) -> Said:
    if message.error_message:
        return Said({}, {}, message.error_message)
    response = message.infer_response
    outputs = {
        each.name: _values(each.datatype, content)
        for each, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    parameters = {
        name: getattr(each, each.WhichOneof("parameter_choice")) for name, each in response.parameters.items()
    }
    return Said(outputs, parameters)


def _values(datatype: str, content: bytes) -> list[Any]:
    if datatype == "BYTES":
        return list(deserialize_bytes_tensor(content))
    return [value for (value,) in struct.iter_unpack(f"<{_FORMATS[datatype]}", content)]


FURTHER: dict[str, tuple[list[Any], list[Any]]] = {
    "presence_penalty": ([1], [3]),
    "frequency_penalty": ([1], [3]),
    "min_p": ([0.1], [2]),
    "repetition_penalty": ([1.1], [0]),
    "min_tokens": ([1], [-1]),
    "ignore_eos": ([True], [1]),
    "stop_token_ids": ([[1]], [["a"]]),
    "logit_bias": ([{"1": 1}], [[]]),
    "skip_special_tokens": ([True], [1]),
    "bad_words": ([["x"]], ["x"]),
    "include_stop_str_in_output": ([True], [1]),
    "allowed_token_ids": ([[1]], [[-1]]),
    "structured_outputs": ([{"regex": "a"}], ["a"]),
    "priority": ([1], ["x"]),
    "cache_salt": (["s"], [7]),
}
"""By sampling field that no API but chats has: values that are taken, and values that are refused."""
