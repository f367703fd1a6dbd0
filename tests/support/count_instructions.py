"""What a wave of an AMD attention kernel executes for a pass of 32 keys, counted by the machine that executes
its code: the difference of two calls, one with 8 or 32 passes more. Prints rows of the tables in
docs/guide/rocm.md.

count_instructions.py GPU OP LAYOUT[+LAYOUT]... [--by-place]
    OP: ragged, 16 heads on 4 waves, or sparse, 32 heads on 8.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import emulation
import torch

import mla_fp8

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"ragged": (1024, 2048), "sparse": (256, 512)}
WAVES = {"ragged": 4, "sparse": 8}
KERNEL = {"ragged": "paged_attention_ragged_kernel", "sparse": "sparse_attention_kernel"}
PASS, PAGE = 32, 64
QUARTER_RATE = (
    "v_mul_lo",
    "v_mul_hi",
    "v_mad_u64",
    "v_mad_i64",
    "v_exp",
    "v_log",
    "v_rcp",
    "v_rsq",
    "v_sqrt",
)
Place = tuple[int, str]  # byte in the kernel, instruction


def call(gpu: str, op: str, name: str, keys: int) -> None:
    emulation.load(gpu)
    torch.manual_seed(0)
    layouts = [mla_fp8.KV_LAYOUTS[x] for x in name.split("+")]
    caches = []
    for layout in layouts:
        cache = torch.zeros(keys // PAGE, layout.page_bytes(PAGE), dtype=torch.uint8)
        scale = torch.tensor([0.05]) if layout.needs_scale else None
        rows = torch.randn(keys, layout.head_dim_qk).bfloat16()
        mla_fp8.quantize_kv(rows, torch.arange(keys), cache, layout=layout, page_size=PAGE, scale=scale)
        caches.append(cache)
    options = {"layout": layouts[0], "page_size": PAGE, "scale": scale, "sm_scale": 0.04}
    q = torch.randn(1, 16 if op == "ragged" else 32, layouts[0].head_dim_qk).bfloat16()
    if op == "ragged":
        pages = keys // PAGE
        pointers = [torch.tensor(x, dtype=torch.int32) for x in ([0, pages], range(pages), [PAGE])]
        mla_fp8.paged_attention_ragged_latent(q, caches[0], *pointers, **options, num_splits=1)
        return
    slots = torch.arange(keys // len(layouts), dtype=torch.int32)[None]
    options |= {"layout": layouts[0].id, "kernel": "portable", "heads": 32, "splits": 1}
    if len(layouts) > 1:
        options |= {"extra_kv_cache": caches[1], "extra_indices": slots, "extra_layout": layouts[1].id}
        options |= {"extra_page_size": PAGE}
    torch.ops.mla_fp8._sparse_attention(q, caches[0], slots, **options)


def counted(gpu: str, op: str, name: str, keys: int) -> Counter[Place]:
    with tempfile.NamedTemporaryFile() as file:
        paths = os.pathsep.join(str(ROOT / folder) for folder in ("python", "tests/support"))
        environment = {"PYTHONPATH": paths, "FAKE_HIP_COUNTS": file.name, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, gpu, op, name, "--keys", str(keys)]
        subprocess.run(command, check=True, env=os.environ | environment)
        lines = [line.split() for line in Path(file.name).read_text().splitlines()]
    counts: Counter[Place] = Counter()
    for _, kernel, byte, instruction, count in lines:
        if KERNEL[op] in kernel:
            counts[int(byte), instruction] += int(count)
    return counts


def of_a_pass(gpu: str, op: str, name: str) -> dict[Place, float]:
    few, many = (counted(gpu, op, name, keys) for keys in KEYS[op])
    waves = WAVES[op] * (KEYS[op][1] - KEYS[op][0]) // PASS
    return {place: (many[place] - few[place]) / waves for place in sorted(many) if many[place] != few[place]}


def row(counts: dict[Place, float]) -> list[float]:
    """Instructions, vector, quarter rate, MFMA, LDS; cycles of the vector instructions and of MFMA."""

    def total(*prefixes: str, but: str = " ") -> float:
        return sum(n for (_, i), n in counts.items() if i.startswith(prefixes) and not i.startswith(but))

    mfma, vector = total("v_mfma"), total("v_", but="v_mfma")
    quarter, lds = total(*QUARTER_RATE), total("ds_")
    return [sum(counts.values()), vector - quarter, quarter, mfma, lds, 4 * vector + 12 * quarter, 16 * mfma]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpu")
    parser.add_argument("op", choices=KEYS)
    parser.add_argument("layouts", nargs="+")
    parser.add_argument("--by-place", action="store_true", help="a line per place in the kernel")
    parser.add_argument("--keys", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.keys:
        call(args.gpu, args.op, args.layouts[0], args.keys)
        return
    for name in args.layouts:
        counts = of_a_pass(args.gpu, args.op, name)
        if args.by_place:
            for (byte, instruction), n in counts.items():
                print(f"{byte:6} {n:8.2f} {instruction}")
        print(f"| {args.gpu} `{name}` | " + " | ".join(f"{x:.0f}" for x in row(counts)) + " |", flush=True)


if __name__ == "__main__":
    main()
