"""The console's browser modules, by node: their own tests, and tensors compared with numpy's bytes."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from typing import Any

import numpy as np
import pytest
from tests.support.console import STATIC, node_problem
from tests.support.servers import ROOT

from conch.core.tensor import NUMPY_DTYPES, brain_floats, encode_bytes

pytestmark = pytest.mark.process


@pytest.fixture(scope="module", autouse=True)
def node() -> None:
    """Skips the module without node."""
    if problem := node_problem():
        pytest.skip(problem)


def test_the_modules_pass_their_tests() -> None:
    files = sorted(str(path) for path in (ROOT / "tests" / "conch_console" / "js").glob("*.test.mjs"))
    environment = {**os.environ, "CONCH_STATIC": str(STATIC)}
    done = subprocess.run(
        ["node", "--test", "--test-reporter=spec", *files],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_tensors_have_the_bytes_that_numpy_gives_them() -> None:
    random = np.random.default_rng(7)
    cases: list[tuple[str, list[Any]]] = []
    expected: list[bytes] = []
    for datatype, dtype in NUMPY_DTYPES.items():
        if datatype == "BYTES":
            texts = ["", "a", "é€😀", "x" * 300]
            cases.append((datatype, texts))
            expected.append(bytes(encode_bytes([text.encode() for text in texts])))
        elif dtype.kind == "f":
            values = _floats(random)
            with np.errstate(over="ignore"):
                expected.append(np.array(values, np.float64).astype(dtype).tobytes())
            cases.append((datatype, [str(value) for value in values]))
        elif dtype.kind == "b":
            cases.append((datatype, ["true", "false"]))
            expected.append(np.array([True, False]).tobytes())
        else:
            limits = np.iinfo(dtype)
            numbers = [limits.min, limits.max, 0, 1, *random.integers(limits.min, limits.max, 20, dtype)]
            cases.append((datatype, [str(number) for number in numbers]))
            expected.append(np.array(numbers, dtype).tobytes())
    # Values that have the same digits in both kinds of float: conversion to BF16 begins at FP32.
    brains = [float(value) for value in np.array(_floats(random), np.float32)]
    cases.append(("BF16", [str(value) for value in brains]))
    expected.append(brain_floats(np.array(brains, np.float32)))
    program = (
        f'import {{ encodeTensor, parseValues }} from "file://{STATIC}/js/tensors.js";\n'
        'import { readFileSync } from "node:fs";\n'
        'const cases = JSON.parse(readFileSync(0, "utf8"));\n'
        "const valuesOf = (datatype, texts) => "
        'datatype === "BYTES" ? texts : parseValues(texts.join(" "), datatype).values;\n'
        "console.log(JSON.stringify(cases.map(([datatype, texts]) => "
        'Buffer.from(encodeTensor(datatype, valuesOf(datatype, texts))).toString("base64"))));'
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", program],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
    )
    for (datatype, texts), made, bytes_ in zip(cases, json.loads(done.stdout), expected, strict=True):
        assert base64.b64decode(made) == bytes_, (datatype, texts)


def _floats(random: np.random.Generator) -> list[float]:
    edges = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        65504.0,
        65519.0,
        65520.0,
        1e-8,
        6e-8,
        6.1e-5,
        1e30,
        float("inf"),
        -float("inf"),
    ]
    spread = random.normal(size=200) * 10.0 ** random.integers(-8, 5, 200)
    ties = [1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 3 * 2**-25]  # between two FP16 numbers
    return [*edges, *map(float, spread), *ties]
