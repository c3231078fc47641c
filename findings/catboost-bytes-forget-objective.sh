#!/usr/bin/env bash
# catboost 1.2.10: a regressor of Poisson's objective predicts other values if it is loaded from bytes than if it
# is loaded from the same bytes in a file.
#
# Expected: `load_model(path)`, `load_model(blob=...)` and `load_model(stream=...)` give one model.
# Seen: of a path, `CatBoostRegressor.predict` returns the exponent, as the trained model does. Of bytes it
# returns the raw value, without a warning: the parameters of the model are read for paths alone, so the class
# does not know the objective.
#
# Ends with 0 while that is so, with 1 if it has changed. Needs Python 3.11 and pip.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check catboost==1.2.10 pandas==3.1.1 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PROGRAM'
from pathlib import Path

import catboost
import numpy as np

rows = np.random.default_rng(0).random((60, 2))
settings = {"loss_function": "Poisson", "iterations": 5, "verbose": 0, "allow_writing_files": False}
model = catboost.CatBoostRegressor(**settings).fit(rows, rows[:, 0])
model.save_model("model.cbm")
by_path = catboost.CatBoostRegressor().load_model("model.cbm").predict(rows)
by_bytes = catboost.CatBoostRegressor().load_model(blob=Path("model.cbm").read_bytes()).predict(rows)
print(f"catboost {catboost.__version__}: trained {model.predict(rows)[0]}, path {by_path[0]}, bytes {by_bytes[0]}")
assert np.array_equal(by_path, model.predict(rows))
assert np.allclose(np.exp(by_bytes), by_path) and not np.allclose(by_bytes, by_path), "this has changed"
PROGRAM
