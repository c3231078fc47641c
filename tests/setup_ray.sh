#!/usr/bin/env bash
# Makes the environment with Ray Serve that its tests run a cluster in; what Ray needs stays out of .venv.
set -euo pipefail
target="${CONCH_RAY:-$HOME/.cache/conch-tests/ray}"
root="$(cd "$(dirname "$0")/.." && pwd)"
# Entry points may have changed since.
[ "$target/.ready" -nt "$root/pyproject.toml" ] && exit 0
"${PYTHON:-python3}" -m venv "$target"
# conch for its dependencies and entry points; tests run the code of their checkout.
"$target/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" \
  'ray[serve]==2.60.0' -e "$root"
touch "$target/.ready"
