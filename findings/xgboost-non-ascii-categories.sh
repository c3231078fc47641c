#!/usr/bin/env bash
# xgboost 3.2.0 (with pandas 3.1.1): categories beyond ASCII of a pandas DataFrame are cut and shifted in the model.
#
# Expected: a model that was trained on a pandas DataFrame has its categories, as one that was trained on an Arrow
# table, and a row is recoded by them.
# Seen: of pandas the offsets count characters, and the values are bytes of UTF-8, cut at the last offset: the
# categories ungültig, S, M, L are saved as "ungülti", "g", "S", "M". So the row S, in a frame that has only this
# category, is recoded to the place of M, and M to that of L, without an error: their predictions are of others.
#
# Ends with 0 while that is so, with 1 if it has changed. Needs Python 3.11 and pip.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check xgboost==3.2.0 pandas==3.1.1 numpy==2.4.6 pyarrow==26.0.1
"$folder/venv/bin/python" - <<'PROGRAM'
import json
from itertools import pairwise

import numpy as np
import pandas as pd
import pyarrow as pa
import xgboost

names = ["ungültig", "S", "M", "L"]
target = np.tile(np.arange(4.0), 20)


def matrix(frame, label=None):
    return xgboost.DMatrix(frame, label, enable_categorical=True)


def trained(frame):
    settings = {"verbosity": 0, "min_child_weight": 0, "lambda": 0, "learning_rate": 1}
    return xgboost.train(settings, matrix(frame, target), 4)


def saved(model):
    document = json.loads(model.save_raw("json"))
    (column,) = document["learner"]["gradient_booster"]["model"]["cats"]["enc"]
    content = bytes(each & 0xFF for each in column["values"])
    return [content[a:b].decode(errors="replace") for a, b in pairwise(column["offsets"])]


frame = pd.DataFrame({"size": pd.Categorical(names * 20, names)})
by_pandas, by_arrow = trained(frame), trained(pa.table({"size": pa.array(names * 20).dictionary_encode()}))
found = {}
for name in names:
    row = pd.DataFrame({"size": pd.Categorical([name], [name])})
    found[name] = round(float(by_pandas.predict(matrix(row))[0]), 3)
print(f"xgboost {xgboost.__version__}: of pandas {saved(by_pandas)}, of Arrow {saved(by_arrow)}")
print(f"trained on {dict(zip(names, target[:4].tolist()))}, predicted by the model of pandas: {found}")
assert saved(by_arrow) == names
assert saved(by_pandas) == ["ungülti", "g", "S", "M"], "this has changed"
assert found["S"] == 2.0 and found["M"] == 3.0, "this has changed"
PROGRAM
