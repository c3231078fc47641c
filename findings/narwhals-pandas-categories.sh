#!/usr/bin/env bash
# narwhals 2.29.0 (with pandas 3.1.1): get_categories of a pandas column is another list in narwhals' two APIs.
#
# Expected: `Series.cat.get_categories()` returns the categories of the column's type, in their order, as
# narwhals.stable.v2 does.
# Seen: the API without a version returns the values that occur, sorted: ['a', 'b'] for the categories b, a, c.
# A model's categories that are read so are wrong without an error. It warns that the method is deprecated.
#
# Ends with 0 while that is so, with 1 if it has changed. Needs Python 3.11 and pip.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check narwhals==2.29.0 pandas==3.1.1
"$folder/venv/bin/python" - <<'PROGRAM'
import warnings

import narwhals
import narwhals.stable.v2 as stable
import pandas as pd

warnings.simplefilter("ignore", DeprecationWarning)
frame = pd.DataFrame({"x": pd.Categorical(["a", "b"], ["b", "a", "c"])})
found = [each.from_native(frame)["x"].cat.get_categories().to_list() for each in (narwhals, stable)]
print(f"narwhals {narwhals.__version__}: {found[0]}, stable.v2: {found[1]}")
assert found == [["a", "b"], ["b", "a", "c"]], "this has changed"
PROGRAM
