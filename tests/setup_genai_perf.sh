#!/usr/bin/env bash
# Makes the environment with GenAI-Perf that its test runs; perf_analyzer is conch's.
set -euo pipefail
target="${CONCH_GENAI_PERF:-$HOME/.cache/conch-tests/genai-perf}"
[ -e "$target/.ready" ] && exit 0
"${PYTHON:-python3}" -m venv "$target"
"$target/bin/python" -m pip install --quiet --disable-pip-version-check genai-perf==0.0.16
touch "$target/.ready"
