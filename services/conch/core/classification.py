"""Classification extension: formats the top k values of an output as ``value:index[:label]``.

Used by: `shaping`.
"""

from __future__ import annotations

from math import prod

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.spec import TensorSpec
from conch.core.tensor import Array, Tensor

_MOST_ELEMENTS = 1_000_000


def classify(tensor: Tensor, count: int, spec: TensorSpec | None, batches: bool) -> Tensor:
    """Formats the highest values of each row of an output.

    Args:
        tensor: A numeric output; all dimensions after the batch form a row.
        count: Most classes per row.
        spec: The output's config, which has the labels.
        batches: True if the first dimension is the batch.

    Returns:
        A BYTES tensor of shape [batch, k], or [k] for a model without batching. Floating-point
        values have six decimals; among equal values, the lower index comes first.

    Raises:
        InvalidArgumentError: The datatype is unsupported, or the tensor is too large.
    """
    if tensor.datatype in ("BYTES", "BOOL", "FP16", "BF16"):
        raise InvalidArgumentError(
            f"class result not available for output due to unsupported type '{tensor.datatype}'"
        )
    array = tensor.numpy()
    if array.size > _MOST_ELEMENTS:
        raise InvalidArgumentError("classification output tensor too large")
    # numpy can't infer -1 for a batch without rows.
    rows = array.reshape(array.shape[0], prod(array.shape[1:])) if batches else array.reshape(1, -1)
    k = min(count, rows.shape[1])
    labels = spec.labels if spec is not None else ()
    classes = np.empty((rows.shape[0], k), dtype=object)
    for index, row in enumerate(rows):
        classes[index] = _top(row, k, labels)
    return Tensor.from_array(tensor.name, classes if batches else classes[0], "BYTES")


def _top(row: Array, k: int, labels: tuple[str, ...]) -> list[bytes]:
    # The reversed stable sort keeps the lower index first among equal values.
    order = np.argsort(row[::-1], kind="stable")[::-1][:k]
    floating = row.dtype.kind == "f"
    texts: list[bytes] = []
    for place in order:
        index = len(row) - 1 - int(place)
        value = f"{float(row[index]):.6f}" if floating else str(int(row[index]))
        label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
        texts.append(f"{value}:{index}{label}".encode())
    return texts
