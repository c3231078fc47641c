"""Tests of the backend 'standardize'; they need no server."""

from pathlib import Path

import numpy as np
import pytest

import conch.testing

MODEL = Path(__file__).parent / "models/standardize"


def test_rows_of_requests_that_share_a_batch():
    inputs = [{"INPUT": np.array([[1, 2, 3]] * rows, np.float32) * rows} for rows in (1, 2)]
    with conch.testing.load(MODEL) as model:
        for given, outputs in zip(inputs, model.run_all(inputs), strict=True):
            expected = [[-(1.5**0.5), 0, 1.5**0.5]] * len(given["INPUT"])
            np.testing.assert_allclose(outputs["OUTPUT"], expected, rtol=1e-6)


def test_another_datatype_is_refused():
    with pytest.raises(conch.testing.ModelError, match="inference input 'INPUT'"):
        conch.testing.run(MODEL, {"INPUT": np.ones((1, 2), np.int32)})
