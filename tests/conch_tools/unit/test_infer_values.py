"""Values of `conch infer`: what a command line and JSON say, as tensors that fit the model."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conch.core.tensor import NUMPY_DTYPES, Tensor
from conch_tools.infer.client import InferResponse, array_of
from conch_tools.infer.display import as_json
from conch_tools.infer.images import ImageError, image_array
from conch_tools.infer.input_values import InputError, make_tensors, read_value
from conch_tools.infer.signature import ModelSignature, TensorRule

NUMBERS = TensorRule("N", "FP32", (-1, 2, 2))
TEXTS = TensorRule("T", "BYTES", (-1, 1))
COLUMN = TensorRule("C", "FP64", (-1, 1))
FLAGS = TensorRule("F", "BOOL", (-1, 1))
WHOLE = TensorRule("W", "INT8", (-1, -1))
BATCHED = ModelSignature("m", [NUMBERS, TEXTS, WHOLE], [], True, most_rows=4)


def read(rule: TensorRule, text: str, stdin: bytes = b"") -> Tensor:
    """The tensor of one input of a model that has only that."""
    signature = ModelSignature("m", [rule], [], True, most_rows=4)
    value = read_value(signature, rule, text, "none", lambda: stdin)
    (tensor,) = make_tensors(signature, {rule.name: value})
    return tensor


@pytest.mark.parametrize("datatype", [*NUMPY_DTYPES, "BF16"])
def test_what_json_shows_is_what_json_sends(datatype: str) -> None:
    random = np.random.default_rng(7)
    if datatype == "BYTES":
        array = np.array([b"", "ü\n".encode(), b"\xff\x00", b"[1]"], object)
        tensor = Tensor.from_array("IN", array, datatype)
    elif datatype == "BOOL":
        tensor = Tensor.from_array("IN", np.array([True, False, True, True]), datatype)
    else:
        width = 2 if datatype == "BF16" else NUMPY_DTYPES[datatype].itemsize
        if datatype == "BF16" or NUMPY_DTYPES[datatype].kind == "f":
            # Its largest number, its infinity, a number that is no round one, and minus zero.
            source = "FP32" if datatype == "BF16" else datatype
            made = np.array([np.finfo(NUMPY_DTYPES[source]).max, np.inf, 1 / 3, -0.0], NUMPY_DTYPES[source])
            data = made.view(np.uint16)[1::2].tobytes() if datatype == "BF16" else made.tobytes()
        else:
            data = random.bytes(4 * width)
        tensor = Tensor("IN", datatype, (4,), data)
    rule = TensorRule("IN", datatype, (4,))
    (shown,) = as_json(InferResponse("m", "1", "", {}, [tensor]))["outputs"]
    sent = json.loads(json.dumps(shown["data"]))
    (again,) = make_tensors(ModelSignature("m", [rule], [], False), {"IN": sent})
    assert (bytes(again.data), again.shape) == (bytes(tensor.data), (4,))


@pytest.mark.parametrize(
    ("rule", "text", "shape", "values"),
    [
        (NUMBERS, "[[[1, 2], [3, 4]]]", (1, 2, 2), [1, 2, 3, 4]),
        (NUMBERS, "[[1, 2], [3, 4]]", (1, 2, 2), [1, 2, 3, 4]),
        (NUMBERS, "[1, 2, 3, 4]", (1, 2, 2), [1, 2, 3, 4]),
        (WHOLE, "5", (1, 1), [5]),
        (WHOLE, "[1.0, 2]", (1, 2), [1, 2]),
        (WHOLE, "[[1, 2], [3, 4]]", (2, 2), [1, 2, 3, 4]),
        (WHOLE, "7, 8", (1, 2), [7, 8]),
        (COLUMN, "70,57", (2, 1), [70, 57]),
        (COLUMN, "true,-1.5", (2, 1), [1, -1.5]),
        (COLUMN, "null", (1, 1), [None]),
        (FLAGS, "true", (1, 1), [True]),
        (FLAGS, "true,false", (2, 1), [True, False]),
        (TEXTS, "a text, not JSON", (1, 1), [b"a text, not JSON"]),
        (TEXTS, "5", (1, 1), [b"5"]),
        (TEXTS, '["a"]', (1, 1), [b"a"]),
        (TEXTS, '[["a"], ["b"]]', (2, 1), [b"a", b"b"]),
        (TEXTS, "[no JSON", (1, 1), [b"[no JSON"]),
        (TEXTS, "@@here", (1, 1), [b"@here"]),
        (TEXTS, "@-", (1, 1), [b"from\nstandard input"]),
    ],
)
def test_forms_of_values(rule: TensorRule, text: str, shape: tuple[int, ...], values: list[Any]) -> None:
    tensor = read(rule, text, b"from\nstandard input\n")
    found = [None if each != each else each for each in array_of(tensor).ravel().tolist()]
    assert (tensor.shape, found) == (shape, values)


def test_arrays_of_files_are_converted_if_the_datatype_holds_them(tmp_path: Path) -> None:
    file = tmp_path / "array.npy"
    np.save(file, np.array([[1, 2]], np.int64))
    assert array_of(read(WHOLE, f"@{file}")).dtype == np.int8
    np.save(file, np.array([[1, 200]], np.int64))
    with pytest.raises(InputError, match="'W' has values that INT8 can't hold"):
        read(WHOLE, f"@{file}")
    np.save(file, np.array(["ü"]))
    assert array_of(read(TEXTS, f"@{file}")).tolist() == [["ü".encode()]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"X": 1}, r"model 'm' has no input 'X'; it has N FP32 \[-1, 2, 2\], T BYTES"),
        ({}, "no value for N, T, W; model 'm' has N FP32"),
        ({"N": [1, 2, 3]}, r"'N' takes FP32 of shape \[-1, 2, 2\], the first for .*; the value has .*\[3\]"),
        ({"N": [[1, 2], [3]]}, "'N' has lists of different lengths"),
        ({"N": ["a", 2, 3, 4]}, r"'N' takes numbers \(FP32\), not 'a'"),
        ({"N": [1e39, 2, 3, 4]}, "'N': 1e.39 is out of the range of FP32"),
        ({"W": 128}, "'W': 128 is out of the range of INT8"),
        ({"N": [2**24 + 1, 2, 3, 4]}, "'N': FP32 has whole numbers up to 16777216, not 16777217"),
        ({"N": np.full((2, 2), 2**24 + 1)}, "'N' has values that FP32 can't hold"),
        ({"W": 1.5}, r"'W' takes whole numbers \(INT8\), not '1.5'"),
        ({"W": None}, r"'W' takes whole numbers \(INT8\), not 'null'"),
        ({"W": [[1]] * 5}, "'W' has 5 rows, and the model takes 4 at most"),
        ({"W": {"b64": "?"}}, "'W' is neither a list nor has it 'b64'"),
        ({"W": {"content": [1, 2], "shape": [3]}}, r"'W' has 2 elements, which do not fill \[3\]"),
        ({"T": 1}, r"'T' takes texts \(BYTES\), not '1'"),
        ({"T": "\udcff"}, "'T' has a text that is not UTF-8: give bytes as @FILE"),
    ],
)
def test_values_that_do_not_fit(values: dict[str, Any], message: str) -> None:
    others = {"N": [1, 2, 3, 4], "T": "a", "W": 1} if values else {}
    with pytest.raises(InputError, match=message):
        make_tensors(BATCHED, {**others, **values})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"C": [70, 57], "T": "a,b"}, """'T' has 1 rows, and input 'C' has 2: write texts as '["a", "b"]'"""),
        ({"C": 70, "T": ["a", "b"], "F": [True, False]}, "'C' has 1 rows, and input 'T' has 2"),
    ],
)
def test_the_input_with_other_rows_is_named(values: dict[str, Any], text: str) -> None:
    rules = [each for each in (COLUMN, TEXTS, FLAGS) if each.name in values]
    with pytest.raises(InputError, match=f"^input {re.escape(text)}$"):
        make_tensors(ModelSignature("m", rules, [], True, most_rows=4), values)


def test_null_is_no_text() -> None:
    with pytest.raises(InputError, match="and null is none: the text null is '\"null\"'"):
        read(TEXTS, "null")
    assert array_of(read(TEXTS, '"null"')).tolist() == [[b"null"]]
    knows = ModelSignature("m", [TEXTS], [], True, 4, stated_columns='[{"name": "T", "null": "-"}]')
    assert read_value(knows, TEXTS, "null", "none", bytes) == "-"


def test_a_whole_number_is_not_rounded() -> None:
    rule = TensorRule("L", "INT64", (-1, 1))
    assert array_of(read(rule, "9007199254740993")).item() == 2**53 + 1
    assert array_of(read(rule, "1e15")).item() == 10**15
    with pytest.raises(InputError, match=r"'L': 9007199254740992\.0 may have been rounded"):
        read(rule, "9007199254740993.0")
    with pytest.raises(InputError, match=r"'L': 1e.18 may have been rounded"):
        read(rule, "1e18")
    brain = TensorRule("B", "BF16", (-1, 1))
    with pytest.raises(InputError, match="'B': BF16 has whole numbers up to 256, not 257"):
        read(brain, "257")


@pytest.mark.parametrize("text", ["1e400", "[1, -1e400]", "1,1e400", pytest.param("[" * 100_000, id="deep")])
def test_what_is_no_number_of_json_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="'C' takes FP64 as JSON"):
        read(COLUMN, text)


def image_file(*pixels: tuple[int, int, int]) -> bytes:
    """A PNG with these pixels beside each other."""
    image = Image.new("RGB", (len(pixels), 1))
    image.putdata(pixels)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("shape", "layout", "scaling", "expected"),
    [
        ((1, 2, 3), "NHWC", "none", [[[255, 0, 0], [0, 0, 255]]]),
        ((3, 1, 2), "", "none", [[[255, 0]], [[0, 0]], [[0, 255]]]),
        ((3, -1, -1), "", "inception", [[[1, -1]], [[-1, -1]], [[-1, 1]]]),
        ((1, 2), "", "unit", [[76 / 255, 29 / 255]]),  # luma of red and of blue
    ],
)
def test_pixels_have_the_layout_of_the_input(
    shape: tuple[int, ...], layout: str, scaling: str, expected: Any
) -> None:
    rule = TensorRule("I", "FP32", (-1, *shape), layout=layout)
    found = image_array(image_file((255, 0, 0), (0, 0, 255)), rule, True, scaling)
    np.testing.assert_allclose(found, [expected], rtol=1e-6)
    (tensor,) = make_tensors(ModelSignature("m", [rule], [], True), {"I": found})
    assert tensor.shape == (1, *np.shape(expected))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (TensorRule("I", "FP32", (7,)), "takes no image"),
        (TensorRule("I", "FP32", (3, 8, 3)), "the config's 'format' must say which"),
        (TensorRule("I", "UINT8", (8, 8, 3)), "leave --image-scaling out"),
    ],
)
def test_inputs_that_take_no_image(rule: TensorRule, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        image_array(image_file((0, 0, 0)), rule, False, "unit")
