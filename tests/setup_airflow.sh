#!/usr/bin/env bash
# Makes the environment with Airflow and conch's provider that its tests run; 300 MB.
set -euo pipefail
target="${CONCH_AIRFLOW:-$HOME/.cache/conch-tests/airflow}"
provider="$(cd "$(dirname "$0")/.." && pwd)/services/airflow_provider_conch"
# Its entry point and dependencies may have changed since.
[ "$target/.ready" -nt "$provider/pyproject.toml" ] && exit 0
"${PYTHON:-python3}" -m venv "$target"
# Installed for its entry point; tests run the code of their checkout.
"$target/bin/python" -m pip install --quiet --disable-pip-version-check apache-airflow==3.3.2 "$provider"
touch "$target/.ready"
