"""Samples of `conch optimize`, and the configs that it writes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conch.core.errors import InvalidArgumentError
from conch_tools.optimize.model_signature import ModelSignature
from conch_tools.optimize.sample_data import fitted, random_samples, read_arrays, read_json

SIGNATURE = ModelSignature.of(
    {
        "batching": True,
        "inputs": [
            {"name": "image", "datatype": "FP32", "dims": [2, -1]},
            {"name": "text", "datatype": "BYTES", "dims": [1]},
        ],
        "outputs": [{"name": "y", "datatype": "FP32", "dims": []}],
    }
)


def test_json_of_perf_analyzer(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32)
    forms: list[Any] = [
        {"content": values.tolist(), "shape": [2, 2]},
        {"content": {"b64": base64.b64encode(values.tobytes()).decode()}, "shape": [2, 2]},
        {"b64": base64.b64encode(values.tobytes()).decode()},
        values.tolist(),
    ]
    file = tmp_path / "data.json"
    file.write_text(json.dumps({"data": [{"image": form, "text": ["word"]} for form in forms]}))
    assert read_arrays(file) == {}
    found = read_json(file, SIGNATURE)
    assert (found["image"] == values.reshape(2, 2)).all()
    assert found["text"].tolist() == [[b"word"]] * len(forms)
    file.write_text('{"data": [{"image": [1]}]}')
    with pytest.raises(InvalidArgumentError, match="is not of the form"):
        read_json(file, SIGNATURE)


def test_arrays_of_files(tmp_path: Path) -> None:
    array = np.arange(6).reshape(3, 2)
    np.savez(tmp_path / "a.npz", x=array)
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "x.npy", array)
    for place in ("a.npz", "folder"):
        assert (read_arrays(tmp_path / place)["x"] == array).all()
    (tmp_path / "a.csv").touch()
    with pytest.raises(InvalidArgumentError, match=r"must be an \.npz file"):
        read_arrays(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"image": None}, "has no array for input 'image'; it has 'text'"),
        ({"image": np.zeros((40, 3, 5))}, r"expected samples of \[2, -1\]"),
        ({"image": np.zeros((40, 2))}, r"has the shape \[40, 2\]"),
        ({"image": np.zeros((39, 2, 5))}, r"all inputs need as many samples, not \[39, 40\]"),
    ],
)
def test_arrays_that_do_not_suit(changes: dict[str, Any], text: str) -> None:
    arrays = {"image": np.zeros((40, 2, 5)), "text": np.full((40, 1), "a")}
    assert fitted(arrays, SIGNATURE, "it")["image"].dtype == np.float32
    given = {name: array for name, array in {**arrays, **changes}.items() if array is not None}
    with pytest.raises(InvalidArgumentError, match=text):
        fitted(given, SIGNATURE, "it")


def test_random_samples_need_all_dims() -> None:
    with pytest.raises(InvalidArgumentError, match="--shape image:2,N"):
        random_samples(SIGNATURE, {})
    found = random_samples(SIGNATURE, {"image": (2, 7)})
    assert fitted(found, SIGNATURE, "random").keys() == found.keys()


def test_an_output_of_one_value_has_dims_in_the_config() -> None:
    (output,) = SIGNATURE.with_dims().outputs
    assert (output.dims, output.reshape) == ((1,), ())
    assert ModelSignature.of(json.loads(json.dumps(SIGNATURE.with_dims().as_json()))) == SIGNATURE.with_dims()
