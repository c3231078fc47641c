"""Fixtures of tests of the Python API."""

from __future__ import annotations

import polars as pl
import pytest


@pytest.fixture(scope="session", autouse=True)
def polars_engine() -> None:
    """Descriptors that polars keeps from its first query on."""
    pl.Series("x", ["a"]).to_frame()["x"].is_null().to_numpy()
