"""q + kv and kv alone, against a copy of the same bytes and, where vLLM is installed, against its own op.

Operands rotate, so that memory gives them. "q in L2": q and kv do not, as a projection has just made them.
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
    (name, heads, n, False)
    for name, heads in (("dsv4", 64), ("dsv4", 8), ("dsv41", 64), ("dsv4", 0), ("dsv41", 0))
    for n in (1, 32, 128, 1024, 8192)
]
CASES += [(name, 64, n, True) for name in ("dsv4", "dsv41") for n in (32, 128)]


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


def work(layout: KVLayout, heads: int, num_tokens: int, q_in_l2: bool, device: str) -> Work:
    norm_q, per_token = layout.name == "dsv4", 2 * 512 * (1 + 2 * heads) + layout.bytes_per_token
    num_bytes = num_tokens * per_token
    rounds = gpu_rotation(num_bytes)
    num_slots = -(-num_tokens * rounds // PAGE_SIZE) * PAGE_SIZE
    kv_cache = layout.empty(num_slots // PAGE_SIZE, PAGE_SIZE, device).zero_()
    slots = make_slots(num_tokens * rounds, num_slots, "paged", device).split(num_tokens)
    kept = min(rounds, 32)
    written = 1 if q_in_l2 else kept
    kv = [torch.randn(num_tokens, 512, device=device).bfloat16() for _ in range(written)]
    q = [torch.randn(num_tokens, max(heads, 1), 512, device=device).bfloat16() for _ in range(written)]
    out = [torch.empty_like(q[0]) for _ in range(kept)]
    table = torch.rand(MAX_POS, 64, device=device)
    weight, at = torch.ones(512, device=device), torch.randint(MAX_POS, (num_tokens,), device=device)
    rest = (weight, table[:, :32], table[:, 32:], at)
    options = {"layout": layout, "page_size": PAGE_SIZE, "eps": EPS}

    def insert(i: int) -> None:
        j = i % written
        if heads:
            mla_fp8.qk_norm_rope_insert(
                q[j], kv[j], *rest, slots[i], kv_cache, **options, norm_q=norm_q, out_q=out[i % kept]
            )
        else:
            mla_fp8.k_norm_rope_insert(kv[j], *rest, slots[i], kv_cache, **options)

    baselines = {"copy": copies(num_bytes, device)}
    if q_in_l2:
        baselines["copy of q"] = [lambda x=x: x.copy_(q[0]) for x in out]
    if device == "cpu" and num_tokens <= 128:
        few = kv_cache[: -(-num_tokens // PAGE_SIZE)]
        near = make_slots(num_tokens, len(few) * PAGE_SIZE, "random", device)
        baselines["torch"] = lambda: layer_reference.k_norm_rope_insert(kv[0], *rest, near, few, **options)
    if heads and norm_q and (theirs := vllm_op()):
        baselines["vllm"] = [
            lambda i=i: theirs(q[i % written], kv[i % written], kv_cache, slots[i], at, table, EPS, PAGE_SIZE)
            for i in range(rounds)
        ]
    what = f"q{heads}+kv" if heads else "kv"
    return Work(
        label=f"{layout.name} {what} tokens={num_tokens}{' q in L2' if q_in_l2 else ''}",
        run=[lambda i=i: insert(i) for i in range(rounds)],
        num_bytes=num_bytes,
        baselines=baselines,
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run("norm_rope_insert", (work(KV_LAYOUTS[name], *case, device) for name, *case in CASES))
