#!/usr/bin/env bash
# tests/fuzz/fuzz.py on a library with AddressSanitizer and UBSan for the CPU that is here, which it builds first:
#   ci/fuzz.sh [arguments of tests/fuzz/fuzz.py]      $PYTHON as in packaging/build_wheel.sh
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || command -v python3)}
export PATH="$(dirname "$PYTHON"):$PATH"
ci/need.sh cmake ninja
out=build/sanitize
MLA_FP8_SANITIZE=1 MLA_FP8_CPU_NATIVE=1 MLA_FP8_CUDA=0 MLA_FP8_BUILD_DIR=$out/cmake \
  "$PYTHON" setup.py -q build --build-base $out/build --build-lib $out > $out.log 2>&1 || { cat $out.log; exit 1; }
# The runtimes come first in the process, as Python has none; C++'s, so that ASan sees what it throws.
runtime() { "${CXX:-c++}" -print-file-name="$1"; }
export LD_PRELOAD="$(runtime libasan.so) $(runtime libubsan.so) $(runtime libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
PYTHONPATH=$PWD/$out "$PYTHON" tests/fuzz/fuzz.py --last $out/last_seed "$@" || {
  unset LD_PRELOAD
  echo "ci/fuzz.sh: failed in the call of seed $(cat $out/last_seed)" >&2
  exit 1
}
