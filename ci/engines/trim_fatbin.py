#!/usr/bin/env python3
"""Zeroes the machine code for other GPUs inside a shared library, in place: `trim_fatbin.py FILE ARCH...`.

The section .nv_fatbin is a row of containers, each a header and a row of entries; an entry's header names the
kind of code and its architecture. The driver reads the entries of its own GPU only, so the others may hold
zeros, which compress to nothing. No offset changes.
"""

import struct
import sys
from pathlib import Path

_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries
_ENTRY = struct.Struct("<HHIQ")  # kind, unused, bytes of this header, bytes of the code
_MAGIC, _VERSION = 0xBA55ED50, 1
_PTX, _CUBIN = 1, 2
_ARCH_OFFSET, _MIN_ENTRY_HEADER = 28, 32


def trim(path: Path, architectures: set[int]) -> tuple[int, int]:
    """(bytes kept, bytes zeroed). Cubins for ``architectures`` (90, ..) stay, PTX goes."""
    data = bytearray(path.read_bytes())
    kept = zeroed = 0
    at = -1
    while (at := data.find(struct.pack("<I", _MAGIC), at + 1)) >= 0:
        _, version, header, size = _CONTAINER.unpack_from(data, at)
        begin, end = at + header, at + header + size
        if version != _VERSION or header != _CONTAINER.size or end > len(data):
            continue  # these four bytes by chance
        while begin < end:
            kind, _, entry_header, size = _ENTRY.unpack_from(data, begin)
            code = begin + entry_header
            if kind not in (_PTX, _CUBIN) or entry_header < _MIN_ENTRY_HEADER or code + size > end:
                raise ValueError(f"{path}: an entry at {begin:#x} of kind {kind} with {size} bytes of code")
            (architecture,) = struct.unpack_from("<I", data, begin + _ARCH_OFFSET)
            if kind == _CUBIN and architecture in architectures:
                kept += size
            else:
                data[code : code + size] = bytes(size)
                zeroed += size
            begin = code + size
        at = end - 1
    path.write_bytes(data)
    return kept, zeroed


if __name__ == "__main__":
    print("{} bytes kept, {} zeroed".format(*trim(Path(sys.argv[1]), {int(x) for x in sys.argv[2:]})))
