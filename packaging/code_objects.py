#!/usr/bin/env python3
"""Are the AMD code objects in libmla_fp8_hip.so what they should be? Prints a table; exit code 1 if not.

  packaging/code_objects.py python/mla_fp8/lib/libmla_fp8_hip.so --zig .../site-packages/ziglang/zig

Reads each kernel's resources from the metadata that the HIP runtime reads too. With --zig, clang assembles
the instructions that the attention kernels must be made of, and their opcodes are looked for in the code.
"""

import argparse
import io
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from elftools.elf.elffile import ELFFile

MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
MAX_BYTES = 5_000_000  # of the library as a wheel has it, stripped
MAX_LDS = 64 << 10  # of gfx90a and gfx942; gfx950 has more
MAX_VGPRS = 256  # two waves of a block per SIMD: more would halve what is resident
MAX_SGPR_SPILLS = 224  # into lanes of four VGPRs, not into memory
# Kernel -> VGPRs that it may spill: two of 64 heads do on gfx90a, which decodes e4m3 with integers.
VGPR_SPILLS = {"sparse_attention_kernel": 1}

# Arch -> (assembly, encoding's opcode bits). FP8 conversion: gfx90a has none and decodes with integers.
MFMA_BF16 = {
    "gfx90a": "v_mfma_f32_16x16x16bf16_1k a[0:3], v[0:1], v[2:3], a[0:3]",
    "gfx942": "v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]",
    "gfx950": "v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]",
}
MFMA_F16 = {arch: text.replace("bf16_1k", "f16").replace("_bf16", "_f16") for arch, text in MFMA_BF16.items()}
FROM_FP8 = dict.fromkeys(("gfx942", "gfx950"), "v_cvt_pk_f32_fp8 v[0:1], v2")
MFMA_MASK, VOP1_MASK = 0xFFFF0000, 0xFE01FE00
MIN_INSTRUCTIONS = 4  # of each kind, in the kernel with the fewest


@dataclass
class Kernel:
    name: str
    metadata: dict[str, Any]
    code: bytes
    keeps_subnormals: bool  # float and 16-bit, as the kernel descriptor sets the mode
    reads_dispatch_packet: bool  # for the size of an array in LDS that the source does not declare


def bundles(library: bytes) -> Iterator[dict[str, bytes]]:
    """The code objects of each offload bundle in the library, by arch."""
    at = library.find(MAGIC)
    while at >= 0:
        found, entry = {}, at + len(MAGIC) + 8
        for _ in range(struct.unpack_from("<Q", library, at + len(MAGIC))[0]):
            offset, size, length = struct.unpack_from("<QQQ", library, entry)
            name = library[entry + 24 : entry + 24 + length].decode()
            entry += 24 + length
            if "amdgcn" in name:
                found[name.rsplit("-", 1)[1]] = library[at + offset : at + offset + size]
        if found:
            yield found
        at = library.find(MAGIC, at + 1)


def elf(content: bytes) -> ELFFile:
    return ELFFile(io.BytesIO(content))


def metadata(code_object: ELFFile) -> list[dict[str, Any]]:
    """Of each kernel, as the compiler wrote it for the runtime: MessagePack in a note."""
    (note,) = code_object.get_section_by_name(".note").iter_notes()
    return list(msgpack.unpackb(note["n_descdata"])["amdhsa.kernels"])


def kernels(content: bytes) -> list[Kernel]:
    code_object = elf(content)
    text, rodata = (code_object.get_section_by_name(name) for name in (".text", ".rodata"))
    instructions, descriptors = text.data(), rodata.data()
    code, modes, properties = {}, {}, {}
    for symbol in code_object.get_section_by_name(".dynsym").iter_symbols():
        if symbol["st_info"]["type"] == "STT_FUNC":
            at = symbol["st_value"] - text["sh_addr"]
            code[symbol.name] = instructions[at : at + symbol["st_size"]]
        elif symbol.name.endswith(".kd"):
            # compute_pgm_rsrc1 is at byte 48, FLOAT_DENORM_MODE its bits 16 to 19; kernel_code_properties at
            # 56, ENABLE_SGPR_DISPATCH_PTR its bit 1.
            name, at = symbol.name.removesuffix(".kd"), symbol["st_value"] - rodata["sh_addr"]
            modes[name] = int.from_bytes(descriptors[at + 48 : at + 52], "little")
            properties[name] = int.from_bytes(descriptors[at + 56 : at + 58], "little")
    return [
        Kernel(name, k, code[name], modes[name] >> 16 & 15 == 15, bool(properties[name] & 2))
        for k in metadata(code_object)
        for name in [k[".name"]]
    ]


def loaded_constants(content: bytes) -> list[str]:
    """Constants that code loads in place of having them in instructions: those of a class, whose member
    functions were called where nothing wanted a constant expression. What follows from them is computed at
    run time then, divisions and the trip counts of loops included."""
    sections = [s for s in elf(content).iter_sections() if s.name.startswith(".data") and s["sh_size"] > 0]
    return [f"loads {s['sh_size']} bytes of constants from {s.name}" for s in sections]


def wrong_resources(kernel: Kernel) -> list[str]:
    spills = next((count for name, count in VGPR_SPILLS.items() if name in kernel.name), 0)
    limits = {
        ".private_segment_fixed_size": 8 * spills,
        ".vgpr_spill_count": spills,
        ".sgpr_spill_count": MAX_SGPR_SPILLS,
        ".group_segment_fixed_size": MAX_LDS,
        ".vgpr_count": MAX_VGPRS,
    }
    above = [
        f"{name[1:]} {kernel.metadata[name]}, at most {limit}"
        for name, limit in limits.items()
        if kernel.metadata[name] > limit
    ]
    if kernel.reads_dispatch_packet:
        above.append("reads the dispatch packet")
    return above if kernel.keeps_subnormals else [*above, "flushes subnormals"]


def encoding(zig: Path, arch: str, assembly: str) -> int:
    """The first word of an instruction."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "x.s"), Path(folder, "x.o")
        source.write_text(f".text\n{assembly}\n")
        command = [zig, "clang", "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-c", source, "-o", target]
        subprocess.run(command, check=True, capture_output=True)
        text = elf(target.read_bytes()).get_section_by_name(".text").data()
        return int.from_bytes(text[:4], "little")


def count(kernel: Kernel, opcode: int, mask: int) -> int:
    words = struct.unpack(f"<{len(kernel.code) // 4}I", kernel.code[: len(kernel.code) // 4 * 4])
    return sum(word & mask == opcode & mask for word in words)


RAGGED, SPARSE = "29paged_attention_ragged_kernel", "23sparse_attention_kernel"


def types_of(name: str) -> tuple[str, set[str]]:
    """Of an attention kernel by its mangled name: its dtype's number, and the formats of its caches."""
    if RAGGED in name:
        stored = {"CacheDtypeE2": "e4m3fn", "CacheDtypeE3": "e4m3fnuz"}
        return name.rsplit("5DtypeE", 1)[1][0], {fmt for code, fmt in stored.items() if code in name}
    first, second = re.search(r"6FormatE(\d)ELS\w_(\d)E", name).groups()
    known = {"1": "e4m3fn", "2": "e4m3fnuz"}
    return "0", {known[code] for code in (first, second) if code in known}


def missing_instructions(zig: Path, arch: str, attention: list[Kernel]) -> Iterator[str]:
    """An attention kernel multiplies by MFMA, and widens the FP8 formats of its GPU by instructions."""
    mfma = {dtype: encoding(zig, arch, text[arch]) for dtype, text in (("0", MFMA_BF16), ("1", MFMA_F16))}
    fp8 = encoding(zig, arch, FROM_FP8[arch]) if arch in FROM_FP8 else None
    for kernel in attention:
        dtype, formats = types_of(kernel.name)
        if count(kernel, mfma[dtype], MFMA_MASK) < MIN_INSTRUCTIONS:
            yield f"{arch} {kernel.name}: no MFMA of its dtype"
        # gfx942 takes e4m3fn by a detour through its own format, gfx950 decodes e4m3fnuz with integers.
        by_instruction = {"e4m3fn", "e4m3fnuz"} if arch == "gfx942" else {"e4m3fn"}
        if fp8 is not None and formats & by_instruction and count(kernel, fp8, VOP1_MASK) < MIN_INSTRUCTIONS:
            yield f"{arch} {kernel.name}: no FP8 conversion"


def stripped_size(library: bytes) -> int:
    found = (elf(library).get_section_by_name(name) for name in (".symtab", ".strtab"))
    return len(library) - sum(section["sh_size"] for section in found if section is not None)


def check(library: Path, zig: Path | None = None, verbose: bool = False) -> list[str]:
    wrong, content = [], library.read_bytes()
    if (size := stripped_size(content)) > MAX_BYTES:
        wrong.append(f"{library.name}: {size} bytes, at most {MAX_BYTES}")
    for bundle in bundles(content):
        for arch, code_object in bundle.items():
            of_arch = kernels(code_object)
            wrong += [f"{arch} {of_arch[0].name}: {what}" for what in loaded_constants(code_object)]
            for kernel in of_arch:
                wrong += [f"{arch} {kernel.name}: {what}" for what in wrong_resources(kernel)]
                if verbose:
                    m = kernel.metadata
                    resources = f"{m['.vgpr_count']:4} VGPRs {m['.group_segment_fixed_size']:6} LDS"
                    print(f"{arch} {resources} {len(kernel.code):6} code  {kernel.name}")
            if zig:
                attention = [k for k in of_arch if RAGGED in k.name or SPARSE in k.name]
                wrong += missing_instructions(zig, arch, attention)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--zig", type=Path)
    options = parser.parse_args()
    wrong = check(options.library, options.zig, verbose=True)
    print(f"{stripped_size(options.library.read_bytes())} bytes")
    print("\n".join(wrong) or "ok")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
