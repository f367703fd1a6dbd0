"""The ops over csrc/ops/sparse_attention.h: sparse_decode, sparse_prefill_paged, sparse_prefill.

Both baselines are tuned eager PyTorch, bf16 matmuls around a softmax: "eager" does the whole job from the
same packed bytes (gather, dequantise, attend), "ready rows" finds them dequantised. The ceiling is a large
bf16 matmul. The KV cache exceeds the last-level cache and the baselines clear it: rows come from memory.
"""

import torch

import mla_fp8
from harness import Work, run
from mla_fp8 import KV_LAYOUTS

PAGE_SIZE, NUM_TOKENS = 64, 8
NUM_SLOTS = 1 << 16
HEADS = (8, 16, 64, 128)


def attend(q, k, sm_scale):
    """[T, H, 512] of softmax(q k^T) v in bf16, one [T, H, topk] tensor of scores."""
    weights = (q @ k.mT * sm_scale).softmax(-1)
    return weights @ k[..., :512]


def gather(kv_cache, indices, layout):
    """The selected rows of a packed cache as bf16."""
    page, row = indices // PAGE_SIZE, indices % PAGE_SIZE
    nope, scale, rope = (view[page, row] for view in layout.views(kv_cache, PAGE_SIZE))
    if layout.num_tiles:
        nope = (nope.float().unflatten(-1, (layout.num_tiles, -1)) * scale.float()[..., None]).flatten(-2)
    return torch.cat([nope.bfloat16(), rope.bfloat16()], -1)


def work(name, num_q_heads, topk, device, form="decode", extra_topk=0):
    layout = KV_LAYOUTS[name]
    generator = torch.Generator(device).manual_seed(0)
    random = {"device": device, "generator": generator}
    rows = torch.randn(NUM_SLOTS, layout.head_dim_qk, **random).bfloat16()
    kv_cache = layout.empty(NUM_SLOTS // PAGE_SIZE, PAGE_SIZE, device)
    slots = torch.arange(NUM_SLOTS, device=device)
    mla_fp8.quantize_kv(rows, slots, kv_cache, layout=layout, page_size=PAGE_SIZE)
    q = torch.randn(NUM_TOKENS, num_q_heads, layout.head_dim_qk, **random).bfloat16()
    indices = torch.randint(NUM_SLOTS, (NUM_TOKENS, topk), dtype=torch.int32, **random)
    options = {"sm_scale": layout.head_dim_qk**-0.5}
    paged = options | {"layout": layout, "page_size": PAGE_SIZE}
    if extra_topk:
        extra = torch.randint(NUM_SLOTS, (NUM_TOKENS, extra_topk), dtype=torch.int32, **random)
        paged |= {"extra_kv_cache": kv_cache, "extra_indices": extra, "extra_page_size": PAGE_SIZE}
    both = indices if not extra_topk else torch.cat([indices, extra], 1)
    runs = {
        "decode": lambda: mla_fp8.sparse_decode(q, kv_cache, indices, **paged),
        "prefill_paged": lambda: mla_fp8.sparse_prefill_paged(q, kv_cache, indices, **paged),
        "prefill": lambda: mla_fp8.sparse_prefill(q, rows, indices, **options),
    }
    baselines = {"ready rows": lambda: attend(q, rows[both.long()], options["sm_scale"])}
    if form != "prefill":
        packed = {"eager": lambda: attend(q, gather(kv_cache, both.long(), layout), options["sm_scale"])}
        baselines = packed | baselines
    num_keys = NUM_TOKENS * both.shape[1]
    row_bytes = 2 * layout.head_dim_qk if form == "prefill" else layout.bytes_per_token
    return Work(
        label=f"{form} {name} h{num_q_heads} topk {topk}" + (f"+{extra_topk}" if extra_topk else ""),
        run=runs[form],
        num_bytes=num_keys * (row_bytes + 4) + 2 * q.numel() + 2 * NUM_TOKENS * num_q_heads * 512,
        flops=2 * num_keys * num_q_heads * (layout.head_dim_qk + layout.head_dim_v),
        baselines=baselines,
    )


def pair_work(num_q_heads, device):
    """V4.1's decode, a window of 128 next to 512 FP4 entries, against the same in V4's layout."""
    q = torch.randn(NUM_TOKENS, num_q_heads, 512, device=device).bfloat16()
    scopes = [torch.randint(NUM_SLOTS, (NUM_TOKENS, n), dtype=torch.int32, device=device) for n in (128, 512)]
    latent, slots = (
        torch.randn(NUM_SLOTS, 512, device=device).bfloat16(),
        torch.arange(NUM_SLOTS, device=device),
    )

    def decode(*names):
        layouts = [KV_LAYOUTS[name] for name in names]
        caches = [layout.empty(NUM_SLOTS // PAGE_SIZE, PAGE_SIZE, device) for layout in layouts]
        for layout, kv_cache in zip(layouts, caches, strict=True):
            mla_fp8.quantize_kv(latent, slots, kv_cache, layout=layout, page_size=PAGE_SIZE)
        return lambda: mla_fp8.sparse_decode(
            q, caches[0], scopes[0], layout=layouts[0], page_size=PAGE_SIZE, sm_scale=512**-0.5,
            extra_kv_cache=caches[1], extra_indices=scopes[1], extra_page_size=PAGE_SIZE,
            extra_layout=layouts[1],
        )  # fmt: skip

    first, second = (KV_LAYOUTS[name].bytes_per_token for name in ("dsv41", "dsv41_fp4"))
    return Work(
        label=f"decode dsv41+dsv41_fp4 h{num_q_heads} topk 128+512",
        run=decode("dsv41", "dsv41_fp4"),
        num_bytes=NUM_TOKENS * (128 * first + 512 * second),
        flops=2 * NUM_TOKENS * 640 * num_q_heads * 1024,
        baselines={"dsv4": decode("dsv4", "dsv4")},
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [work(name, h, 2048, device) for name in ("dsv32", "dsv4") for h in HEADS]
    cases += [work("dsv4", h, 128, device, extra_topk=1024) for h in (16, 128)]
    cases += [work("dsv4", 16, 640, device, form="prefill_paged")]
    cases += [work("bf16_512", h, 640, device, form="prefill") for h in (16, 64)]
    cases += [pair_work(h, device) for h in HEADS]
    run("sparse_attention", cases)
