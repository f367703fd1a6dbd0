"""The machine that executes the CUDA library's PTX (tests/emulator/ptx): does it see bugs? What our kernels
compute on it `make machine-sm_90a` tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import emulation
import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.gpu_library(emulation.CUDA_LIBRARY)


def run(*command: object, **environment: str) -> str:
    """Output of a Python of its own: the machine replaces PyTorch's allocator."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("python", "tests/support"))
    environment |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, *map(str, command)]
    environment = os.environ | environment
    return subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, list[int]]]:
    return json.loads(run(ROOT / "tests/support/plant_ptx_bugs.py", FAKE_CUDA_RACES="1"))


@pytest.mark.parametrize("kernel", ["few_heads", "many_heads"])
def test_an_arrival_that_is_missing_is_seen(seen, kernel):
    found, planted = seen[kernel]["arrival"]
    assert found == planted > 0


@pytest.mark.parametrize("bug", ["wait", "barrier"])
def test_waits_that_are_missing_are_seen_where_every_warp_does_everything(seen, bug):
    found, planted = seen["few_heads"][bug]
    assert found == planted > 0


def test_some_missing_waits_are_seen_between_roles(seen):
    """Not those that repeat what another wait implies, nor those that keep products in turn."""
    assert seen["many_heads"]["wait"][0] >= 5
    found, planted = seen["many_heads"]["barrier"]
    assert found >= planted - 2 > 0


@pytest.mark.parametrize("kernel", ["few_heads", "many_heads"])
def test_products_of_what_was_stored_want_a_proxy_fence(seen, kernel):
    assert seen[kernel]["proxy fence"][0] > 0


SCRIPT = """
import torch, mla_fp8, emulation
emulation.load(emulation.HOPPER)
layout = mla_fp8.KV_LAYOUTS["dsv32"]
cache = torch.frombuffer(bytearray(layout.page_bytes(64)), dtype=torch.uint8)[None]  # not PyTorch's memory
q, indices = torch.zeros(1, 8, 576).bfloat16(), torch.zeros(1, 8, dtype=torch.int32)
try:
    mla_fp8.sparse_decode(q, cache, indices, layout=layout, page_size=64, sm_scale=1.0)
except RuntimeError as e:
    print(e)
"""


def test_memory_of_nobody_is_not_read():
    said = run("-c", SCRIPT)
    assert "few_heads" in said and "are in no allocation" in said


# Where a warpgroup once read what the other, or another warp of its own, might already write.
RACES = {
    "sparse_attention_cuda": "test_windows and alone-33 and bf16_tiles and bf16_512",
    "sparse_prefill_window": "nan_reaches and 24-bf16_512",
}


@pytest.mark.parametrize("file", RACES)
def test_warps_wait_for_each_other(file):
    (path,) = ROOT.glob(f"tests/*/test_{file}.py")
    said = run("-m", "pytest", "--emulated", "sm_90a", path, "-k", RACES[file], FAKE_CUDA_RACES="1")
    assert " passed" in said
