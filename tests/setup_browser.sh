#!/usr/bin/env bash
# Installs what the tests of the console need: Debian's Chromium and axe-core, which finds what shuts people out.
set -euo pipefail
target="${CONCH_BROWSER:-$HOME/.cache/conch-tests/browser}"
if ! command -v chromium > /dev/null && command -v apt-get > /dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update --quiet --quiet
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends chromium fonts-inter
fi
if command -v npm > /dev/null && [ ! -e "$target/node_modules/axe-core/axe.min.js" ]; then
    mkdir -p "$target"
    npm install --prefix "$target" --no-audit --no-fund --loglevel=error axe-core@4.14.1
fi
