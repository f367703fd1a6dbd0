"""Calls written for SGLang's helpers get their results from our ops."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from kv_cache_cases import POISON, assert_same_values, distinct_slots, latents
from prefill_cases import BEYOND, NEGATIVE, WINDOW_PAGE, make_chunk, negative

import mla_fp8
from mla_fp8 import KV_LAYOUTS, reference
from mla_fp8.compat import sglang
from mla_fp8.testing import assert_within_flash_mla_tolerance

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


def written(layout, num_pages, num_rows, device):
    """A cache whose first rows are written."""
    kv_cache = layout.empty(num_pages, PAGE_SIZE, device).fill_(POISON)
    slots = torch.arange(num_rows, device=device)
    rows = latents(layout, num_rows, device)
    mla_fp8.quantize_kv(rows, slots, kv_cache, layout=layout, page_size=PAGE_SIZE)
    return kv_cache


@pytest.mark.parametrize(
    "function, names",
    [
        (sglang.dequantize_k_cache_paged, "quant_k_cache page_table_1_flattened page_size out layout"),
        (
            sglang.combine_topk_swa_indices,
            "topk_indices query_start_loc seq_lens gather_lens compressed_base swa_base window_size "
            "compress_ratio topk out_indices out_lens query_pos",
        ),
        (
            sglang.build_swa_token_ids,
            "seq_lens extend_seq_lens req_pool_indices req_to_token full_to_swa swa_window total_swa",
        ),
        (sglang.dequantize_k_cache_paged_dsa, "quant_k_cache page_table_1_flattened group_size"),
        (
            sglang.SparsePrefillChunkCache.build,
            "seq_lens extend_seq_lens query_lens query_pos req_pool_indices req_to_token full_to_swa "
            "swa_window_size swa_page_size num_qo_tokens max_seq_len total_swa request_window_layout "
            "seq_lens_cpu",
        ),
    ],
)
def test_names_and_order_are_those_of_sglang(function, names):
    assert " ".join(inspect.signature(function).parameters) == names


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_dequantize_gives_rows_of_one_head(dtype, slot_dtype, device):
    kv_cache = written(LAYOUT, 4, 256, device)
    slots = distinct_slots(100, 256, device, slot_dtype)
    want = reference.dequantize_kv(kv_cache, slots, layout=LAYOUT, page_size=PAGE_SIZE)
    got = sglang.dequantize_k_cache_paged(kv_cache.view(dtype), slots, PAGE_SIZE)
    assert_same_values(got, want[:, None])

    workspace = torch.full((120, 1, LAYOUT.head_dim_qk), 7.0, dtype=torch.bfloat16, device=device)
    part = workspace[10:110]
    assert sglang.dequantize_k_cache_paged(kv_cache.view(dtype), slots, PAGE_SIZE, out=part) is part
    assert_same_values(part, want[:, None])
    assert (workspace[:10] == 7).all() and (workspace[110:] == 7).all()


@pytest.mark.parametrize("name, ours", sglang.LAYOUTS.items())
def test_dequantize_knows_sglangs_names_of_layouts(name, ours, device):
    layout = KV_LAYOUTS[ours]
    kv_cache = written(layout, 2, 100, device)
    slots = distinct_slots(50, 100, device, torch.int32)
    want = reference.dequantize_kv(kv_cache, slots, layout=layout, page_size=PAGE_SIZE)
    got = sglang.dequantize_k_cache_paged_dsv4(kv_cache, slots, PAGE_SIZE, layout=name)
    assert_same_values(got, want[:, None])
    with pytest.raises(ValueError, match="layout must be one of v4, v41, v41_fp4, got 'v41_new'"):
        sglang.dequantize_k_cache_paged_dsv4(kv_cache, slots, PAGE_SIZE, layout="v41_new")


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


@pytest.mark.parametrize("shape", ["flat", "paged"])
def test_dequantize_of_v32_reads_slots_of_any_page_size(shape, device):
    layout = KV_LAYOUTS["dsv32"]
    kv_cache = written(layout, 4, 256, device)
    slots = distinct_slots(100, 256, device, torch.int32)
    want = reference.dequantize_kv(kv_cache, slots, layout=layout, page_size=PAGE_SIZE)
    row = layout.bytes_per_token
    given = kv_cache.view(torch.float8_e4m3fn).view(*((256, 1, row) if shape == "flat" else (4, 64, 1, row)))
    assert_same_values(sglang.dequantize_k_cache_paged_dsa(given, slots), want[:, None])
    assert_same_values(sglang.dequantize_k_cache_paged_dsa(given, slots, group_size=128), want[:, None])
    with pytest.raises(ValueError, match="group_size must be 128, got 64"):
        sglang.dequantize_k_cache_paged_dsa(given, slots, 64)
    with pytest.raises(ValueError, match=r"quant_k_cache must have shape .*, got \[4, "):
        sglang.dequantize_k_cache_paged_dsa(given.view(4, -1), slots)


def chunk_cache(chunk, **changes):
    """SGLang's cache of a chunk of prefill_cases, built as SGLang builds it."""
    spans = [range(n - q, n) for n, q in zip(chunk.seq_lens, chunk.query_lens, strict=True)]
    query_lens = ints(negative(chunk.query_lens), chunk.device)
    arguments = {
        "seq_lens": chunk.seq_lens_device,
        "extend_seq_lens": query_lens,
        "query_lens": query_lens,
        "query_pos": ints([p for span in spans for p in span], chunk.device),
        "req_pool_indices": chunk.req_pool_indices,
        "req_to_token": chunk.req_to_token,
        "full_to_swa": chunk.full_to_swa,
        "swa_window_size": chunk.window,
        "swa_page_size": WINDOW_PAGE,
        "num_qo_tokens": len(chunk.q),
        "max_seq_len": max(chunk.seq_lens),
        "total_swa": sum(
            min(n, q + chunk.window - 1) for n, q in zip(chunk.seq_lens, chunk.query_lens, strict=True)
        ),
        "seq_lens_cpu": chunk.seq_lens,
    }
    return sglang.SparsePrefillChunkCache.build(**(arguments | changes))


class Metadata(SimpleNamespace):
    """What SGLang's backend hands to layer_inputs: a row of each table per query."""

    def sparse_page_indices(self, ratio):
        return self.page_indices

    def sparse_raw_indices(self, ratio):
        return self.raw_indices


def metadata(chunk):
    request = [r for r, q in enumerate(chunk.query_lens) for _ in range(q)]
    size = chunk.page_tokens // chunk.ratio
    entry = torch.arange(chunk.max_len // chunk.ratio, device=chunk.device)
    slots = chunk.page_table[request][:, entry // size] * size + entry % size
    pos = [p for n, q in zip(chunk.seq_lens, chunk.query_lens, strict=True) for p in range(n - q, n)]
    past = (ints(pos, chunk.device) + 1) // chunk.ratio
    page_indices = torch.where(entry < past[:, None], slots, -1)
    return Metadata(
        page_table=chunk.page_table[request], page_indices=page_indices, raw_indices=chunk.topk_indices
    )


def attend_as_sglang_does(chunk, cache, layer, inputs):
    """Dequantise by flat_token_ids, then the window, into one workspace; attend."""
    ids, indices, lens = inputs
    workspace = torch.full((len(ids) + len(cache.swa_token_ids), 1, 512), float("nan"), device=chunk.device)
    workspace = workspace.bfloat16()
    if len(ids):
        data, page_size = layer.entries
        sglang.dequantize_k_cache_paged_dsv4(data, ids, page_size, out=workspace[: len(ids)])
    sglang.dequantize_k_cache_paged(
        layer.window.data, cache.swa_token_ids, WINDOW_PAGE, out=workspace[len(ids) :]
    )
    out, _, lse = mla_fp8.sparse_prefill(
        chunk.q, workspace[:, 0], indices, sm_scale=chunk.sm_scale, attn_sink=chunk.attn_sink,
        topk_length=lens,
    )  # fmt: skip
    return out, lse


CHUNKS = {
    "c0": {"seq_lens": [90, 0, 7, 30, 33, 8], "query_lens": [20, 0, 7, 2, 9, 0]},
    "c4": {"seq_lens": [90, 0, 7, 30, 33, 8], "query_lens": [20, 0, 7, 2, 9, 0]},
    "c128": {
        "seq_lens": [700, 0, 127, 128, 257], "query_lens": [20, 0, 7, 2, 3], "ratio": 128, "page_tokens": 256,
        "max_len": 768,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", CHUNKS)
@pytest.mark.parametrize("lengths", ["known", "read from the device"])
def test_layers_of_a_chunk_attend_to_their_rows(kind, lengths, device):
    chunk = make_chunk("dsv4", device, **CHUNKS[kind])
    layer = chunk.layer(entries=kind != "c0")
    from_device = {
        "seq_lens": ints(negative(chunk.seq_lens), device),
        "seq_lens_cpu": None,
    }
    cache = chunk_cache(chunk, **({} if lengths == "known" else from_device))
    if kind == "c0":
        inputs = (cache.swa_token_ids[:0], cache.c0_combined_indices, cache.c0_combined_lens)
    else:
        inputs = cache.layer_inputs(chunk.ratio, metadata(chunk), chunk.page_tokens // chunk.ratio)
    out, lse = attend_as_sglang_does(chunk, cache, layer, inputs)
    want = chunk.expected(layer, chunk.topk_indices if kind == "c4" else None)
    assert_within_flash_mla_tolerance(out, lse, want[0], want[2])


def test_a_page_that_is_missing_gives_a_token_that_sglang_may_read(device):
    """Its kernels follow every id: the entry's row is never attended to, but it is gathered."""
    chunk = make_chunk("dsv4", device, **CHUNKS["c4"])
    tables = metadata(chunk)
    tables.page_table[:, 1:] = -1
    gather = chunk_cache(chunk).ensure_compressed(4, tables.page_table, 4)
    assert gather.flat_token_ids.min() == 0


def test_layers_share_what_does_not_change_and_reuse_the_rest(device):
    chunk = make_chunk("dsv4", device, **CHUNKS["c4"])
    cache, found = chunk_cache(chunk), metadata(chunk)
    first = cache.layer_inputs(4, found, 4)
    kept = [x.clone() for x in first]
    found.raw_indices = found.raw_indices.flip(1).contiguous()
    second = cache.layer_inputs(4, found, 4)
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert torch.equal(second[0], kept[0]) and not torch.equal(second[1], kept[1])


@pytest.mark.parametrize("queries", [0, 3])
def test_garbage_lengths_shift_no_other_request(queries, device):
    """Nor does a chunk of requests without a query fail."""
    chunk = make_chunk("dsv4", device, seq_lens=[30, 20], query_lens=[0, queries])
    wants = {}
    for seq_len in (0, 30, *NEGATIVE, *BEYOND):
        for query_len in (0, *NEGATIVE):
            changes = {
                "seq_lens": ints([seq_len, 20], device),
                "query_lens": ints([query_len, queries], device),
            }
            cache = chunk_cache(chunk, **changes)
            four = cache.ensure_compressed(4, metadata(chunk).page_table, 4)
            every = cache.ensure_c128(torch.zeros(queries, 1, dtype=torch.int32, device=device))
            cache.combine_compressed(4, chunk.topk_indices)
            found = [four.compressed_base, four.combined_indices, four.combined_lens, every.combined_lens]
            want = wants.setdefault(min(max(seq_len, 0), 30), found)
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert [x[0].tolist() for x in wants.values()] == [[0, 0], [0, 7]]


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda c, m: chunk_cache(c, request_window_layout=1), "request_window_layout must be None"),
        (
            lambda c, m: chunk_cache(c).ensure_compressed(4, m.page_table[:, :2], 4),
            "page_table must reach 22 entries of c4, got 2 pages of 4",
        ),
        (
            lambda c, m: chunk_cache(c, max_seq_len=700).ensure_c128(m.page_indices[:, :2]),
            "c128_page_indices must have at least 5 columns, got 2",
        ),
        (
            lambda c, m: chunk_cache(c).ensure_compressed(4, m.page_table[:2], 4),
            "page_table must have at least 38 rows, got 2",
        ),
        (
            lambda c, m: chunk_cache(c, seq_lens_cpu=[1]),
            r"seq_lens_cpu must be 6 lengths in \[0, 2\^31\), got \[1\]",
        ),
    ],
)
def test_wrong_metadata_is_named(spoil, message):
    chunk = make_chunk("dsv4", "cpu", **CHUNKS["c4"])
    with pytest.raises(ValueError, match=message):
        spoil(chunk, metadata(chunk))
