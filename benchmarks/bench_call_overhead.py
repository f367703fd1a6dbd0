"""What a call costs before any work: one row through torch.ops; and what the import adds to that of torch."""

import statistics
import subprocess
import sys

import torch

import mla_fp8
from harness import Work, run

FIRST_CALLS = """
import time, torch
row = torch.zeros(1, 512, dtype=torch.bfloat16, device="cuda")
import mla_fp8
layout = mla_fp8.KV_LAYOUTS["dsv4"]
slot, kv_cache = torch.zeros(1, dtype=torch.int64, device="cuda"), layout.empty(1, 64, "cuda")
torch.cuda.synchronize()
start = time.perf_counter()
mla_fp8.quantize_kv(row, slot, kv_cache, layout=layout, page_size=64)
torch.cuda.synchronize()
print((time.perf_counter() - start) * 1e3)
"""
IMPORT = "import time, torch; t = time.perf_counter(); import mla_fp8; print((time.perf_counter() - t) * 1e3)"


def works(device):
    layout = mla_fp8.KV_LAYOUTS["dsv4"]
    kv_cache = layout.empty(1, 64, device).zero_()
    row = torch.zeros(1, layout.head_dim_qk, dtype=torch.bfloat16, device=device)
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    raw, named = {"layout": layout.id, "page_size": 64}, {"layout": "dsv4", "page_size": 64}
    ops = torch.ops.mla_fp8
    calls = {
        "torch.ops quantize_kv": lambda: ops.quantize_kv(row, slot, kv_cache, **raw),
        "torch.ops dequantize_kv": lambda: ops.dequantize_kv(kv_cache, slot, **raw),
        "torch.ops dequantize_kv_out": lambda: ops.dequantize_kv_out(kv_cache, slot, **raw, out=row),
        "mla_fp8.quantize_kv": lambda: mla_fp8.quantize_kv(row, slot, kv_cache, **named),
        "mla_fp8.dequantize_kv": lambda: mla_fp8.dequantize_kv(kv_cache, slot, **named),
    }
    clone = {"clone of the row": row.clone}
    return [Work(label=name, run=fn, calls=500, baselines=clone, host=True) for name, fn in calls.items()]


def fresh_process_ms(source):
    """Median over fresh processes."""
    command = [sys.executable, "-c", source]
    return statistics.median(float(subprocess.check_output(command, text=True)) for _ in range(3))


if __name__ == "__main__":
    run("call_overhead", works("cuda" if torch.cuda.is_available() else "cpu"))
    print(f"import mla_fp8 after torch: {fresh_process_ms(IMPORT):.0f} ms")
    if torch.cuda.is_available():
        print(f"first quantize_kv of a process, on the GPU: {fresh_process_ms(FIRST_CALLS):.1f} ms")
