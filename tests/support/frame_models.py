"""Models that are trained on DataFrames, and frames for them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

COUNT = 240


@cache
def people() -> pd.DataFrame:
    """Rows of numbers, texts, categories and bools; numbers and towns miss some values."""
    random = np.random.default_rng(7)
    frame = pd.DataFrame(
        {
            "age": random.integers(18, 90, COUNT),
            "income": random.normal(50, 12, COUNT),
            "town": random.choice(["Ulm", "Bonn", "Köln"], COUNT),
            "plan": pd.Categorical(random.choice(["basic", "pro"], COUNT)),
            "level": random.integers(1, 4, COUNT),
            "active": random.random(COUNT) < 0.5,
        }
    )
    frame.loc[::11, "income"] = np.nan
    frame.loc[::13, "town"] = np.nan
    return frame


@cache
def left() -> Any:
    """The labels of `people`."""
    frame = people()
    score = frame["age"] / 30 + (frame["town"] == "Ulm") + (frame["plan"] == "pro") * 2 - frame["level"]
    return (score + frame["active"] > 2).to_numpy()


def pipeline(path: Path | None = None) -> Any:
    """A pipeline with imputers, encoders and a scaler, saved to a path by skops."""
    import skops.io
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

    towns = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore"))
    columns = ColumnTransformer(
        [
            ("numbers", make_pipeline(SimpleImputer(), StandardScaler()), ["age", "income"]),
            ("towns", towns, ["town"]),
            ("plans", OneHotEncoder(), ["plan"]),
            ("levels", OrdinalEncoder(), ["level"]),
            ("rest", "passthrough", ["active"]),
        ]
    )
    made = make_pipeline(columns, LogisticRegression()).fit(people(), left())
    if path is not None:
        skops.io.dump(made, path)
    return made


def boosted() -> pd.DataFrame:
    """Rows of numbers and categories, with a space in a name, for boosters."""
    frame = people()
    return pd.DataFrame(
        {
            "annual income": frame["income"],
            "age": frame["age"],
            "plan": frame["plan"],
            "level": pd.Categorical(frame["level"] * 10),
        }
    )


def lightgbm_frames(path: Path) -> Any:
    """A booster of LightGBM that was trained on `boosted`, saved to a path."""
    import lightgbm

    settings = {"objective": "binary", "verbose": -1, "num_threads": 1, "min_data_in_leaf": 5}
    booster = lightgbm.train(settings, lightgbm.Dataset(boosted(), left()), 8)
    booster.save_model(path)
    return booster


def xgboost_frames(path: Path) -> Any:
    """A booster of XGBoost that was trained on `boosted`, saved to a path."""
    import xgboost

    matrix = xgboost.DMatrix(boosted(), left(), enable_categorical=True)
    booster = xgboost.train({"objective": "binary:logistic", "nthread": 1, "max_depth": 3}, matrix, 8)
    path.write_bytes(booster.save_raw("json" if path.suffix == ".json" else "ubj"))
    return booster
