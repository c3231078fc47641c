#!/usr/bin/env bash
# mkdocs 1.6.1: `mkdocs build --strict --quiet` ends with 0 although a page has a broken link.
#
# Documented: with `--strict` a build with warnings ends with an error. Seen: that is so, but not with `--quiet`,
# which is to silence the output: the build counts as clean, and a check of docs that is made so finds nothing.
#
# Ends with 0 while that is so, with 1 if it has changed. Needs Python 3.11 and pip.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check mkdocs==1.6.1
mkdir docs
printf 'site_name: Test\nnav: [index.md]\n' >mkdocs.yml
printf '# Start\n\n[a page that is not there](missing.md)\n' >docs/index.md

status() { "$@" >output 2>&1 && echo 0 || echo $?; }
strict=$(status venv/bin/mkdocs build --strict --site-dir site)
quiet=$(status venv/bin/mkdocs build --strict --quiet --site-dir site)
venv/bin/mkdocs --version
echo "exit status of a build with a broken link: --strict $strict, --strict --quiet $quiet"
[ "$strict" = 1 ] && [ "$quiet" = 0 ] || { echo "this has changed"; exit 1; }
