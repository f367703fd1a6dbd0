#!/usr/bin/env bash
# Every variant of the Hopper attention kernels under compute-sanitizer (tests/sanitizers/sanitize_attention.cu).
#   BUILD=...      a CMake build directory with MLA_FP8_CUDA for 90a (default: that of `make build`)
#   SANITIZER=...  compute-sanitizer, if it is not on PATH
#   TOOLS=...      default: memcheck initcheck racecheck, the last from 2026.4 on (PyPI: nvidia-cuda-sanitizer-api):
#                  2025.3 of CUDA 13.0 does not see that bar.sync orders. Not synccheck, which wants all warps of a
#                  block to come to a barrier at the same instruction (docs/kernels/emulators.md)
set -euo pipefail
cd "$(dirname "$0")/.."
build=${BUILD:-build/cmake} sanitizer=${SANITIZER:-compute-sanitizer} shards=8
version=$("$sanitizer" --version | sed -n 's/^Version \([0-9]*\)[.]\([0-9]*\).*/\1\2/p')
[ "$version" -ge 20264 ] || echo "compute-sanitizer is too old for racecheck: skipped"
tools=${TOOLS:-memcheck initcheck $([ "$version" -lt 20264 ] || echo racecheck)}
cmake --build "$build" --target sanitize_attention
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
for tool in $tools; do
  for ((shard = 0; shard < shards; ++shard)); do
    "$sanitizer" --tool $tool --error-exitcode 9 --print-limit 5 "$build/sanitize_attention" $shard $shards \
      > "$logs/$tool.$shard" 2>&1 && touch "$logs/$tool.$shard.clean" &
  done
  wait
  echo "== $tool: $(cat "$logs/$tool".? | grep -c '^ok') kernels ran"
  for ((shard = 0; shard < shards; ++shard)); do
    [ -e "$logs/$tool.$shard.clean" ] || cat "$logs/$tool.$shard"
  done
  [ "$(ls "$logs/$tool".?.clean 2>/dev/null | wc -l)" = $shards ] || { echo "$tool reported errors"; exit 9; }
done
