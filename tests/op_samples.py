"""A valid small call of every op, for the tests that hold for all of them. A new op adds a row to SAMPLES."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mla_fp8
from mla_fp8 import KV_LAYOUTS

Call = tuple[tuple[Any, ...], dict[str, Any]]  # of the public wrapper: tensors, then keywords
LAYOUT, PAGE_SIZE, NUM_PAGES = "dsv4", 4, 3
OPTIONS = {"layout": LAYOUT, "page_size": PAGE_SIZE}


def ints(values: object, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def bf16(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, device=device).bfloat16()


def kv_cache(device: str) -> Tensor:
    layout = KV_LAYOUTS[LAYOUT]
    cache = layout.empty(NUM_PAGES, PAGE_SIZE, device).zero_()
    slots = torch.arange(NUM_PAGES * PAGE_SIZE, device=device)
    mla_fp8.quantize_kv(bf16(len(slots), layout.head_dim_qk, device=device), slots, cache, **OPTIONS)
    return cache


def quantize_kv(device: str) -> Call:
    latent = bf16(5, KV_LAYOUTS[LAYOUT].head_dim_qk, device=device)
    return (latent, torch.tensor([4, -1, 9, 0], device=device), kv_cache(device)), OPTIONS


def dequantize_kv(device: str) -> Call:
    return (kv_cache(device), torch.tensor([3, -1, 11], device=device)), OPTIONS


def dequantize_kv_paged(device: str) -> Call:
    requests = ([[2, 0], [1, 1]], [6, 3], [5, 2], [0, 5])  # page_table, seq_lens, gather_lens, row_offsets
    return (kv_cache(device), *(ints(x, device) for x in requests)), OPTIONS | {"num_rows": 8}


def combine_topk_swa_indices(device: str) -> Call:
    per_request = ([0, 2, 3], [9, 4], [6, 4], [0, 10], [20, 30])
    topk_indices = ints([[0, 1, -1, 2]] * 3, device)
    tensors = (topk_indices, *(ints(x, device) for x in per_request))
    return tensors, {"window_size": 4, "compress_ratio": 2, "topk": 3}


def build_swa_token_ids(device: str) -> Call:
    tables = (torch.arange(24, device=device).view(2, 12).int(), torch.arange(24, device=device) * 2)
    tensors = (ints([7, 3], device), ints([2, 3], device), torch.tensor([1, 0], device=device), *tables)
    return tensors, {"window_size": 4, "capacity": 16}


def pad_q_heads(device: str) -> Call:
    return (bf16(3, 8, 64, device=device), torch.randn(8, device=device)), {"num_heads": 16}


def sparse_prefill(device: str) -> Call:
    q, kv = bf16(3, 8, 576, device=device), bf16(20, 576, device=device)
    indices = torch.randint(-1, 20, (3, 16), dtype=torch.int32, device=device)
    return (q, kv, indices), {"sm_scale": 0.04, "attn_sink": torch.zeros(8, device=device)}


def sparse_decode(device: str) -> Call:
    q = bf16(3, 8, KV_LAYOUTS[LAYOUT].head_dim_qk, device=device)
    indices = torch.randint(-1, NUM_PAGES * PAGE_SIZE, (3, 16), dtype=torch.int32, device=device)
    extra = {"extra_kv_cache": kv_cache(device), "extra_indices": indices, "extra_page_size": PAGE_SIZE}
    return (q, kv_cache(device), indices), OPTIONS | extra | {"sm_scale": 0.04}


def sparse_prefill_window(device: str) -> Call:
    (q, cache, _), options = sparse_decode(device)
    requests = ([[2, 0], [1, 1]], [0, 2, 3], [6, 3])  # page_table, query_start_loc, seq_lens
    return (q, cache, *(ints(x, device) for x in requests)), options | {"window_size": 3}


def paged_attention_ragged(device: str) -> Call:
    q, cache = bf16(2, 8, 128, device=device), bf16(NUM_PAGES, PAGE_SIZE, 2, 128, device=device)
    ragged = (ints(x, device) for x in ([0, 2, 3], [1, 0, 2], [3, 4]))  # indptr, pages, last_page_len
    return (q, cache, cache.clone(), *ragged), {"sm_scale": 0.1, "page_size": PAGE_SIZE}


def paged_attention_ragged_latent(device: str) -> Call:
    q = bf16(4, 8, KV_LAYOUTS[LAYOUT].head_dim_qk, device=device)
    ragged = (ints(x, device) for x in ([0, 2, 3], [1, 0, 2], [3, 4]))
    return (q, kv_cache(device), *ragged), OPTIONS | {"sm_scale": 0.04, "q_len": 2}


def merge_attention_states(device: str) -> Call:
    def state() -> tuple[Tensor, Tensor]:
        return bf16(3, 4, 64, device=device), torch.randn(3, 4, device=device)

    return (*state(), *state()), {}


# Devices that an op has no kernel for yet: its tests there are skipped.
NO_KERNEL: dict[str, tuple[str, ...]] = {}
if torch.version.hip:
    NO_KERNEL |= dict.fromkeys(
        ("sparse_prefill", "sparse_prefill_paged", "sparse_prefill_window", "sparse_decode"), ("cuda",)
    )

SAMPLES: dict[str, Callable[[str], Call]] = {
    "quantize_kv": quantize_kv,
    "dequantize_kv": dequantize_kv,
    "dequantize_kv_paged": dequantize_kv_paged,
    "combine_topk_swa_indices": combine_topk_swa_indices,
    "combine_topk_swa_indices_ragged": combine_topk_swa_indices,
    "build_swa_token_ids": build_swa_token_ids,
    "pad_q_heads": pad_q_heads,
    "sparse_prefill": sparse_prefill,
    "sparse_prefill_paged": sparse_decode,
    "sparse_prefill_window": sparse_prefill_window,
    "sparse_decode": sparse_decode,
    "paged_attention_ragged": paged_attention_ragged,
    "paged_attention_ragged_latent": paged_attention_ragged_latent,
    "merge_attention_states": merge_attention_states,
}
