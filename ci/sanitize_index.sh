#!/usr/bin/env bash
# The indexer under compute-sanitizer (csrc/test/cuda/sanitize_index.cpp).
#   BUILD=...      a CMake build directory with MLA_FP8_CUDA (default: that of `make build`)
#   SANITIZER=...  compute-sanitizer, if it is not on PATH
#   TOOLS=...      default: memcheck initcheck racecheck
set -euo pipefail
cd "$(dirname "$0")/.."
build=${BUILD:-build/cmake} sanitizer=${SANITIZER:-compute-sanitizer} shards=5
cmake --build "$build" --target sanitize_index
for tool in ${TOOLS:-memcheck initcheck racecheck}; do
  echo "== $tool"
  runs=()
  for ((shard = 0; shard < shards; ++shard)); do
    "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 5 "$build/sanitize_index" $shard $shards &
    runs+=($!)
  done
  for run in "${runs[@]}"; do wait "$run"; done
done
