# Paths, versions and helpers shared by the scripts. Source it.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
LOGS=${LOGS:-$ROOT/build/logs}
MIN_CMAKE=3.25
MIN_NVCC=12.8

# Programs in .venv, which scripts/setup fills, take precedence.
if [ -d "$ROOT/.venv/bin" ]; then PATH=$ROOT/.venv/bin:$PATH; fi
# nvcc is usually not on PATH. CMake reads CUDACXX.
if [ -z "${CUDACXX:-}" ] && ! command -v nvcc >/dev/null && [ -x /usr/local/cuda/bin/nvcc ]; then
  export CUDACXX=/usr/local/cuda/bin/nvcc
fi
export PATH
# ccache must accept precompiled headers.
export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros}

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

# The nvcc that CMake uses; empty if there is none.
nvcc_path() { echo "${CUDACXX:-$(command -v nvcc || true)}"; }

# The reason why no CUDA code can be compiled here; empty if it can.
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

# The main preset: PRESET if it is set, else cuda if nvcc works, else cpu.
main_preset() {
  if [ -n "${PRESET:-}" ]; then
    echo "$PRESET"
  elif [ -z "$(no_nvcc_reason)" ]; then
    echo cuda
  else
    echo cpu
  fi
}

# configure PRESET [CMAKE ARGUMENT...]: uses ccache if it is installed, and .venv's Python.
configure() {
  local preset=$1
  shift
  # AUTO makes CMake search for nvcc, so that `flashcore info` gives the reason for missing CUDA.
  if [ "$preset" = cpu ] && [ -n "$(no_nvcc_reason)" ]; then set -- -DFLASHCORE_CUDA=AUTO "$@"; fi
  if [ -x "$ROOT/.venv/bin/python" ]; then
    set -- "-DPython3_EXECUTABLE=$ROOT/.venv/bin/python" "$@"
  fi
  if have ccache; then
    set -- -DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache \
      -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache "$@"
  fi
  cmake -S "$ROOT" --preset "$preset" "$@"
}

# quietly LOG COMMAND...: writes the output to the log. On a failure, prints the end of it.
quietly() {
  local log=$LOGS/$1
  shift
  mkdir -p "$LOGS"
  "$@" >"$log" 2>&1 && return 0
  local code=$?
  tail -60 "$log"
  echo "failed: $* (full output: ${log#"$ROOT"/})"
  return $code
}

# progress LOG COMMAND...: like quietly, for a build. Prints ninja's counters.
progress() {
  local log=$LOGS/$1 code=0
  shift
  mkdir -p "$LOGS"
  "$@" 2>&1 | tee "$log" | sed -unE 's/^(\[[0-9]+\/[0-9]+\] ).*/\1/p' || code=${PIPESTATUS[0]}
  [ "$code" = 0 ] && return 0
  tail -60 "$log"
  echo "failed: $* (full output: ${log#"$ROOT"/})"
  return "$code"
}

# build_preset PRESET [BUILD ARGUMENT...]: configures and builds the preset with its tests.
build_preset() {
  local preset=$1
  shift
  quietly "configure-$preset.log" configure "$preset" -DFLASHCORE_BUILD_TESTS=ON
  progress "build-$preset.log" cmake --build --preset "$preset" -j "$(jobs)" "$@"
}

# run_ctest PRESET ARGUMENT...: an empty selection is an error. Prints failures, skips and the total.
# The full output is in ctest-PRESET.log.
run_ctest() {
  local preset=$1 report code=0
  shift
  report=$(mktemp "$LOGS/ctest.XXXXXX.xml")
  ctest --preset "$preset" --no-tests=error -j "$(jobs)" --timeout 900 --output-junit "$report" \
    "$@" 2>&1 | tee -a "$LOGS/ctest-$preset.log" |
    grep -vE '^ *(Start +[0-9]+: |[0-9]+/[0-9]+ Test +#[0-9]+: .* Passed )' || code=${PIPESTATUS[0]}
  python3 "$ROOT/scripts/lib/ctest_skips.py" "$report"
  rm -f "$report"
  return "$code"
}

cli_of() { echo "$ROOT/build/$1/bin/flashcore"; }

# need_cli PRESET: prints the path of the command, or fails if it is not built.
need_cli() {
  local cli
  cli=$(cli_of "$1")
  if [ ! -x "$cli" ]; then
    echo "$cli is missing: the build did not make it (target flashcore_cli)" >&2
    return 1
  fi
  echo "$cli"
}
