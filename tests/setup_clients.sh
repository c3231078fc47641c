#!/usr/bin/env bash
# Installs what the clients in examples/clients are built with: Debian's packages for Go, Java and C++, npm's for Node.js.
# Without root it names what is missing; tests of a language whose tools are missing are skipped.
set -euo pipefail
target="${CONCH_CLIENTS:-$HOME/.cache/conch-tests/clients}"
node="$(dirname "$0")/../examples/clients/node"

packages=(
  make protobuf-compiler
  golang-go golang-google-grpc-dev golang-goprotobuf-dev protoc-gen-go-grpc
  libgrpc-java libprotobuf-java protobuf-compiler-grpc-java-plugin libnetty-java libnetty-tcnative-java
  libnetty-tcnative-jni libperfmark-java libgoogle-gson-java libguava-java libgeronimo-annotation-1.3-spec-java
  cmake g++ pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler-grpc
)
command -v javac > /dev/null || packages+=(default-jdk-headless)
command -v npm > /dev/null || packages+=(nodejs npm)

missing=()
for package in "${packages[@]}"; do
  dpkg-query --show --showformat='${db:Status-Status}' "$package" 2> /dev/null | grep -qx installed || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ]; then
  if ! command -v apt-get > /dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "setup_clients.sh: only root on Debian can install these, without which tests are skipped: ${missing[*]}" >&2
  else
    apt-get update --quiet --quiet
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet --quiet --yes --no-install-recommends "${missing[@]}"
  fi
fi

if command -v npm > /dev/null && ! cmp --silent "$node/package-lock.json" "$target/package-lock.json"; then
  mkdir -p "$target"
  cp "$node/package.json" "$target"
  # The lock comes last, so that a broken installation is not taken for a complete one.
  cp "$node/package-lock.json" "$target/npm-shrinkwrap.json"
  npm ci --prefix "$target" --ignore-scripts --no-audit --no-fund --loglevel=error
  mv "$target/npm-shrinkwrap.json" "$target/package-lock.json"
fi
