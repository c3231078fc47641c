#!/usr/bin/env bash
# Installs what conch is measured against: a real Triton 2.51 server and perf_analyzer.
#
# Both come from public Python packages that carry the binaries, so neither a container nor a build is
# needed. They live in a cache outside the checkout ($CONCH_PEERS), each in a virtual environment of its
# own, because their pinned dependencies do not fit ours. Running this again changes nothing.
set -euo pipefail

peers=${CONCH_PEERS:-$HOME/.cache/conch-peers}
python=${PYTHON:-python3}
triton_package=nvidia-pytriton==0.7.0 # carries tritonserver 2.51 and its Python backend
perf_package=tritonclient==2.48.0     # the last line of releases whose wheel carries perf_analyzer

fail() {
  echo "setup_peers: $*" >&2
  exit 1
}

# install_into VENV FILE PACKAGE...: FILE proves that an earlier run got to the end.
install_into() {
  local venv=$1 proof=$2
  shift 2
  [[ -e $venv/$proof ]] && return
  echo "setup_peers: installing $* into $venv"
  "$python" -m venv --clear "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check "$@"
}

[[ $(uname -sm) == "Linux x86_64" ]] || fail "the packages carry binaries for Linux on x86_64 only"
mkdir -p "$peers/lib"
install_into "$peers/triton" bin/pytriton "$triton_package"
install_into "$peers/perf" bin/perf_analyzer "$perf_package" numpy python-rapidjson

triton_python=$peers/triton/bin/python
site=$("$triton_python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
version=$("$triton_python" -c 'import sys; print(f"{sys.version_info.major}.{sys.version_info.minor}")')
server=$site/pytriton/tritonserver
[[ -x $server/bin/tritonserver ]] || fail "no tritonserver in $site; remove $peers/triton and try again"

# The Python backend starts the stub that lies beside it, and the stub is linked against one Python.
stub=$server/python_backend_stubs/$version/triton_python_backend_stub
[[ -f $stub ]] || fail "$triton_package has no Python backend stub for Python $version; set PYTHON to another one"
cmp --silent "$stub" "$server/backends/python/triton_python_backend_stub" ||
  install -m 755 "$stub" "$server/backends/python/triton_python_backend_stub"

# perf_analyzer is linked against the CUDA runtime, which it does not need on CPU but must be able to load.
cudart=$(find "$site/nvidia_pytriton.libs" -name 'libcudart-*.so*' -print -quit)
[[ -n $cudart ]] || fail "no CUDA runtime in $site/nvidia_pytriton.libs; remove $peers/triton and try again"
ln -sfn "$cudart" "$peers/lib/libcudart.so.12"

if ! ldconfig -p | grep -q 'libb64\.so\.0d'; then
  [[ $(id -u) == 0 ]] || fail "libb64.so.0d is missing; as root: apt-get install libb64-0d"
  command -v apt-get >/dev/null || fail "libb64.so.0d is missing; install your distribution's libb64"
  apt-get update -qq && apt-get install -y -qq libb64-0d >/dev/null
fi

LD_LIBRARY_PATH=$peers/lib "$peers/perf/bin/perf_analyzer" --version >/dev/null 2>&1 ||
  fail "perf_analyzer does not start: LD_LIBRARY_PATH=$peers/lib ldd $peers/perf/bin/perf_analyzer"
echo "setup_peers: ready in $peers"
