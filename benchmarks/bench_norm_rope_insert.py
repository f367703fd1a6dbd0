"""q + kv and kv alone, against a copy of the same bytes and, where vLLM is installed, against its own op.

vLLM's op takes kv normed, quantises dsv4 rows alone, and pads heads to a multiple that it was compiled for.
"""

import importlib.util
from collections.abc import Callable

import torch
from bench_dequantize_kv import PAGE_SIZE, make_slots

import mla_fp8
from harness import Work, copies, gpu_rotation, run
from mla_fp8 import KV_LAYOUTS, KVLayout, layer_reference

MAX_POS, EPS = 8192, 1e-6
CASES = [
    (name, heads, n)
    for name, heads in (("dsv4", 64), ("dsv4", 8), ("dsv41", 64), ("dsv4", 0), ("dsv41", 0))
    for n in (1, 32, 128, 1024, 8192)
]


def vllm_op() -> Callable | None:
    """vLLM's fused insert, in place: q, kv, cache, slots, positions, cos | sin, eps, page size."""
    if importlib.util.find_spec("vllm") is None:
        return None
    import vllm._custom_ops  # noqa: F401, PLC0415

    name = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
    for library in ("_C", "_C_cache_ops"):
        if op := getattr(getattr(torch.ops, library), name, None):
            return op
    return None


def work(layout: KVLayout, heads: int, num_tokens: int, device: str) -> Work:
    norm_q, per_token = layout.name == "dsv4", 2 * 512 * (1 + 2 * heads) + layout.bytes_per_token
    num_bytes = num_tokens * per_token
    rounds = gpu_rotation(num_bytes)
    num_slots = -(-num_tokens * rounds // PAGE_SIZE) * PAGE_SIZE
    kv_cache = layout.empty(num_slots // PAGE_SIZE, PAGE_SIZE, device).zero_()
    slots = make_slots(num_tokens * rounds, num_slots, "paged", device).split(num_tokens)
    kept = min(rounds, 32)
    kv = [torch.randn(num_tokens, 512, device=device).bfloat16() for _ in range(kept)]
    q = [torch.randn(num_tokens, max(heads, 1), 512, device=device).bfloat16() for _ in range(kept)]
    out = [torch.empty_like(x) for x in q]
    table = torch.rand(MAX_POS, 64, device=device)
    weight, at = torch.ones(512, device=device), torch.randint(MAX_POS, (num_tokens,), device=device)
    rest = (weight, table[:, :32], table[:, 32:], at)
    options = {"layout": layout, "page_size": PAGE_SIZE, "eps": EPS}

    def insert(i: int) -> None:
        j = i % kept
        if heads:
            mla_fp8.qk_norm_rope_insert(
                q[j], kv[j], *rest, slots[i], kv_cache, **options, norm_q=norm_q, out_q=out[j]
            )
        else:
            mla_fp8.k_norm_rope_insert(kv[j], *rest, slots[i], kv_cache, **options)

    baselines = {"copy": copies(num_bytes, device)}
    if device == "cpu" and num_tokens <= 128:
        few = kv_cache[: -(-num_tokens // PAGE_SIZE)]
        near = make_slots(num_tokens, len(few) * PAGE_SIZE, "random", device)
        baselines["torch"] = lambda: layer_reference.k_norm_rope_insert(kv[0], *rest, near, few, **options)
    if heads and norm_q and (theirs := vllm_op()):
        baselines["vllm"] = [
            lambda i=i: theirs(q[i % kept], kv[i % kept], kv_cache, slots[i], at, table, EPS, PAGE_SIZE)
            for i in range(rounds)
        ]
    what = f"q{heads}+kv" if heads else "kv"
    return Work(
        label=f"{layout.name} {what} tokens={num_tokens}",
        run=[lambda i=i: insert(i) for i in range(rounds)],
        num_bytes=num_bytes,
        baselines=baselines,
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run("norm_rope_insert", (work(KV_LAYOUTS[name], heads, n, device) for name, heads, n in CASES))
