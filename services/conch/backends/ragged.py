"""Ragged batching: inputs of different shapes as one flat array, and what tells a model where each begins.

Pure functions of shapes; a shape here is a request's, batch dimension first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod

import numpy as np

from conch.core.tensor import Array

Shapes = Sequence[tuple[int, ...]]


def split_flat(array: Array, shapes: Shapes) -> list[Array]:
    """The parts of a flat array that have the shapes, one after the other; views of it.

    Raises:
        ValueError: It has more or fewer elements than the shapes together.
    """
    flat = array.reshape(-1)
    ends = list(accumulate(prod(shape) for shape in shapes))
    if flat.size != ends[-1]:
        raise ValueError(f"{flat.size} elements for shapes of {ends[-1]} elements")
    starts = [0, *ends[:-1]]
    return [flat[start:end].reshape(shape) for start, end, shape in zip(starts, ends, shapes, strict=True)]


def _counts(shapes: Shapes) -> Array:
    return np.array([prod(shape) for shape in shapes], np.int64)


def _accumulated(shapes: Shapes) -> Array:
    return np.cumsum(_counts(shapes))


def _accumulated_with_zero(shapes: Shapes) -> Array:
    return np.concatenate(([0], _accumulated(shapes)))


def _largest_as_shape(shapes: Shapes) -> Array:
    # Only its length says something.
    return np.zeros(max(prod(shape) for shape in shapes), np.int64)


def _item_shapes(shapes: Shapes) -> Array:
    rows = [shape[1:] for shape in shapes for _ in range(shape[0])]
    return np.array(rows, np.int64).reshape(len(rows), len(shapes[0]) - 1)


def _item_shapes_flat(shapes: Shapes) -> Array:
    return _item_shapes(shapes).reshape(-1)


KINDS: Mapping[str, Callable[[Shapes], Array]] = {
    "BATCH_ELEMENT_COUNT": _counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _accumulated,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": _accumulated_with_zero,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": _largest_as_shape,
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": _item_shapes_flat,
}
"""What a batch input of each kind holds, by the shapes of its source in the requests of a batch."""
