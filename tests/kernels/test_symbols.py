"""The built libraries load into any Python and any supported torch, on any CPU (check_symbols.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_fp8 import _libraries

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "packaging"))
import check_symbols

PACKAGES = _libraries.LIB_DIR.parents[1]
LIBRARIES = sorted(_libraries.LIB_DIR.glob("*.so"))


def of_cpu_or_gpu(path: Path) -> object:
    marks = [] if path.name == "libmla_fp8_cpu.so" else [pytest.mark.gpu_library(path)]
    return pytest.param(path, id=path.name, marks=marks)


@pytest.mark.parametrize("library", [of_cpu_or_gpu(path) for path in LIBRARIES])
def test_libraries_import_only_torchs_stable_symbols(library):
    assert check_symbols.check_library(library) == []
    assert any(check_symbols.TORCH_C.fullmatch(symbol) for symbol in check_symbols.imports(library))


def test_the_cpu_library_is_there():
    assert "libmla_fp8_cpu.so" in [path.name for path in LIBRARIES]


def test_kernels_of_an_instruction_set_define_no_weak_symbols():
    objects = check_symbols.isa_objects(ROOT / "build/cmake")
    if not objects:
        pytest.skip("an installed package: no object files")
    assert [line for path in objects for line in check_symbols.check_object(path)] == []


def test_the_import_does_not_load_the_compiler():
    """It takes ten times as long as everything else in the import."""
    command = "import sys, mla_fp8; sys.exit('torch._dynamo' in sys.modules)"
    assert (
        subprocess.call([sys.executable, "-c", command], env=os.environ | {"PYTHONPATH": str(PACKAGES)}) == 0
    )
