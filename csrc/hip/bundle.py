"""Packs code objects into one offload bundle, of which hipModuleLoadData takes the one for its GPU.

bundle.py out.fatbin gfx942=a.hsaco gfx950=b.hsaco ...    (clang-offload-bundler -type=o, uncompressed)
"""

import struct
import sys
from pathlib import Path

ALIGNMENT = 256
MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


def align(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def bundle(code_objects: dict[str, bytes]) -> bytes:
    entries = {"host-x86_64-unknown-linux--": b""} | {
        f"hipv4-amdgcn-amd-amdhsa--{arch}": code for arch, code in code_objects.items()
    }
    offset = align(len(MAGIC) + 8 + sum(24 + len(name) for name in entries))
    header, body = MAGIC + struct.pack("<Q", len(entries)), b""
    for name, code in entries.items():
        header += struct.pack("<QQQ", offset + len(body), len(code), len(name)) + name.encode()
        body += code.ljust(align(len(code)), b"\0")
    return header.ljust(offset, b"\0") + body


if __name__ == "__main__":
    target, *inputs = sys.argv[1:]
    named = (x.split("=", 1) for x in inputs)
    Path(target).write_bytes(bundle({arch: Path(path).read_bytes() for arch, path in named}))
