"""A model's outputs as columns. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Array


def output_columns(outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Columns of outputs: one of shape [rows] or [rows, 1]; ``name_0``, ``name_1`` and so on of [rows, n].

    Returns:
        Arrays of one dimension and one length; BYTES are objects of `str`, or of `bytes` if one is not UTF-8.

    Raises:
        InvalidArgumentError: An output has more dimensions, or two have different numbers of rows.
    """
    columns: dict[str, Array] = {}
    for name, array in outputs.items():
        if array.ndim not in (1, 2):
            raise InvalidArgumentError(
                f"output '{name}' has shape {list(array.shape)}, which a table can't have: leave it out, or "
                f"ask for JSON"
            )
        parts = {name: array.reshape(-1)}
        if array.ndim == 2 and array.shape[1] != 1:
            parts = {f"{name}_{number}": array[:, number] for number in range(array.shape[1])}
        for part, values in parts.items():
            if part in columns:
                raise InvalidArgumentError(f"two outputs of the model are column '{part}'")
            columns[part] = _texts(values) if values.dtype.kind == "O" else values
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidArgumentError(f"the outputs of the model have different numbers of rows: {lengths}")
    return columns


def _texts(values: Array) -> Array:
    found = np.empty(len(values), object)
    try:
        found[:] = [each.decode() if isinstance(each, bytes) else str(each) for each in values.tolist()]
    except UnicodeDecodeError:
        return values
    return found
