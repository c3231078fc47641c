#!/usr/bin/env bash
# Makes the environment with Ray Serve that its tests run a cluster in; what Ray needs stays out of .venv.
set -euo pipefail
target="${CONCH_RAY:-$HOME/.cache/conch-tests/ray}"
[ -e "$target/.ready" ] && exit 0
root="$(cd "$(dirname "$0")/.." && pwd)"
"${PYTHON:-python3}" -m venv "$target"
# conch for its dependencies and entry points; tests run the code of their checkout.
"$target/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" \
  'ray[serve]==2.60.0' -e "$root"
touch "$target/.ready"
