import torch

import mla_fp8
from harness import Work, run
from mla_fp8 import KV_LAYOUTS, reference

# label, query heads, KV heads, head_dim
HEADS = [("gqa8 128", 32, 4, 128), ("mha 128", 8, 8, 128)]
DTYPES = {"bf16": torch.bfloat16, "fn": torch.float8_e4m3fn, "fnuz": torch.float8_e4m3fnuz}
LAYOUTS = ("dsv32", "dsv4", "fp8_e4m3", "fp8_e4m3_fnuz", "bf16")


def torch_on_cpu(device, function):
    """The specification as a baseline; it reads lengths back, which a GPU would wait for."""
    return {"torch": function} if device == "cpu" else {}


def pages(num_requests, seq_len, page_size, device):
    each = -(-seq_len // page_size)
    kv_indptr = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * each
    kv_indices = torch.randperm(num_requests * each, device=device).int()
    last_page_len = torch.full((num_requests,), (seq_len - 1) % page_size + 1, device=device).int()
    return kv_indptr, kv_indices, last_page_len


def separate(heads, dtype_name, num_requests, seq_len, page_size, device):
    label, num_q_heads, num_kv_heads, dim = heads
    dtype = DTYPES[dtype_name]
    ragged = pages(num_requests, seq_len, page_size, device)
    shape = (len(ragged[1]), page_size, num_kv_heads, dim)
    q = torch.randn(num_requests, num_q_heads, dim, device=device).bfloat16()
    args = (q, *(torch.randn(shape, device=device).to(dtype) for _ in "kv"), *ragged)
    scale = torch.ones(1, device=device) if dtype.itemsize == 1 else None
    options = {"sm_scale": dim**-0.5, "k_scale": scale, "v_scale": scale}
    keys = num_requests * seq_len
    return Work(
        label=f"{label} {dtype_name} {num_requests}x{seq_len}",
        run=lambda: mla_fp8.paged_attention_ragged(*args, **options),
        num_bytes=keys * num_kv_heads * 2 * dim * dtype.itemsize,
        flops=4 * keys * num_q_heads * dim,
        baselines=torch_on_cpu(device, lambda: reference.paged_attention_ragged(*args, **options)),
    )


def latent(name, num_heads, num_requests, seq_len, page_size, device):
    layout = KV_LAYOUTS[name]
    ragged = pages(num_requests, seq_len, page_size, device)
    slots = torch.arange(len(ragged[1]) * page_size, device=device)
    cache = layout.empty(len(ragged[1]), page_size, device)
    scale = torch.ones(1, device=device) if layout.needs_scale else None
    cached = {"layout": layout, "page_size": page_size, "scale": scale}
    latents = torch.randn(len(slots), layout.head_dim_qk, device=device).bfloat16()
    mla_fp8.quantize_kv(latents, slots, cache, **cached)
    q = torch.randn(num_requests, num_heads, layout.head_dim_qk, device=device).bfloat16()
    options = cached | {"sm_scale": layout.head_dim_qk**-0.5}
    args, keys = (q, cache, *ragged), num_requests * seq_len
    return Work(
        label=f"{name} {num_heads} heads {num_requests}x{seq_len}",
        run=lambda: mla_fp8.paged_attention_ragged_latent(*args, **options),
        num_bytes=keys * layout.bytes_per_token,
        flops=2 * keys * num_heads * (layout.head_dim_qk + layout.head_dim_v),
        baselines=torch_on_cpu(device, lambda: reference.paged_attention_ragged_latent(*args, **options)),
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [(1, 4096, 16), (4, 1024, 1)] if device == "cpu" else [(1, 32768, 64), (32, 4096, 64)]
    works = [separate(h, d, *shape, device) for h in HEADS for d in DTYPES for shape in shapes]
    works += [latent(name, 16, *shape, device) for name in LAYOUTS for shape in shapes]
    run("paged_attention_ragged", works)
