#!/usr/bin/env bash
# Makes the environment with TensorFlow that its tests run models in; it has versions of packages of its own.
set -euo pipefail
target="${CONCH_TENSORFLOW:-$HOME/.cache/conch-tests/tensorflow}"
[ -e "$target/.ready" ] && exit 0
"${PYTHON:-python3}" -m venv "$target"
"$target/bin/python" -m pip install --quiet --disable-pip-version-check tensorflow-cpu==2.21.0
touch "$target/.ready"
