#!/usr/bin/env bash
# `ci/sanitize.sh index` and `ci/sanitize.sh layer`: the indexer, and the ops around attention, under
# compute-sanitizer (tests/sanitizers/sanitize_*.cu). Attention has a script of its own.
#   BUILD=...      a CMake build directory with MLA_FP8_CUDA (default: that of `make build`)
#   SANITIZER=...  compute-sanitizer, if it is not on PATH
#   TOOLS=...      default: memcheck initcheck racecheck
set -euo pipefail
cd "$(dirname "$0")/.."
program=sanitize_$1 build=${BUILD:-build/cmake} sanitizer=${SANITIZER:-compute-sanitizer} shards=8
cmake --build "$build" --target "$program"
for tool in ${TOOLS:-memcheck initcheck racecheck}; do
  echo "== $tool"
  runs=()
  for ((shard = 0; shard < shards; ++shard)); do
    "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 5 "$build/$program" $shard $shards &
    runs+=($!)
  done
  for run in "${runs[@]}"; do wait "$run"; done
done
