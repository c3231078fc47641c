"""Logs models to an MLflow server, in MLflow's environment; prints what they predict themselves."""

from __future__ import annotations

import json
import sys

import mlflow
import mlflow.sklearn
import mlflow_conch
import numpy as np
import pandas as pd
from mlflow.models import infer_signature
from sklearn.linear_model import LogisticRegression

ROWS = np.array([[5.1, 3.5], [6.2, 1.0], [0.5, 7.5]])


class Text(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Adds two columns, times a param, and writes a text."""

    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """Predicts."""
        total = model_input["a"] * params["factor"] + model_input["when"].dt.year
        return pd.DataFrame({"total": total, "text": [f"<{each}>" for each in model_input["name"]]})


def main(uri: str, directories: list[str]) -> None:
    """Registers two versions of an estimator, a model of Python code, and directories in Triton's layout."""
    mlflow.set_tracking_uri(uri)
    random = np.random.default_rng(3)
    rows = random.uniform(0, 8, (200, 2))
    predicted = []
    with mlflow.start_run():
        for axis in (0, 1):
            model = LogisticRegression().fit(rows, rows[:, axis] > 4)
            mlflow.sklearn.log_model(
                model,
                name="estimator",
                input_example=rows[:2],
                signature=infer_signature(rows, model.predict_proba(rows)),
                pyfunc_predict_fn="predict_proba",
                registered_model_name="estimator",
            )
            predicted.append(model.predict_proba(ROWS).tolist())
        frame = pd.DataFrame({"a": [1.0], "when": [pd.Timestamp("2026-01-01")], "name": ["x"]})
        answer = pd.DataFrame({"total": [1.0], "text": ["x"]})
        mlflow.pyfunc.log_model(
            python_model=Text(),
            name="text",
            signature=infer_signature(frame, answer, params={"factor": 1.0}),
            registered_model_name="text",
            pip_requirements=["mlflow"],
        )
        for directory in directories:
            mlflow_conch.log_model(directory, name="probe", registered_model_name="probe")
    client = mlflow.MlflowClient()
    client.set_registered_model_alias("estimator", "champion", 1)
    if directories:
        client.set_registered_model_alias("probe", "champion", 1)
    sys.stdout.write(f"{json.dumps(predicted)}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
