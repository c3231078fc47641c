#!/usr/bin/env bash
# Installs Azurite, Microsoft's emulator of Azure's object store, for the tests that want it.
# The emulators of S3 and of Google's store are Python packages in the extra `test`.
set -euo pipefail
target="${CONCH_EMULATORS:-$HOME/.cache/conch-emulators}"
mkdir -p "$target"
npm install --prefix "$target" --no-audit --no-fund --loglevel=error azurite@3.37.0
"$target/node_modules/.bin/azurite-blob" --version
