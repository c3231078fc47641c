#!/usr/bin/env bash
# Installs what the tests of deploy/ need, on Debian and its relatives: Go with the libraries that Helm renders charts with,
# systemd for systemd-analyze, and Prometheus' promtool without the server in the same package, so that no service is started.
set -euo pipefail
target="${CONCH_DEPLOY_TOOLS:-$HOME/.cache/conch-tests/deploy}"
packages=(systemd golang-go golang-github-masterminds-sprig-dev golang-github-xeipuuv-gojsonschema-dev golang-k8s-sigs-yaml-dev)
[ -x "$target/promtool" ] && dpkg --status "${packages[@]}" > /dev/null 2>&1 && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "tests/setup_deploy.sh needs root and apt; without it the tests of deploy/ are skipped" >&2
    exit 0
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "${packages[@]}"
mkdir -p "$target"
download="$(mktemp -d)"
trap 'rm -rf "$download"' EXIT
chmod 755 "$download"
(cd "$download" && apt-get download -qq -o APT::Sandbox::User=root prometheus)
dpkg-deb --fsys-tarfile "$download"/prometheus_*.deb | tar --extract --directory "$download" ./usr/bin/promtool
mv "$download/usr/bin/promtool" "$target/promtool"
"$target/promtool" --version | head -n 1
