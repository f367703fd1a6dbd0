"""Calls written for SGLang's helpers get their results from our ops."""

import inspect

import pytest
import torch
from kv_cache_cases import POISON, assert_same_values, distinct_slots, latents

import mla_fp8
from mla_fp8 import KV_LAYOUTS, reference
from mla_fp8.compat import sglang

LAYOUT = KV_LAYOUTS["dsv4"]
PAGE_SIZE = 64


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def combine_inputs(device):
    """Three requests with 5, 0 and 2 query tokens."""
    topk_indices = torch.randint(0, 20, (7, 40), device=device).int()
    topk_indices[:, 3::5] = -1
    tensors = ([11, 16, 16, 18], [90, 50, 33], [70, 50, 33], [0, 20, 40], [100, 170, 220])
    return (topk_indices, *(ints(x, device) for x in tensors))


def swa_inputs(device):
    req_to_token = torch.randperm(4 * 300, device=device).int().view(4, 300)
    full_to_swa = torch.randperm(1200, device=device)
    lengths = ints([250, 40, 7], device), ints([20, 40, 1], device)
    return (*lengths, ints([2, 0, 3], device), req_to_token, full_to_swa)


@pytest.mark.parametrize(
    "function, names",
    [
        (sglang.dequantize_k_cache_paged, "quant_k_cache page_table_1_flattened page_size out"),
        (
            sglang.combine_topk_swa_indices,
            "topk_indices query_start_loc seq_lens gather_lens compressed_base swa_base window_size "
            "compress_ratio topk out_indices out_lens query_pos",
        ),
        (
            sglang.build_swa_token_ids,
            "seq_lens extend_seq_lens req_pool_indices req_to_token full_to_swa swa_window total_swa",
        ),
    ],
)
def test_names_and_order_are_those_of_sglang(function, names):
    assert " ".join(inspect.signature(function).parameters) == names


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_dequantize_gives_rows_of_one_head(dtype, slot_dtype, device):
    kv_cache = LAYOUT.empty(4, PAGE_SIZE, device).fill_(POISON)
    mla_fp8.quantize_kv(
        latents(LAYOUT, 256, device), torch.arange(256, device=device), kv_cache,
        layout=LAYOUT, page_size=PAGE_SIZE,
    )  # fmt: skip
    slots = distinct_slots(100, 256, device, slot_dtype)
    want = reference.dequantize_kv(kv_cache, slots, layout=LAYOUT, page_size=PAGE_SIZE)
    got = sglang.dequantize_k_cache_paged(kv_cache.view(dtype), slots, PAGE_SIZE)
    assert_same_values(got, want[:, None])

    workspace = torch.full((120, 1, LAYOUT.head_dim_qk), 7.0, dtype=torch.bfloat16, device=device)
    part = workspace[10:110]
    assert sglang.dequantize_k_cache_paged(kv_cache.view(dtype), slots, PAGE_SIZE, out=part) is part
    assert_same_values(part, want[:, None])
    assert (workspace[:10] == 7).all() and (workspace[110:] == 7).all()


def test_dequantize_names_a_wrong_out(device):
    kv_cache = LAYOUT.empty(1, PAGE_SIZE, device).fill_(POISON)
    slots = torch.arange(3, device=device)
    out = torch.zeros(3, LAYOUT.head_dim_qk, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"out must have shape \[num_tokens, 1, 512\], got \[3, 512\]"):
        sglang.dequantize_k_cache_paged(kv_cache, slots, PAGE_SIZE, out)
    with pytest.raises(RuntimeError, match=r"out must have shape \[3, 512\], got \[2, 512\]"):
        sglang.dequantize_k_cache_paged(kv_cache, slots, PAGE_SIZE, out[:2, None])
    assert (out == 0).all()


@pytest.mark.parametrize("given", [(), ("out_indices",), ("out_lens",), ("out_indices", "out_lens")], ids=str)
@pytest.mark.parametrize("topk", [0, 33])
def test_combine_with_any_of_its_buffers(given, topk, device):
    inputs = combine_inputs(device)
    want = reference.combine_topk_swa_indices(*inputs, window_size=20, compress_ratio=4, topk=topk)
    results = dict(zip(("out_indices", "out_lens"), want, strict=True))
    buffers = {name: torch.full_like(results[name], 1 << 30) for name in given}
    got = sglang.combine_topk_swa_indices(*inputs, 20, 4, topk, **buffers)
    for ours, (name, expected) in zip(got, results.items(), strict=True):
        assert torch.equal(ours, expected)
        assert name not in given or ours is buffers[name]


def test_combine_takes_the_query_positions_of_later_versions(device):
    inputs = combine_inputs(device)
    query_pos = ints([3, 80, 41, 89, 0, 32, 5], device)
    options = {"window_size": 20, "compress_ratio": 4, "topk": 33, "query_pos": query_pos}
    want = reference.combine_topk_swa_indices(*inputs, **options)
    for ours, expected in zip(sglang.combine_topk_swa_indices(*inputs, **options), want, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("known", [True, False], ids=["total_swa given", "read from the device"])
def test_swa_ids_fill_exactly_what_the_windows_reach(known, device):
    inputs = swa_inputs(device)
    total = (20 + 127) + 40 + 7
    want = reference.build_swa_token_ids(*inputs, window_size=128, capacity=total)
    got = sglang.build_swa_token_ids(*inputs, 128, *([total] if known else []))
    assert got[0].shape == (total,) and (got[0] >= 0).all()
    for ours, expected in zip(got, want, strict=True):
        assert torch.equal(ours, expected)
