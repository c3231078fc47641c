#!/usr/bin/env bash
# Makes the environment with Triton's Model Analyzer that its test runs; perf_analyzer is conch's.
set -euo pipefail
target="${CONCH_MODEL_ANALYZER:-$HOME/.cache/conch-tests/model-analyzer}"
[ -e "$target/.ready" ] && exit 0
"${PYTHON:-python3}" -m venv "$target"
"$target/bin/python" -m pip install --quiet --disable-pip-version-check triton-model-analyzer==1.58.0
touch "$target/.ready"
