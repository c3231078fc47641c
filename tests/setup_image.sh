#!/usr/bin/env bash
# Makes what tests/deploy/e2e/test_image.py runs the image's steps in: a Debian with Python, and the packages that the
# steps install. It needs root, as the test does.
set -euo pipefail
target="${CONCH_IMAGE_BASE:-$HOME/.cache/conch-tests/image}"
[ -e "$target/.ready" ] && exit 0
command -v debootstrap >/dev/null || apt-get install --yes --no-install-recommends debootstrap
rm -rf "$target"
mkdir -p "$target"
debootstrap --variant=minbase --include=python3,python3-venv bookworm "$target/base" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}"
rm -rf "$target"/base/var/cache/apt/archives/*.deb "$target"/base/var/lib/apt/lists/* "$target"/base/usr/share/{doc,locale,man}
here="$(cd "$(dirname "$0")/.." && pwd)"
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --dest "$target/packages" \
    --only-binary=:all: --python-version 3.11 -c "$here/constraints.txt" pip setuptools hatchling \
    $(cd "$here" && "${PYTHON:-python3}" -c 'import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*(each.replace(" ", "") for each in [*project["dependencies"], *project["optional-dependencies"]["onnxruntime"]]))')
touch "$target/.ready"
