"""Decodes infer requests: JSON and binary tensors to an `InferenceRequest`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

from conch.core.errors import InvalidArgumentError
from conch.core.recognition import RequestTemplate, Table
from conch.core.request import InferenceRequest, NamedRegions, Parameter, RegionPart, Responder
from conch.core.spec import ModelSpec
from conch.core.tensor import ELEMENT_SIZES, Tensor
from conch.frontends.http.infer.compression import ENCODINGS, accepted, decompressed
from conch.frontends.http.infer.infer_response import HEAD_LENGTH, BinaryOutputs, UnsupportedEncodingError
from conch.frontends.http.infer.json_elements import json_tensor
from conch.frontends.http.jsontext import json_values as access
from conch.frontends.http.jsontext.json_loader import QUICK_BYTES, load
from conch.frontends.http.jsontext.json_values import JsonAccessError, parsed, parsed_member

QUICK_BODY = 1 << 20
"""Bytes of a body, or used in regions, that an event loop may copy."""
_LONGEST_KEY = 4096
_MOST_DIMS = 1024
_UNDERSTOOD = (*ENCODINGS, b"identity", b"")
_HEAD_LENGTH = re.compile(rb"[ \t]*[-+]?[0-9]+[ \t]*")
_LEAST, _MOST = -(2**31), 2**31 - 1


def head_length(value: bytes) -> int:
    """Returns the length of the JSON, 0 for a raw request, from its header.

    Raises:
        InvalidArgumentError: The header is no number; texts are Triton's.
    """
    text = value.decode("latin-1")
    if _HEAD_LENGTH.fullmatch(value) is None:
        raise InvalidArgumentError(f"Unable to parse Inference-Header-Content-Length, got: {text}")
    number = int(value) if len(value) < 32 else _MOST + 1
    if not _LEAST <= number <= _MOST:
        raise InvalidArgumentError(
            f"Unable to parse Inference-Header-Content-Length, value is out of range [ {_LEAST}, {_MOST} ], "
            f"got: {text}"
        )
    return number


class InferHead(NamedTuple):
    """Headers of an infer request, parsed.

    Attributes:
        packed: True if the body is compressed.
        json_size: Length of the JSON in bytes; None for the whole body.
        encoding: Compression of the response, or None.
    """

    packed: bool
    json_size: int | None
    encoding: bytes | None

    def is_short(self, size: int) -> bool:
        """True if a body of `size` bytes is so quick to decode that an event loop may do it."""
        json_size = size if self.json_size is None else self.json_size
        return size <= QUICK_BODY and json_size <= QUICK_BYTES and not self.packed


def read_head(fields: Mapping[bytes, bytes], length: int | None, most_bytes: int) -> InferHead:
    """Reads the headers of an infer request, and checks the length of its body as far as it is known.

    Args:
        fields: The headers.
        length: Announced length of the body, or None.
        most_bytes: Largest JSON, raw or decompressed body.

    Raises:
        UnsupportedEncodingError: Its encoding is not supported.
        InvalidArgumentError: A length is out of range.
    """
    packed, json_size, encoding = False, None, None
    content_encoding = fields.get(b"content-encoding")
    if content_encoding is not None:
        if content_encoding not in _UNDERSTOOD:
            raise UnsupportedEncodingError("Unsupported compression type")
        packed = content_encoding in ENCODINGS
    if HEAD_LENGTH in fields:
        json_size = head_length(fields[HEAD_LENGTH])
    if length is not None and not packed and (json_size is not None or length > most_bytes):
        check_head(json_size, length, most_bytes)
    accept = fields.get(b"accept-encoding")
    if accept is not None:
        encoding = accepted(accept)
    return InferHead(packed, json_size, encoding)


UNREAD_HEAD = InferHead(False, None, None)
"""Head of a request whose headers are not read yet."""


def unpacked_body(
    body: memoryview, head: InferHead, length: int | None, most_bytes: int, hold: Callable[[int], object]
) -> memoryview:
    """The body without its compression; checks what `read_head` could not. See `inflate` for `hold`.

    Raises:
        InvalidArgumentError: It is too large or damaged, or the length of its JSON is out of range.
    """
    if head.packed:
        body = decompressed(body, most_bytes, hold)
    if head.packed or length is None:
        check_head(head.json_size, len(body), most_bytes)
    return body


def check_head(head: int | None, size: int, most_bytes: int) -> None:
    """Checks the JSON length against the body length.

    Raises:
        InvalidArgumentError: The length is out of range; texts are Triton's.
    """
    if head is not None and not 0 <= head <= size:
        raise InvalidArgumentError(f"inference header size should be in range (0, {size}), got: {head}")
    if head == 0 and size > most_bytes:
        raise InvalidArgumentError(
            f"Raw input has a byte_size ({size} bytes) that exceeds the maximum allowed value of "
            f"{most_bytes} bytes. Use --http-max-input-size to increase the limit."
        )
    length = size if head is None else head
    if length > most_bytes:
        raise InvalidArgumentError(
            f"request JSON size of {length} bytes exceeds the maximum allowed input size of {most_bytes} "
            f"bytes. Use --http-max-input-size to increase the limit."
        )


class LargeRegionsError(Exception):
    """A request uses more bytes of regions than the decoding thread has time for.

    Some are copied, and caches hash all of them.
    """


class _Template(RequestTemplate):
    """Parts that HTTP requests with equal JSON share.

    Attributes:
        spans: Begin and end of each input behind the JSON, in bytes.
        size: Bytes of all inputs.
        wanted: Outputs that are sent as binary.
    """

    __slots__ = ("size", "spans", "wanted")

    def __init__(self, request: InferenceRequest, sizes: list[int], wanted: BinaryOutputs) -> None:
        tensors = request.inputs.values()
        super().__init__([(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors], request)
        self.spans = tuple(pairwise((0, *accumulate(sizes))))
        self.size = sum(sizes)
        self.wanted = wanted


class RequestDecoder:
    """Decodes infer requests; remembers the JSON of requests with binary tensors only.

    Args:
        most_bytes: Largest tensor taken as JSON.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._templates: Table[bytes, _Template] = Table()

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
            LargeRegionsError: It uses more than `most_used`.
            SlowTextError: Its JSON would take long, with `most_used` given.
        """
        length = len(body) if head is None else head
        text = body[:length] if length > QUICK_BYTES else bytes(body[:length])
        # Fast path for JSON that repeats; the careful path below keeps the template. Test of both:
        # tests/conch/unit/http/test_infer_request.py. Long texts are not remembered: hashing them takes long.
        key = text if isinstance(text, bytes) and len(text) <= _LONGEST_KEY else None
        template = None if key is None else self._templates.get(key)
        if template is not None and head is not None and len(body) - head == template.size:
            tensors = body[head:]
            request = InferenceRequest(
                model[0],
                model[1],
                {
                    name: Tensor(name, datatype, shape, tensors[start:end])
                    for (name, datatype, shape), (start, end) in zip(
                        template.inputs, template.spans, strict=True
                    )
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
        request = InferenceRequest(*model, {}, responder, now_ns)
        wanted = BinaryOutputs(False, {})
        document = load(text, quick=most_used is not None)
        inputs = None
        if isinstance(document, dict):
            inputs = document.get("inputs")
            if "id" in document:
                request.id = parsed(access.text, document["id"], "id")
            if "parameters" in document:
                wanted.binary = read_parameters(request, document["parameters"])
        if type(inputs) is not list:
            inputs = parsed_member(access.elements, document, "inputs")
        sizes = self._read_inputs(request, inputs, None if head is None else body[head:])
        if "outputs" in document:
            self._read_outputs(request, document["outputs"], wanted)
        regions = request.named_regions
        if regions is not None and most_used is not None:
            parts = *regions.inputs.values(), *regions.outputs.values()
            if sum(part.byte_size for part in parts) > most_used:
                raise LargeRegionsError
        all_binary = regions is None and len(sizes) == len(inputs)
        simple = not (request.id or request.correlation_id or request.sequence_start or request.sequence_end)
        if key is not None and simple and all_binary:
            self._templates.keep(key, _Template(request, sizes, wanted))
        return request, wanted

    def _read_inputs(
        self,
        request: InferenceRequest,
        inputs: list[Any],
        tensors: memoryview | None,
    ) -> list[int]:
        """Reads the inputs; returns the sizes of the binary ones."""
        position = 0
        sizes: list[int] = []
        for given in inputs:
            parameters = given.get("parameters") if isinstance(given, dict) else None
            if not isinstance(parameters, dict):
                parameters = {}
            in_json = isinstance(given, dict) and "data" in given
            in_body, in_region = "binary_data_size" in parameters, "shared_memory_region" in parameters
            if in_json + in_body + in_region != 1:
                raise _wrong_source(given, in_json, in_body, in_region)
            name, datatype, shape = _declared(request, given)
            field = ""
            try:
                if in_json:
                    field = "data"
                    tensor = json_tensor(name, datatype, shape, given[field], self._most_bytes)
                elif in_body:
                    field = "binary_data_size"
                    size = access.unsigned(parameters[field])
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
                    # `_region` names the field itself.
                    _regions_of(request).inputs[name] = _region(parameters)
                    tensor = Tensor(name, datatype, shape, b"")
            except (JsonAccessError, KeyError) as error:
                raise _wrong_field(error, given, field, name) from None
            if name in request.inputs:
                raise InvalidArgumentError(f"{request.log_prefix}input '{name}' already exists in request")
            request.inputs[name] = tensor
        if tensors is not None and position != len(tensors):
            raise InvalidArgumentError(
                f"unexpected additional input data for model '{request.model_name}': the inputs expect "
                f"{position} bytes, got {len(tensors)}"
            )
        return sizes

    def _read_outputs(self, request: InferenceRequest, given: Any, wanted: BinaryOutputs) -> None:
        """Reads the requested outputs."""
        outputs = parsed(access.elements, given, "outputs")
        if not outputs:
            return
        wanted.binary = False  # applies only to requests that list no outputs
        names: dict[str, None] = {}
        for output in outputs:
            name = parsed_member(access.text, output, "name")
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
                count = parsed(access.unsigned, parameters["classification"], "classification", "set")
                if count:
                    request.classes = {**(request.classes or {}), name: count}
            # Clients send binary_data=false for outputs in regions.
            if "binary_data" in parameters and parsed(
                access.boolean, parameters["binary_data"], "binary_data", "set" if lies else "parse"
            ):
                if lies:
                    raise InvalidArgumentError(
                        "Output can't set both 'shared_memory_region' and 'binary_data'"
                    )
                wanted.named[name] = True
            if lies:
                _regions_of(request).outputs[name] = _region(parameters)
        request.requested = tuple(names)


_SOURCES = ("data", "binary_data_size", "shared_memory_region")


def _declared(request: InferenceRequest, given: Any) -> tuple[str, str, tuple[int, ...]]:
    """Name, datatype and shape of an input."""
    name = field = "name"
    try:
        # What nearly all requests have is taken as it is; `access` converts the rest, or refuses it.
        name = given[field]
        if type(name) is not str or not name.isascii():
            name = access.text(name)
        field = "datatype"
        datatype = given[field]
        if type(datatype) is not str or not datatype.isascii():
            datatype = access.text(datatype)
        field = "shape"
        dims = given[field]
        if type(dims) is not list:
            dims = access.elements(dims)
        if len(dims) > _MOST_DIMS:
            raise InvalidArgumentError(
                f"{request.log_prefix}input '{name}' has {len(dims)} dimensions, and at most "
                f"{_MOST_DIMS} are taken"
            )
        for dim in dims:
            if type(dim) is not int or dim < 0:
                access.unsigned(dim)  # raises
    except (JsonAccessError, KeyError) as error:
        raise _wrong_field(error, given, field, name) from None
    return name, datatype, tuple(dims)


def _wrong_source(given: Any, *found: bool) -> InvalidArgumentError:
    """The error of an input whose contents are at no place, or at several."""
    names = [name for name, there in zip(_SOURCES, found, strict=True) if there]
    quoted = " ".join(f"'{name}'" for name in names)
    return InvalidArgumentError(
        f"Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        f"'shared_memory_region' in 'parameters'. But {f'set {quoted}' if names else 'no field is set'}"
        f"{_of_input(given)}"
    )


def _wrong_field(error: Exception, given: dict[str, Any], field: str, name: str) -> Exception:
    """The error of an input with a field that is missing or has the wrong type."""
    if isinstance(error, JsonAccessError):
        text = f"Unable to parse '{field}': {error.message}" if field else error.message
    elif field in given:
        return error  # it does not come from this
    else:
        text = f"Unable to parse '{field}': attempt to access non-existing object member '{field}'"
    return JsonAccessError(text if field == "name" else f"{text}, for input '{name}'")


def _of_input(given: Any) -> str:
    """Suffix of an error message with the input's name, if it has one."""
    name = given.get("name") if isinstance(given, dict) else None
    return f", for input '{access.text(name)}'" if isinstance(name, str) else ""


def _regions_of(request: InferenceRequest) -> NamedRegions:
    if request.named_regions is None:
        request.named_regions = NamedRegions()
    return request.named_regions


def _region(parameters: dict[str, Any]) -> RegionPart:
    """Region, offset and size of a tensor in shared memory."""
    region = parsed(access.text, parameters["shared_memory_region"], "shared_memory_region")
    offset, size = (
        parsed(access.unsigned, parameters.get(name, 0), name)
        for name in ("shared_memory_offset", "shared_memory_byte_size")
    )
    return RegionPart(region, offset, size)


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
            request.correlation_id = value if is_number else parsed(access.text, value, key)
        elif key in ("sequence_start", "sequence_end"):
            setattr(request, key, parsed(access.boolean, value, key))
        elif key == "priority":
            request.priority = parsed(access.unsigned, value, key)
        elif key == "timeout":
            request.timeout_us = parsed(access.unsigned, value, key)
        elif key == "binary_data_output":
            binary = parsed(access.boolean, value, key)
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


def add_raw_tensor(body: memoryview, request: InferenceRequest, spec: ModelSpec) -> None:
    """Adds the input of a raw request; derives its shape from the size.

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
        request.inputs[wanted.name] = Tensor(wanted.name, wanted.datatype, (*leading, 1), data)
        return
    if wanted.dims.count(-1) > 1:
        raise InvalidArgumentError(
            f"{request.log_prefix}The shape of the raw input '{wanted.name}' can not be deduced because "
            f"there are more than one variable-sized dimension"
        )
    fixed = prod(dim for dim in wanted.dims if dim != -1) * ELEMENT_SIZES[wanted.datatype]
    left = len(body) // fixed if fixed else 0
    shape = (*leading, *(left if dim == -1 else dim for dim in wanted.dims))
    request.inputs[wanted.name] = Tensor(wanted.name, wanted.datatype, shape, body)
