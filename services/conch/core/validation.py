"""Validates requests against a model and sets their batch size and batch key.

Rules, order and texts are those of Triton's core. Owns: per model, the signatures of requests that
passed, which skip most checks. Threads and locks: any thread, without a lock.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any, NamedTuple

from conch.core.batch_key import batch_key_for
from conch.core.errors import InvalidArgumentError
from conch.core.recognition import Table
from conch.core.request import InferenceRequest
from conch.core.spec import ControlTensor, ModelSpec, TensorSpec
from conch.core.tensor import ELEMENT_SIZES, STRING_LENGTH, Tensor

_MOST_BYTES = 2**63 - 1
_POINTER_SIZE = 8
"""Size of an element in a numpy array of strings."""
_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim in "
    "your input dims config, try setting max_batch_size to zero. See the model configuration docs for "
    "more info on max_batch_size."
)


class _Passed(NamedTuple):
    """Result of a validated signature; sizes in bytes, None for BYTES."""

    batch_size: int
    batch_key: Any
    sizes: tuple[int | None, ...]


class RequestValidator:
    """Validates the requests of one model; precomputes its rules."""

    __slots__ = (
        "_assigns_ids",
        "_batch_key",
        "_batches",
        "_correlation",
        "_has_shapes",
        "_outputs",
        "_passed",
        "_required",
        "_rules",
        "_skip",
        "_spec",
    )

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._passed: Table[object, _Passed] = Table()
        self._rules = {tensor.name: tensor for tensor in spec.inputs}
        self._required = frozenset(tensor.name for tensor in spec.inputs if not tensor.optional)
        self._outputs = frozenset(tensor.name for tensor in spec.outputs)
        self._batches = spec.max_batch_size > 0
        self._skip = 1 if self._batches else 0
        self._batch_key = batch_key_for(spec)
        # The batch key depends on the values of shape tensors, which are not part of a signature.
        self._has_shapes = any(tensor.is_shape for tensor in spec.inputs)
        # The correlation id is not part of a signature: it is checked for each request.
        controls = () if spec.sequence is None else spec.sequence.controls
        self._assigns_ids = spec.sequence is not None and spec.sequence.iterative
        self._correlation = next((control for control in controls if control.kind == "CORRID"), None)

    def __call__(self, request: InferenceRequest) -> None:
        """Validates a request and sets its batch size and batch key.

        Raises:
            InvalidArgumentError: The request does not fit the model; the text is Triton's.
        """
        signature = request.signature
        if signature is None:
            signature = self._signature_of(request)
            if signature is None:
                self._check(request)
                return
        passed = self._passed.get(signature)
        if passed is not None:
            # The signature has passed before: only the sizes remain to be checked.
            batch_size, batch_key, sizes = passed
            for tensor, size in zip(request.inputs.values(), sizes, strict=True):
                if size is None:
                    self._check_strings(request, tensor)
                elif tensor.nbytes != size:
                    break
            else:
                request.batch_size = batch_size
                request.batch_key = batch_key
                return
        self._check(request)
        self._remember(signature, request)

    @property
    def remembered(self) -> int:
        """Number of signatures whose result is remembered."""
        return len(self._passed)

    def _signature_of(self, request: InferenceRequest) -> object:
        """Everything the checks read except tensor data; None if the result must not be remembered."""
        requested = request.requested
        if self._correlation is not None or (requested is not None and len(requested) > len(self._outputs)):
            return None
        return requested, *[(name, one.datatype, one.shape) for name, one in request.inputs.items()]

    def _remember(self, signature: object, request: InferenceRequest) -> None:
        if self._has_shapes:
            return
        sizes = tuple(
            None if tensor.datatype == "BYTES" else tensor.nbytes for tensor in request.inputs.values()
        )
        self._passed.keep(signature, _Passed(request.batch_size, request.batch_key, sizes))

    def _check(self, request: InferenceRequest) -> None:
        inputs = request.inputs
        rules = self._rules
        required = self._required
        if len(inputs) < len(required) or len(inputs) > len(rules) or not inputs.keys() >= required:
            self._reject_inputs(request)
        skip = self._skip
        batch_size = -1
        for name, tensor in reversed(inputs.items()):  # of several faults Triton names the last input's
            rule = rules.get(name)
            if rule is None:
                raise self._unexpected(name)
            if tensor.datatype != rule.datatype:
                raise InvalidArgumentError(
                    f"{request.log_prefix}inference input '{name}' data-type is '{tensor.datatype}', but "
                    f"model '{self._spec.name}' expects '{rule.datatype}'"
                )
            shape = tensor.shape
            if skip and not rule.is_shape:
                if not shape:
                    raise InvalidArgumentError(
                        f"{request.log_prefix}input '{name}' has no shape but model requires batch "
                        f"dimension for '{self._spec.name}'. Expected "
                        f"{shape_text(self._spec.full_dims(rule))}, got []"
                    )
                if batch_size < 0:
                    batch_size = shape[0]
                elif batch_size != shape[0]:
                    raise InvalidArgumentError(
                        f"{request.log_prefix}input '{name}' batch size does not match other inputs for "
                        f"'{self._spec.name}'. Expected {batch_size}, got {shape[0]}"
                    )
            self._check_shape(request, rule, shape)
            self._check_size(request, tensor)
        if skip:
            if batch_size > self._spec.max_batch_size:
                raise InvalidArgumentError(
                    f"{request.log_prefix}inference request batch-size must be <= "
                    f"{self._spec.max_batch_size} for '{self._spec.name}', got {batch_size}"
                )
            request.batch_size = max(batch_size, 1)
        if request.requested is not None:
            self._check_outputs(request.requested)
        if self._batch_key is not None:
            request.batch_key = self._batch_key(request)
        if self._correlation is not None:
            self._check_correlation(request, self._correlation)

    def _check_correlation(self, request: InferenceRequest, control: ControlTensor) -> None:
        """Checks that a request's correlation id can be given to the model; one of 0 is a number too."""
        if self._assigns_ids and not request.correlation_id:
            return  # it is given one
        given = "BYTES" if isinstance(request.correlation_id, str) else "UINT64"
        if (given == "BYTES") is not (control.datatype == "BYTES"):
            raise InvalidArgumentError(
                f"{request.log_prefix}sequence batching control '{control.name}' data-type is '{given}', but "
                f"model '{self._spec.name}' expects '{control.datatype}'"
            )

    def _check_outputs(self, requested: tuple[str, ...]) -> None:
        for output in requested:
            if output not in self._outputs:
                raise InvalidArgumentError(
                    f"unexpected inference output '{output}' for model '{self._spec.name}', allowed outputs "
                    f"are: {', '.join(tensor.name for tensor in self._spec.outputs)}"
                )

    def _check_shape(self, request: InferenceRequest, rule: TensorSpec, shape: tuple[int, ...]) -> None:
        skip = 0 if rule.is_shape else self._skip
        dims = rule.dims
        if shape[skip:] == dims and (not skip or shape[0] >= 0) and -1 not in dims:
            return
        if any(dim < 0 for dim in shape):
            raise InvalidArgumentError(
                f"{request.log_prefix}All input dimensions should be specified for input '{rule.name}' for "
                f"model '{self._spec.name}', got {shape_text(shape)}"
            )
        fits = len(shape) == len(dims) + skip and all(
            want in (-1, got) for want, got in zip(dims, shape[skip:], strict=True)
        )
        if not fits:
            expected = shape_text(self._spec.full_dims(rule))
            raise InvalidArgumentError(
                f"{request.log_prefix}unexpected shape for input '{rule.name}' for model "
                f"'{self._spec.name}'. Expected {expected}, got {shape_text(shape)}. "
                f"{_BATCH_NOTE if skip else ''}"
            )

    def _check_empty(self, request: InferenceRequest, tensor: Tensor) -> None:
        """Refuses shapes whose size says nothing of their dimensions: no array can have every one of them."""
        element_size = ELEMENT_SIZES.get(tensor.datatype, _POINTER_SIZE)
        if prod(dim for dim in tensor.shape if dim) * element_size > _MOST_BYTES:
            raise InvalidArgumentError(
                f"{request.log_prefix}byte size overflow for input '{tensor.name}' for model "
                f"'{self._spec.name}': the dimensions of shape {shape_text(tensor.shape)} other than 0 * "
                f"data type size ({element_size}) exceed the maximum allowed size ({_MOST_BYTES})"
            )

    def _check_size(self, request: InferenceRequest, tensor: Tensor) -> None:
        if 0 in tensor.shape:
            self._check_empty(request, tensor)
        element_size = ELEMENT_SIZES.get(tensor.datatype)
        if element_size is None:
            self._check_strings(request, tensor)
            return
        expected = prod(tensor.shape) * element_size
        if expected != tensor.nbytes:
            # Triton's tests compare this text as a whole.
            prefix = request.log_prefix or "[request id: <id_unknown>] "
            raise InvalidArgumentError(
                f"{prefix}input byte size mismatch for input '{tensor.name}' for model "
                f"'{self._spec.name}'. Expected {expected}, got {tensor.nbytes}"
            )

    def _check_strings(self, request: InferenceRequest, tensor: Tensor) -> None:
        if not tensor.has_data:
            return  # an array from another model: its elements need not be found first
        expected = prod(tensor.shape)
        data = memoryview(tensor.data)
        end = len(data)
        position = count = 0
        while position < end:
            try:
                position += 4 + STRING_LENGTH.unpack_from(data, position)[0]
            except struct.error:
                raise InvalidArgumentError(
                    f"{request.log_prefix}incomplete string length indicator for inference input "
                    f"'{tensor.name}' for model '{self._spec.name}', expecting 4 bytes but only "
                    f"{end - position} bytes available. Please make sure the string length indicator is "
                    f"in one buffer."
                ) from None
            if position > end and count < expected:
                break  # an element that runs past the end does not count
            count += 1
            if count > expected:
                raise InvalidArgumentError(
                    f"{request.log_prefix}unexpected number of string elements {count} for inference "
                    f"input '{tensor.name}' for model '{self._spec.name}', expecting {expected}"
                )
        if count != expected:
            raise InvalidArgumentError(
                f"{request.log_prefix}expected {expected} string elements for inference input "
                f"'{tensor.name}' for model '{self._spec.name}', got {count}"
            )

    def _unexpected(self, name: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"unexpected inference input '{name}' for model '{self._spec.name}', allowed inputs are: "
            f"{', '.join(self._rules)}"
        )

    def _reject_inputs(self, request: InferenceRequest) -> None:
        name = self._spec.name
        for given in reversed(request.inputs):
            if given not in self._rules:
                raise self._unexpected(given)
        least, most, got = len(self._required), len(self._rules), len(request.inputs)
        count = (
            f"expected {most}" if least == most else f"expected number of inputs between {least} and {most}"
        )
        given_names = ",".join(f"'{given}'" for given in sorted(request.inputs))
        missing = ",".join(f"'{need}'" for need in sorted(self._required.difference(request.inputs)))
        raise InvalidArgumentError(
            f"{request.log_prefix}{count}{' inputs' if least == most else ''} but got {got} inputs for model "
            f"'{name}'. Got input(s) [{given_names}], but missing required input(s) [{missing}]. Please "
            f"provide all required input(s)."
        )


def reshaped_shape(
    shape: tuple[int, ...], target: tuple[int, ...], source: tuple[int, ...], skip: int
) -> tuple[int, ...]:
    """Applies a config's reshape to a shape.

    Args:
        shape: Concrete shape with batch dimensions.
        target: New dims; each -1 takes the value of the matching -1 of `source`, in order.
        source: Dims that `shape` follows.
        skip: Number of unchanged leading dimensions (1 for a batch dimension).
    """
    wild = (got for want, got in zip(source, shape[skip:], strict=True) if want == -1)
    return (*shape[:skip], *(next(wild) if dim == -1 else dim for dim in target))


def shape_text(shape: tuple[int, ...]) -> str:
    """Formats a shape as in Triton's messages: ``[1,16]``."""
    return "[" + ",".join(str(dim) for dim in shape) + "]"
