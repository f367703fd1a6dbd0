"""Plants bugs into the machine code of the attention kernel for dsv32 latents, one at a time, and prints as
JSON which of them the machine saw: {"s_barrier": [true, ...], "s_waitcnt": ..., "global": ...}.

plant_bugs.py GPU
"""

import ctypes
import json
import mmap
import sys
from pathlib import Path

import emulation
import torch
from machine_code import instructions

import mla_fp8

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packaging"))
from code_objects import bundles, kernels

LAYOUT = mla_fp8.KV_LAYOUTS["dsv32"]
KERNEL = f"29paged_attention_ragged_kernelINS1_11LatentCacheILNS_10KvLayoutIdE{int(LAYOUT.id)}EEE"
S_NOP = 0xBF800000
OFFSET_MASK, FAR = 0x1FFF, 0x0FFF  # of a global instruction's first word: 4095 bytes


def problem() -> tuple[torch.Tensor, ...]:
    """Four requests of three query tokens and 40 keys, in pages of 16; two tokens share a block."""
    torch.manual_seed(0)
    page_size, requests, pages = 16, 4, 3
    cache = torch.zeros(requests * pages, LAYOUT.page_bytes(page_size), dtype=torch.uint8)
    rows = torch.randn(len(cache) * page_size, LAYOUT.head_dim_qk).bfloat16()
    mla_fp8.quantize_kv(rows, torch.arange(len(rows)), cache, layout=LAYOUT, page_size=page_size)
    q = torch.randn(3 * requests, 8, LAYOUT.head_dim_qk).bfloat16()
    indptr = torch.arange(0, len(cache) + 1, pages, dtype=torch.int32)
    indices = torch.arange(len(cache), dtype=torch.int32)
    return q, cache, indptr, indices, torch.full((requests,), 8, dtype=torch.int32)


def address_of(library: Path, offset: int) -> int:
    """Where a byte of the loaded library's file is in memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == str(library):
            begin, end = (int(x, 16) for x in fields[0].split("-"))
            if 0 <= offset - int(fields[2], 16) < end - begin:
                return begin + offset - int(fields[2], 16)
    raise RuntimeError(f"{library} is not mapped")


def writable(address: int, size: int) -> None:
    begin = address & -mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(address + size - begin), 3):
        raise OSError(ctypes.get_errno(), "mprotect")


def main(gpu: str) -> None:
    arguments = problem()
    content = emulation.HIP_LIBRARY.read_bytes()
    (kernel,) = (k for b in bundles(content) for k in kernels(b[gpu]) if KERNEL in k.name)
    emulation.load(gpu)
    runtime = ctypes.CDLL(str(emulation.HIP_RUNTIME))
    code = address_of(emulation.HIP_LIBRARY, content.index(kernel.code))
    writable(code, len(kernel.code))
    words = ctypes.cast(code, ctypes.POINTER(ctypes.c_uint32))
    inputs = [x.clone() for x in arguments]  # where the machine's allocator knows them

    def is_seen() -> bool:
        """A device for which nothing is loaded: its code is what is in memory now."""
        is_seen.device += 1
        runtime.hipSetDevice(is_seen.device)
        try:
            for options in ({"num_splits": 1}, {"num_splits": 2, "logits_soft_cap": 20.0}):
                mla_fp8.paged_attention_ragged_latent(
                    *inputs, layout=LAYOUT, page_size=16, sm_scale=0.04, q_len=3, **options
                )
        except RuntimeError as error:
            assert kernel.name in str(error), error
            return True
        return False

    is_seen.device = 0
    assert not is_seen()
    seen: dict[str, list[bool]] = {}
    for k, text in instructions(runtime, kernel.code).items():
        kind = text.split()[0].split("_load")[0].split("_store")[0]
        if kind in ("s_barrier", "s_waitcnt", "global"):
            right = words[k]
            words[k] = right & ~OFFSET_MASK | FAR if kind == "global" else S_NOP
            seen.setdefault(kind, []).append(is_seen())
            words[k] = right
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
