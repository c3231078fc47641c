"""Raw binary requests: the whole body is the model's only input."""

from __future__ import annotations

from math import prod

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest
from conch.core.spec import ModelSpec
from conch.core.tensor import ELEMENT_SIZES, Tensor


def raw_tensor(request: InferenceRequest, spec: ModelSpec, body: memoryview) -> Tensor:
    """The input of a raw request, its shape worked out from its size.

    Raises:
        InvalidArgumentError: It can't be; texts are Triton's.
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
