"""A valid small call of every op, for the tests that hold for all of them. A new op adds a row to SAMPLES."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import pool_cases
import torch
from torch import Tensor

import mla_fp8
from mla_fp8 import INDEX_LAYOUTS, KV_LAYOUTS

Call = tuple[tuple[Any, ...], dict[str, Any]]  # of the public wrapper: tensors, then keywords
LAYOUT, PAGE_SIZE, NUM_PAGES = "dsv4", 4, 3


class Size(NamedTuple):
    """What a caller varies from call to call."""

    num_tokens: int = 5
    heads: int = 8
    topk: int = 16


SIZE = Size()
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


def quantize_kv(device: str, size: Size = SIZE) -> Call:
    latent = bf16(size.num_tokens, KV_LAYOUTS[LAYOUT].head_dim_qk, device=device)
    slots = torch.arange(size.num_tokens, device=device) - 1
    return (latent, slots, kv_cache(device)), OPTIONS


def k_norm_rope_insert(device: str, size: Size = SIZE) -> Call:
    n = size.num_tokens
    cos, sin = torch.rand(2, 9, 32, device=device)
    positions = torch.arange(n, device=device) % 10
    tensors = (bf16(n, 512, device=device), torch.rand(512, device=device).bfloat16(), cos, sin, positions)
    return (*tensors, torch.arange(n, device=device) - 1, kv_cache(device)), OPTIONS | {"eps": 1e-6}


def qk_norm_rope_insert(device: str, size: Size = SIZE) -> Call:
    tensors, options = k_norm_rope_insert(device, size)
    q = bf16(size.num_tokens, size.heads, 512, device=device)
    return (q, *tensors), options | {"norm_q": True, "num_heads": 2 * size.heads}


def prepare_keys(device: str, size: Size = SIZE) -> Call:
    n = size.num_tokens
    cos, sin = torch.rand(2, 9, 32, device=device)
    cache = KV_LAYOUTS["dsv32"].empty(NUM_PAGES, PAGE_SIZE, device).zero_()
    index_cache = INDEX_LAYOUTS["index_fp8"].empty(NUM_PAGES, PAGE_SIZE, device).zero_()
    tensors = (bf16(n, 512, device=device), torch.rand(512, device=device), cos, sin)
    tensors += (torch.arange(n, device=device) % 10, torch.arange(n, device=device) - 1, cache)
    queries = (bf16(n, 64, device=device), torch.rand(64, device=device))
    index = (bf16(n, 128, device=device), *torch.rand(2, 128, device=device))
    options = {"index_cache": index_cache, "index_neox": True, "index_rope_first": True, "eps": 1e-6}
    options["out_q_a"] = bf16(n, 64, device=device)
    return (*tensors, bf16(n, 64, device=device), *queries, *index), OPTIONS | options | {"layout": "dsv32"}


def prepare_queries(device: str, size: Size = SIZE) -> Call:
    n = size.num_tokens
    cos, sin = torch.rand(2, 9, 32, device=device)
    index = (bf16(n, size.heads, 128, device=device), torch.randn(n, size.heads, device=device))
    tensors = (bf16(n, 16, 64, device=device), *index, cos, sin, torch.arange(n, device=device) % 10)
    return tensors, {"index_neox": True, "index_rope_first": True, "layout": "index_fp4"}


def dequantize_kv(device: str, size: Size = SIZE) -> Call:
    slots = torch.arange(size.num_tokens, device=device) - 1
    return (kv_cache(device), slots), OPTIONS


def dequantize_kv_paged(device: str, size: Size = SIZE) -> Call:
    requests = ([[2, 0], [1, 1]], [6, 3], [5, 2], [0, 5])  # page_table, seq_lens, gather_lens, row_offsets
    num_rows = 5 + size.num_tokens
    return (kv_cache(device), *(ints(x, device) for x in requests)), OPTIONS | {"num_rows": num_rows}


def combine_topk_swa_indices(device: str, size: Size = SIZE) -> Call:
    n, topk = size.num_tokens, size.topk
    per_request = ([0, n - 1, n], [9, 4], [6, 4], [0, 10], [20, 30])
    topk_indices = torch.arange(-1, topk - 1, dtype=torch.int32, device=device).repeat(n, 1)
    tensors = (topk_indices, *(ints(x, device) for x in per_request))
    return tensors, {"window_size": topk, "compress_ratio": 2, "topk": topk - 1}


def build_swa_token_ids(device: str, size: Size = SIZE) -> Call:
    tables = (torch.arange(24, device=device).view(2, 12).int(), torch.arange(24, device=device) * 2)
    tensors = (ints([7, 3], device), ints([2, 3], device), torch.tensor([1, 0], device=device), *tables)
    return tensors, {"window_size": size.num_tokens + 1, "capacity": size.topk}


def pad_q_heads(device: str, size: Size = SIZE) -> Call:
    q = bf16(size.num_tokens, size.heads, 64, device=device)
    return (q, torch.randn(size.heads, device=device)), {"num_heads": 2 * size.heads}


def inverse_rope(device: str, size: Size = SIZE) -> Call:
    o, positions = bf16(size.num_tokens, size.heads, 512, device=device), ints(range(size.num_tokens), device)
    return (o, *torch.rand(2, 4, 32, device=device), positions), {}


def inverse_rope_quantize(device: str, size: Size = SIZE) -> Call:
    tensors, _ = inverse_rope(device, size)
    return tensors, {"num_groups": 2}


def compress_kv(device: str, size: Size = SIZE) -> Call:
    n = size.num_tokens
    ape, weight, (cos, sin) = (
        torch.randn(4, 1024, device=device),
        torch.ones(512, device=device),
        torch.rand(2, 9, 32, device=device),
    )
    state = torch.zeros(3, 8, 2048, device=device)
    requests = (ints([0, n - 1, n], device), ints([0, 3], device), state, ints([2, 0], device))
    slots = torch.arange(n, device=device)
    tensors = (torch.randn(n, 2048, device=device), *requests, ape, weight, cos, sin, slots, kv_cache(device))
    return tensors, OPTIONS | {"ratio": 4, "eps": 1e-6}


def sparse_prefill(device: str, size: Size = SIZE) -> Call:
    q, kv = bf16(size.num_tokens, size.heads, 576, device=device), bf16(20, 576, device=device)
    indices = torch.randint(-1, 20, (size.num_tokens, size.topk), dtype=torch.int32, device=device)
    return (q, kv, indices), {"sm_scale": 0.04, "attn_sink": torch.zeros(size.heads, device=device)}


def sparse_decode(device: str, size: Size = SIZE) -> Call:
    q = bf16(size.num_tokens, size.heads, KV_LAYOUTS[LAYOUT].head_dim_qk, device=device)
    shape = (size.num_tokens, size.topk)
    indices = torch.randint(-1, NUM_PAGES * PAGE_SIZE, shape, dtype=torch.int32, device=device)
    extra = {"extra_kv_cache": kv_cache(device), "extra_indices": indices, "extra_page_size": PAGE_SIZE}
    return (q, kv_cache(device), indices), OPTIONS | extra | {"sm_scale": 0.04}


def plan_shared_keys(device: str, size: Size = SIZE) -> Call:
    (_, _, indices), options = sparse_decode(device, size)
    keys = {"extra_indices": options["extra_indices"], "extra_num_slots": NUM_PAGES * PAGE_SIZE}
    sizes = {"query_groups": 2, "num_q_heads": size.heads, "num_slots": NUM_PAGES * PAGE_SIZE}
    return (indices,), {"layout": LAYOUT} | sizes | keys


def sparse_prefill_window(device: str, size: Size = SIZE) -> Call:
    (q, cache, _), options = sparse_decode(device, size)
    n = size.num_tokens
    requests = ([[2, 0], [1, 1]], [0, n - 1, n], [6, 3])  # page_table, query_start_loc, seq_lens
    return (q, cache, *(ints(x, device) for x in requests)), options | {"window_size": 3}


def sparse_prefill_entries(device: str, size: Size = SIZE) -> Call:
    tensors, options = sparse_prefill_window(device, size)
    del options["extra_indices"]
    lens = torch.arange(size.num_tokens, device=device).int()
    return tensors, options | {"extra_page_table": ints([[1, 2], [0, -1]], device), "extra_topk_length": lens}


def ragged(device: str, num_requests: int) -> list[Tensor]:
    """kv_indptr, kv_indices, kv_last_page_len: the first request has two pages."""
    lists = ([0, *range(2, num_requests + 2)], [1, *[0, 2] * num_requests][: num_requests + 1])
    return [ints(x, device) for x in (*lists, [3, 4, 1, 2][:num_requests])]


def paged_attention_ragged(device: str, size: Size = SIZE) -> Call:
    q, cache = bf16(2, size.heads, 128, device=device), bf16(NUM_PAGES, PAGE_SIZE, 2, 128, device=device)
    return (q, cache, cache.clone(), *ragged(device, 2)), {"sm_scale": 0.1, "page_size": PAGE_SIZE}


def paged_attention_ragged_latent(device: str, size: Size = SIZE) -> Call:
    requests = size.num_tokens // 2
    q = bf16(2 * requests, size.heads, KV_LAYOUTS[LAYOUT].head_dim_qk, device=device)
    return (q, kv_cache(device), *ragged(device, requests)), OPTIONS | {"sm_scale": 0.04, "q_len": 2}


def merge_attention_states(device: str, size: Size = SIZE) -> Call:
    shape = (size.num_tokens, size.heads)

    def state() -> tuple[Tensor, Tensor]:
        return bf16(*shape, 64, device=device), torch.randn(*shape, device=device)

    return (*state(), *state()), {}


def merge_partial_states(device: str, size: Size = SIZE) -> Call:
    shape = (3, size.num_tokens, size.heads)
    return (bf16(*shape, 64, device=device), torch.randn(*shape, device=device)), {}


def merge_topk(device: str, size: Size = SIZE) -> Call:
    shape = (3, size.num_tokens, size.topk)
    positions = torch.randint(-1, 1000, shape, dtype=torch.int32, device=device)
    return (torch.randn(shape, device=device), positions), {"topk": size.topk}


def quantize_index_k(device: str, size: Size = SIZE) -> Call:
    k, slots = bf16(size.num_tokens, 128, device=device), torch.arange(size.num_tokens, device=device) - 1
    cache = INDEX_LAYOUTS["index_fp8"].empty(NUM_PAGES, PAGE_SIZE, device).zero_()
    return (k, slots, cache), {"layout": "index_fp8", "page_size": PAGE_SIZE}


def index_queries(device: str, size: Size) -> tuple[Tensor, Tensor]:
    q = torch.randn(size.num_tokens, size.heads, 128, device=device).to(torch.float8_e4m3fn)
    return q, torch.randn(size.num_tokens, size.heads, device=device)


def index_logits(device: str, size: Size = SIZE) -> Call:
    options = {"layout": "index_fp8", "page_size": PAGE_SIZE}
    cache = INDEX_LAYOUTS["index_fp8"].empty(NUM_PAGES, PAGE_SIZE, device).zero_()
    slots = torch.arange(NUM_PAGES * PAGE_SIZE, device=device)
    mla_fp8.quantize_index_k(bf16(len(slots), 128, device=device), slots, cache, **options)
    n = size.num_tokens
    table = ints([[2, 0, 1], [1, 2, -1]], device).repeat(n, 1)[:n]
    seq_lens = torch.arange(n, device=device).int() * 3
    return (*index_queries(device, size), cache, table, seq_lens), options | {"width": size.topk}


def index_topk(device: str, size: Size = SIZE) -> Call:
    tensors, options = index_logits(device, size)
    return tensors, {key: x for key, x in options.items() if key != "width"} | {"topk": size.topk // 2}


def index_logits_ragged(device: str, size: Size = SIZE) -> Call:
    k = torch.randn(4 * size.topk, 128, device=device).to(torch.float8_e4m3fn)
    start = torch.arange(size.num_tokens, device=device).int()
    keys = (k, torch.rand(len(k), device=device), start, start * 9)
    return (*index_queries(device, size), *keys), {}


def index_topk_ragged(device: str, size: Size = SIZE) -> Call:
    tensors, options = index_logits_ragged(device, size)
    return tensors, options | {"topk": size.topk}


def index_topk_blocks(device: str, size: Size = SIZE) -> Call:
    tensors, options = index_topk(device, size)
    return tensors, options | {"num_blocks": 2}


def index_topk_ragged_blocks(device: str, size: Size = SIZE) -> Call:
    tensors, options = index_topk_ragged(device, size)
    return tensors, options | {"num_blocks": 3}


def topk_to_slots(device: str, size: Size = SIZE) -> Call:
    positions = torch.arange(-1, size.topk - 1, dtype=torch.int32, device=device).repeat(size.num_tokens, 1)
    options = {"page_size": PAGE_SIZE, "next_n": size.num_tokens, "group_size": 2}
    return (positions, ints([[2, 0], [1, -1]], device)), options


def resolve_hot_rows(device: str, size: Size = SIZE) -> Call:
    n, topk = size.num_tokens, size.topk
    entries = torch.randint(-1, 6 * PAGE_SIZE, (n, topk), dtype=torch.int32, device=device)
    held = torch.full((n + 1, 2 * topk), -1, dtype=torch.int32, device=device)
    order = torch.arange(2 * topk, dtype=torch.int16, device=device).repeat(n + 1, 1)
    pages = torch.arange(6 * (n + 1), dtype=torch.int32, device=device).view(n + 1, 6)
    hot_pages = torch.arange(n * topk, dtype=torch.int32, device=device).view(n, topk)
    sizes = {"num_host_rows": 6 * n * PAGE_SIZE, "host_page_size": PAGE_SIZE, "hot_page_size": 2}
    states = torch.arange(n, 0, -1, dtype=torch.int32, device=device)
    options = {"state_rows": states, "counters": torch.zeros(2, dtype=torch.int64, device=device)}
    return (entries, held, order, pages[:n], hot_pages, pages % 2 - 1), sizes | options


def copy_host_rows(device: str, size: Size = SIZE) -> Call:
    rows = torch.randperm(NUM_PAGES * PAGE_SIZE, device=device)[: size.num_tokens]
    options = {"host_page_size": PAGE_SIZE, "hot_page_size": PAGE_SIZE, "layout": LAYOUT}
    host = kv_cache("cpu") if device == "cpu" else kv_cache("cpu").pin_memory()
    return (host, kv_cache(device), torch.arange(len(rows), device=device) - 1, rows), options


def store_host_rows(device: str, size: Size = SIZE) -> Call:
    (host, hot, *rows), options = copy_host_rows(device, size)
    return (hot, host, *rows), options


def forget_rows(device: str, size: Size = SIZE) -> Call:
    held = torch.arange(4 * size.topk, dtype=torch.int32, device=device).view(4, size.topk)
    return (torch.arange(size.num_tokens, device=device) - 1, held), {}


# Devices that an op has no kernel for yet: its tests there are skipped.
NO_KERNEL: dict[str, tuple[str, ...]] = {}
if torch.version.hip:
    NO_KERNEL |= dict.fromkeys(
        ("prepare_keys", "prepare_queries", "quantize_index_k", "index_logits", "index_logits_ragged",
         "index_topk", "index_topk_ragged", "index_topk_blocks", "index_topk_ragged_blocks", "topk_to_slots",
         "merge_topk", "plan_shared_keys", "pool_index_k", "resolve_hot_rows", "copy_host_rows",
         "store_host_rows", "forget_rows"), ("cuda",)
    )  # fmt: skip

SAMPLES: dict[str, Callable[..., Call]] = {
    "quantize_kv": quantize_kv,
    "k_norm_rope_insert": k_norm_rope_insert,
    "qk_norm_rope_insert": qk_norm_rope_insert,
    "prepare_keys": prepare_keys,
    "prepare_queries": prepare_queries,
    "dequantize_kv": dequantize_kv,
    "dequantize_kv_paged": dequantize_kv_paged,
    "combine_topk_swa_indices": combine_topk_swa_indices,
    "combine_topk_swa_indices_ragged": combine_topk_swa_indices,
    "build_swa_token_ids": build_swa_token_ids,
    "pad_q_heads": pad_q_heads,
    "compress_kv": compress_kv,
    "inverse_rope": inverse_rope,
    "inverse_rope_quantize": inverse_rope_quantize,
    "sparse_prefill": sparse_prefill,
    "sparse_prefill_paged": sparse_decode,
    "sparse_prefill_window": sparse_prefill_window,
    "sparse_decode": sparse_decode,
    "plan_shared_keys": plan_shared_keys,
    "paged_attention_ragged": paged_attention_ragged,
    "paged_attention_ragged_latent": paged_attention_ragged_latent,
    "merge_attention_states": merge_attention_states,
    "merge_partial_states": merge_partial_states,
    "quantize_index_k": quantize_index_k,
    "pool_index_k": lambda device, size=SIZE: pool_cases.sample(device, size.num_tokens),
    "index_logits": index_logits,
    "index_logits_ragged": index_logits_ragged,
    "index_topk": index_topk,
    "index_topk_ragged": index_topk_ragged,
    "index_topk_blocks": index_topk_blocks,
    "index_topk_ragged_blocks": index_topk_ragged_blocks,
    "topk_to_slots": topk_to_slots,
    "merge_topk": merge_topk,
    "resolve_hot_rows": resolve_hot_rows,
    "copy_host_rows": copy_host_rows,
    "store_host_rows": store_host_rows,
    "forget_rows": forget_rows,
}
OF_LAYERS = ("host_caches", "hot_caches")  # first arguments, which are lists: a cache of each layer


def index_workspace(tensors: tuple, options: dict, device: str) -> Tensor:
    """Of a call of index_topk or a sibling."""
    sizes = {}
    if "num_blocks" in options:
        paged = "page_size" in options
        sizes["num_positions"] = tensors[3].shape[1] * options["page_size"] if paged else len(tensors[2])
    if (blocks := options.get("candidate_blocks")) is not None:
        sizes["num_candidates"] = blocks.shape[1]
    size = mla_fp8.index_topk_workspace(len(tensors[0]), topk=options["topk"], device=device, **sizes)
    return torch.zeros(size, dtype=torch.uint8, device=device)


def layout_id(name: str) -> int:
    return (KV_LAYOUTS | INDEX_LAYOUTS)[name].id


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    return [x for x in values if isinstance(x, Tensor)]


@cache  # torch lists those of all its ops, in 50 ms
def schemas() -> dict[str, torch.FunctionSchema]:
    """Of torch.ops.mla_fp8, by name."""
    found = (s for s in torch._C._jit_get_all_schemas() if s.name.startswith("mla_fp8::"))
    return {s.name.removeprefix("mla_fp8::"): s for s in sorted(found, key=lambda s: s.name)}


def op_call(name: str, device: str) -> tuple[tuple, dict]:
    """The sample as arguments of the op itself; an _out twin gets poisoned buffers for its results."""
    functional = name.removesuffix("_out")
    tensors, options = SAMPLES[functional](device)
    if "layout" in options:
        options = options | {"layout": layout_id(options["layout"])}
    if schemas()[name].arguments[0].name in OF_LAYERS:
        tensors = ([tensors[0]], [tensors[1]], *tensors[2:])
    if name != functional:
        results = getattr(torch.ops.mla_fp8, functional)(*tensors, **options)
        results = iter(results if isinstance(results, tuple) else (results,))
        inputs = {argument.name for argument in schemas()[functional].arguments}  # a cache is written too
        for argument in schemas()[name].arguments:
            is_result = argument.name not in inputs and not argument.has_default_value()
            if is_result and argument.alias_info and argument.alias_info.is_write:
                result = next(results)
                poison = {torch.float8_e4m3fn: 448, torch.uint8: 0xA5}.get(result.dtype, 1 << 30)
                options = options | {argument.name: result.clone().fill_(poison)}
        assert next(results, None) is None
        options = {a.name: options[a.name] for a in schemas()[name].arguments if a.name in options}
        if functional.startswith("index_topk") and device == "cuda":
            options["workspace"] = index_workspace(tensors, options, device)
    return tensors, options
