#!/bin/sh
# Creates the environment $2 from the Python $1: it sees the packages next to $1's torch, and nothing else.
set -eu
rm -rf "$2"
"$1" -m venv "$2"
outer=$("$1" -c "import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])")
echo "$outer" > "$("$2/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/outer.pth"
