#!/usr/bin/env bash
# Makes the environment with openai-agents and LiteLLM, whose pins are not those of .venv; 460 MB.
set -euo pipefail
target="${CONCH_LLM_CLIENTS:-$HOME/.cache/conch-tests/llm-clients}"
[ -e "$target/.ready" ] && exit 0
"${PYTHON:-python3}" -m venv "$target"
"$target/bin/python" -m pip install --quiet --disable-pip-version-check openai-agents==0.24.0 litellm==1.110.2
touch "$target/.ready"
