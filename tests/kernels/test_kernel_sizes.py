"""The code, registers and local memory of Hopper kernels are those of packaging/kernel_sizes.csv, or less.

After a deliberate change: packaging/kernel_sizes.py build/tests/libmla_fp8_emulated_cuda.so --write
"""

import sys
from pathlib import Path

import pytest
from emulation import CUDA_LIBRARY

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packaging"))
try:
    import kernel_sizes
except ModuleNotFoundError:  # pyelftools: not on every GPU machine
    pytest.skip("no pyelftools", allow_module_level=True)

KNOWN = kernel_sizes.read()


KNOWN_SHARE = 0.9  # of the table that a library has: else the table is of other kernels


@pytest.mark.gpu_library(CUDA_LIBRARY)
def test_no_hopper_kernel_has_grown():
    found = kernel_sizes.sizes(CUDA_LIBRARY.read_bytes())
    assert kernel_sizes.grown(found, KNOWN) == []
    assert len(found.keys() & KNOWN.keys()) >= KNOWN_SHARE * len(KNOWN)


@pytest.mark.parametrize(
    "what, factor, complaint",
    [
        (0, 1.031, "x: 10000 -> 10310 bytes"),
        (0, 1.029, None),
        (0, 0.5, None),
        (1, 1.05, "x: 100 -> 105 registers"),
        (2, 2.0, "x: 8 -> 16 frame"),
    ],
)
def test_what_grows_by_more_than_three_percent_is_named(what, factor, complaint):
    before = {"x": (10000, 100, 8), "y": (10000, 100, 0)}
    grown = {"x": tuple(round(n * (factor if i == what else 1)) for i, n in enumerate(before["x"]))}
    assert kernel_sizes.grown(before | grown, before) == ([complaint] if complaint else [])


def test_the_first_local_memory_of_a_kernel_is_named():
    assert kernel_sizes.grown({"x": (1, 1, 8)}, {"x": (1, 1, 0)}) == ["x: 0 -> 8 frame"]


@pytest.mark.parametrize(
    "packed, plain",
    [(b"\x30abc", b"abc"), (b"\x35abc\x03\x00\x10d", b"abcabcabcabcd"), (b"\xf0\x02" + b"a" * 17, b"a" * 17)],
)
def test_lz4_is_unpacked(packed, plain):
    assert kernel_sizes.unpack_lz4(packed, len(plain)) == plain
