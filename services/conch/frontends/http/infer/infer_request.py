"""Decodes infer requests: JSON and binary tensors to an `InferenceRequest`. Used by: `infer_route`."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeVar

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest, Parameter, Responder
from conch.core.spec import ModelSpec
from conch.core.tensor import ELEMENT_SIZES, Tensor
from conch.frontends.http.infer.infer_response import BinaryOutputs
from conch.frontends.http.infer.json_elements import check_size, tensor_bytes
from conch.frontends.http.jsontext import json_values as access
from conch.frontends.http.jsontext.json_loader import QUICK_BYTES, load, load_quickly
from conch.frontends.http.jsontext.json_values import JsonAccessError
from conch.memory.region_bindings import RegionBindings
from conch.memory.regions import Regions

_MOST_TEMPLATES = 4096
_LONGEST_KEY = 4096
_MOST_DIMS = 1024
_T = TypeVar("_T")


class _RequestTemplate:
    """The common part of requests with equal JSON; compared by identity."""

    __slots__ = ("inputs", "requested", "settings", "size", "wanted")

    def __init__(self, request: InferenceRequest, sizes: list[int], wanted: BinaryOutputs) -> None:
        start = 0
        inputs: list[tuple[str, str, tuple[int, ...], int, int]] = []
        for tensor, size in zip(request.inputs.values(), sizes, strict=True):
            inputs.append((tensor.name, tensor.datatype, tensor.shape, start, start + size))
            start += size
        self.inputs = tuple(inputs)
        self.size = start
        self.requested = request.requested
        self.wanted = wanted
        self.settings = tuple(
            (name, value) for name in _SETTINGS if (value := getattr(request, name)) not in (None, 0, False)
        )


_SETTINGS = ("classes", "parameters", "priority", "timeout_us")


class RequestDecoder:
    """Decodes infer requests; remembers the JSON of requests with binary tensors only.

    Args:
        most_bytes: Largest tensor taken as JSON.
        regions: The shared memory of clients.
    """

    def __init__(self, most_bytes: int, regions: Regions) -> None:
        self._most_bytes = most_bytes
        self._regions = regions
        self._templates: dict[bytes, _RequestTemplate] = {}

    def __call__(
        self,
        model: tuple[str, str],
        body: memoryview,
        head: int | None,
        responder: Responder,
        now_ns: int,
        most_used: int | None = None,
    ) -> tuple[InferenceRequest, BinaryOutputs]:
        """Decodes a request.

        Args:
            model: Name and version of the model.
            body: The JSON, followed by the binary tensors, which keep views of it.
            head: Length of the JSON; None for the whole body.
            responder: Takes the responses.
            now_ns: Monotonic time of arrival.
            most_used: Limit of bytes in regions, for threads that must not compute for long; None for no
                limit.

        Returns:
            The request, and which outputs to send as binary.

        Raises:
            ConchError: It is malformed or contradicts itself; texts are Triton's.
            LargeBindingsError: It uses more than `most_used`.
            SlowTextError: Its JSON would take long, with `most_used` given.
        """
        text = _text(body, len(body) if head is None else head)
        # Longer texts are not remembered: hashing them would take long.
        template = None
        if isinstance(text, bytes) and len(text) <= _LONGEST_KEY:
            template = self._templates.get(text)
        if template is not None and head is not None and len(body) - head == template.size:
            tensors = body[head:]
            request = InferenceRequest(
                model[0],
                model[1],
                {
                    name: Tensor(name, datatype, shape, tensors[start:end])
                    for name, datatype, shape, start, end in template.inputs
                },
                responder,
                now_ns,
                "",
                template.requested,
            )
            request.signature = template
            for attribute, value in template.settings:
                setattr(request, attribute, value)
            return request, template.wanted
        uses = RegionBindings(self._regions, most_used)
        try:
            return self._parse(model, text, body, head, responder, now_ns, uses, most_used is not None)
        except BaseException:
            uses.release()
            raise

    def _parse(
        self,
        model: tuple[str, str],
        text: bytes | memoryview,
        body: memoryview,
        head: int | None,
        responder: Responder,
        now_ns: int,
        uses: RegionBindings,
        quick: bool,
    ) -> tuple[InferenceRequest, BinaryOutputs]:
        document = load_quickly(text) if quick else load(text)
        request = InferenceRequest(model[0], model[1], {}, responder, now_ns)
        wanted = BinaryOutputs(False, {})
        if isinstance(document, dict):
            if "id" in document:
                request.id = _parsed("id", access.text, document["id"])
            if "parameters" in document:
                wanted.binary = read_parameters(request, document["parameters"])
        inputs = _inputs(document)
        tensors = None if head is None else body[head:]
        sizes, shared = self._read_inputs(request, inputs, tensors, text, uses)
        placed = "outputs" in document and _read_outputs(request, document["outputs"], wanted, uses)
        if placed or shared:
            request.region_bindings = uses
        all_binary = not placed and len(sizes) == len(inputs)
        simple = not (request.id or request.correlation_id or request.sequence_start or request.sequence_end)
        if simple and all_binary and isinstance(text, bytes) and len(text) <= _LONGEST_KEY:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()  # requests that never repeat must not fill the memory
            self._templates[text] = _RequestTemplate(request, sizes, wanted)
        return request, wanted

    def _read_inputs(
        self,
        request: InferenceRequest,
        inputs: list[Any],
        tensors: memoryview | None,
        text: bytes | memoryview,
        uses: RegionBindings,
    ) -> tuple[list[int], bool]:
        """Reads the inputs; returns the sizes of the binary ones, and whether any lies in a region."""
        shared = False
        position = 0
        sizes: list[int] = []
        for given in inputs:
            parameters = given.get("parameters") if isinstance(given, dict) else None
            if not isinstance(parameters, dict):
                parameters = {}
            _check_source(given, parameters)
            name = _member(given, "name", access.text)
            try:
                datatype = _member(given, "datatype", access.text)
                dims = _member(given, "shape", access.elements)
                if len(dims) > _MOST_DIMS:
                    raise InvalidArgumentError(
                        f"{request.log_prefix}input '{name}' has {len(dims)} dimensions, and at most "
                        f"{_MOST_DIMS} are taken"
                    )
                shape = tuple(_parsed("shape", access.unsigned, dim) for dim in dims)
                if "data" in given:
                    tensor = self._json_tensor(name, datatype, shape, given["data"])
                elif "binary_data_size" in parameters:
                    size = _parsed("binary_data_size", access.unsigned, parameters["binary_data_size"])
                    if tensors is None:
                        if size:
                            raise InvalidArgumentError(
                                "must specify valid 'Infer-Header-Content-Length' in request header and "
                                "'binary_data_size' when passing inputs in binary data format"
                            )
                        tensors = memoryview(b"")
                    missing = position + size - len(tensors)
                    if missing > 0:
                        raise InvalidArgumentError(
                            f"unexpected size for input '{name}', expecting {missing} additional bytes for "
                            f"model '{request.model_name}'"
                        )
                    tensor = Tensor(name, datatype, shape, tensors[position : position + size])
                    position += size
                    sizes.append(size)
                else:
                    tensor = uses.input(*_region(parameters), name, datatype, shape)
                    shared = True
            except JsonAccessError as error:
                raise JsonAccessError(f"{error.message}, for input '{name}'") from None
            if name in request.inputs:
                raise InvalidArgumentError(f"{request.log_prefix}input '{name}' already exists in request")
            request.inputs[name] = tensor
        if tensors is not None and position != len(tensors):
            raise InvalidArgumentError(
                f"unexpected additional input data for model '{request.model_name}': the inputs expect "
                f"{position} bytes, got {len(tensors)}"
            )
        return sizes, shared

    def _json_tensor(self, name: str, datatype: str, shape: tuple[int, ...], data: Any) -> Tensor:
        if datatype in ("FP16", "BF16") and 0 not in shape:
            raise InvalidArgumentError(
                f"receiving {datatype} data via JSON is not supported. Please use the binary data format for "
                f"input {name}"
            )
        given = _parsed("data", access.array, data)
        count = check_size(name, datatype, shape, self._most_bytes)
        if not count or datatype not in _DATATYPES:
            return Tensor(name, datatype, shape, b"")  # the model's check reports the error
        return Tensor(name, datatype, shape, tensor_bytes(name, given, datatype, count))


_DATATYPES = frozenset(ELEMENT_SIZES.keys() - {"FP16", "BF16"} | {"BYTES"})
"""Datatypes with a JSON form."""
_SOURCES = "'data', 'binary_data_size' in 'parameters', 'shared_memory_region' in 'parameters'"


def _check_source(given: Any, parameters: dict[str, Any]) -> None:
    found = ["data"] if isinstance(given, dict) and "data" in given else []
    found += [name for name in ("binary_data_size", "shared_memory_region") if name in parameters]
    if len(found) != 1:
        names = " ".join(f"'{name}'" for name in found)
        raise InvalidArgumentError(
            f"Input must set only one of the following fields: {_SOURCES}. But "
            f"{f'set {names}' if found else 'no field is set'}{_of_input(given)}"
        )


def _of_input(given: Any) -> str:
    """Suffix of an error message with the input's name, if it has one."""
    name = given.get("name") if isinstance(given, dict) else None
    return f", for input '{access.text(name)}'" if isinstance(name, str) else ""


def _region(parameters: dict[str, Any]) -> tuple[str, int, int]:
    """Region, offset and size of a tensor in shared memory."""
    region = _parsed("shared_memory_region", access.text, parameters["shared_memory_region"])
    offset = _parsed("shared_memory_offset", access.unsigned, parameters.get("shared_memory_offset", 0))
    size = "shared_memory_byte_size"
    return region, offset, _parsed(size, access.unsigned, parameters.get(size, 0))


def _text(body: memoryview, length: int) -> bytes | memoryview:
    """Returns the JSON at the start of a body; a view of it if it is long."""
    text = body[:length]
    return text if length > QUICK_BYTES else bytes(text)


def _inputs(document: Any) -> list[Any]:
    return _parsed("inputs", lambda value: access.elements(access.member(value, "inputs")), document)


def _member(given: Any, name: str, read: Callable[[Any], _T]) -> _T:
    return _parsed(name, lambda value: read(access.member(value, name)), given)


def _parsed(name: str, read: Callable[[Any], _T], value: Any, what: str = "parse") -> _T:
    try:
        return read(value)
    except JsonAccessError as error:
        raise JsonAccessError(f"Unable to {what} '{name}': {error.message}") from None


def read_parameters(request: InferenceRequest, given: Any) -> bool:
    """Reads the parameters: the protocol's own into attributes, others unchanged.

    Returns:
        True if all outputs are to be binary.

    Raises:
        ConchError: A value has the wrong type, or a key is reserved; texts are Triton's.
    """
    if not isinstance(given, dict):
        raise JsonAccessError("failed to get request params.: attempt to get members for non-object")
    binary = False
    custom: dict[str, Parameter] = {}
    for key, value in given.items():
        if key == "sequence_id":
            is_number = type(value) is int and value >= 0
            request.correlation_id = value if is_number else _parsed(key, access.text, value)
        elif key in ("sequence_start", "sequence_end"):
            setattr(request, key, _parsed(key, access.boolean, value))
        elif key == "priority":
            request.priority = _parsed(key, access.unsigned, value)
        elif key == "timeout":
            request.timeout_us = _parsed(key, access.unsigned, value)
        elif key == "binary_data_output":
            binary = _parsed(key, access.boolean, value)
        elif key.startswith("triton_"):
            raise InvalidArgumentError(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be "
                "specified."
            )
        elif isinstance(value, str):
            custom[access.text(key)] = access.text(value)
        elif isinstance(value, bool | int | float):
            custom[access.text(key)] = value
        else:
            raise InvalidArgumentError(
                f"parameter '{access.text(key)}' has invalid type. It should be either 'int', 'bool', or "
                f"'string'."
            )
    if custom:
        request.parameters = custom
    return binary


def _read_outputs(request: InferenceRequest, given: Any, wanted: BinaryOutputs, uses: RegionBindings) -> bool:
    """Reads the requested outputs; returns whether any goes to a region."""
    outputs = _parsed("outputs", access.elements, given)
    if not outputs:
        return False
    placed = False
    wanted.binary = False  # applies only to requests that list no outputs
    names: dict[str, None] = {}
    for output in outputs:
        name = _member(output, "name", access.text)
        if name in names:
            raise InvalidArgumentError(f"{request.log_prefix}output '{name}' already exists in request")
        names[name] = None
        parameters = output.get("parameters")
        if not isinstance(parameters, dict):
            continue
        lies = "shared_memory_region" in parameters
        if "classification" in parameters:
            if lies:
                raise InvalidArgumentError(
                    "Output can't set both 'shared_memory_region' and 'classification'"
                )
            count = _parsed("classification", access.unsigned, parameters["classification"], "set")
            if count:
                request.classes = {**(request.classes or {}), name: count}
        # Clients send binary_data=false for outputs in regions.
        if "binary_data" in parameters and _parsed(
            "binary_data", access.boolean, parameters["binary_data"], "set" if lies else "parse"
        ):
            if lies:
                raise InvalidArgumentError("Output can't set both 'shared_memory_region' and 'binary_data'")
            wanted.named[name] = True
        if lies:
            uses.output(*_region(parameters), name)
            placed = True
    request.requested = tuple(names)
    return placed


def raw_tensor(request: InferenceRequest, spec: ModelSpec, body: memoryview) -> Tensor:
    """Returns the input of a raw request; derives its shape from the size.

    Raises:
        InvalidArgumentError: The model does not allow it; texts are Triton's.
    """
    if len(spec.inputs) != 1:
        raise InvalidArgumentError(
            f"{request.log_prefix}Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(spec.inputs)} inputs in '{spec.name}' model configuration"
        )
    wanted = spec.inputs[0]
    leading = (1,) if spec.max_batch_size > 0 else ()
    if wanted.datatype == "BYTES":
        if wanted.dims != (1,):
            raise InvalidArgumentError(
                f"{request.log_prefix}For BYTE datatype raw input '{wanted.name}', the model must have input "
                f"shape [1]"
            )
        data = len(body).to_bytes(4, "little") + body
        return Tensor(wanted.name, wanted.datatype, (*leading, 1), data)
    if wanted.dims.count(-1) > 1:
        raise InvalidArgumentError(
            f"{request.log_prefix}The shape of the raw input '{wanted.name}' can not be deduced because "
            f"there are more than one variable-sized dimension"
        )
    fixed = prod(dim for dim in wanted.dims if dim != -1) * ELEMENT_SIZES[wanted.datatype]
    left = len(body) // fixed if fixed else 0
    return Tensor(
        wanted.name,
        wanted.datatype,
        (*leading, *(left if dim == -1 else dim for dim in wanted.dims)),
        body,
    )
