import torch

import mla_fp8
from harness import Work, run
from mla_fp8 import reference

# label, query heads, KV heads, head_dim, head_dim_v
HEADS = [("gqa8 128", 32, 4, 128, 128), ("mha 128", 8, 8, 128, 128), ("mqa16 576/512", 16, 1, 576, 512)]
DTYPES = {"bf16": torch.bfloat16, "fn": torch.float8_e4m3fn, "fnuz": torch.float8_e4m3fnuz}


def work(heads, dtype_name, num_requests, seq_len, page_size, device):
    label, num_q_heads, num_kv_heads, head_dim, head_dim_v = heads
    dtype = DTYPES[dtype_name]
    pages_each = -(-seq_len // page_size)
    num_pages = num_requests * pages_each
    rows = (num_pages, page_size, num_kv_heads)
    q = torch.randn(num_requests, num_q_heads, head_dim, device=device).bfloat16()
    k_cache = torch.randn(*rows, head_dim, device=device).to(dtype)
    v_cache = torch.randn(*rows, head_dim_v, device=device).to(dtype)
    kv_indptr = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * pages_each
    kv_indices = torch.randperm(num_pages, device=device).int()
    last_page_len = torch.full((num_requests,), (seq_len - 1) % page_size + 1, device=device).int()
    args = (q, k_cache, v_cache, kv_indptr, kv_indices, last_page_len)
    scale = torch.ones(1, device=device) if dtype.itemsize == 1 else None
    options = {"sm_scale": head_dim**-0.5, "k_scale": scale, "v_scale": scale}
    keys = num_requests * seq_len
    return Work(
        label=f"{label} {dtype_name} {num_requests}x{seq_len}",
        run=lambda: mla_fp8.paged_attention_ragged(*args, **options),
        num_bytes=keys * num_kv_heads * (head_dim + head_dim_v) * dtype.itemsize,
        flops=2 * keys * num_q_heads * (head_dim + head_dim_v),
        baselines={"torch": lambda: reference.paged_attention_ragged(*args, **options)},
    )


if __name__ == "__main__":
    if torch.cuda.is_available():
        print("paged_attention_ragged has no CUDA kernel yet: nothing to measure")
        raise SystemExit(0)
    shapes = [(1, 4096, 16), (4, 1024, 1)]
    works = [work(h, d, *shape, "cpu") for h in HEADS for d in DTYPES for shape in shapes]
    run("paged_attention_ragged", works)
