#!/usr/bin/env bash
# The one command for a machine with a GPU: build if nothing is built, tests, the speed of sparse attention,
# sanitizers, benchmark smoke; on an AMD GPU (PYTHON has ROCm's torch) tests of the ops that the HIP library has.
# It ends with a report for an issue.
#   PYTHON=...      the Python to use: one with a CUDA torch (default: python3)
#   SANITIZER=...   compute-sanitizer, if it is not on PATH; empty: none
#   WHEEL=...       test this wheel, installed, in place of what is built here
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-python3}
gpu=$("$PYTHON" -c "import torch; print('hip' if torch.version.hip else 'cuda')")
if [ -n "${WHEEL:-}" ]; then
  home=$PWD/build/wheel_installed
  rm -rf "$home"
  "$PYTHON" -m pip install -q --no-index --no-deps --target "$home" "$WHEEL"
else
  [ -e python/mla_fp8/lib/libmla_fp8_$gpu.so ] || make build
  [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
  home=$PWD/python
fi
export PYTHONPATH=$home:${PYTHONPATH:-}
[ -z "${WHEEL:-}" ] || export CI=  # the libraries of tests are in no wheel

"$PYTHON" - "$home" $gpu <<'PYTHON'
import sys, torch, mla_fp8._libraries as libraries
assert torch.cuda.is_available(), "no GPU, or a torch without CUDA and ROCm"
assert libraries.status[f"libmla_fp8_{sys.argv[2]}.so"] == "loaded", libraries.status
assert libraries.LIB_DIR.is_relative_to(sys.argv[1]), f"{libraries.LIB_DIR} is not under {sys.argv[1]}"
print(torch.cuda.get_device_name(), "torch", torch.__version__, libraries.LIB_DIR)
PYTHON

# With pytest-xdist a process of one thread per core: the machine's cores check what its GPU computes. Threads
# besides processes take four times as long.
parallel=$("$PYTHON" -c 'import os, xdist; print(f"-n {min(16, os.cpu_count())}")' 2>/dev/null || true)
[ -z "$parallel" ] || export OMP_NUM_THREADS=1

# What an issue needs, however this ends.
logs=$(mktemp -d)
report() {
  printf '\n== The report: to be pasted into an issue, as code\n'
  "$PYTHON" -m mla_fp8 doctor
  for log in tests memcheck racecheck initcheck; do
    [ -e "$logs/$log" ] || continue
    echo "$log"
    grep -E '^(FAILED|ERROR)|(passed|failed|error).* in [0-9.]+s|SUMMARY' "$logs/$log" | head -40 | sed 's/^/  /'
  done
  [ ! -e "$logs/speed" ] || cat "$logs/speed"
  rm -rf "$logs"
}
trap report EXIT
tests() { "$PYTHON" -m pytest $parallel -rfE "$@" 2>&1 | tee "$logs/tests"; }
speed() { "$PYTHON" benchmarks/bench_sparse_attention.py --seconds 0.3 2>&1 | tee "$logs/speed"; }

if [ $gpu = hip ]; then
  tests $(make -s hip-tests) tests/kernels/test_{cuda_matches_cpu,capture,hip_library,aiter_accuracy}.py
  "$PYTHON" benchmarks/bench_paged_attention_ragged.py --smoke
  speed
  exit
fi

# tests/core needs the module that `make build` makes; it has nothing to do with the GPU.
core=$(ls build/tests/_mla_fp8_core*.so build/cmake/_mla_fp8_core*.so 2>/dev/null || true)
tests tests ${core:---ignore=tests/core} --durations=5
speed

# Hostile indices and graph replays under the sanitizers, all at once: they keep a core busy each, not the GPU.
# Without torch's caching, every tensor has red zones. One seed in four and no timing under tools this slow.
SANITIZER=${SANITIZER-$(command -v compute-sanitizer || true)}
if [ -n "$SANITIZER" ]; then
  for tool in memcheck racecheck initcheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$SANITIZER" --tool $tool --error-exitcode 9 --print-limit 5 \
      "$PYTHON" -m pytest tests/kernels/test_{cuda_matches_cpu,capture}.py -x \
      -k "not allocates and not graph and (not seed or seed1 or seed3) and not fnuz" \
      > "$logs/$tool" 2>&1 && touch "$logs/$tool.clean" &
  done
  wait
  for tool in memcheck racecheck initcheck; do
    echo "== $tool"
    tail -n 30 "$logs/$tool"
  done
  [ "$(ls "$logs"/*.clean 2>/dev/null | wc -l)" = 3 ] || { echo "a sanitizer reported errors"; exit 9; }
  # Attention needs a program of its own for racecheck, and a build directory to make it in.
  ! grep -qs '^MLA_FP8_CUDA_ARCHS.*90a' build/cmake/CMakeCache.txt || SANITIZER=$SANITIZER ci/sanitize_attention.sh
else
  echo "no compute-sanitizer: skipped"
fi

for bench in benchmarks/bench_*.py; do
  "$PYTHON" "$bench" --smoke
done
