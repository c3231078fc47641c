"""Tree libraries for the contract suite."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tests.support.engines.engine import WIDTH, Engine
from tests.support.tree_models import gtil, labels, samples

from conch.core.tensor import Array

assert samples().shape[1] == WIDTH, "the suite's rows fit the trees"


class ForestEngine(Engine):
    """Backend `fil` with files of one type."""

    backend = "fil"
    input = "input__0"
    outputs: ClassVar[Mapping[str, tuple[int, ...]]] = {"output__0": (1,)}
    tolerance = 0.0

    def write(self, version: Path, level: float) -> None:
        forest = self.save(version / self.file, level)
        forest.serialize(_beside(version))

    def opened(self, version: Path) -> Callable[[Array], dict[str, Array]]:
        import treelite

        forest = treelite.Model.deserialize(_beside(version))
        return lambda rows: {"output__0": gtil(forest, rows)[:, 0].astype(np.float32)}

    @abstractmethod
    def save(self, path: Path, level: float) -> Any:
        """Writes a regression whose results are about `level`; returns it as treelite has it."""


class XgboostJsonForest(ForestEngine):
    """XGBoost's JSON."""

    name = "fil_xgboost_json"
    packages = ("treelite", "xgboost")
    file = "xgboost.json"
    parameters: ClassVar[Mapping[str, str]] = {"model_type": "xgboost_json", "is_classifier": "false"}

    def save(self, path: Path, level: float) -> Any:
        import treelite

        return treelite.frontend.from_xgboost(_xgboost(path, level))


class LightgbmForest(ForestEngine):
    """LightGBM's text."""

    name = "fil_lightgbm"
    packages = ("treelite", "lightgbm")
    file = "model.txt"
    parameters: ClassVar[Mapping[str, str]] = {"model_type": "lightgbm", "is_classifier": "false"}

    def save(self, path: Path, level: float) -> Any:
        import lightgbm
        import treelite

        settings = {"num_threads": 1, "verbose": -1, "max_depth": 3}
        data = lightgbm.Dataset(samples(), labels("regression") + level)
        booster = lightgbm.train(settings, data, 5)
        booster.save_model(path)
        return treelite.frontend.from_lightgbm(booster)


class CheckpointForest(ForestEngine):
    """treelite's checkpoints."""

    name = "fil_treelite"
    packages = ("treelite", "xgboost")
    file = "checkpoint.tl"
    parameters: ClassVar[Mapping[str, str]] = {"model_type": "treelite_checkpoint", "is_classifier": "false"}

    def save(self, path: Path, level: float) -> Any:
        import treelite

        forest = treelite.frontend.from_xgboost(_xgboost(None, level))
        forest.serialize(path)
        return forest


class XgboostEngine(Engine):
    """Backend `xgboost`."""

    name = "xgboost"
    backend = "xgboost"
    packages = ("treelite", "xgboost")
    file = "xgboost.ubj"
    input = "input"
    outputs: ClassVar[Mapping[str, tuple[int, ...]]] = {"margin": (1,)}

    def write(self, version: Path, level: float) -> None:
        _xgboost(version / self.file, level)

    def opened(self, version: Path) -> Callable[[Array], dict[str, Array]]:
        import xgboost

        booster = xgboost.Booster({"nthread": 1}, model_file=version / self.file)
        return lambda rows: {"margin": booster.inplace_predict(rows).reshape(-1, 1)}


def _xgboost(path: Path | None, level: float) -> Any:
    """A booster, saved to a path."""
    import xgboost

    settings = {"nthread": 1, "max_depth": 3, "base_score": level}
    data = xgboost.DMatrix(samples(), labels("regression") + level)
    booster = xgboost.train(settings, data, 5)
    if path is not None:
        booster.save_model(path)
    return booster


def _beside(version: Path) -> Path:
    """Path at which the test keeps a version's forest for itself; moves with the version."""
    return version / "direct.tl"
