"""What a call costs the host before any work, and what the import adds to that of torch.

    PYTHONPATH=python:.peers python benchmarks/bench_call_overhead.py

Attention has as little work as a caller can give it: one token of decode, 64 of prefill, 128 keys; on a CPU,
where work takes the host's time, one token and one key. Baselines are the bare op and, where it is on the
path, FlashMLA, with the heads that it takes.
"""

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from flashmla import find_flash_mla

import mla_fp8
from harness import Work, run
from mla_fp8.compat import flash_mla as compat

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


Call = Callable[[], object]
TOKENS, KEYS = (64, 128) if torch.cuda.is_available() else (1, 1)
PAGE = 64


def work(label: str, call: Call, **baselines: Call | None) -> Work:
    """Not too many calls a sample: the GPU, which runs on behind them, must not fill its queue."""
    found = {name: each for name, each in baselines.items() if each is not None}
    return Work(label=label, run=call, calls=100, baselines=found, host=True)


def cache_works(device: str) -> Iterator[Work]:
    layout = mla_fp8.KV_LAYOUTS["dsv4"]
    kv_cache = layout.empty(1, PAGE, device).zero_()
    row = torch.zeros(1, layout.head_dim_qk, dtype=torch.bfloat16, device=device)
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    raw, named = {"layout": layout.id, "page_size": PAGE}, {"layout": "dsv4", "page_size": PAGE}
    ops = torch.ops.mla_fp8
    calls = {
        "torch.ops quantize_kv": lambda: ops.quantize_kv(row, slot, kv_cache, **raw),
        "torch.ops dequantize_kv": lambda: ops.dequantize_kv(kv_cache, slot, **raw),
        "torch.ops dequantize_kv_out": lambda: ops.dequantize_kv_out(kv_cache, slot, **raw, out=row),
        "mla_fp8.quantize_kv": lambda: mla_fp8.quantize_kv(row, slot, kv_cache, **named),
        "mla_fp8.dequantize_kv": lambda: mla_fp8.dequantize_kv(kv_cache, slot, **named),
    }
    for name, call in calls.items():
        yield work(name, call, **{"clone of the row": row.clone})


def attention_works(device: str, name: str, heads: int) -> Iterator[Work]:
    """The functions, the same into the caller's memory, and by FlashMLA's signatures."""
    layout, theirs, op = mla_fp8.KV_LAYOUTS[name], find_flash_mla(), torch.ops.mla_fp8
    kv_cache = layout.empty(2, PAGE, device).zero_()
    pages, rows = (
        layout.flash_mla_view(kv_cache, PAGE),
        torch.zeros(KEYS, layout.head_dim_qk, device=device).bfloat16(),
    )
    padded = next(n for n in (64, 128) if n >= heads)

    def queries(tokens: int, num_heads: int = heads) -> torch.Tensor:
        return torch.zeros(tokens, num_heads, layout.head_dim_qk, dtype=torch.bfloat16, device=device)

    def memory(q: torch.Tensor) -> dict[str, torch.Tensor]:
        size = mla_fp8.sparse_attention_workspace(len(q), num_q_heads=heads, device=device)
        return {
            "out": q.new_empty(len(q), heads, 512), "lse": q.new_empty(len(q), heads, dtype=torch.float32),
            "workspace": q.new_empty(size, dtype=torch.float32),
        }  # fmt: skip

    one, many = queries(1), queries(TOKENS)
    slots, few = (torch.zeros(n, KEYS, dtype=torch.int32, device=device) for n in (1, TOKENS))
    named = {"layout": name, "page_size": PAGE, "sm_scale": 0.1}
    raw, into_one, into_many = named | {"layout": layout.id}, memory(one), memory(many)

    def flash_mla(module: object, q: torch.Tensor) -> Call:
        metadata, options = module.get_mla_metadata()[0], {"softmax_scale": 0.1, "is_fp8_kvcache": True}
        return lambda: module.flash_mla_with_kvcache(
            q[:, None], pages, None, None, 512, metadata, **options, indices=slots[:, None]
        )

    decode = theirs and flash_mla(theirs, queries(1, padded))
    bare = lambda: op.sparse_decode(one, kv_cache, slots, **raw)  # noqa: E731
    peers = {"the op": bare, "flash_mla": decode}
    shape = f"{name} h{heads}"
    yield work(
        f"sparse_decode {shape}", lambda: mla_fp8.sparse_decode(one, kv_cache, slots, **named), **peers
    )
    yield work(
        f"sparse_decode {shape} out",
        lambda: mla_fp8.sparse_decode(one, kv_cache, slots, **named, **into_one), **peers,
    )  # fmt: skip
    yield work(f"compat decode {shape}", flash_mla(compat, one), **peers)
    prompts = queries(TOKENS, padded)
    peers = {
        "the op": lambda: op.sparse_prefill(many, rows, few, sm_scale=0.1),
        "flash_mla": theirs
        and (lambda: theirs.flash_mla_sparse_fwd(prompts, rows[:, None], few[:, None], 0.1)),
    }
    yield work(
        f"sparse_prefill {shape}", lambda: mla_fp8.sparse_prefill(many, rows, few, sm_scale=0.1), **peers
    )
    into = {"return_max_logits": False, **into_many}
    yield work(
        f"sparse_prefill {shape} out", lambda: mla_fp8.sparse_prefill(many, rows, few, sm_scale=0.1, **into),
        **peers,
    )  # fmt: skip
    yield work(
        f"compat prefill {shape}",
        lambda: compat.flash_mla_sparse_fwd(many, rows[:, None], few[:, None], 0.1), **peers,
    )  # fmt: skip
    yield work(
        f"sparse_prefill_paged {shape}",
        lambda: mla_fp8.sparse_prefill_paged(many, kv_cache, few, **named),
        **{"the op": lambda: op.sparse_prefill_paged(many, kv_cache, few, **raw)},
    )


def works(device: str) -> Iterator[Work]:
    yield from cache_works(device)
    for heads in (16, 128):
        yield from attention_works(device, "dsv32", heads)


def fresh_process_ms(source):
    """Median over fresh processes."""
    command = [sys.executable, "-c", source]
    return statistics.median(float(subprocess.check_output(command, text=True)) for _ in range(3))


if __name__ == "__main__":
    run("call_overhead", works("cuda" if torch.cuda.is_available() else "cpu"))
    print(f"import mla_fp8 after torch: {fresh_process_ms(IMPORT):.0f} ms")
    if torch.cuda.is_available():
        print(f"first quantize_kv of a process, on the GPU: {fresh_process_ms(FIRST_CALLS):.1f} ms")
