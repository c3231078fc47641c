"""Uses the deployment plug-in by MLflow's Python API, in MLflow's environment; prints what came of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from mlflow.deployments import get_deploy_client
from mlflow.exceptions import MlflowException

ROWS = np.array([[5.1, 3.5], [6.2, 1.0], [0.5, 7.5]])


def error_of(work: Callable[[], Any]) -> str:
    """The text of the error that must come."""
    try:
        work()
    except MlflowException as error:
        return f"{error.error_code}: {error.message}"
    raise AssertionError("no error")


def main(target: str) -> None:
    """Updates, reads, runs and deletes the deployment ``flowers``, and runs ``probe``."""
    client = get_deploy_client(target)
    told = {
        "again": error_of(lambda: client.create_deployment("flowers", "models:/estimator/1")),
        "updated": client.update_deployment("flowers", "models:/estimator/2"),
        "listed": [each["name"] for each in client.list_deployments() if each["name"] != "probe"],
        "got": client.get_deployment("flowers")["versions"],
        "frame": client.predict("flowers", pd.DataFrame(ROWS)).get_predictions("ndarray").tolist(),
        "array": client.predict("flowers", ROWS)["predictions"],
        "wrong name": error_of(lambda: client.delete_deployment("../flowers")),
        "wrong key": error_of(lambda: client.delete_deployment("flowers", {"step": "1"})),
        "wrong input": error_of(lambda: client.predict("flowers", {"inputs": [[1]]})),
        "missing": error_of(lambda: client.get_deployment("other")),
        "stream": list(client.predict_stream("probe", {"IN": 1.0})),
        "no stream": error_of(lambda: next(client.predict_stream("flowers", [1]))),
    }
    client.delete_deployment("flowers")
    client.delete_deployment("flowers")
    client.delete_deployment("probe", {"alias": "missing"})
    told["left"] = [each["name"] for each in client.list_deployments()]
    sys.stdout.write(f"{json.dumps(told)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
