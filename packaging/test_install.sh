#!/usr/bin/env bash
# Installs a variant from a built index as a user would, and uses it:
#   packaging/test_install.sh INDEX VARIANT [PYTHON...]          packaging/test_install.sh site/whl cpu .venv/bin/python
# Each PYTHON (default: .venv's) has torch. The package goes into an empty environment made from it that
# sees those packages and nothing of this checkout. Checked: time from `pip install` to the first correct result,
# time of the import beyond torch's, `doctor`, and the whole `demo` if DEMO=1.
set -euo pipefail
cd "$(dirname "$0")/.."
index=$(realpath "$1") variant=$2
shift 2
[ $# -gt 0 ] || set -- .venv/bin/python
checks=$PWD/packaging/first_result.py
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for python in "$@"; do
  packaging/bare_venv.sh "$python" "$work/venv"
  venv=$work/venv/bin/python
  echo "== $("$venv" -c "import sys, torch; print('Python', sys.version.split()[0], 'torch', torch.__version__)")"
  (
    cd "$work"
    unset PYTHONPATH
    begin=$(date +%s%N)
    PIP_FIND_LINKS='' "$venv" -m pip install -q --disable-pip-version-check --index-url "file://$index/$variant" mla-fp8
    "$venv" - "$begin" "$variant" < "$checks"
    "$venv" -m mla_fp8 doctor > doctor.txt
    sed -n '1p; /^libraries/,/^$/p' doctor.txt
    [ "${DEMO:-0}" = 0 ] || "$venv" -m mla_fp8 demo --out "$work/demo" 2>/dev/null | sed -n 1p
  )
done
