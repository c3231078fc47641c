"""Reads models of XGBoost in JSON and UBJSON, and checks all that C++ code uses as an index or a length.

XGBoost trusts its files, and treelite refuses what it does not serve itself: linear boosters, several
targets, and categories of a DataFrame. `read_xgboost` reads the documents that XGBoost writes as dicts, in
which arrays of numbers are lists or numpy arrays.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Array
from conch_engines.trees.model_files import XGBOOST_JSON, DamagedError

_CLASSIFIERS = ("binary:logistic", "multi:softprob", "multi:softmax")
"""Objectives whose results are probabilities of classes, or are made of them."""
_MOST = 1 << 24
"""Bound of features, outputs and categories; XGBoost has the last."""
_LATER_FIELDS = {"leaf_weights", "loss_changes", "sum_hessian"}
"""Fields of trees whose leaves hold vectors, since XGBoost 3.2."""
_NO_PARENT = (1 << 31) - 1
_DEEPEST = 32
_NUMBERS = {
    marker: np.dtype(name)
    for marker, name in zip("iUIlLdD", ("i1", "u1", ">i2", ">i4", ">i8", ">f4", ">f8"), strict=True)
}
"""UBJSON's markers of numbers."""
_CONSTANTS = {"Z": None, "T": True, "F": False}

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class XgboostModel:
    """A checked model.

    Attributes:
        features: Number of input columns.
        outputs: Values per row: 1, or one for each class, target or quantile.
        targets: Number of targets or quantiles.
        trees: Number of trees; 0 for a linear booster.
        objective: Name of the objective.
        linear: True if the booster is `gblinear`.
        has_vectors: True if leaves hold a value for each output.
        has_old_vectors: True if they do so in the form of XGBoost before 3.2, which later ones crash on.
        has_encoder: True if it was trained on a DataFrame with categories.
        iterations: Number of boosting rounds.
        best: Number of iterations up to the best one, or 0 if early stopping did not name one.
        best_trees: Number of trees up to the best iteration.
        document: The model as XGBoost writes it.
    """

    features: int
    outputs: int
    targets: int
    trees: int
    objective: str
    linear: bool
    has_vectors: bool
    has_old_vectors: bool
    has_encoder: bool
    iterations: int
    best: int
    best_trees: int
    document: Document

    @property
    def classifies(self) -> bool:
        """True if the outputs are probabilities of classes."""
        return self.targets == 1 and self.objective in _CLASSIFIERS

    def best_as_json(self) -> bytes:
        """The model in JSON, without the trees after the best iteration."""
        learner = self.document["learner"]
        booster = learner["gradient_booster"]
        kept, parts = _forest(booster), dict(booster)
        forest = {
            **kept,
            "gbtree_model_param": {**kept["gbtree_model_param"], "num_trees": str(self.best_trees)},
            "trees": kept["trees"][: self.best_trees],
            "tree_info": kept["tree_info"][: self.best_trees],
        }
        if "iteration_indptr" in kept:
            forest["iteration_indptr"] = kept["iteration_indptr"][: self.best + 1]
        if "gbtree" in booster:
            parts["gbtree"] = {**booster["gbtree"], "model": forest}
            parts["weight_drop"] = booster["weight_drop"][: self.best_trees]
        else:
            parts["model"] = forest
        document = {**self.document, "learner": {**learner, "gradient_booster": parts}}
        return json.dumps(document, default=np.ndarray.tolist).encode()


def read_xgboost(content: bytes, kind: str) -> XgboostModel:
    """Reads and checks a model."""
    try:
        document = _read_json(content) if kind == XGBOOST_JSON else _Ubjson(content).document()
    except (ValueError, RecursionError, struct.error) as error:
        raise DamagedError(f"{error}") from error
    learner = _part(document, "learner")
    sizes = _part(learner, "learner_model_param")
    features = _count(sizes, "num_feature")
    classes, targets = (max(_count(sizes, name, 0), 1) for name in ("num_class", "num_target"))
    _require(features >= 1 and min(classes, targets) == 1, "an impossible number of features or outputs")
    outputs = classes * targets
    scores = len(str(sizes.get("base_score", "")).split(","))
    _require(scores in (1, outputs), f"{scores} base scores for {outputs} outputs")
    booster = _part(learner, "gradient_booster")
    linear = booster.get("name") == "gblinear"
    trees = iterations = best = best_trees = 0
    has_vectors = has_old_vectors = has_encoder = False
    if linear:
        weights = _part(booster, "model").get("weights")
        _numbers(weights, (features + 1) * outputs, "weights")
    else:
        forest = _forest(booster)
        trees, has_vectors = _check_forest(forest, features, outputs)
        if "weight_drop" in booster:
            _numbers(booster["weight_drop"], trees, "weight_drop")
        has_old_vectors = has_vectors and not all(tree.keys() >= _LATER_FIELDS for tree in forest["trees"])
        has_encoder = _check_encoder(forest.get("cats"), features)
        starts = _iterations(forest, trees, 1 if has_vectors else outputs)
        iterations = len(starts) - 1
        best = _best(learner.get("attributes"), iterations)
        best_trees = int(starts[best])
    objective = str(_part(learner, "objective").get("name"))
    return XgboostModel(
        features=features,
        outputs=outputs,
        targets=targets,
        trees=trees,
        objective=objective,
        linear=linear,
        has_vectors=has_vectors,
        has_old_vectors=has_old_vectors,
        has_encoder=has_encoder,
        iterations=iterations,
        best=best,
        best_trees=best_trees,
        document=document,
    )


def choose_iterations(
    found: XgboostModel | None, wanted: bool | None, path: Path, model: str
) -> tuple[int, tuple[str, ...]]:
    """Number of iterations to use, 0 for all, and a warning where the config should choose.

    Args:
        found: The model; None for files that name no best iteration.
        wanted: The parameter `CONCH_BEST_ITERATION`.
        path: The model's file.
        model: The model's name.
    """
    best = found.best if found else 0
    if wanted and not best:
        raise InvalidArgumentError(
            f"unable to load model '{model}': parameter 'CONCH_BEST_ITERATION' is 'true', but '{path}' "
            f"names no best iteration: XGBoost writes one after early stopping, and LightGBM saves no trees "
            f"behind it; leave the parameter out"
        )
    if wanted is None and found and 0 < best < found.iterations:
        return 0, (
            f"model '{model}': early stopping found iteration {best} of {found.iterations} the best, and all "
            f"are used; set parameter 'CONCH_BEST_ITERATION' to 'true' to stop there, as XGBoost's "
            f"classes for scikit-learn do, or to 'false' to use all",
        )
    return best if wanted else 0, ()


def _read_json(content: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> Document:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise DamagedError("a name that is there twice")
        return found

    return json.loads(content.decode(), object_pairs_hook=unique)


class _Ubjson:
    """Reads the UBJSON that XGBoost writes: objects, counted and typed arrays, strings and numbers."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def document(self) -> Any:
        value = self._value(self._marker(), 0)
        _require(self._at == len(self._content), "bytes behind its end")
        return value

    def _value(self, marker: str, depth: int) -> Any:
        _require(depth <= _DEEPEST, "values within each other, too many")
        if marker == "{":
            return self._object(depth)
        if marker == "[":
            return self._array(depth)
        if marker == "S":
            return self._text(self._marker())
        if marker in _CONSTANTS:
            return _CONSTANTS[marker]
        return self._numbers(marker, 1)[0].item()

    def _object(self, depth: int) -> Document:
        found: Document = {}
        while (marker := self._marker()) != "}":
            name = self._text(marker)
            _require(name not in found, "a name that is there twice")
            found[name] = self._value(self._marker(), depth + 1)
        return found

    def _array(self, depth: int) -> Any:
        marker = self._marker()
        if marker == "$":
            of = self._marker()
            _require(self._marker() == "#", "a typed array without a length")
            return self._numbers(of, self._length(self._marker()))
        if marker == "#":
            count = self._length(self._marker())
            _require(count <= len(self._content), "it ends too early")
            return [self._value(self._marker(), depth + 1) for _ in range(count)]
        found = []
        while marker != "]":
            found.append(self._value(marker, depth + 1))
            marker = self._marker()
        return found

    def _numbers(self, marker: str, count: int) -> Array:
        dtype = _NUMBERS.get(marker)
        if dtype is None:
            raise DamagedError(f"an unknown marker at byte {self._at}")
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _text(self, marker: str) -> str:
        return self._take(self._length(marker)).decode()

    def _length(self, marker: str) -> int:
        return int(self._numbers(marker, 1)[0])

    def _marker(self) -> str:
        return chr(self._take(1)[0])

    def _take(self, size: int) -> bytes:
        start = self._at
        _require(0 <= size <= len(self._content) - start, "it ends too early")
        self._at = start + size
        return self._content[start : self._at]


def _forest(booster: Mapping[str, Any]) -> Document:
    """The trees of a booster, which `dart` wraps."""
    return _part(_part(booster, "gbtree") if "gbtree" in booster else booster, "model")


def _check_forest(forest: Mapping[str, Any], features: int, outputs: int) -> tuple[int, bool]:
    """Checks trees; returns their number, and True if leaves hold a value for each output."""
    trees = forest.get("trees")
    if not isinstance(trees, list):
        raise DamagedError("trees is missing, or no list")
    _require(_count(_part(forest, "gbtree_model_param"), "num_trees") == len(trees), "trees that are missing")
    _require(_within(_integers(forest, "tree_info", len(trees)), 0, outputs), "a tree of an unknown output")
    has_vectors = False
    for number, tree in enumerate(trees):
        try:
            size = max(_count(_part(tree, "tree_param"), "size_leaf_vector", 1), 1)
            _require(size in (1, outputs), f"leaves of {size} values for {outputs} outputs")
            _require(tree.get("id") == number, "another number")
            _check_tree(tree, features, size)
        except DamagedError as error:
            raise DamagedError(f"tree {number}: {error}") from None
        _require(number == 0 or has_vectors == (size > 1), "leaves of different sizes")
        has_vectors = size > 1
    return len(trees), has_vectors


def _check_tree(tree: Mapping[str, Any], features: int, size: int) -> None:
    count = _count(_part(tree, "tree_param"), "num_nodes")
    _require(count >= 1, f"{count} nodes")
    left, right, split, parents = (
        _integers(tree, name, count)
        for name in ("left_children", "right_children", "split_indices", "parents")
    )
    inner = left != -1
    children = np.concatenate((left[inner], right[inner]))
    _require(_within(children, 1, count), "a child that is no node")
    # With one parent for each node, no path from the root comes back to a node.
    _require(not len(children) or int(np.bincount(children).max()) == 1, "a node with two parents")
    _require(_within(split[inner], 0, features), "a split by an unknown feature")
    _require(_within(parents[parents != _NO_PARENT], -1, count), "a parent that is no node")
    _numbers(tree.get("split_conditions"), count, "split_conditions")
    _integers(tree, "default_left", count)
    for name in ("loss_changes", "sum_hessian"):
        if name in tree:
            _numbers(tree[name], count, name)
    _numbers(tree.get("base_weights"), count * size, "base_weights")
    if "leaf_weights" in tree and size > 1:  # its leaves are numbered in place of their right children
        leaves = int((~inner).sum())
        _numbers(tree["leaf_weights"], leaves * size, "leaf_weights")
        _require(_within(right[~inner], 0, leaves), "a leaf beyond the leaf weights")
    _check_categories(tree, count, inner)


def _check_categories(tree: Mapping[str, Any], count: int, inner: Array) -> None:
    if "split_type" not in tree:  # before XGBoost 1.3
        return
    kinds = _integers(tree, "split_type", count)
    _require(_within(kinds, 0, 2), "a split of unknown kind")
    nodes, starts, sizes, categories = (
        _integers(tree, name)
        for name in ("categories_nodes", "categories_segments", "categories_sizes", "categories")
    )
    _require(len(nodes) == len(starts) == len(sizes), "categories that are missing")
    _require(np.array_equal(nodes, np.flatnonzero((kinds == 1) & inner)), "splits by unknown categories")
    _require(_within(sizes, 1, len(categories) + 1), "a split by no categories")
    inside = _within(starts, 0, len(categories)) and _within(starts + sizes, 0, len(categories) + 1)
    _require(inside, "splits by unknown categories")
    _require(_within(categories, 0, _MOST), "an impossible category")


def _check_encoder(encoder: Any, features: int) -> bool:
    """Checks the categories of a DataFrame; returns True if there are any."""
    columns = encoder.get("enc") if isinstance(encoder, dict) else encoder
    if encoder is None or (isinstance(columns, Sequence) and not columns):
        return False
    if not isinstance(columns, list) or len(columns) != features:
        raise DamagedError("categories of unknown features")
    sizes = []
    for column in columns:
        values = column.get("values") if isinstance(column, dict) else None
        size = len(_numbers(values, None, "categories"))
        if "offsets" in column:
            ends = _integers(column, "offsets")
            _require(_grows(ends) and int(ends[-1]) == size if len(ends) else not size, "texts in no order")
            size = max(len(ends) - 1, 0)
        sizes.append(size)
    bounds = _integers(encoder, "feature_segments", features + 1)
    _require(np.array_equal(bounds, np.cumsum([0, *sizes])), "categories of unknown features")
    order = _integers(encoder, "sorted_idx", sum(sizes))
    for start, size in zip(bounds.tolist(), sizes, strict=False):
        _require(_within(order[start : start + size], 0, size), "categories in no order")
    return True


def _iterations(forest: Mapping[str, Any], trees: int, outputs: int) -> Array:
    """The first tree of each iteration, and the end."""
    if "iteration_indptr" in forest:
        starts = _integers(forest, "iteration_indptr")
        ends = len(starts) and int(starts[-1]) == trees and _grows(starts)
        _require(bool(ends), "iterations in no order")
        return starts
    # XGBoost before 2.1
    step = outputs * max(_count(_part(forest, "gbtree_model_param"), "num_parallel_tree", 1), 1)
    _require(trees % step == 0, f"{trees} trees for {outputs} outputs")
    return np.arange(0, trees + 1, step)


def _best(attributes: Any, iterations: int) -> int:
    """Iterations up to the best one, or 0; attributes may be a user's own."""
    text = attributes.get("best_iteration", "") if isinstance(attributes, dict) else ""
    best = int(text) + 1 if isinstance(text, str) and text.isdecimal() and len(text) < 10 else 0
    return best if best <= iterations else 0


def _part(of: Any, name: str) -> Document:
    part = of.get(name) if isinstance(of, dict) else None
    if not isinstance(part, dict):
        raise DamagedError(f"{name} is missing, or no object")
    return part


def _count(of: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A number that XGBoost writes as a text."""
    try:
        value = int(of[name]) if default is None or name in of else default
    except (KeyError, TypeError, ValueError):
        raise DamagedError(f"{name} is missing, or no number") from None
    _require(0 <= value < _MOST, f"{name} is {value}")
    return value


def _numbers(values: Any, count: int | None, name: str) -> Array:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.ndim != 1 or (array.dtype.kind not in "biuf" and len(array)):
        raise DamagedError(f"{name} is missing, or no list of numbers")
    if count is not None and len(array) != count:
        raise DamagedError(f"{name} has {len(array)} elements, not {count}")
    return array


def _integers(of: Mapping[str, Any], name: str, count: int | None = None) -> Array:
    array = _numbers(of.get(name), count, name)
    if len(array) and array.dtype.kind == "f":
        raise DamagedError(f"{name} has an element that is no whole number")
    return array.astype(np.int64)


def _grows(values: Sequence[int] | Array) -> bool:
    """True for bounds that begin at 0 and never fall."""
    return bool(values[0] == 0 and (np.diff(values) >= 0).all())


def _within(values: Array, least: int, end: int) -> bool:
    return not len(values) or bool(values.min() >= least and values.max() < end)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DamagedError(otherwise)
