#!/usr/bin/env bash
# Makes the environment with MLflow's server and client that its test runs; 1 GB.
set -euo pipefail
target="${CONCH_MLFLOW:-$HOME/.cache/conch-tests/mlflow}"
[ -e "$target/.ready" ] && exit 0
"${PYTHON:-python3}" -m venv "$target"
"$target/bin/python" -m pip install --quiet --disable-pip-version-check mlflow==3.17.2 skops==0.16.0
touch "$target/.ready"
