#!/usr/bin/env python3
"""Machine code, registers and local memory of each Hopper kernel, against packaging/kernel_sizes.csv.

  packaging/kernel_sizes.py python/mla_fp8/lib/libmla_fp8_cuda.so          exit code 1 if a kernel has grown
  packaging/kernel_sizes.py python/mla_fp8/lib/libmla_fp8_cuda.so --write  writes the CSV

Reads libraries that are built with MLA_FP8_TESTS=1: others are packed by zstd. Cold code costs a kernel time
between other kernels, and one that needs more registers may spill.
"""

import argparse
import csv
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from elftools.elf.elffile import ELFFile

SIZES = Path(__file__).with_suffix(".csv")
MOST_GROWTH = 0.03
ARCH = 90
MAGIC = struct.pack("<I", 0xBA55ED50)
ELF, LZ4, ZSTD = 2, 0x2000, 0x8000  # an image's kind; how it is packed
WITH_VALUE, REGISTERS, FRAME = 4, 0x2F, 0x11  # a record of .nv.info that has a value, and what two are of
COLUMNS = ("bytes", "registers", "frame")  # of code; of a thread; bytes of a thread's local memory
Sizes = dict[str, tuple[int, ...]]  # of each kernel


def unpack_lz4(packed: bytes, size: int) -> bytes:
    """A block of LZ4: literals, then a copy of what is unpacked already, again and again."""
    plain, at = bytearray(), 0

    def length(of_token: int) -> int:
        nonlocal at
        total = more = of_token
        if of_token == 15:
            while (more := packed[at]) == 255:
                total, at = total + more, at + 1
            total, at = total + more, at + 1
        return total

    while at < len(packed):
        token, at = packed[at], at + 1
        literals = length(token >> 4)
        plain += packed[at : at + literals]
        at += literals
        if at >= len(packed):
            break
        distance, at = packed[at] | packed[at + 1] << 8, at + 2
        left = length(token & 15) + 4
        while left > 0:  # a copy may read what it has just written
            piece = plain[len(plain) - distance :][:left]
            plain += piece
            left -= len(piece)
    assert len(plain) == size, "an image of a fat binary is not LZ4"
    return bytes(plain)


def cubins(library: bytes) -> Iterator[bytes]:
    """The ELF images for Hopper in a library's fat binaries."""
    section = ELFFile(BytesIO(library)).get_section_by_name(".nv_fatbin")
    library = section.data() if section else b""
    start = library.find(MAGIC)
    while start >= 0:
        header_bytes, size = struct.unpack_from("<HQ", library, start + 6)
        at, end = start + header_bytes, start + header_bytes + size
        while at < end:
            kind, _, header, stored, packed = struct.unpack_from("<HHIQI", library, at)
            arch, _, flags, _, plain = struct.unpack_from("<IQQQQ", library, at + 28)
            content = library[at + header :][: packed or stored]
            at += header + stored
            if kind != ELF or arch != ARCH:
                continue
            if flags & ZSTD:
                raise SystemExit("mla_fp8: the library is packed by zstd; build it with MLA_FP8_TESTS=1")
            yield unpack_lz4(content, plain) if flags & LZ4 else content
        start = library.find(MAGIC, end)


def readable(names: list[str]) -> list[str]:
    """Kernels without parameters and namespaces."""
    command = ["c++filt", "-p"]  # without parameters
    text = subprocess.run(command, input="\n".join(names), check=True, capture_output=True, text=True).stdout
    plain = re.sub(r"mla_fp8::|gpu::|\(anonymous namespace\)::|^void ", "", text, flags=re.MULTILINE)
    return re.sub(r"\.\w+=\(((?:\(\w+\))?\w+)\)", r"\1", plain).splitlines()  # fields without their names


def resources(cubin: ELFFile) -> dict[tuple[int, str], int]:
    """(REGISTERS or FRAME, mangled name) -> how many, from records of (form, what, bytes, symbol, value)."""
    symbols, info = cubin.get_section_by_name(".symtab"), cubin.get_section_by_name(".nv.info").data()
    found, at = {}, 0
    while at < len(info):
        form, what, size = struct.unpack_from("<BBH", info, at)
        if form == WITH_VALUE and what in (REGISTERS, FRAME):
            symbol, value = struct.unpack_from("<II", info, at + 4)
            found[what, symbols.get_symbol(symbol).name] = value
        at += 4 + (size if form == WITH_VALUE else 0)
    return found


def sizes(library: bytes) -> Sizes:
    found: Sizes = {}
    for image in cubins(library):
        cubin = ELFFile(BytesIO(image))
        code = {
            s.name.removeprefix(".text."): s["sh_size"]
            for s in cubin.iter_sections()
            if s.name.startswith(".text.")
        }
        by_name = resources(cubin)
        for name, (mangled, size) in zip(readable(list(code)), code.items(), strict=True):
            assert name not in found, name
            found[name] = size, by_name[REGISTERS, mangled], by_name[FRAME, mangled]
    return found


def read(path: Path = SIZES) -> Sizes:
    with path.open(newline="") as file:
        return {row["kernel"]: tuple(int(row[x]) for x in COLUMNS) for row in csv.DictReader(file)}


def write(found: Sizes, path: Path = SIZES) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("kernel", *COLUMNS))
        rows.writerows((name, *found[name]) for name in sorted(found))


def grown(found: Sizes, known: Sizes) -> list[str]:
    """What kernels take more than MOST_GROWTH more of than they did."""
    return [
        f"{name}: {old} -> {new} {what}"
        for name in sorted(found.keys() & known.keys())
        for what, old, new in zip(COLUMNS, known[name], found[name], strict=True)
        if new > (1 + MOST_GROWTH) * old
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    found = sizes(arguments.library.read_bytes())
    print(f"{len(found)} kernels, {sum(of[0] for of in found.values()) / 1e6:.1f} MB")
    if arguments.write:
        write(found)
        return 0
    known = read()
    wrong = grown(found, known)
    print("\n".join(wrong + [f"{name}: new or gone" for name in sorted(found.keys() ^ known.keys())]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
