"""Problems for `paged_attention_ragged`, and what is compared of a result."""

from itertools import pairwise

import pytest
import torch
from emulation import is_cpu_kernel

import mla_fp8
from mla_fp8 import reference
from mla_fp8.testing import assert_as_accurate_as

NAN, INF = float("nan"), float("inf")
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fn": torch.float8_e4m3fn,
    "fnuz": torch.float8_e4m3fnuz,
}
all_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
fp8_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=["fn", "fnuz"]
)

# query heads, KV heads, head_dim, head_dim_v, page_size
SHAPES = {
    "mha 16/16": (2, 2, 16, 16, 1),
    "gqa 64/64": (8, 2, 64, 64, 16),
    "gqa 128/48": (6, 2, 128, 48, 7),
    "mqa 256/256": (13, 1, 256, 256, 64),
    "mqa 192/176": (40, 1, 192, 176, 16),
}
LENGTHS = (5, 0, 64, 1, 130, 16, 17)  # keys of each request


def nhd(values):
    return values


def hnd(values):
    return values.transpose(1, 2).contiguous().transpose(1, 2)


def padded_rows(values):
    return torch.nn.functional.pad(values.float(), (0, 48), value=NAN).to(values.dtype)[
        ..., : values.shape[3]
    ]


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_case(
    device,
    dtype=torch.bfloat16,
    shape=(8, 2, 64, 64, 16),
    lengths=LENGTHS,
    memory=nhd,
    per_head_scales=True,
    q_len=1,
):
    """``(args, options)``: random pages of a cache that is NaN wherever no request attends."""
    num_q_heads, num_kv_heads, head_dim, head_dim_v, page_size = shape
    counts = [-(-n // page_size) for n in lengths]
    num_pages = sum(counts) + 5
    kv_indices = (1 + torch.randperm(num_pages - 1))[: sum(counts)].int()
    kv_indptr = torch.tensor([0, *counts]).cumsum(0).int()
    last_page_len = [(n - 1) % page_size + 1 if n else 0 for n in lengths]

    caches = []
    for dim in (head_dim, head_dim_v):
        cache = torch.full((num_pages, page_size, num_kv_heads, dim), NAN)
        for n, (begin, end) in zip(lengths, pairwise(kv_indptr.tolist()), strict=True):
            for i, page in enumerate(kv_indices[begin:end].tolist()):
                cache[page, : n - i * page_size] = torch.randn_like(cache[page, : n - i * page_size])
        caches.append(memory(cache.to(dtype).to(device)))
    q_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    q = torch.randn(len(lengths) * q_len, num_q_heads, head_dim).to(q_dtype).to(device)
    options = {"sm_scale": head_dim**-0.5} | ({"q_len": q_len} if q_len > 1 else {})
    if dtype.itemsize == 1:
        options["k_scale"] = torch.rand(num_kv_heads if per_head_scales else 1, device=device) + 0.5
        options["v_scale"] = torch.rand(1, device=device) + 0.5
    indices = (kv_indptr.to(device), kv_indices.to(device), int32(last_page_len, device))
    return (q, *caches, *indices), options


def check(args, options, result=None):
    """The result errs at most twice as much from float64 as float32 PyTorch rounded to q's dtype."""
    out, lse = mla_fp8.paged_attention_ragged(*args, **options) if result is None else result
    options = {name: value for name, value in options.items() if name != "num_splits"}
    exact, exact_lse = reference.paged_attention_ragged(args[0].double(), *args[1:], **options)
    rounded, _ = reference.paged_attention_ragged(*args, **options)
    assert out.dtype == args[0].dtype and lse.dtype == torch.float32
    # A GPU rounds the softmax weights to bf16 for its matrix units.
    assert_as_accurate_as(out, rounded, exact, factor=2.0 if is_cpu_kernel(out.device.type) else 4.0)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    return out, lse
