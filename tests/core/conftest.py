"""Tests of csrc/common and the CPU kernels without torch: numpy, hypothesis and the module _mla_fp8_core.

`make build-cpu` builds the module. Where there is no torch: `pytest --confcutdir tests/core tests/core`.
A missing module is an error, never a skip: these tests carry the numerics of every other one.
"""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

BUILD = Path(__file__).resolve().parents[2] / "build"

for folder in (BUILD / "tests", BUILD / "cmake"):  # installed by `make test`, else as CMake built it
    if any(folder.glob("_mla_fp8_core*.so")):
        sys.path.insert(0, str(folder))
        break
else:
    raise pytest.UsageError("tests/core needs the module _mla_fp8_core, which `make build-cpu` builds")

# Derandomised: a red run is red for everyone.
settings.register_profile("mla_fp8", derandomize=True, deadline=None, max_examples=300)
settings.load_profile("mla_fp8")
