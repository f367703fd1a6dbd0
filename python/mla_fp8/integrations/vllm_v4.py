"""vLLM's layers of DeepSeek V4 and V4.1: query heads without FlashMLA's padding, few of them straight from
the pages.

Around methods of vLLM's two classes DeepseekV4FlashMLAAttention, whose calls of FlashMLA flash_mla_calls.py
serves.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .. import probes
from ..layout import KV_LAYOUTS
from ..ops.topk_to_slots import topk_to_slots
from . import attend, drafts, replay, same_bits
from .flash_mla_calls import around
from .log import say_once

MODULES = {
    "DeepSeek V4": "vllm.models.deepseek_v4.nvidia.flashmla",
    "DeepSeek V4.1": "vllm.models.deepseek_v41.nvidia.flashmla",
}
LAYER = "DeepseekV4FlashMLAAttention"
HEADS = (8, 16, 32, 64, 128)  # that vLLM's kernel which writes the queries is compiled for
# Up to here a prompt's keys are read from the pages as they are; above, vLLM's bf16 workspace is faster.
MAX_HEADS_FROM_PAGES, MAX_HEADS = 32, HEADS[-1]
# Of V4's layers that attend to every compressed entry of the past, without an indexer.
EVERY_ENTRY = 128
INDEXED = 4  # the ratio of those with one
_LAYOUT = KV_LAYOUTS["dsv4"]


def get_padded_num_q_heads(original: Callable[..., int], cls: type, num_heads: int) -> int:
    ours = None
    if cls.__module__ in MODULES.values():  # not a backend for other GPUs that inherits from it
        ours = next((n for n in HEADS if n >= num_heads), None)
    return ours or original(cls, num_heads)


def forward_prefill(
    original: Callable[..., None],
    self: Any,
    q: Tensor,
    positions: Tensor,
    compressed_k_cache: Tensor | None,
    swa_k_cache: Tensor,
    output: Tensor,
    attn_metadata: Any,
    swa_metadata: Any,
) -> None:
    packed = swa_k_cache.shape[-1] * swa_k_cache.element_size() == _LAYOUT.bytes_per_token
    most_heads = MAX_HEADS if same_bits.on() else MAX_HEADS_FROM_PAGES
    if q.shape[1] > most_heads or not packed or swa_metadata.prefill_left_visible is not None:
        if same_bits.on():
            say_once("mla_fp8: prompts of V4 with images, or over other rows, have other bits than decode")
        original(self, q, positions, compressed_k_cache, swa_k_cache, output, attn_metadata, swa_metadata)
        return
    first, num_tokens = swa_metadata.num_decodes, swa_metadata.num_prefill_tokens
    end = first + swa_metadata.num_prefills  # vLLM's tensors may be longer
    entries = {}
    if attn_metadata is not None and compressed_k_cache is not None:
        entries = _entries(self, positions, compressed_k_cache, attn_metadata, swa_metadata)
    attend.over_windows(
        q[:num_tokens],
        swa_k_cache,
        swa_metadata.block_table[first:end],
        swa_metadata.query_start_loc[first : end + 1],
        swa_metadata.prefill_seq_lens[: swa_metadata.num_prefills],
        layout=_LAYOUT,
        page_size=swa_metadata.block_size,
        window_size=self.window_size,
        sm_scale=self.scale,
        attn_sink=self.attn_sink,
        out=output[:num_tokens],
        **entries,
    )


def _entries(
    layer: Any, positions: Tensor, cache: Tensor, attn_metadata: Any, swa_metadata: Any
) -> dict[str, Any]:
    """The compressed entries that each token of the prompts attends to."""
    begin = swa_metadata.num_decode_tokens
    tokens = slice(begin, begin + swa_metadata.num_prefill_tokens)
    if layer.compress_ratio == EVERY_ENTRY:
        by_pages = _entries_by_pages(positions, cache, attn_metadata, swa_metadata)
        if by_pages is not None:
            return by_pages
        chosen = attn_metadata.c128a_prefill_topk_indices
    else:
        chosen = layer.topk_indices_buffer[tokens]
    requests = swa_metadata.token_to_req_indices[tokens].where(swa_metadata.is_valid_token[tokens], -1)
    # vLLM's own kernel for this is Triton's, compiled anew for every width of ``chosen``.
    slots, lengths = topk_to_slots(
        chosen,
        attn_metadata.block_table,
        page_size=attn_metadata.block_size // layer.compress_ratio,
        row_to_request=requests,
    )
    return {
        "extra_kv_cache": cache, "extra_indices": slots, "extra_topk_length": lengths,
        "extra_page_size": cache.shape[1],
    }  # fmt: skip


def _entries_by_pages(
    positions: Tensor | None, cache: Tensor, attn_metadata: Any, swa_metadata: Any
) -> dict[str, Any] | None:
    """Every entry that is closed at a token's position, by the layer's block table: no index is read.

    None where vLLM's metadata do not say as much: a position per token, a row of block table per prompt,
    whose blocks are pages of the cache.
    """
    num_tokens, num_prompts = swa_metadata.num_prefill_tokens, swa_metadata.num_prefills
    table = attn_metadata.block_table[swa_metadata.num_decodes :][:num_prompts]
    if positions is None or positions.dim() != 1 or len(positions) < num_tokens or len(table) < num_prompts:
        return None
    if cache.shape[1] * EVERY_ENTRY != attn_metadata.block_size or table.dtype is not torch.int32:
        return None
    closed = torch.empty(num_tokens, dtype=torch.int32, device=positions.device)
    torch.add(positions[:num_tokens], 1, out=closed).floor_divide_(EVERY_ENTRY)
    return {
        "extra_kv_cache": cache, "extra_page_table": table, "extra_topk_length": closed,
        "extra_page_size": cache.shape[1],
    }  # fmt: skip


def forward_decode(
    original: Callable[..., None],
    self: Any,
    q: Tensor,
    kv_cache: Tensor | None,
    swa_metadata: Any,
    attn_metadata: Any,
    swa_only: bool,
    output: Tensor,
) -> None:
    """vLLM flattens the drafts of a request before it calls FlashMLA: says which rows they are."""
    longest, starts = swa_metadata.max_decode_query_len, swa_metadata.query_start_loc
    layers = None if swa_only else _layers_with_these_slots(self, swa_metadata, attn_metadata)
    with drafts.step(drafts.of_requests(len(q), swa_metadata.num_decodes, longest, starts, layers)):
        original(self, q, kv_cache, swa_metadata, attn_metadata, swa_only, output)


def _layers_with_these_slots(layer: Any, swa_metadata: Any, attn_metadata: Any) -> drafts.Layers | None:
    """Those of every entry (V4), or of one indexer (V4.1). V4's ratio 4 chooses anew.

    Layers of the window alone make lists in each call: drafting layers are such, which vLLM may run in turns
    over one object of metadata that it writes in place.
    """
    ratio, source = layer.compress_ratio, getattr(layer, "index_source_layer_id", None)
    if source is None and ratio != EVERY_ENTRY:
        return None
    # Layers of one block table have one object of metadata.
    return drafts.Layers(swa_metadata, ratio, (source, id(attn_metadata)), id(layer))


def forward_mqa(
    original: Callable[..., None], self: Any, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor
) -> None:
    """Behind the choice of a layer of ratio 4."""
    if replay.wanted() and self.compress_ratio == INDEXED:
        metadata = import_module(type(self).__module__).get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            swa = metadata[self.swa_cache_layer.prefix]
            rows = swa.num_decode_tokens + swa.num_prefill_tokens
            requests = swa.token_to_req_indices[:rows].where(swa.is_valid_token[:rows], -1)
            replay.chosen(self.prefix, self.topk_indices_buffer[:rows], requests)
    original(self, q, kv, positions, output)


METHODS: dict[str, Callable[..., Any]] = {
    "get_padded_num_q_heads": get_padded_num_q_heads,
    "_forward_prefill": forward_prefill,
}
REPLAY: dict[str, Callable[..., Any]] = {"forward_mqa": forward_mqa}  # replay.py
# With drafts.py switched on.
DRAFTS: dict[str, Callable[..., Any]] = {"_forward_decode": forward_decode}
_NEEDED: dict[str, tuple[str, ...]] = {
    "get_padded_num_q_heads": ("num_heads",),
    "_forward_prefill": (
        "q", "positions", "compressed_k_cache", "swa_k_cache", "output", "attn_metadata", "swa_metadata",
    ),
    "forward_mqa": ("q", "kv", "positions", "output"),
    "_forward_decode": ("q", "kv_cache", "swa_metadata", "attn_metadata", "swa_only", "output"),
}  # fmt: skip


def why_not(model: str, methods: dict[str, Callable[..., Any]] = METHODS) -> str | None:
    """Why these methods of the layer of ``model`` cannot be ours, or None."""
    module = MODULES[model]
    reason = probes.why_not_call({module: {f"{LAYER}.{name}": _NEEDED[name] for name in methods}})
    if reason:
        return reason
    layer = getattr(import_module(module), LAYER)
    for name, ours in methods.items():
        reason = probes.why_not_replace(_function(layer, name), ours)
        if reason:
            return f"{LAYER}.{name} {reason}"
    return None


def take_over(model: str, methods: dict[str, Callable[..., Any]] = METHODS) -> None:
    """Re-entrant."""
    layer = getattr(import_module(MODULES[model]), LAYER)
    for name, hook in methods.items():
        kind = type(vars(layer)[name])
        wrapped = around(_function(layer, name), hook)
        setattr(layer, name, classmethod(wrapped) if kind is classmethod else wrapped)


def _function(layer: type, name: str) -> Callable[..., Any]:
    """The plain function, also of a classmethod."""
    found = vars(layer)[name]
    function: Callable[..., Any] = getattr(found, "__func__", found)
    return function
