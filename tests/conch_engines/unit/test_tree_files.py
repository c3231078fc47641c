"""Damaged files of tree models: refused before C++ code can follow what they say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tree_models import FEATURES, OLD_XGBOOST, lightgbm_model, xgboost_model

from conch.core.errors import ConchError, InternalError
from conch.core.file_formats import XGBOOST_BINARY, identify
from conch_engines.trees.checkpoint import check_checkpoint
from conch_engines.trees.forest import Gtil, TreeliteEngine
from conch_engines.trees.lightgbm_text import read_lightgbm
from conch_engines.trees.model_files import CHECKPOINT, LIGHTGBM, XGBOOST_JSON, XGBOOST_UBJ, DamagedError
from conch_engines.trees.xgboost_file import read_xgboost


@pytest.fixture(scope="module")
def engine() -> TreeliteEngine:
    return TreeliteEngine()


@pytest.fixture(scope="module")
def checkpoint() -> bytes:
    import treelite

    found: bytes = treelite.frontend.from_xgboost(xgboost_model("multi")).serialize_bytes()
    return found


@pytest.fixture(scope="module")
def text() -> bytes:
    model: str = lightgbm_model("multi").model_to_string()
    return model.encode()


@pytest.mark.parametrize("kind", [CHECKPOINT, LIGHTGBM, XGBOOST_UBJ])
def test_a_file_with_changed_bytes_is_refused_or_predicts(
    engine: TreeliteEngine,
    checkpoint: bytes,
    text: bytes,
    tmp_path: Path,
    kind: str,
) -> None:
    ubjson = bytes(xgboost_model("multi").save_raw("ubj"))
    whole = {CHECKPOINT: checkpoint, LIGHTGBM: text, XGBOOST_UBJ: ubjson}[kind]
    path = tmp_path / "file"
    places = st.integers(0, len(whole) - 1)
    changes = st.lists(st.tuples(places, st.sampled_from([0, 1, 45, 57, 127, 255])), min_size=1, max_size=8)

    @given(changes, st.none() | places)
    @settings(deadline=None)
    def check(changes: list[tuple[int, int]], end: int | None) -> None:
        content = bytearray(whole)
        for place, byte in changes:
            content[place] = byte
        path.write_bytes(content[:end])
        with suppress(ConchError):
            forest = engine.open(path, kind, "m")
            if forest.features < 1000:
                Gtil(forest, 1)(np.zeros((2, forest.features), np.float32))

    check()


Change = Callable[[Any], None]


def child_beyond_the_nodes(forest: Any) -> None:
    _set(forest, "cleft", 0, 99)


def node_that_is_its_own_ancestor(forest: Any) -> None:
    _set(forest, "cleft", 1, 0)


def nodes_that_share_a_child(forest: Any) -> None:
    _set(forest, "cleft", 1, 1)


def split_by_an_unknown_feature(forest: Any) -> None:
    _set(forest, "split_index", 0, FEATURES)


def tree_of_an_unknown_class(forest: Any) -> None:
    forest.get_header_accessor().set_field("class_id", np.full(forest.num_tree, 3, np.int32))


def too_few_base_scores(forest: Any) -> None:
    forest.get_header_accessor().set_field("base_scores", np.zeros(1))


def leaves_without_vectors(forest: Any) -> None:
    header = forest.get_header_accessor()
    header.set_field("leaf_vector_shape", np.array([1, 3], np.int32))
    header.set_field("class_id", np.full(forest.num_tree, -1, np.int32))


def _set(forest: Any, name: str, place: int, value: int) -> None:
    tree = forest.get_tree_accessor(0)
    values = tree.get_field(name).copy()
    values[place] = value
    tree.set_field(name, values)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (child_beyond_the_nodes, "tree 0: a child that is no node"),
        (node_that_is_its_own_ancestor, "tree 0: a child that is no node"),
        (nodes_that_share_a_child, "tree 0: a node with two parents"),
        (split_by_an_unknown_feature, "tree 0: a split by an unknown feature"),
        (tree_of_an_unknown_class, "trees of unknown classes"),
        (too_few_base_scores, "1 base scores"),
        (leaves_without_vectors, "tree 0: a leaf without its vector"),
    ],
)
def test_a_checkpoint_that_leads_astray(
    engine: TreeliteEngine, tmp_path: Path, checkpoint: bytes, change: Change, reason: str
) -> None:
    import treelite

    forest = treelite.Model.deserialize_bytes(checkpoint)
    change(forest)
    path = tmp_path / "checkpoint.tl"
    path.write_bytes(forest.serialize_bytes())
    with pytest.raises(InternalError) as caught:
        engine.open(path, CHECKPOINT, "m")
    assert caught.value.message == (
        f"unable to load model 'm': '{path}' can't be read as a treelite checkpoint: {reason}"
    )


def test_checkpoints_have_no_more_and_no_less(checkpoint: bytes) -> None:
    check_checkpoint(checkpoint)
    with pytest.raises(DamagedError, match="bytes behind the last tree"):
        check_checkpoint(checkpoint + b"\0")
    for size in (0, 11, len(checkpoint) // 2, len(checkpoint) - 1):
        with pytest.raises(DamagedError, match="it ends too early"):
            check_checkpoint(checkpoint[:size])


def test_checkpoints_of_old_versions_name_the_way(
    engine: TreeliteEngine, checkpoint: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.tl"
    path.write_bytes(b"\x03\0\0\0" + checkpoint[4:])
    with pytest.raises(InternalError, match=r"convert one of treelite 3.9 with treelite 4: treelite"):
        engine.open(path, CHECKPOINT, "m")


def _tree(document: Any) -> Any:
    return _booster(document)["model"]["trees"][1]


def _booster(document: Any) -> Any:
    return document["learner"]["gradient_booster"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda of: _tree(of)["left_children"].__setitem__(0, 99), "tree 1: a child that is no node"),
        (lambda of: _tree(of)["left_children"].__setitem__(0, 2), "tree 1: a node with two parents"),
        (lambda of: _tree(of)["split_indices"].__setitem__(0, FEATURES), "split by an unknown feature"),
        (lambda of: _tree(of)["split_conditions"].pop(), "tree 1: split_conditions has .* elements"),
        (lambda of: _tree(of)["base_weights"].__setitem__(0, "1"), "base_weights is missing, or no list"),
        (lambda of: _tree(of)["parents"].__setitem__(1, -2), "tree 1: a parent that is no node"),
        (lambda of: _tree(of)["categories"].append(3), "tree 1: splits by unknown categories"),
        (lambda of: _tree(of)["tree_param"].update(size_leaf_vector="2"), "leaves of 2 values for 3 outputs"),
        (lambda of: _tree(of).update(id=0), "tree 1: another number"),
        (lambda of: _booster(of)["model"]["tree_info"].__setitem__(0, 3), "a tree of an unknown output"),
        (lambda of: _booster(of)["model"]["iteration_indptr"].pop(), "iterations in no order"),
        (lambda of: _booster(of)["model"]["trees"].pop(), "trees that are missing"),
        (lambda of: _booster(of)["model"].update(cats={"enc": [{}]}), "categories of unknown features"),
        (lambda of: _booster(of).update(name="gblinear"), "weights is missing, or no list of numbers"),
        (lambda of: of["learner"]["learner_model_param"].update(base_score="[1,2]"), "2 base scores for 3"),
    ],
)
def test_a_model_of_xgboost_that_leads_astray(change: Change, reason: str) -> None:
    document = json.loads(xgboost_model("multi").save_raw("json"))
    read_xgboost(json.dumps(document).encode(), XGBOOST_JSON)
    change(document)
    if reason == "tree 1: splits by unknown categories":
        _tree(document)["split_type"][0] = 1
    with pytest.raises(DamagedError, match=reason):
        read_xgboost(json.dumps(document).encode(), XGBOOST_JSON)


def test_ubjson_is_read_as_json() -> None:
    booster = xgboost_model("multi")
    document = read_xgboost(bytes(booster.save_raw("ubj")), XGBOOST_UBJ).document
    own = read_xgboost(bytes(booster.save_raw("json")), XGBOOST_JSON).document
    as_json = json.loads(json.dumps(document, default=np.ndarray.tolist), parse_float=np.float32)
    assert as_json == json.loads(json.dumps(own), parse_float=np.float32)
    deep = b"{L" + (1).to_bytes(8, "big") + b"a" + b"[" * 10_000
    for content, kind in (
        (deep, XGBOOST_UBJ),
        (b'{"a": ' + b"[" * 100_000, XGBOOST_JSON),
        (b'{"a": 1, "a": 2}', XGBOOST_JSON),
        (b"{" + 2 * b"i\x01aT" + b"}", XGBOOST_UBJ),
    ):
        with pytest.raises(DamagedError):
            read_xgboost(content, kind)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"end of trees", b"end of them", "it ends before the end of its trees"),
        (b"end of parameters", b"", "it ends before the end of its parameters"),
        (rb"\[boosting: gbdt\]", b"[boosting- gbdt]", "a parameter of the training has no name and value"),
        (b"Tree=1\n", b"Tree=11\n", "the sizes of its trees do not fit"),
        (b"num_class=3", b"num_class=three", "num_class is missing, or no number"),
        (b"\nnum_cat=0", b"\nnum_cat=1", "tree 0: cat_boundaries has 0 elements, not 2"),
        (rb"decision_type=\d+", b"decision_type=1", "tree 0: a split by categories that are missing"),
        (rb"left_child=-?\d+", b"left_child=7", "tree 0: its nodes are no tree"),
        (b"left_child=", b"left_child ", "tree 0: a line without a value"),
        (b"leaf_value=", b"leaf_value=_", "tree 0: leaf_value has an element that is no number"),
        (b"Tree=0", b"Tree=\xff", "it is no text"),
    ],
)
def test_a_text_that_leads_astray(text: bytes, old: bytes, new: bytes, reason: str) -> None:
    read_lightgbm(text)
    wrong = re.sub(old, new, text, count=1)
    if reason.startswith("tree 0"):  # the sizes of trees fit
        size = int(text.partition(b"tree_sizes=")[2].split()[0])
        wrong = wrong.replace(b"tree_sizes=%d" % size, b"tree_sizes=%d" % (size + len(wrong) - len(text)), 1)
    assert wrong != text
    with pytest.raises(DamagedError, match=reason):
        read_lightgbm(wrong)


def test_old_files_of_xgboost_are_recognised(tmp_path: Path) -> None:
    for name, content in (("new", OLD_XGBOOST), ("without_magic", OLD_XGBOOST[4:])):
        tmp_path.joinpath(name).write_bytes(content)
        assert identify(tmp_path / name) is XGBOOST_BINARY
    tmp_path.joinpath("no").write_bytes(bytes(200) + OLD_XGBOOST)
    assert identify(tmp_path / "no") is not XGBOOST_BINARY
