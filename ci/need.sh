#!/bin/sh
# Fails at once if one of the commands is missing: ci/need.sh COMMAND...
missing=""
for command in "$@"; do
  command -v "$command" > /dev/null || missing="$missing $command"
done
[ -z "$missing" ] && exit
echo "mla_fp8: not on PATH:$missing. Install what has them into the Python that is used: pip install$missing" >&2
exit 1
