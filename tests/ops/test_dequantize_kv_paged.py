import pytest
import torch
from kv_cache_cases import (
    INT32,
    all_layouts,
    assert_same_values,
    layer_scale,
    page_sizes,
    poisoned_cache,
)

import mla_fp8
from mla_fp8 import KV_LAYOUTS, reference

NUM_PAGES = 9
MARK = 0x5AA5  # bf16 bits that no op writes


def filled_cache(layout, page_size, device):
    """Finite latents in every slot."""
    kv_cache = poisoned_cache(layout, NUM_PAGES, page_size, device, gap=16)
    n = NUM_PAGES * page_size
    latent = torch.randn(n, layout.head_dim_qk, dtype=torch.bfloat16, device=device)
    kwargs = {"layout": layout, "page_size": page_size, "scale": layer_scale(layout, device)}
    mla_fp8.quantize_kv(latent, torch.arange(n, device=device), kv_cache, **kwargs)
    return kv_cache, kwargs


def marked_out(num_rows, layout, device):
    out = torch.empty(num_rows, layout.head_dim_qk + 64, dtype=torch.bfloat16, device=device)
    out.view(torch.int16).fill_(MARK)
    return out[:, : layout.head_dim_qk]


def tensors(page_table, seq_lens, gather_lens, row_offsets, device):
    return [
        torch.tensor(x, dtype=torch.int32, device=device)
        for x in (page_table, seq_lens, gather_lens, row_offsets)
    ]


def check(kv_cache, arguments, num_rows, kwargs):
    """The out form equals the reference on top of what out held, the functional form on top of zeros."""
    layout = kwargs["layout"]
    got, want = (marked_out(num_rows, layout, kv_cache.device) for _ in range(2))
    assert mla_fp8.dequantize_kv_paged(kv_cache, *arguments, out=got, **kwargs) is got
    reference.dequantize_kv_paged(kv_cache, *arguments, out=want, **kwargs)
    assert_same_values(got, want)
    zeros = torch.zeros(num_rows, layout.head_dim_qk, dtype=torch.bfloat16, device=kv_cache.device)
    reference.dequantize_kv_paged(kv_cache, *arguments, out=zeros, **kwargs)
    assert_same_values(mla_fp8.dequantize_kv_paged(kv_cache, *arguments, num_rows=num_rows, **kwargs), zeros)
    return got


@all_layouts
@page_sizes
def test_the_last_tokens_of_each_request_go_to_its_rows(layout, page_size, device):
    """Page crossings, a request of zero tokens, one of zero gathered, gaps between the requests' rows."""
    kv_cache, kwargs = filled_cache(layout, page_size, device)
    table = [[3, 1, 8], [0, 2, 4], [5, 6, 7], [8, 8, 8]]
    seq_lens = [3 * page_size, page_size + 1, 0, 2 * page_size]
    gather_lens = [2 * page_size + 1, page_size + 1, 0, 0]
    arguments = tensors(table, seq_lens, gather_lens, [2, 2 * page_size + 5, 7, 0], device)
    got = check(kv_cache, arguments, 3 * page_size + 9, kwargs)

    first = seq_lens[0] - gather_lens[0]
    slots = [table[0][p // page_size] * page_size + p % page_size for p in range(first, seq_lens[0])]
    by_slots = mla_fp8.dequantize_kv(kv_cache, torch.tensor(slots, device=device), **kwargs)
    assert torch.equal(got[2 : 2 + gather_lens[0]], by_slots)


@all_layouts
@pytest.mark.usefixtures("several_threads")
def test_many_tokens_over_several_threads(layout, device):
    kv_cache, kwargs = filled_cache(layout, 64, device)
    table = torch.randperm(NUM_PAGES).repeat(3, 1).tolist()
    arguments = tensors(table, [576, 401, 77], [500, 401, 3], [0, 520, 960], device)
    check(kv_cache, arguments, 1000, kwargs)


@all_layouts
def test_rows_outside_out_are_dropped(layout, device):
    kv_cache, kwargs = filled_cache(layout, 61, device)
    arguments = tensors([[1, 2], [3, 4], [5, 6]], [120, 100, 122], [120, 100, 122], [-70, 60, 150], device)
    got = check(kv_cache, arguments, 130, kwargs).view(torch.int16)
    assert (got[50:60] == MARK).all() and (got[60:] != MARK).any(1).all()


HOSTILE = [-1, INT32.min, INT32.max, NUM_PAGES, 1 << 30, -(1 << 30), 0]


@all_layouts
def test_pages_outside_the_cache_give_zeros(layout, device):
    kv_cache, kwargs = filled_cache(layout, 2, device)
    arguments = tensors([HOSTILE], [2 * len(HOSTILE)], [2 * len(HOSTILE)], [0], device)
    got = check(kv_cache, arguments, 2 * len(HOSTILE), kwargs)
    assert (got[:-2] == 0).all() and (got[-2:] != 0).any(1).all()


def test_no_length_or_offset_is_trusted(device):
    """Every mix of hostile numbers, one request at a time, writes what the contract says and nothing else."""
    kv_cache, kwargs = filled_cache(KV_LAYOUTS["dsv4"], 2, device)
    numbers = [INT32.min, -5, 3, 9, INT32.max]
    for seq_len in numbers:
        for gather_len in numbers:
            for offset in numbers:
                arguments = tensors([[3, 1]], [seq_len], [gather_len], [offset], device)
                check(kv_cache, arguments, 8, kwargs)


def test_requests_may_share_pages_and_a_strided_page_table(device):
    layout = KV_LAYOUTS["dsv4"]
    kv_cache, kwargs = filled_cache(layout, 64, device)
    wide = torch.full((3, 9), 1 << 30, dtype=torch.int32, device=device)
    wide[:, :2] = torch.tensor([[2, 5], [2, 6], [2, 7]], device=device)
    _, *rest = tensors([], [100, 90, 80], [100, 90, 80], [0, 100, 190], device)
    check(kv_cache, (wide[:, :2], *rest), 270, kwargs)


@pytest.mark.parametrize("num_rows", [0, 4])
@pytest.mark.parametrize("num_requests, max_pages", [(0, 3), (2, 0)])
def test_no_requests_no_pages_and_no_rows_are_legal(num_rows, num_requests, max_pages, device):
    layout = KV_LAYOUTS["dsv4"]
    kv_cache, kwargs = filled_cache(layout, 64, device)
    page_table = torch.empty(num_requests, max_pages, dtype=torch.int32, device=device)
    _, *rest = tensors([], [2, 2][:num_requests], [2, 2][:num_requests], [0, 2][:num_requests], device)
    check(kv_cache, (page_table, *rest), num_rows, kwargs)


def test_exactly_one_of_num_rows_and_out_is_given(device):
    layout = KV_LAYOUTS["dsv4"]
    kv_cache, kwargs = filled_cache(layout, 64, device)
    arguments = tensors([[1]], [2], [2], [0], device)
    out = marked_out(4, layout, device)
    for more, got in (({}, "neither"), ({"num_rows": 4, "out": out}, "both")):
        with pytest.raises(ValueError, match=f"expected exactly one of num_rows and out, got {got}"):
            mla_fp8.dequantize_kv_paged(kv_cache, *arguments, **more, **kwargs)
    assert (out.view(torch.int16) == MARK).all()


def test_offsets_that_the_rows_are_written_over_lead_out_of_no_memory():
    """Not allowed, and harmless: a row never lies where nobody has looked whether it may."""
    layout = KV_LAYOUTS["dsv4"]
    kv_cache, kwargs = filled_cache(layout, 64, "cpu")
    around = torch.empty(96, layout.head_dim_qk, dtype=torch.bfloat16)
    around.view(torch.int16).fill_(MARK)
    out = around[32:64]
    offsets = out.view(torch.int32)[0, :2]
    offsets.copy_(torch.tensor([0, 16]))
    page_table, lens, *_ = tensors([[1], [2]], [16, 16], [], [], "cpu")
    mla_fp8.dequantize_kv_paged(kv_cache, page_table, lens, lens, offsets, out=out, **kwargs)
    beyond = torch.cat([around[:32], around[64:]])
    assert (beyond.view(torch.int16) == MARK).all()
