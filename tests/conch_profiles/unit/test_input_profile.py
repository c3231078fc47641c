"""Sketches of columns, compared with exact counts, and profiles with training sets."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.tensor import NUMPY_DTYPES, Array, Tensor
from conch_frames.column_rules import ModelColumns, ModelInput, make_columns
from conch_frames.conversion import Table

pytest.importorskip("datasketches", reason="it has no wheels for Python 3.14")

from conch_profiles.input_profile import MOST_COLUMNS, MOST_ROWS, InputProfile
from conch_profiles.profile_check import check_profile
from conch_profiles.sketches import MOST_TEXT, NumberSketch, TextSketch
from conch_profiles.training_counter import TrainingCounter
from conch_profiles.training_profile import (
    TrainingColumn,
    TrainingNumbers,
    TrainingProfile,
    TrainingTexts,
    psi,
    read_training,
)

RANKS = (0.05, 0.25, 0.5, 0.75, 0.95)
MOST_ERROR = 0.02
DAY_S = 86400.0


def columns(stated: str | None = None, **datatypes: str) -> ModelColumns:
    inputs = [ModelInput(name, datatype, (-1, 1)) for name, datatype in datatypes.items()]
    return make_columns("m", inputs, stated, 8)


def wire(name: str, datatype: str, values: Iterable[Any]) -> Tensor:
    """A tensor as it comes over gRPC."""
    listed = list(values)
    if datatype == "BYTES":
        data = b"".join(struct.pack("<I", len(each)) + each for each in listed)
    else:
        data = np.array(listed, NUMPY_DTYPES[datatype]).tobytes()
    return Tensor(name, datatype, (len(listed), 1), data)


def counted(profile: InputProfile, *requests: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """The columns by name, once requests are counted."""
    for inputs in requests:
        sample = profile.sample(inputs)
        assert sample is not None
        profile.add(sample)
        profile.fold(lambda: None)
        profile.reopen()
    return {each["name"]: each for each in profile.as_object()["columns"]}


@given(st.lists(st.floats(width=32) | st.integers(-5, 5).map(float), min_size=1, max_size=400))
def test_a_sketch_of_numbers_has_exact_counts_and_nearly_exact_quantiles(values: list[float]) -> None:
    edges = [-1.0, 0.0, 2.5]
    sketch, other = NumberSketch(edges), NumberSketch(edges)
    half = len(values) // 2
    sketch.add(np.array(values[:half], np.float32))
    other.add(np.array(values[half:], np.float64)[::1])
    sketch.merge(other)
    array = np.array(values)
    finite = np.sort(array[np.isfinite(array)])
    assert (sketch.rows, sketch.nulls) == (len(array), np.isnan(array).sum())
    assert sketch.infinities == np.isinf(array).sum()
    bounds = [-np.inf, *edges, np.inf]
    assert sketch.bins.tolist() == [
        ((finite > low) & (finite <= high)).sum() for low, high in pairwise(bounds)
    ]
    if not len(finite):
        assert sketch.quantiles(RANKS) == []
        return
    slack = MOST_ERROR + 1 / len(finite)
    for rank, value in zip(RANKS, sketch.quantiles(RANKS), strict=True):
        below, upto = (finite < value).mean(), (finite <= value).mean()
        assert below - slack <= rank <= upto + slack


@given(st.lists(st.sampled_from("abcdef") | st.text(max_size=3), max_size=300))
def test_a_sketch_of_texts_has_exact_counts_and_all_frequent_texts(values: list[str]) -> None:
    sketch = TextSketch(["a", "b"], {"a", "b", "c"})
    sketch.add(Counter(values[::2]), 2)
    other = TextSketch(["a", "b"], {"a", "b", "c"})
    other.add(Counter(values[1::2]))
    sketch.merge(other)
    exact = Counter(values)
    assert (sketch.rows, sketch.nulls) == (len(values) + 2, 2)
    assert sketch.bins.tolist() == [exact["a"], exact["b"], len(values) - exact["a"] - exact["b"]]
    assert sketch.new == len(values) - sum(exact[each] for each in "abc")
    found = dict(sketch.frequent())
    assert all(found[text] <= count for text, count in exact.items() if text in found)
    assert {text for text, count in exact.items() if count > 0.014 * len(values)} <= found.keys()


def test_a_column_of_each_kind_is_counted_by_its_rule() -> None:
    stated = """[
        {"name": "plan", "categories": ["basic", "pro"], "codes": true},
        {"name": "level", "categories": [10.0, 0.1]},
        {"name": "since", "unit": "ms"},
        {"name": "town", "null": "-"}
    ]"""
    types = {"age": "FP32", "plan": "FP32", "level": "FP32", "since": "INT64", "town": "BYTES", "on": "BOOL"}
    rows: dict[str, list[Any]] = {
        "age": [1.5, np.nan, np.inf, 3.5],
        "plan": [0, 1, 1, np.nan],
        "level": [0.1, 0.1, 10, 0.1],
        "since": [1000, 2000, 3000, 4000],
        "town": [b"-", b"Ulm", "K\u00f6ln".encode(), b"\xff" + b"x" * 200],
        "on": [True, False, True, True],
    }
    profile = InputProfile(columns(stated, **types), None, "", DAY_S)
    tensors = {name: wire(name, types[name], values) for name, values in rows.items()}
    arrays = {
        name: Tensor(name, types[name], (4, 1), None, each.numpy().copy()) for name, each in tensors.items()
    }
    for inputs in (tensors, arrays):
        found = counted(InputProfile(columns(stated, **types), None, "", DAY_S), inputs)
        assert (found["age"]["nulls"], found["age"]["infinite"]) == (1, 1)
        assert (found["age"]["quantiles"]["0"], found["age"]["quantiles"]["1"]) == (1.5, 3.5)
        assert found["plan"]["top"] == [{"value": "pro", "share": 0.5}, {"value": "basic", "share": 0.25}]
        assert found["plan"]["nulls"] == found["town"]["nulls"] == 1
        assert found["level"]["top"][0] == {"value": "0.1", "share": 0.75}
        assert (found["since"]["quantiles"]["0"], found["since"]["quantiles"]["1"]) == (1.0, 4.0)
        long = next(each["value"] for each in found["town"]["top"] if "x" in each["value"])
        assert len(long) == MOST_TEXT and long[0] == "\ufffd"
        assert found["on"]["top"] == [{"value": "true", "share": 0.75}, {"value": "false", "share": 0.25}]
        assert all(each["rows"] == 4 and each["psi"] is None for each in found.values())
    assert profile.requests == 0  # each has its own


def test_columns_of_a_matrix_are_counted_by_their_places() -> None:
    matrix = make_columns("m", [ModelInput("x", "FP32", (-1, 3))], '["a", "b", "c"]', 8)
    profile = InputProfile(matrix, None, "", DAY_S)
    data = np.arange(3000, dtype=np.float32).reshape(1000, 3)
    sent = Tensor("x", "FP32", (1000, 3), data.tobytes())
    strange = Tensor("x", "FP32", (4, 2), data[:4, :2].tobytes())
    found = counted(profile, {"x": sent}, {"x": strange})
    assert [found[name]["quantiles"]["0"] for name in "abc"] == [0, 1, 2]
    assert {each["rows"] for each in found.values()} == {500}  # spread over the request
    assert found["a"]["quantiles"]["1"] > 2900
    one = make_columns("m", [ModelInput("x", "FP32", (-1, -1))], '["a"]', 8)
    strange = Tensor("x", "FP32", (2, 3), data[:2].tobytes())
    assert counted(InputProfile(one, None, "", DAY_S), {"x": strange})["a"]["rows"] == 0


def test_columns_of_a_matrix_of_texts_stay_apart_where_a_request_is_cut() -> None:
    matrix = make_columns("m", [ModelInput("x", "BYTES", (-1, 3))], '["a", "b", "c"]', 8)
    profile = InputProfile(matrix, None, "", DAY_S)
    cut = wire("x", "BYTES", [letter * 1000 for letter in (b"a", b"b", b"c")] * 100)
    cut.shape = (100, 3)
    sample = profile.sample({"x": cut})
    assert sample is not None and profile.add(sample) and not profile.add(sample)
    profile.fold(lambda: None)
    for each in profile.as_object()["columns"]:
        assert {shown["value"][0] for shown in each["top"]} == {each["name"]} and each["rows"] > 0


def test_a_sample_is_a_copy_of_the_columns_that_are_profiled() -> None:
    names = [f"c{number}" for number in range(5 * MOST_COLUMNS)]
    matrix = make_columns("m", [ModelInput("x", "FP32", (-1, len(names)))], json.dumps(names), 8)
    wide = InputProfile(matrix, None, "", DAY_S)
    rows = np.arange(MOST_ROWS * len(names), dtype=np.float32).reshape(MOST_ROWS, len(names))
    sample = wide.sample({"x": Tensor("x", "FP32", rows.shape, None, rows)})
    assert sample is not None and sample.nbytes == MOST_ROWS * MOST_COLUMNS * 4
    small = Tensor("x", "FP32", (2, len(names)), rows[:2].tobytes())
    assert counted(wide, {"x": small})["c99"]["quantiles"]["1"] == rows[1, 99]
    block = bytearray(struct.pack("<2d", 1, 2))
    profile = InputProfile(columns(x="FP64"), None, "", DAY_S)
    sample = profile.sample({"x": Tensor("x", "FP64", (2, 1), memoryview(block))})
    block[:] = bytes(16)  # its owner uses it again
    assert sample is not None and profile.add(sample)
    profile.fold(lambda: None)
    assert profile.as_object()["columns"][0]["quantiles"]["0"] == 1


def test_long_texts_are_counted_and_not_kept() -> None:
    long = [b"y" * (1 << 20), b"z" * (1 << 20)]
    array = np.array(long, object).reshape(2, 1)
    profile = InputProfile(columns(t="BYTES"), None, "", DAY_S)
    sample = profile.sample({"t": Tensor("t", "BYTES", (2, 1), None, array)})
    assert sample is not None and sum(map(len, sample.pieces["t"])) < 1024
    column = counted(profile, {"t": wire("t", "BYTES", long[:1])})["t"]
    assert (column["rows"], column["top"][0]["value"]) == (1, "y" * MOST_TEXT)
    names = [f"t{number}" for number in range(MOST_COLUMNS)]
    profile = InputProfile(columns(**dict.fromkeys(names, "BYTES")), None, "", DAY_S)
    whole = profile.sample({name: wire(name, "BYTES", long[:1]) for name in names})
    assert whole is not None and profile.add(whole) and not profile.is_open


@pytest.mark.parametrize("datatype", ["FP64", "FP32", "FP16"])
def test_numbers_on_edges_have_no_drift_in_any_precision(datatype: str) -> None:
    tenths = np.tile(np.arange(1, 10) / 10, 100)
    counter = TrainingCounter()
    for take in (counter.scan, counter.count):
        take(Table({"x": tenths}))
    profile = InputProfile(columns(x=datatype), counter.profile(), "", DAY_S)
    found = counted(profile, *({"x": wire("x", datatype, half)} for half in np.split(tenths, 2)))
    assert found["x"]["psi"] == 0


def test_columns_of_a_training_set_are_found_as_the_model_has_them() -> None:
    large = [2**53 + 1, 2**53 + 3]
    levels = {"name": "level", "categories": [0.1, 10.0]}
    stated = json.dumps([{"name": "a_b", "spaces": True}, {"name": "id", "categories": large}, levels])
    counter = TrainingCounter()
    dates = np.array(["2026-01-01", "NaT"] * 250, "datetime64[ns]")
    level = np.array([0.1, 10] * 250, np.float32)
    table = Table({"a b": np.ones(500), "id": np.array(large * 250), "level": level, "when": dates})
    for take in (counter.scan, counter.count):
        take(table)
    trained = counter.profile()
    # A request has the text of a date in any form.
    assert trained.columns["when"].texts is None and trained.columns["when"].nulls == 250
    model = columns(stated, a_b="FP64", id="INT64", level="FP32")
    request = {"a_b": wire("a_b", "FP64", [1.0] * 500), "id": wire("id", "INT64", large * 250)}
    request["level"] = wire("level", "FP32", level)
    found = counted(InputProfile(model, trained, "", DAY_S), request)
    assert [found[name]["psi"] for name in ("a_b", "id", "level")] == [0, 0, 0]
    assert found["id"]["new"] == found["level"]["new"] == 0


def test_nan_of_csv_is_a_null_of_numbers_and_else_a_text() -> None:
    counter = TrainingCounter()
    cells = {"x": ["nan", "1", "", "2"], "none": ["NaN", "nan", "", ""], "t": ["nan", "a", "", "b"]}
    table = Table({name: [each or None for each in column] for name, column in cells.items()}, texts=True)
    for take in (counter.scan, counter.count):
        take(table)
    found = counter.profile().columns
    assert found["x"].nulls == 2 and found["x"].texts == TrainingTexts({"1": 1, "2": 1})
    assert found["none"].nulls == 4 and found["none"].texts is None
    assert found["t"].nulls == 1 and found["t"].texts is not None and "nan" in found["t"].texts.counts


def skewed(shift: float, count: int = 4000) -> Array:
    return np.random.default_rng(7).normal(shift, 1, count)


TRAINED = TrainingProfile(
    4000,
    {
        "x": TrainingColumn(
            0, TrainingNumbers(tuple(np.quantile(skewed(0), np.arange(1, 10) / 10).tolist()), (400,) * 10)
        ),
        "t": TrainingColumn(0, None, TrainingTexts({"a": 3000, "b": 1000})),
        "many": TrainingColumn(0, None, TrainingTexts({"a": 3000}, others=1000)),
        "wrong": TrainingColumn(0, None, TrainingTexts({"1": 4000})),
    },
)


def test_the_same_distribution_has_no_drift_and_another_one_has() -> None:
    types = {"x": "FP64", "t": "BYTES", "many": "BYTES", "wrong": "FP64", "extra": "FP64"}
    random = np.random.default_rng(8)

    def requests(shift: float, texts: list[bytes], rows: int) -> list[dict[str, Tensor]]:
        values = random.normal(shift, 1, rows)
        chosen = [texts[each] for each in random.integers(len(texts), size=rows)]
        return [
            {
                name: wire(name, kind, chosen[at : at + 500] if kind == "BYTES" else values[at : at + 500])
                for name, kind in types.items()
            }
            for at in range(0, rows, 500)
        ]

    alike = counted(
        InputProfile(columns(**types), TRAINED, "", DAY_S), *requests(0, [b"a", b"a", b"a", b"b"], 4000)
    )
    assert 0 <= alike["x"]["psi"] < 0.02 and 0 <= alike["t"]["psi"] < 0.02
    assert alike["t"]["new"] == 0 and alike["many"]["new"] is None
    assert (alike["wrong"]["psi"], alike["extra"]["psi"]) == (None, None)
    assert "no numbers" in alike["wrong"]["note"] and "no such column" in alike["extra"]["note"]
    drifted = counted(InputProfile(columns(**types), TRAINED, "", DAY_S), *requests(1, [b"a", b"c"], 4000))
    assert drifted["x"]["psi"] > 0.5 and drifted["t"]["psi"] > 0.5
    assert drifted["t"]["new"] == pytest.approx(0.5, abs=0.05) and drifted["t"]["new_values"] == ["c"]
    assert sum(each["requests"] for each in drifted["x"]["bins"]) == pytest.approx(1)
    gaps = np.where(np.arange(4000) % 3 == 0, np.nan, skewed(0)).reshape(8, 500)
    nulls = counted(
        InputProfile(columns(x="FP64"), TRAINED, "", DAY_S), *({"x": wire("x", "FP64", row)} for row in gaps)
    )
    assert nulls["x"]["psi"] > 0.5 and nulls["x"]["bins"][-1]["is"] == "null"
    few = counted(InputProfile(columns(**types), TRAINED, "", DAY_S), requests(1, [b"a"], 100)[0])
    assert few["x"]["psi"] is None and "needs 500 rows" in few["x"]["note"]


@given(st.lists(st.integers(0, 50), min_size=2, max_size=20).filter(any))
def test_psi_is_zero_for_equal_shares_and_never_below(counts: list[int]) -> None:
    assert psi(counts, [3 * each for each in counts]) == pytest.approx(0, abs=1e-12)
    assert psi(counts, counts[::-1]) >= 0


def test_memory_and_work_are_bounded_whatever_clients_send() -> None:
    names = {f"c{number}": "FP64" for number in range(MOST_COLUMNS + 5)} | {"t": "BYTES"}
    profile = InputProfile(columns(**names), None, "", DAY_S)
    assert len(profile.as_object()["columns"]) == MOST_COLUMNS
    assert profile.left_out == [*list(names)[MOST_COLUMNS:]]
    texts = InputProfile(columns(t="BYTES"), None, "", DAY_S)
    for start in range(0, 20_000, 1000):
        request = {"t": wire("t", "BYTES", (f"{each:0100}".encode() for each in range(start, start + 1000)))}
        column = counted(texts, request)["t"]
    assert column["rows"] == 20 * MOST_ROWS and len(column["top"]) <= 10
    taken = 0
    one = profile.sample({"c0": wire("c0", "FP64", [1.0])})
    assert one is not None
    while profile.is_open:
        profile.add(one)
        taken += 1
    assert taken == 64 and not profile.add(one)
    whole = texts.sample({"t": wire("t", "BYTES", [b"x" * (1 << 20)])})
    assert whole is not None and len(whole.pieces["t"]) <= 64 << 10


def test_inputs_that_can_not_be_read_are_left_to_the_model() -> None:
    profile = InputProfile(columns(x="FP64"), None, "", DAY_S)
    assert profile.sample({"x": Tensor("x", "FP64", (), b"")}) is None
    sample = profile.sample({})
    assert sample is not None and sample.pieces == {}


def test_a_profile_covers_two_windows() -> None:
    now = [0]
    profile = InputProfile(columns(x="FP64"), None, "", 10.0, lambda: now[0])

    def rows_after(seconds: int, *requests: dict[str, Tensor]) -> tuple[int, float]:
        now[0] += seconds * 10**9
        return counted(profile, *requests)["x"]["rows"], profile.as_object()["seconds"]

    request = {"x": wire("x", "FP64", [1.0, 2.0])}
    assert rows_after(1, request) == (2, 1)
    assert rows_after(10, request) == (4, 11)
    assert rows_after(10, request) == (4, 10)  # the first window is forgotten
    assert rows_after(10) == (2, 10)
    assert rows_after(1, request) == (4, 11)
    assert rows_after(20) == (0, 0)  # as the window before had no requests


NUMBERS = '{"format": 1, "rows": 1, "columns": {"x": {"nulls": 0, "numbers": %s}}}'


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "is no JSON"),
        ("[]", "the profile must have 'format', a whole number"),
        ('{"format": 2, "rows": 1, "columns": {}}', "its format is 2"),
        ('{"format": 1, "rows": true, "columns": {}}', "'rows', a whole number"),
        ('{"format": 1, "rows": 1, "columns": {"x": {"nulls": -1}}}', "'nulls' of column 'x' is below 0"),
        (NUMBERS % '{"edges": [1, 1], "counts": [], "quantiles": []}', "edges ascend"),
        (NUMBERS % '{"edges": [1], "counts": [1], "quantiles": []}', "one more than edges"),
        (NUMBERS.replace("numbers", "categories") % '{"counts": {"a": 1.5}, "others": 0}', "whole numbers"),
    ],
)
def test_a_malformed_training_set_is_reported(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "profile.json").write_text(content)
    (finding,) = check_profile({}, tmp_path, None)
    assert finding.severity == "warning" and text in finding.message, finding.message


def test_a_parameter_that_is_no_boolean_is_reported(tmp_path: Path) -> None:
    (finding,) = check_profile({"parameters": {"CONCH_PROFILE": {"string_value": "yes"}}}, tmp_path, None)
    assert finding.severity == "error" and "must be 'true' or 'false'" in finding.message


def test_a_training_set_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(TRAINED.text())
    assert read_training(tmp_path / "profile.json") == TRAINED
    assert read_training(tmp_path / "none.json") is None and not [*check_profile({}, tmp_path / "none", None)]
