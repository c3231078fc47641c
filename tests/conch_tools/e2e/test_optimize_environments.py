"""Each converter of `conch optimize` in an environment that conch builds for it, without conch's packages.

Environments are built, in minutes and with gigabytes, only if the folder `ENVIRONMENTS` exists, and stay.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from tests.support import tree_models
from tests.support.optimize_models import (
    ENVIRONMENTS,
    OFFLINE,
    keep_environments,
    write_torch_module,
    write_two_outputs,
)

from conch_tools.optimize import OptimizeOptions, optimize

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(OFFLINE, reason=f"without the folder {ENVIRONMENTS} no environment is built"),
]

Source = tuple[str | Path, Path | None]
"""A model, and its samples."""


def _sklearn(folder: Path) -> Source:
    tree_models.sklearn_model("RandomForestClassifier", "multi", folder / "m.skops")
    return folder / "m.skops", None


def _xgboost(folder: Path) -> Source:
    tree_models.xgboost_model("multi", folder / "m.json")
    return folder / "m.json", None


def _lightgbm(folder: Path) -> Source:
    tree_models.lightgbm_model("multi", folder / "m.txt")
    return folder / "m.txt", None


@pytest.mark.parametrize("write", [write_two_outputs, write_torch_module, _sklearn, _xgboost, _lightgbm])
def test_no_step_lacks_a_package(
    write: Callable[[Path], Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_environments(monkeypatch)
    source, data = write(tmp_path)
    conchs = [each for each in metadata.distributions() if each.name.startswith("conch")]
    monkeypatch.setattr(metadata, "distributions", lambda **which: conchs)
    result = optimize(str(source), tmp_path / "out", OptimizeOptions(data=data, measure_s=0.05))
    lacking = [each for each in result.candidates if each["id"] and each["status"] == "error"]
    assert not lacking
    not_built = [each["reason"] for each in result.candidates if not each["id"] and each["status"] == "error"]
    if not_built:
        pytest.skip(not_built[0])
