#!/usr/bin/env bash
# Same commit, same tools, same bytes: builds a variant's wheel twice without ccache and compares the files.
#   packaging/check_reproducible.sh [VARIANT]     (cpu)
set -euo pipefail
cd "$(dirname "$0")/.."
variant=${1:-cpu}
COMMIT=$(git rev-parse HEAD)
export COMMIT
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for i in 1 2; do
  CCACHE_DISABLE=1 packaging/build_wheel.sh "$variant" "$work/$i"
done
(cd "$work/1" && sha256sum ./*.whl) > "$work/first"
cat "$work/first"
cd "$work/2" && sha256sum --check "$work/first"
