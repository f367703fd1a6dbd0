"""libmla_fp8_hip.so without an AMD GPU: its code objects, and its host code against a stand-in HIP runtime.

What its kernels compute is tested by every op's own tests with --emulated.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulation import HIP_LIBRARY, HIP_RUNTIME

from mla_fp8 import _libraries

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "packaging"))
try:
    import code_objects
except ModuleNotFoundError:  # pyelftools and msgpack: not on every GPU machine
    code_objects = None

LIBRARY = _libraries.LIB_DIR / "libmla_fp8_hip.so"
ARCHS = ("gfx90a", "gfx942", "gfx950")

needs_library = pytest.mark.gpu_library(LIBRARY)
needs_readers = pytest.mark.skipif(code_objects is None, reason="no pyelftools or msgpack")
needs_emulation = pytest.mark.gpu_library(HIP_LIBRARY)


def zig() -> Path | None:
    found = importlib.util.find_spec("ziglang")
    return Path(found.origin).parent / "zig" if found and found.origin else None


@needs_library
@needs_readers
def test_code_objects_are_within_their_budgets():
    """Size, no scratch, no spills to memory, LDS and registers, no layout that is loaded in place of known;
    MFMA and FP8 conversions in attention."""
    assert code_objects.check(LIBRARY, zig()) == []


@needs_library
@needs_readers
def test_every_source_has_a_code_object_for_every_gpu():
    bundles = list(code_objects.bundles(LIBRARY.read_bytes()))
    assert len(bundles) == 12 and all(tuple(bundle) == ARCHS for bundle in bundles)
    names = [sorted(k.name for b in bundles for k in code_objects.kernels(b[arch])) for arch in ARCHS]
    assert names[0] == names[1] == names[2] and len(names[0]) > 80


@needs_library
@needs_readers
def test_a_library_that_has_grown_is_found(monkeypatch):
    monkeypatch.setattr(code_objects, "MAX_BYTES", code_objects.stripped_size(LIBRARY.read_bytes()) - 1)
    (complaint,) = code_objects.check(LIBRARY)
    assert complaint.startswith("libmla_fp8_hip.so: ") and "bytes, at most" in complaint


@needs_library
def test_library_links_to_no_gpu_library():
    dynamic = subprocess.run(["readelf", "-d", LIBRARY], check=True, capture_output=True, text=True).stdout
    needed = [line.split("[")[1].split("]")[0] for line in dynamic.splitlines() if "NEEDED" in line]
    assert not [name for name in needed if "hip" in name or "amd" in name or "cuda" in name]


CALL = """
import sys, ctypes, torch, mla_fp8
library, runtime, warm = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
if runtime:
    ctypes.CDLL(runtime)
torch.ops.load_library(library)
op = torch.ops.mla_fp8_emulated
if warm:
    op._warmup(torch.empty(0))
out, _ = op.pad_q_heads(torch.ones(2, 3, 64).bfloat16(), None, num_heads=4)
print("right" if out[:, :3].eq(1).all() and out[:, 3].eq(0).all() else "wrong")
"""


def call(*, runtime: bool = True, warm: bool = False, **environment: str) -> str:
    files = (str(HIP_LIBRARY), str(HIP_RUNTIME) if runtime else "")
    command = [sys.executable, "-c", CALL, *files, str(warm)]
    paths = {"PYTHONPATH": str(ROOT / "python")}
    result = subprocess.run(
        command, env=os.environ | paths | environment, capture_output=True, text=True, check=False
    )
    return result.stdout + result.stderr


@needs_emulation
@pytest.mark.parametrize("arch", ARCHS)
def test_each_gpu_finds_its_code_object(arch):
    assert call(FAKE_HIP_ARCH=arch).endswith("right\n")


@needs_emulation
@pytest.mark.parametrize("arch", ARCHS)
def test_warmup_loads_every_kernel_by_its_name(arch):
    """Each one is in the code object, and the stand-in knows all of its instructions."""
    assert call(warm=True, FAKE_HIP_ARCH=arch).endswith("right\n")


@needs_emulation
@pytest.mark.parametrize("warm", [False, True])
def test_gpu_without_a_code_object_is_named_in_the_error(warm):
    output = call(FAKE_HIP_ARCH="gfx1030", warm=warm)
    assert "RuntimeError: mla_fp8: no code object for this GPU in the package" in output
    assert "gfx90a, gfx942, gfx950" in output


@needs_emulation
def test_machine_without_a_hip_runtime_says_so():
    assert "RuntimeError: mla_fp8: no HIP runtime (libamdhip64.so) was found" in call(runtime=False)


@needs_emulation
def test_order_of_the_waves_changes_nothing():
    """A missing barrier would make the result depend on it: here waves run as far ahead as they can."""
    file = ROOT / "tests/ops/test_paged_attention_ragged_options.py"
    pytest_quietly = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    command = [sys.executable, *pytest_quietly, "--emulated", "gfx942", file]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python"), "FAKE_HIP_SEED": "7"}
    result = subprocess.run(
        [*command, "-k", "7-fn or 4-fn"], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:]


EVERY_E4M3FN = """
import emulation, sys, torch, mla_fp8
emulation.load(sys.argv[1])
layout = mla_fp8.KV_LAYOUTS["fp8_e4m3"]
codes = (torch.arange(576) % 256).byte()
cache = torch.zeros(1, layout.page_bytes(1), dtype=torch.uint8)
cache[0, :576] = codes
options = {"slots": torch.zeros(1, dtype=torch.int32), "layout": layout.id, "page_size": 1}
want = emulation.cpu_ops.dequantize_kv(cache, **options, scale=torch.ones(1))
got = torch.ops.mla_fp8.dequantize_kv(cache, **options, scale=torch.ones(1))
print((got.view(torch.int16) != want.view(torch.int16)).sum().item(), "differ")
"""

NO_INDEXER = """
import emulation, sys, mla_fp8
from op_samples import SAMPLES
tensors, options = SAMPLES["topk_to_slots"]("cpu")
emulation.load(sys.argv[1])
try:
    mla_fp8.topk_to_slots(*tensors, **options)
except NotImplementedError as e:
    print(e)
"""


def run_emulated(code: str, arch: str) -> str:
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("python", "tests/support"))
    command = [sys.executable, "-c", code, arch]
    variables = os.environ | {"PYTHONPATH": paths}
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


@needs_emulation
@pytest.mark.parametrize("arch", ARCHS)
def test_every_e4m3fn_code_is_exact_on_every_gpu(arch):
    """gfx942 reads e4m3fn by way of e4m3fnuz, which has no -0."""
    assert run_emulated(EVERY_E4M3FN, arch) == "0 differ\n"


@needs_emulation
def test_an_op_that_the_emulated_library_lacks_is_not_run_by_another():
    assert "Could not run 'mla_fp8_emulated::topk_to_slots'" in run_emulated(NO_INDEXER, "gfx942")


@pytest.mark.device(torch.version.hip is not None, "an AMD GPU with a ROCm torch")
def test_library_is_loaded_under_rocm():
    assert _libraries.status["libmla_fp8_hip.so"] == "loaded"
