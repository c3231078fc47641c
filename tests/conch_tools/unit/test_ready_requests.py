"""Requests with tensors as JSON have the values of those with bytes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from conch_tools.perf.load.input_data import InputRule, made_up
from conch_tools.perf.load.ready_requests import InputTensor, array_data, json_request, texts_data


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "FP16", "FP32", "FP64", "BF16", "BYTES"])
def test_json_has_the_values_of_the_bytes(datatype: str) -> None:
    rules = [InputRule("IN", datatype, (2, 3))]
    ((tensor,),) = made_up(rules, 4, True, 1, "random", seed=5, text_length=7)
    request = json_request([tensor], {"p": 1})
    assert request.head_bytes == 0
    found = json.loads(request.body)
    (written,) = found["inputs"]
    assert found["parameters"] == {"p": 1}
    assert (written["name"], written["datatype"], written["shape"]) == ("IN", datatype, [4, 2, 3])
    values = written["data"]
    if datatype == "BYTES":
        assert texts_data([text.encode() for text in values]) == tensor.data
    else:
        assert array_data(values, datatype) == tensor.data


@pytest.mark.parametrize(
    "tensor",
    [
        InputTensor("IN", "FP32", (1,), np.float32(math.nan).tobytes()),
        InputTensor("IN", "BYTES", (1,), texts_data([b"\xff"])),
    ],
    ids=["nan", "bytes"],
)
def test_json_refuses_values_that_it_has_no_form_for(tensor: InputTensor) -> None:
    with pytest.raises(ValueError):
        json_request([tensor], {})
