"""Versions whose columns mean something else are no candidates of each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.core.spec import ModelSpec, TensorSpec
from conch_rollout.interface_check import interface_differences

PLAN: dict[str, Any] = {"name": "plan", "categories": ["basic", "pro"], "codes": True}


def spec(*columns: Any) -> ModelSpec:
    rule = TensorSpec("input", "FP32", (len(columns) or 2,))
    parameters = {"CONCH_COLUMNS": json.dumps(columns)} if columns else {}
    return ModelSpec("m", 1, "", "x", 8, (rule,), (), Path("m"), Path("m/1"), "", (), parameters=parameters)


@pytest.mark.parametrize(
    ("stable", "candidate", "reason"),
    [
        (spec(), spec("a", "b"), ""),
        (spec("a", PLAN), spec("a", PLAN), ""),
        (spec("a", PLAN), spec("a", {**PLAN, "unseen": "null"}), ""),
        (spec("a", "b"), spec("b", "a"), "the columns of input 'input' are not those of stable"),
        (spec("a", "b"), spec(), "the columns of input 'input' are not those of stable"),
        (
            spec("a", PLAN),
            spec("a", {**PLAN, "categories": ["pro", "basic"]}),
            "column 'plan' has other codes",
        ),
        (
            spec("a", {"name": "b", "unit": "s"}),
            spec("a", {"name": "b", "unit": "ms"}),
            "column 'b' has other",
        ),
        (spec("a", "b"), spec("a", {"name": "b", "unit": "iso"}), "model 'm': parameter 'CONCH_COLUMNS'"),
    ],
)
def test_columns_of_a_candidate_are_those_of_stable(
    stable: ModelSpec, candidate: ModelSpec, reason: str
) -> None:
    found = interface_differences(stable, candidate)
    assert [each.startswith(reason) for each in found] == ([True] if reason else [])
