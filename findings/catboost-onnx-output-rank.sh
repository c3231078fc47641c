#!/usr/bin/env bash
# catboost 1.2.10 (with onnx 1.22.0 and onnxruntime 1.32.0): the ONNX file of a regressor declares an output of
# one dimension, and what it computes has two.
#
# Expected: shapes in a file are those of its results, as ONNX asks; onnx's checker, with inference of shapes,
# accepts the file.
# Seen: the output `predictions` is declared as ['N'], and four rows give an array of shape (4, 1). ONNX Runtime
# prints a warning with each run and goes on, so a client that makes room by the declaration has the wrong rank.
#
# Ends with 0 while that is so, with 1 if it has changed. Needs Python 3.11 and pip.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check catboost==1.2.10 onnx==1.22.0 onnxruntime==1.32.0
cd "$folder"
venv/bin/python - <<'PROGRAM'
import catboost
import numpy as np
import onnx
import onnxruntime

rows = np.random.default_rng(0).random((40, 3), np.float32)
regressor = catboost.CatBoostRegressor(iterations=5, depth=2, verbose=False, allow_writing_files=False)
regressor.fit(rows, rows.sum(axis=1))
regressor.save_model("model.onnx", format="onnx")
onnx.checker.check_model(onnx.load("model.onnx"), full_check=True)

session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
declared = session.get_outputs()[0].shape
(found,) = session.run(["predictions"], {"features": rows[:4]})
print(f"catboost {catboost.__version__}: declared {declared}, found {found.shape}")
assert np.allclose(found[:, 0], regressor.predict(rows[:4]), atol=1e-5)
assert declared == ["N"] and found.shape == (4, 1), "this has changed"
PROGRAM
