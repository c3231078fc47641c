"""What plain requests have in common, remembered by the bytes of it."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.frontends.grpc.parameters import (
    EMPTY_FINAL,
    SHARED_MEMORY,
    RegionPart,
    read_parameters,
    read_region,
)
from conch.protocol import inference_pb2

MOST_TEMPLATES = 4096
"""How many are remembered."""

LONGEST_KEY = 4096
"""How many bytes of a request are remembered at most."""


class Template:
    """What requests that differ only in their id and their bytes have in common; compared by identity.

    Attributes:
        model_name: Name of the model.
        model_version: Version of the model.
        inputs: Name, datatype and shape of each input.
        requested: Names of the outputs wanted, or None for all.
        settings: Attributes of the requests that are not as by default.
        parts: Where the inputs lie, None for one in the message; None in all if no tensor is in a region.
        places: The outputs that are written to regions, and where to.
        strings: Whether any input is of strings, which are looked at one by one.
    """

    __slots__ = (
        "inputs",
        "model_name",
        "model_version",
        "parts",
        "places",
        "requested",
        "settings",
        "strings",
    )

    def __init__(
        self,
        model_name: str,
        model_version: str,
        inputs: tuple[tuple[str, str, tuple[int, ...]], ...],
        requested: tuple[str, ...] | None,
        settings: tuple[tuple[str, object], ...],
        parts: tuple[RegionPart | None, ...] | None,
        places: tuple[tuple[str, RegionPart], ...],
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.inputs = inputs
        self.requested = requested
        self.settings = settings
        self.parts = parts
        self.places = places
        self.strings = any(datatype == "BYTES" for _, datatype, _ in inputs)

    def takes(self, raw: int) -> bool:
        """Whether requests can have so many raw contents; those of others are wrong, or have to be parsed."""
        return raw == len(self.inputs) if self.parts is None else raw >= self.parts.count(None)


class Templates(dict[bytes, Template]):
    """Templates by the bytes of their requests without id and raw contents."""

    def learn(self, key: bytes) -> Template | None:
        """Remembers what a plain request has in common with others; None if it is not that plain."""
        if len(key) > LONGEST_KEY:
            return None
        try:
            wire = inference_pb2.ModelInferRequest.FromString(key)
        except DecodeError:
            return None
        names = [tensor.name for tensor in wire.inputs]
        requested = tuple(output.name for output in wire.outputs)
        if (
            len(set(names)) != len(names)
            or len(set(requested)) != len(requested)
            or any(tensor.HasField("contents") for tensor in wire.inputs)
            or not all(_repeats(name, value) for name, value in wire.parameters.items())
        ):
            return None
        try:
            parts = tuple([_only_region(tensor) for tensor in wire.inputs])
            places = tuple([(output.name, _only_region(output)) for output in wire.outputs])
        except ConchError:
            return None  # to be said when it is parsed
        placed = tuple([(name, place) for name, place in places if place is not None])
        in_regions = bool(placed) or any(part is not None for part in parts)
        template = Template(
            wire.model_name,
            wire.model_version,
            tuple((tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in wire.inputs),
            requested or None,
            _settings(wire),
            parts if in_regions else None,
            placed,
        )
        if len(self) >= MOST_TEMPLATES:
            self.clear()  # requests that never repeat must not fill the memory
        self[key] = template
        return template


def _only_region(tensor: Any) -> RegionPart | None:
    """Where a tensor of a plain request lies; None for one that has no parameters.

    Raises:
        InvalidArgumentError: It has other parameters, or wrong ones.
    """
    if not tensor.parameters:
        return None
    part = read_region(tensor)
    if part is None or not SHARED_MEMORY.keys() >= set(tensor.parameters):
        raise InvalidArgumentError("not a plain request")
    return part


def _repeats(name: str, value: Any) -> bool:
    """Whether a request parameter is likely to be the same in many requests, and is well-formed."""
    kind = value.WhichOneof("parameter_choice")
    if name in ("priority", "timeout"):
        return bool(kind == "int64_param" and value.int64_param >= 0)
    return bool(
        kind == "bool_param" and (name == EMPTY_FINAL or not name.startswith(("triton_", "sequence_")))
    )


def _settings(wire: Any) -> tuple[tuple[str, object], ...]:
    """What the parameters of a plain message set on its requests."""
    if not wire.parameters:
        return ()
    blank = InferenceRequest("", "", {}, _nobody, 0)
    request = InferenceRequest("", "", {}, _nobody, 0)
    read_parameters(request, wire.parameters)
    names = ("empty_final", "parameters", "priority", "timeout_us")
    return tuple(
        (name, getattr(request, name)) for name in names if getattr(request, name) != getattr(blank, name)
    )


def _nobody(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """The responder of a request that is never submitted."""
