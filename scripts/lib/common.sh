# Shared by the shell scripts of this folder, which source it: where things are, and how to say so.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
LOGS=$ROOT/build/logs
MIN_CMAKE=3.25
MIN_NVCC=12.8

# What scripts/setup puts into .venv comes first.
if [ -d "$ROOT/.venv/bin" ]; then PATH=$ROOT/.venv/bin:$PATH; fi
# nvcc's usual place is on nobody's PATH by default; CMake looks at CUDACXX.
if [ -z "${CUDACXX:-}" ] && ! command -v nvcc >/dev/null && [ -x /usr/local/cuda/bin/nvcc ]; then
  export CUDACXX=/usr/local/cuda/bin/nvcc
fi
export PATH

if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
  BOLD=$(printf '\033[1m') RED=$(printf '\033[31m') GREEN=$(printf '\033[32m') PLAIN=$(printf '\033[0m')
else
  BOLD='' RED='' GREEN='' PLAIN=''
fi

die() {
  echo "$(basename "$0"): $*" >&2
  exit 2
}

heading() { printf '\n%s== %s%s\n' "$BOLD" "$*" "$PLAIN"; }

# version_at_least HAVE WANT
version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -1)" = "$2" ]; }

have() { command -v "$1" >/dev/null 2>&1; }

jobs() { echo "${JOBS:-$(nproc)}"; }

cmake_version() { cmake --version 2>/dev/null | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p' || true; }

# The nvcc CMake would use; empty where there is none.
nvcc_path() { echo "${CUDACXX:-$(command -v nvcc || true)}"; }

# Why no CUDA code can be compiled here; empty where it can.
no_nvcc_reason() {
  local nvcc version
  nvcc=$(nvcc_path)
  if [ -z "$nvcc" ]; then
    echo "no nvcc was found"
    return
  fi
  version=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p' || true)
  if [ -z "$version" ]; then
    echo "$nvcc does not run"
  elif ! version_at_least "$version" "$MIN_NVCC"; then
    echo "$nvcc is version $version; $MIN_NVCC is the oldest that can build the kernels"
  elif ! echo | "$nvcc" -std=c++20 -arch=sm_90 -x cu -c - -o /dev/null 2>/dev/null; then
    echo "$nvcc cannot compile an empty file with this machine's C++ compiler"
  fi
}

# The preset everything is built with: PRESET where it is set, else cuda where nvcc works, else cpu.
main_preset() {
  if [ -n "${PRESET:-}" ]; then
    echo "$PRESET"
  elif [ -z "$(no_nvcc_reason)" ]; then
    echo cuda
  else
    echo cpu
  fi
}

# configure PRESET [CMAKE ARGUMENT...]: the tests' Python is the one of .venv where there is one.
configure() {
  local preset=$1
  shift
  # Let CMake look for nvcc too: `flashcore info` then says why there is no CUDA, not that nobody
  # wanted it.
  if [ "$preset" = cpu ] && [ -n "$(no_nvcc_reason)" ]; then set -- -DFLASHCORE_CUDA=AUTO "$@"; fi
  if [ -x "$ROOT/.venv/bin/python" ]; then
    set -- "-DPython3_EXECUTABLE=$ROOT/.venv/bin/python" "$@"
  fi
  cmake -S "$ROOT" --preset "$preset" "$@"
}

cli_of() { echo "$ROOT/build/$1/bin/flashcore"; }

# need_cli PRESET: the command, or an error that says what is missing.
need_cli() {
  local cli
  cli=$(cli_of "$1")
  if [ ! -x "$cli" ]; then
    echo "$cli is missing: the build did not make it (target flashcore_cli)" >&2
    return 1
  fi
  echo "$cli"
}
