#!/usr/bin/env bash
# Builds the wheel of a variant from the last commit (or $COMMIT) and checks it:
#   packaging/build_wheel.sh VARIANT [FOLDER]      (dist)
#
#   cpu                        libmla_fp8_cpu.so
#   cu126 cu128 cu129 cu130    and libmla_fp8_cuda.so; the nvcc on PATH must be of that very version
#   rocm6 rocm7                and libmla_fp8_hip.so, the same for both; needs ziglang, no ROCm
#
# $PYTHON (default: .venv's, else python3) has torch >= 2.10 for its headers, and what ci/setup_venv.sh installs.
# $CMAKE_ARGS is passed on.
# The platform tag is the oldest one that auditwheel finds true: manylinux_2_28 in the image of packaging/Dockerfile,
# a newer one on a newer machine. Every build of a variant happens at the same path, from `git archive`: nvcc
# derives names from paths, and nothing that is not committed can get in. Same commit, same tools, same bytes
# (packaging/check_reproducible.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
variant=${1:?variant: cpu, cu126, cu128, cu129, cu130, rocm6 or rocm7}
out=$(mkdir -p "${2:-dist}" && cd "${2:-dist}" && pwd)
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || command -v python3)}

cuda=0 hip=0 archs=all cmake_args="-DMLA_FP8_WERROR=ON -DMLA_FP8_RELEASE=ON ${CMAKE_ARGS:-}"
case $variant in
  cpu) ;;
  cu126) cuda=1 archs="80;89;90a" ;;  # the compiler knows no newer ones
  cu128 | cu129 | cu130) cuda=1 ;;
  rocm6 | rocm7) hip=1 ;;
  *) echo "unknown variant $variant" >&2; exit 2 ;;
esac
if [ $cuda = 1 ]; then
  release=$(nvcc --version | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1\2/p')
  [ "cu$release" = "$variant" ] || { echo "$variant needs nvcc of that version, PATH has $release" >&2; exit 2; }
fi
PATH="$(dirname "$PYTHON"):$PATH" ci/need.sh cmake ninja auditwheel patchelf  # before minutes of compiling
commit=$(git rev-parse "${COMMIT:-HEAD}")
git diff --quiet "$commit" || echo "build_wheel: changes that are not in $commit are left out" >&2

work=/tmp/mla_fp8_wheel/$variant
exec 9> "/tmp/mla_fp8_wheel.$variant.lock"
flock 9
rm -rf "$work" && mkdir -p "$work/src"
git archive "$commit" | tar -x -C "$work/src"
"$PYTHON" -c "import runpy, sys; print(runpy.run_path('python/mla_fp8/_version.py')['find'](commit=sys.argv[1]))" \
  "$commit" > "$work/src/version.txt"
umask 022
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct "$commit")} LC_ALL=C
(
  cd "$work/src"
  PATH="$(dirname "$PYTHON"):$PATH" MLA_FP8_LOCAL=$variant MLA_FP8_CUDA=$cuda MLA_FP8_CUDA_ARCHS=$archs \
    MLA_FP8_HIP=$hip CMAKE_ARGS=$cmake_args "$PYTHON" -m pip wheel -q --no-build-isolation --no-deps -w "$work/raw" .
)
PATH="$(dirname "$PYTHON"):$PATH" "$PYTHON" -m auditwheel repair --plat auto --exclude 'libtorch*.so' \
  -w "$work/repaired" "$work"/raw/*.whl 2>&1 | tail -1
"$PYTHON" packaging/check_wheel.py "$work"/repaired/*.whl
rm -f "$out"/mla_fp8-*+"$variant"[.-]*.whl
cp "$work"/repaired/*.whl "$out"
