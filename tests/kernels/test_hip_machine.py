"""The machine that executes AMD code objects (tests/emulator/machine): does it read them as LLVM does,
and does it see bugs? `make machine` tests what our kernels compute on it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from emulation import HIP_RUNTIME

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests/support"
LISTING = SUPPORT / "cdna_instructions.s"
ARCHS = ("gfx942", "gfx950")

pytestmark = pytest.mark.gpu_library(HIP_RUNTIME)


def zig() -> Path:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        pytest.skip("no ziglang")
    return Path(spec.origin).parent / "zig"


def assemble(source: Path, arch: str, target: Path) -> None:
    command = [zig(), "clang", "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", f"-Wa,-defsym,{arch.upper()}=1"]
    subprocess.run([*command, "-c", source, "-o", target], check=True)


def run(script: str, arch: str, *arguments: object, **environment: str) -> str:
    """Output of a script of tests/support in its own process: the machine replaces PyTorch's allocator."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("python", "tests/support"))
    environment |= {"PYTHONPATH": paths, "FAKE_HIP_ARCH": arch, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SUPPORT / script, *map(str, arguments)]
    result = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


# ---- decoding
def instructions(source: str, arch: str) -> list[str]:
    """The lines that are assembled for an arch."""
    kept, wanted = [], True
    for line in source.splitlines():
        if line.startswith(".ifdef"):
            wanted = line.split()[1] == arch.upper()
        elif line.startswith(".endif"):
            wanted = True
        elif wanted and line and not line.startswith(("//", ".")):
            kept.append(line)
    return kept


def operands(text: str) -> list[str]:
    """The registers that an instruction names, each by its first: v[4:7] is v4."""
    return re.findall(r"\b(?:v\d+|s\d+|vcc|exec|m0)\b", re.sub(r"\b([vs])\[(\d+):\d+\]", r"\1\2", text))


def is_within(wanted: list[str], found: list[str]) -> bool:
    rest = iter(found)
    return all(register in rest for register in wanted)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_instruction_is_decoded_as_llvm_assembles_it(arch, tmp_path):
    """Names and registers."""
    elffile = pytest.importorskip("elftools.elf.elffile")
    assemble(LISTING, arch, tmp_path / "x.o")
    with (tmp_path / "x.o").open("rb") as file:
        (tmp_path / "text").write_bytes(elffile.ELFFile(file).get_section_by_name(".text").data())
    decoded = json.loads(run("machine_code.py", arch, "decode", HIP_RUNTIME, tmp_path / "text"))
    texts = instructions(LISTING.read_text(), arch)
    assert len(decoded) == len(texts)
    for text, got in zip(texts, decoded, strict=True):
        name = re.sub(r"_(e32|e64|sdwa|dpp)$", "", text.split()[0])
        assert got.split()[0] == name, f"{text}: {got}"
        assert is_within(operands(text), operands(got)), f"{text}: {got}"


def test_every_instruction_that_is_known_is_assembled():
    texts = [line for arch in ("gfx90a", *ARCHS) for line in instructions(LISTING.read_text(), arch)]
    assembled = {re.sub(r"_(e32|e64|sdwa|dpp)$", "", text.split()[0]) for text in texts}
    assert assembled == set(json.loads(run("machine_code.py", "gfx942", "names", HIP_RUNTIME)))


# ---- what machine code must not do. Two waves; the parameters are in s[4:7]: where to read 256 words and to
# write 128; v0 is the thread, v1 four times that.
KERNEL = """
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 2, v0
s_waitcnt lgkmcnt(0)
{body}
s_endpgm
{name}_end:
.size {name}, {name}_end-{name}
.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_group_segment_fixed_size 1024
  .amdhsa_kernarg_size 16
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_next_free_vgpr 16
  .amdhsa_next_free_sgpr 16
  .amdhsa_accum_offset 16
  .amdhsa_float_denorm_mode_32 3
  .amdhsa_float_denorm_mode_16_64 3
.end_amdhsa_kernel
"""
STORE = "global_store_dword v1, v2, s[6:7]"
LOAD = "global_load_dword v2, v1, s[4:5]"
TO_LDS = "ds_write_b32 v1, v0; s_waitcnt lgkmcnt(0)"
OF_OTHER_WAVE = "v_xor_b32_e32 v3, 0x100, v1; ds_read_b32 v2, v3; s_waitcnt lgkmcnt(0)"
# name: (body, what is stored by thread t, or what is said)
CASES = {
    "loaded": (f"{LOAD}; s_waitcnt vmcnt(0); {STORE}", "1000 + t"),
    "loads_come_in_order": (
        f"{LOAD}; global_load_dword v3, v1, s[4:5]; s_waitcnt vmcnt(1); {STORE}",
        "1000 + t",
    ),
    "loads_of_two_branches": (
        f"s_mov_b64 exec, 0xf; {LOAD}; s_not_b64 exec, exec; {LOAD} offset:4; s_mov_b64 exec, -1;"
        f"s_waitcnt vmcnt(0); {STORE}",
        "1000 + t + (t % 64 > 3)",
    ),
    "through_lds": (f"{TO_LDS}; s_barrier; {OF_OTHER_WAVE}; {STORE}", "t ^ 64"),
    "swapped_in_pairs": (
        f"v_mov_b32_dpp v2, v0 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf; {STORE}",
        "t ^ 1",
    ),
    "rotated": (
        f"v_mov_b32_dpp v2, v0 row_ror:4 row_mask:0xf bank_mask:0xf; {STORE}",
        "(t & ~15) + (t - 4) % 16",
    ),
    "high_half": (
        "v_lshlrev_b32_e32 v3, 16, v0; v_mov_b32_e32 v2, 5;"
        "v_add_u32_sdwa v2, v3, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD;"
        + STORE,
        "t + 5",
    ),
    "no_wait_for_a_load": (f"{LOAD}; {STORE}", "reads v2 before s_waitcnt"),
    "wait_for_too_few_loads": (
        f"global_load_dword v3, v1, s[4:5]; {LOAD}; s_waitcnt vmcnt(1); {STORE}",
        "reads v2 before s_waitcnt",
    ),
    "no_wait_for_a_scalar_load": ("s_load_dword s8, s[4:5], 0x0; s_add_u32 s8, s8, 1", "reads s8 before"),
    "scalar_loads_come_in_any_order": (
        "s_load_dword s8, s[4:5], 0x0; s_load_dword s9, s[4:5], 0x4;"
        "s_waitcnt lgkmcnt(1); s_add_u32 s8, s8, 1",
        "reads s8 before",
    ),
    "no_wait_for_lds": (f"{TO_LDS}; ds_read_b32 v2, v1; {STORE}", "reads v2 before s_waitcnt"),
    "no_wait_before_overwriting": (f"{LOAD}; v_mov_b32_e32 v2, 0", "writes v2 before s_waitcnt"),
    "flat_loads_count_twice": (
        "v_mov_b32_e32 v4, s4; v_mov_b32_e32 v5, s5; flat_load_dword v2, v[4:5]; s_waitcnt vmcnt(0);" + STORE,
        "reads v2 before s_waitcnt",
    ),
    "flat_into_lds": (
        "s_mov_b64 s[8:9], src_shared_base; v_mov_b32_e32 v5, s9; v_mov_b32_e32 v4, v1; v_mov_b32_e32 v2, v0;"
        "flat_store_dword v[4:5], v2; s_waitcnt vmcnt(0) lgkmcnt(0); s_barrier;"
        + OF_OTHER_WAVE
        + ";"
        + STORE,
        "t ^ 64",
    ),
    "flat_race_in_lds": (
        "s_mov_b64 s[8:9], src_shared_base; v_mov_b32_e32 v5, s9; v_mov_b32_e32 v4, v1;"
        "flat_store_dword v[4:5], v0; s_waitcnt vmcnt(0) lgkmcnt(0);" + OF_OTHER_WAVE,
        "no barrier is between them",
    ),
    "no_barrier": (f"{TO_LDS}; {OF_OTHER_WAVE}", "no barrier is between them"),
    "no_barrier_before_overwriting": (
        f"{TO_LDS}; s_barrier; {OF_OTHER_WAVE}; {TO_LDS}",
        "no barrier is between them",
    ),
    "barrier_before_the_write_is_done": ("ds_write_b32 v1, v0; s_barrier", "waited for writes to LDS"),
    "store_beyond_the_end": (
        "global_store_dword v1, v0, s[6:7] offset:4",
        "writes 4 bytes at 0x[0-9a-f]+: 4 bytes beyond an allocation of 512",
    ),
    "load_before_the_begin": (
        "global_load_dword v2, v1, s[4:5] offset:-4",
        "reads 4 bytes at 0x[0-9a-f]+: 4 bytes before an allocation of 1024",
    ),
    "lds_beyond_the_end": ("ds_write_b32 v1, v0 offset:1020", "of which its kernel has 1024 bytes"),
    "lds_unaligned": ("ds_write_b64 v1, v[2:3]", "is not aligned"),
    "lane_that_is_not_active": (
        "s_mov_b64 exec, 1; v_mov_b32_e32 v3, 4; ds_bpermute_b32 v2, v3, v0",
        "reads lane 1, which is not active",
    ),
    "register_that_is_not_allotted": ("v_mov_b32_e32 v16, 0", "v16, but its kernel has 16 VGPRs"),
    "unknown": ("v_sin_f32_e32 v2, v1", "kernel unknown: unknown instruction 0x7e0453"),
    "no_end": ("again: s_branch again", "does not end"),
}


@pytest.fixture(scope="module", params=ARCHS)
def launched(request, tmp_path_factory) -> tuple[dict[str, object], str]:
    """Of each kernel: what it stored, or what was said. How often which instruction was executed."""
    folder = tmp_path_factory.mktemp(request.param)
    text = "".join(
        KERNEL.format(name=name, body=body.replace(";", "\n")) for name, (body, _) in CASES.items()
    )
    (folder / "x.s").write_text(text)
    assemble(folder / "x.s", request.param, folder / "x.o")
    subprocess.run([zig(), "ld.lld", "-shared", folder / "x.o", "-o", folder / "x.hsaco"], check=True)
    bundle = [sys.executable, ROOT / "csrc/hip/bundle.py", folder / "x.fatbin"]
    subprocess.run([*bundle, f"{request.param}={folder / 'x.hsaco'}"], check=True)
    question = ("launch", HIP_RUNTIME, folder / "x.fatbin", *CASES)
    answer = run("machine_code.py", request.param, *question, FAKE_HIP_COUNTS=str(folder / "counts"))
    return json.loads(answer), (folder / "counts").read_text()


@pytest.mark.parametrize("name", CASES)
def test_machine_code_gets_its_results_or_is_told_what_is_wrong(name, launched):
    _, expected = CASES[name]
    got = launched[0][name]
    if isinstance(got, list):
        assert got == [eval(expected, {"t": t}) for t in range(128)]
    else:
        assert re.search(expected, got), got


def test_executed_instructions_are_counted(launched):
    """By two waves: one store to LDS, three waits, each at a place of its own."""
    lines = [line.split() for line in launched[1].splitlines()]
    counts: dict[tuple[str, str], list[int]] = {}
    for _, kernel, _, instruction, count in lines:
        counts.setdefault((kernel, instruction), []).append(int(count))
    assert counts["through_lds", "ds_write_b32"] == [2]
    assert counts["through_lds", "s_waitcnt"] == [2, 2, 2]


# ---- bugs in the machine code of our kernel for dsv32 latents
@pytest.mark.parametrize("arch", ARCHS)
def test_planted_bugs_are_seen(arch):
    """One at a time: each barrier and each wait replaced by s_nop, each global access moved 4095 bytes up."""
    pytest.importorskip("elftools.elf.elffile")
    seen = json.loads(run("plant_bugs.py", arch, arch))
    assert all(seen["s_barrier"]), seen
    assert sum(seen["s_waitcnt"]) >= 0.9 * len(seen["s_waitcnt"]), seen
    assert sum(seen["global"]) >= 0.9 * len(seen["global"]), seen
