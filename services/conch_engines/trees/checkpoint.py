"""Checks a forest in treelite's checkpoint format (version 4) before C++ code relies on its indices.

treelite trusts checkpoints, and what its parsers read: a damaged file crashes the process when it is opened,
or when the first request follows a wrong child. `check_checkpoint` reads the bytes as numpy arrays within
their bounds, and checks all that GTIL uses as an index or a length.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np

from conch.core.tensor import Array
from conch_engines.trees.model_files import DamagedError

MAJOR = 4
"""The version of the format that is read."""

_FLOATS: dict[int, np.dtype[Any]] = {2: np.dtype("<f4"), 3: np.dtype("<f8")}
"""Types of thresholds and leaves by treelite's number."""
_MOST_CLASSES = 1 << 20
_MOST_FEATURES = 1 << 24
_OPERATORS = 6
_NODE_TYPES = 3
_TASKS = 5
_LEAF = -1

_I1, _U1, _I4, _U4, _U8, _F8 = (np.dtype(name) for name in ("i1", "u1", "<i4", "<u4", "<u8", "<f8"))


def check_checkpoint(data: bytes | memoryview) -> None:
    """Checks a whole checkpoint."""
    reader = _Reader(data)
    major, _, _, threshold_type, leaf_type = reader.values("<iiiBB")
    if major != MAJOR:
        raise DamagedError(f"its version is {major}, not {MAJOR}")
    if threshold_type != leaf_type or threshold_type not in _FLOATS:
        raise DamagedError(f"unknown types {threshold_type} and {leaf_type} of thresholds and leaves")
    trees, features, task, _, targets = reader.values("<QiBBi")
    classes, leaf_shape = reader.array(_I4), reader.array(_I4)
    target_id, class_id = reader.array(_I4), reader.array(_I4)
    postprocessor = reader.array(_U1).tobytes()
    reader.values("<ff")
    base_scores = reader.array(_F8)
    reader.array(_U1)
    reader.no_extensions()
    _require(task < _TASKS, f"unknown task {task}")
    _require(0 <= features <= _MOST_FEATURES, f"{features} features")
    _require(re.fullmatch(rb"\w+", postprocessor) is not None, "a postprocessor without a name")
    _require(targets >= 1 and len(classes) == targets, f"{targets} targets with {len(classes)} classes")
    _require(_within(classes, 1, _MOST_CLASSES), f"{classes.tolist()[:8]} classes")
    most = int(classes.max())
    _require(len(base_scores) == targets * most, f"{len(base_scores)} base scores")
    _require(
        len(leaf_shape) == 2 and int(leaf_shape[0]) in (1, targets) and int(leaf_shape[1]) in (1, most),
        f"leaves of the shape {leaf_shape.tolist()[:8]}",
    )
    leaf_size = int(leaf_shape.prod())
    for name, ids, count, values in (
        ("targets", target_id, targets, int(leaf_shape[0])),
        ("classes", class_id, most, int(leaf_shape[1])),
    ):
        # -1 stands for all, which takes leaves with a value for each; other numbers take leaves with one.
        least = -1 if leaf_size > 1 and values == count else 0
        end = count if values == 1 else 0
        _require(len(ids) == trees and _within(ids, least, end), f"trees of unknown {name}")
    for number in range(trees):
        try:
            _check_tree(reader, _FLOATS[threshold_type], features, leaf_size)
        except DamagedError as error:
            raise DamagedError(f"tree {number}: {error}") from None
    _require(reader.at_end, "bytes behind the last tree")


def _check_tree(reader: _Reader, floats: np.dtype[Any], features: int, leaf_size: int) -> None:
    count, _ = reader.values("<iB")
    _require(count >= 1, f"{count} nodes")
    kinds = reader.array(_I1, count)
    left, right, split = (reader.array(_I4, count) for _ in range(3))
    reader.array(_U1, count)  # default direction
    reader.array(floats, count)
    reader.array(floats, count)
    operators = reader.array(_I1, count)
    reader.array(_U1, count)  # which child the categories lead to
    vector = reader.array(floats)
    vector_begin, vector_end = reader.array(_U8), reader.array(_U8)
    categories = reader.array(_U4)
    categories_begin, categories_end = reader.array(_U8), reader.array(_U8)
    for kind in (_U8, _F8, _F8):  # statistics of nodes, which prediction does not use
        reader.array(kind)
        reader.array(_U1)
    reader.no_extensions()
    reader.no_extensions()

    leaves = left == _LEAF
    inner = ~leaves
    children = np.concatenate((left[inner], right[inner]))
    _require(_within(children, 1, count), "a child that is no node")
    # With one parent for each node, no path from the root comes back to a node.
    _require(not len(children) or int(np.bincount(children).max()) == 1, "a node with two parents")
    _require(_within(split[inner], 0, features), "a split by an unknown feature")
    _require(_within(kinds, 0, _NODE_TYPES) and _within(operators, 0, _OPERATORS), "a node of unknown kind")
    _require(_spans(vector_begin, vector_end, len(vector), count), "a leaf beyond the leaf vectors")
    _require(_spans(categories_begin, categories_end, len(categories), count), "unknown categories")
    if leaf_size > 1:
        sizes = (vector_end - vector_begin)[leaves]
        _require(len(vector_end) == count and bool((sizes == leaf_size).all()), "a leaf without its vector")


class _Reader:
    """Reads values and arrays in order, never past the end."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    def values(self, form: str) -> tuple[Any, ...]:
        start = self._at
        self._advance(struct.calcsize(form))
        return struct.unpack_from(form, self._data, start)

    def array(self, dtype: np.dtype[Any], count: int | None = None) -> Array:
        """An array behind its length, which is `count` where that is given."""
        (length,) = self.values("<Q")
        if count is not None and length != count:
            raise DamagedError(f"an array of {length} for {count} nodes")
        start = self._at
        self._advance(length * dtype.itemsize)
        return np.frombuffer(self._data, dtype, length, start) if length else np.empty(0, dtype)

    def no_extensions(self) -> None:
        """Reads the number of extension fields, of which no version of the format has any yet."""
        (count,) = self.values("<i")
        _require(count == 0, "extension fields: written by a newer treelite")

    @property
    def at_end(self) -> bool:
        return self._at == self._size

    def _advance(self, size: int) -> None:
        if size > self._size - self._at:
            raise DamagedError("it ends too early")
        self._at += size


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DamagedError(otherwise)


def _within(values: Array, least: int, end: int) -> bool:
    return not len(values) or (int(values.min()) >= least and int(values.max()) < end)


def _spans(begin: Array, end: Array, size: int, count: int) -> bool:
    """True for the begin and end of each node's part of an array, or for none at all."""
    if not len(begin) and not len(end):
        return True
    return len(begin) == len(end) == count and bool((begin <= end).all()) and int(end.max()) <= size
