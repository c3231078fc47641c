"""Small tree models for tests, trained on the spot, and what each library says of rows itself."""

from __future__ import annotations

import base64
import warnings
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from conch.core.tensor import Array

FEATURES = 4
ROUNDS = 6

OLD_XGBOOST = zlib.decompress(
    base64.b85decode(
        "c-l+K%uDNA@xhLT0RkAIG!vA~h$Kd9zz?O9GV>CPDy?$z(=&@pGLzY$!s$sRMX9OGbaW6o0OU4yBtFX^aPNO0U_^@4@-wCTf"
        "m8!C)P3O4<($12M6&`hEX41*Znp!fZ}<-dAhEb#-1dx6Ght$z!mjLNLQ^+G%@!nvqRzKc)h>bcxr4liyOT-2$WD-0-R{GVp7"
        "q?0|E{~)gZL&95stnYDo!QG%=f|EU**5w0c0<XZxE;N0J0OtpY3$k5o8~X|4+Ky5oFg;hz}4h=F>%q50F@5ZpVJ)_yEbZ7JA"
        "sD$A|iSD;xCqcu=>%4m~~=>wepd9v^RxY_^ToTI6u~oU_y9y%ViKVqLQv9rhViIqH<Y0EeI5-(ZKuPOMJi`{Uu^+jLIG5o9l"
        "nUvXrY1ISJoU-!^aN05CmzEK;eBgn3yl0Rw=Z{LTWKh}32*o~e)xH?v1<PYP;92oiIT=Ykb{Nb>95k~$fOPFO>Qq<}YQS0Qi"
        "Z^kuikl50{QBDf-6C6+PKL8G2&0IF83AevE%A~}?<0CXd!x3aJjDLOidk2u6F#g?|iH;!qVEnYbZjK<ku$5gPzzL=Eld@8iO"
        "ESw+U7!NhN_mO7sY+H#XhpP=j#5!-dVEfPadCV>Vo_qQl2x@*adKi#YJ5R{aeR4dW_m^mP@ADrZ7l#O2_Dq"
    )
)
"""Three trees of `binary:logistic` for 4 features, written by XGBoost 2.1 in its old binary format."""


@cache
def samples(count: int = 200) -> Array:
    """Rows with some missing values."""
    random = np.random.default_rng(5)
    rows = random.standard_normal((count, FEATURES), np.float32)
    rows[random.random(rows.shape) < 0.05] = np.nan
    return rows


@cache
def labels(kind: str) -> Array:
    """Labels of `samples` for a task: ``binary``, ``multi`` (three classes) or ``regression``."""
    rows = np.nan_to_num(samples())
    score: Array = rows[:, 0] + rows[:, 1] * rows[:, 2]
    if kind == "regression":
        return np.exp(score / 2)
    return (score > 0).astype(int) if kind == "binary" else np.digitize(score, [-0.5, 0.5])


def xgboost_model(kind: str, path: Path | None = None, **parameters: Any) -> Any:
    """A booster of XGBoost, saved to a path."""
    import xgboost

    objectives: dict[str, dict[str, Any]] = {
        "binary": {"objective": "binary:logistic"},
        "multi": {"objective": "multi:softprob", "num_class": 3},
        "regression": {"objective": "reg:gamma"},
    }
    settings = {"max_depth": 3, "nthread": 1, **objectives[kind], **parameters}
    settings = {key: value for key, value in settings.items() if value is not None}
    booster = xgboost.train(settings, xgboost.DMatrix(samples(), labels(kind)), ROUNDS)
    if path is not None:  # XGBoost warns of other names, to which it writes UBJSON
        path.write_bytes(booster.save_raw("json" if path.suffix == ".json" else "ubj"))
    return booster


def lightgbm_model(kind: str, path: Path | None = None, **parameters: Any) -> Any:
    """A booster of LightGBM, saved to a path."""
    import lightgbm

    objectives: dict[str, dict[str, Any]] = {
        "binary": {"objective": "binary"},
        "multi": {"objective": "multiclass", "num_class": 3},
        "regression": {"objective": "gamma"},
    }
    settings = {"max_depth": 3, "num_threads": 1, "verbose": -1, **objectives[kind], **parameters}
    booster = lightgbm.train(settings, lightgbm.Dataset(samples(), labels(kind)), ROUNDS)
    if path is not None:
        booster.save_model(path)
    return booster


def sklearn_model(name: str, kind: str, path: Path | None = None, **parameters: Any) -> Any:
    """An estimator of `sklearn.ensemble`, saved to a path by skops."""
    import skops.io
    from sklearn import ensemble

    rounds = "max_iter" if name.startswith("Hist") else "n_estimators"
    estimator = getattr(ensemble, name)(random_state=0, **{rounds: ROUNDS}, **parameters)
    estimator.fit(np.nan_to_num(samples()), labels(kind))
    if path is not None:
        skops.io.dump(estimator, path)
    return estimator


def gtil(model: Any, rows: Array) -> Array:
    """Predictions of treelite's engine for rows."""
    import treelite

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Array = treelite.gtil.predict(model, rows, nthread=1)
    return found[:, 0, :]
