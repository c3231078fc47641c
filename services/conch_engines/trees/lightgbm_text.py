"""Checks LightGBM's text format before C++ code parses it, and reads its header.

LightGBM's parser ends the process where a file is cut off or a number is missing, and both it and treelite's
follow indices unchecked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from conch.core.tensor import Array
from conch_engines.trees.feature_columns import Columns, lightgbm_columns
from conch_engines.trees.model_files import DamagedError

_TREE = b"Tree="
_END = b"end of trees"
_PARAMETER = re.compile(rb"\[\w+:.*\]")
_CATEGORICAL = 1
"""Bit of `decision_type` for a split by category."""
_MISSING, _MISSING_ZERO = 0b1100, 0b0100
"""Bits of `decision_type` for the values that are missing, and those of zeros."""
_CATEGORY_BITS = 32
_MOST = 1 << 20

_INNER = ("split_feature", "threshold", "decision_type", "left_child", "right_child")
_OPTIONAL_INNER = ("split_gain", "internal_value", "internal_weight", "internal_count")
_OPTIONAL_LEAF = ("leaf_weight", "leaf_count")

Fields = dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class LightgbmHeader:
    """Header of a LightGBM model.

    Attributes:
        features: Number of input columns.
        outputs: Trees of an iteration: 1, or one for each class.
        trees: Number of trees.
        objective: Name of the objective with its settings; empty if unknown.
        averages: True if the output is the mean of the trees, as of a random forest.
        zero_is_missing: True if a split takes zeros for missing values.
        linear: True if leaves hold linear models.
        columns: Names and categories of the features.
    """

    features: int
    outputs: int
    trees: int
    objective: str
    averages: bool
    zero_is_missing: bool
    linear: bool
    columns: Columns = ()

    @property
    def classifies(self) -> bool:
        """True if the outputs are probabilities of classes."""
        return self.objective.split(" ")[0] in ("binary", "multiclass", "multiclassova")


def read_lightgbm(text: bytes) -> LightgbmHeader:
    """Reads the header, and checks header and trees."""
    if b"\0" in text or not _is_utf8(text):
        raise DamagedError("it is no text")
    start = text.find(b"\n" + _TREE) + 1
    end = text.find(b"\n" + _END) + 1
    if not end:
        raise DamagedError("it ends before the end of its trees")
    fields = _fields(text[: start or end])
    # LightGBM 2.3, which calls its format v3, and later ones end their files with the training parameters.
    _, has_parameters, parameters = text[end:].partition(b"\nparameters:\n")
    parameters, ends, _ = parameters.partition(b"\nend of parameters")
    if not ends and (has_parameters or fields.get(b"version") not in (None, b"v2")):
        raise DamagedError("it ends before the end of its parameters")
    if not all(_PARAMETER.fullmatch(line) for line in parameters.split(b"\n") if line):
        raise DamagedError("a parameter of the training has no name and value")
    outputs = _number(fields, "num_tree_per_iteration")
    if not 1 <= outputs <= _MOST or not 1 <= _number(fields, "num_class") <= _MOST:
        raise DamagedError("an impossible number of classes")
    features = _number(fields, "max_feature_idx") + 1
    if not 1 <= features < 1 << 31:
        raise DamagedError(f"{features} features")
    parts = _trees(text, start, end, fields) if start else []
    zero_is_missing = linear = False
    for number, part in enumerate(parts):
        try:
            if not all(b"=" in line for line in part.split(b"\n") if line):
                raise DamagedError("a line without a value")
            tree = _fields(part)
            zero_is_missing |= _check_tree(tree, features)
            linear |= _is_linear(tree)
        except DamagedError as error:
            raise DamagedError(f"tree {number}: {error}") from None
    if len(parts) % outputs:
        raise DamagedError(f"{len(parts)} trees for {outputs} outputs")
    objective = fields.get(b"objective", b"").decode(errors="replace")
    averages = b"average_output" in fields
    columns = lightgbm_columns(fields, text[end:], features)
    return LightgbmHeader(
        features, outputs, len(parts), objective, averages, zero_is_missing, linear, columns
    )


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _trees(text: bytes, start: int, end: int, fields: Fields) -> list[bytes]:
    """The text of each tree; parsers jump by the sizes in the header, where it has them."""
    if b"tree_sizes" not in fields:
        return [_TREE + part for part in text[start + len(_TREE) : end].split(b"\n" + _TREE)]
    parts: list[bytes] = []
    for size in _numbers(fields, "tree_sizes", None).tolist():
        after = start + int(min(max(size, 0), end - start))
        parts.append(text[start:after])
        if not parts[-1].startswith(b"%b%d\n" % (_TREE, len(parts) - 1)):
            raise DamagedError("the sizes of its trees do not fit; its line ends may have been changed")
        start = after
    if start != end:
        raise DamagedError("it has more trees than sizes of trees")
    return parts


def _check_tree(fields: Fields, features: int) -> bool:
    """Checks a tree; returns True if it takes zeros for missing values."""
    leaves = _number(fields, "num_leaves")
    if leaves < 1:
        raise DamagedError(f"{leaves} leaves")
    inner = leaves - 1
    if not inner:  # a constant, whose lists may have any length or be missing
        _numbers(fields, "leaf_value", 1)
        return False
    split, _, decisions, left, right = (_numbers(fields, name, inner) for name in _INNER)
    _numbers(fields, "leaf_value", leaves)
    for names, count in ((_OPTIONAL_INNER, inner), (_OPTIONAL_LEAF, leaves)):
        for name in names:
            if fields.get(name.encode()):
                _numbers(fields, name, count)
    if not _within(split, 0, features):
        raise DamagedError("a split by an unknown feature")
    children = np.concatenate((left, right))
    # Leaves are numbered from -1 downwards. Each node but the root is the child of one node, so no path from
    # the root comes back to a node.
    expected = np.concatenate((np.arange(-leaves, 0), np.arange(1, inner)))
    if not np.array_equal(np.sort(children), expected):
        raise DamagedError("its nodes are no tree")
    kinds = decisions.astype(np.int64)
    categorical = (kinds & _CATEGORICAL).astype(bool)
    _check_categories(fields, _numbers(fields, "threshold", inner)[categorical])
    if _is_linear(fields):
        _check_linear(fields, leaves, features)
    return bool(((kinds & _MISSING == _MISSING_ZERO) & ~categorical).any())


def _check_categories(fields: Fields, used: Array) -> None:
    """Checks the sets of categories; `used` are the numbers of those that nodes name."""
    count = _number(fields, "num_cat")
    if not count:
        if len(used):
            raise DamagedError("a split by categories that are missing")
        return
    bounds = _numbers(fields, "cat_boundaries", count + 1)
    if bounds[0] != 0 or bool((np.diff(bounds) < 0).any()):
        raise DamagedError("categories in no order")
    words = _numbers(fields, "cat_threshold", int(bounds[-1]))
    if not (_within(used, 0, count) and _within(words, 0, 1 << _CATEGORY_BITS)):
        raise DamagedError("a split by unknown categories")


def _is_linear(fields: Fields) -> bool:
    return fields.get(b"is_linear", b"0") != b"0"


def _check_linear(fields: Fields, leaves: int, features: int) -> None:
    """Checks the linear models in the leaves."""
    _numbers(fields, "leaf_const", leaves)
    total = int(_numbers(fields, "num_features", leaves).sum())
    columns = _numbers(fields, "leaf_features", total)
    _numbers(fields, "leaf_coeff", total)
    if not _within(columns, 0, features):
        raise DamagedError("a leaf with an unknown feature")


def _fields(block: bytes) -> Fields:
    """The lines ``key=value``, and the key of the lines that have no value."""
    return {key: value for key, _, value in (line.partition(b"=") for line in block.split(b"\n")) if key}


def _number(fields: Fields, name: str) -> int:
    try:
        return int(fields.get(name.encode(), b""))
    except ValueError:
        raise DamagedError(f"{name} is missing, or no number") from None


def _numbers(fields: Fields, name: str, count: int | None) -> Array:
    """The numbers of a list of the given length."""
    try:
        values = np.array(fields.get(name.encode(), b"").split(), np.float64)
    except ValueError:
        raise DamagedError(f"{name} has an element that is no number") from None
    if count is not None and len(values) != count:
        raise DamagedError(f"{name} has {len(values)} elements, not {count}")
    return values


def _within(values: Array, least: int, end: int) -> bool:
    """True for whole numbers in a range."""
    return not len(values) or bool(((values >= least) & (values < end) & (values == np.floor(values))).all())
