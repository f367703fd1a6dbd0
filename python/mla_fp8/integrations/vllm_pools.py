"""vLLM's indexer of GLM-5.3-Flash, which chooses among pools of four keys: :func:`mla_fp8.pool_index_k`,
:func:`mla_fp8.index_topk` and :func:`mla_fp8.topk_to_slots` in place of vLLM's function. Part of
``mla_fp8_index_topk`` (vllm_indexer.py).

=====================  ======================================================================================
keys                   one launch for prompts, decode and drafts, into vLLM's cache; the ring of the last
                       tokens is vLLM's tail cache
requests               where each begins, and its place in the tail cache: found with the tail's metadata, in
                       buffers of its builder, whose address a graph may keep
positions              of tokens within the request, ascending; then those behind the last whole pool; then -1
=====================  ======================================================================================
"""

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import probes
from .._index_buffers import counters, one_page
from ..index_layout import INDEX_DIM, INDEX_LAYOUTS
from ..ops.pool_index_k import pool_index_k
from ..ops.topk_to_slots import topk_to_slots
from . import vllm_indexer
from .flash_mla_calls import around
from .log import say_once

MODULE = "vllm.models.glm5next.nvidia.sparse_indexer"
_METADATA = "vllm.v1.attention.backends.mla.indexer"
_BREAKS = "vllm.compilation.breakable_cudagraph"
_LAYOUT, _POOL, _ONE_PAGE = INDEX_LAYOUTS["index_fp8"], 4, 1 << 24  # tokens of a request: all in one page
_MOST_ALIKE = 8  # rows of each request that index_topk takes without looking for where requests begin


class Requests(NamedTuple):
    """Of a step; tensors are int32."""

    query_start_loc: Tensor  # [requests + 1]
    start_pos: Tensor  # [requests]: the position of a request's first row
    state_slots: Tensor  # [requests]: its block of the tail cache, -1 for none
    most_rows: int  # of a request

    def fill(self, metadata: Any, ring: int) -> None:
        """From positions and slots of the tail's metadata."""
        last = min(len(metadata.positions), len(metadata.slot_mapping)) - 1
        first = self.query_start_loc[:-1].clamp(max=last)
        self.start_pos.copy_(metadata.positions[first])
        self.state_slots.copy_(metadata.slot_mapping[first] // ring)


def around_build(
    original: Callable[..., Any],
    self: Any,
    common_prefix_len: int,
    common_attn_metadata: Any,
    fast_build: bool = False,
) -> Any:
    """The tail's metadata, with :class:`Requests` as ``mla_fp8_requests``."""
    made = original(self, common_prefix_len, common_attn_metadata, fast_build)
    requests = common_attn_metadata.num_reqs
    if layer_is_ours() and made.positions is not None and len(made.slot_mapping):
        buffers = vars(self).get("mla_fp8_buffers")
        if buffers is None or buffers.shape[1] < requests:
            most = max(requests, self.vllm_config.scheduler_config.max_num_seqs)
            buffers = torch.empty((2, most), dtype=torch.int32, device=made.slot_mapping.device)
            self.mla_fp8_buffers = buffers
        starts = common_attn_metadata.query_start_loc[: requests + 1]
        start_pos, state_slots = buffers[:, :requests]
        found = Requests(starts, start_pos, state_slots, common_attn_metadata.max_query_len)
        found.fill(made, self.kv_cache_spec.block_size)
        made.mla_fp8_requests = found
    return made


def around_update(original: Callable[..., None], self: Any, metadata: Any) -> None:
    """Of a draft model's further steps."""
    original(self, metadata)
    if found := vars(metadata).get("mla_fp8_requests"):
        found.fill(metadata, self.kv_cache_spec.block_size)


def sparse_attn_indexer_kpool(original: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """vLLM's function of that name."""
    given = dict(zip(probes.parameters(original) or (), args, strict=False)) | options
    module = import_module(MODULE)
    metadata = module.get_forward_context().attn_metadata
    if not isinstance(metadata, dict):  # vLLM measures its memory
        return original(*args, **options)
    own = metadata[module._resolve_layer_name(given["k_cache_prefix"])]
    prefix = given.get("tail_prefix")
    tail = None if prefix is None else metadata.get(module._resolve_layer_name(prefix))
    reason = _why_not(given, own, tail)
    if reason:
        say_once(f"mla_fp8: the indexer over pools stays vLLM's for {reason}")
        return original(*args, **options)
    say_once("mla_fp8 serves the indexer over pools of keys")
    assert tail is not None  # for mypy
    return _choose(given, own, tail.mla_fp8_requests)


def _why_not(given: dict[str, Any], own: Any, tail: Any) -> str | None:
    pages = given["kv_cache"]
    whole = all(given.get(name) is not None for name in ("gate_score", "compress_ape", "positions"))
    reason = vllm_indexer._why_not(given["q_quant"], given.get("q_scale"), given["weights"])
    if reason:
        return reason
    if given["index_kpool"] != _POOL or given["head_dim"] != INDEX_DIM or given["topk_tokens"] % _POOL:
        reason = f"{given['topk_tokens']} tokens in pools of {given['index_kpool']}, {given['head_dim']} dims"
    elif (
        given.get("use_fp4_cache")
        or given["scale_fmt"] is None
        or pages.shape[-1] != _LAYOUT.bytes_per_entry
        or import_module(MODULE).mqa_logits_use_mx_scales()
    ):
        reason = f"another form of its cache, entries of {pages.shape[-1]} bytes"
    elif getattr(own.prefill, "row_shard_sizes", None) is not None or given.get("dcp_world_size", 1) > 1:
        reason = "tokens or prompts that ranks share"
    elif not whole or given.get("tail_kv_cache") is None or own.block_table is None:
        reason = "a layer without gates or without a tail"
    elif not hasattr(tail, "mla_fp8_requests"):
        reason = "metadata without positions"
    return reason


def _choose(given: dict[str, Any], own: Any, requests: Requests) -> Tensor:
    """Into vLLM's buffer: rows of tokens, then -1."""
    out: Tensor = given["topk_indices_buffer"]
    pages, n = given["kv_cache"].unsqueeze(-2), len(own.slot_mapping)
    starts, page_size, topk = requests.query_start_loc, pages.shape[1], given["topk_tokens"] // _POOL
    number = len(starts) - 1
    all_alike = n == number * requests.most_rows <= number * _MOST_ALIKE
    if not given["skip_k_cache_insert"]:
        ring = given["tail_kv_cache"]
        pool_index_k(
            given["k"][:n], given["gate_score"][:n], starts, requests.start_pos, ring[:, 0], ring[:, 1],
            requests.state_slots, given["compress_ape"].detach(), own.slot_mapping, pages,
            page_size=page_size,
        )  # fmt: skip
    pools = torch.empty((n, topk), dtype=torch.int32, device=out.device)
    lens, workspace = vllm_indexer._scratch(n, topk, out.device, captured=True)
    torch.ops.mla_fp8.index_topk_out(
        given["q_quant"][:n], given["weights"][:n], pages, own.block_table[:number], own.seq_lens[:number],
        layout=_LAYOUT.id, page_size=page_size, topk=topk, compress_ratio=_POOL,
        query_start_loc=None if all_alike else starts, next_n=requests.most_rows if all_alike else 1,
        out_positions=pools, out_slots=None, out_lens=lens, workspace=workspace,
        counters=counters(out.device),
    )  # fmt: skip
    width, rows = topk * _POOL + _POOL - 1, given["hidden_states"].shape[0]
    seen = torch.empty_like(lens)
    torch.add(given["positions"][:n], 1, out=seen)
    topk_to_slots(
        pools, one_page(out.device), page_size=_ONE_PAGE, next_n=n, group_size=_POOL, token_lens=seen,
        lens=lens, out_slots=out[:n, :width], out_lens=torch.empty_like(lens),
    )  # fmt: skip
    out[:n, width:] = -1
    out[n:rows] = -1
    return out


_ARGUMENTS = (
    "hidden_states", "k_cache_prefix", "kv_cache", "q_quant", "q_scale", "k", "weights", "scale_fmt",
    "topk_tokens", "head_dim", "topk_indices_buffer", "skip_k_cache_insert", "use_fp4_cache", "gate_score",
    "compress_ape", "index_kpool", "positions", "tail_kv_cache", "tail_prefix",
)  # fmt: skip
_OF_BUILDER: probes.Needs = {
    _METADATA: {
        "KpoolTailMetadataBuilder.build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
        "KpoolTailMetadataBuilder.update_draft_decode_metadata": ("metadata",),
        "DeepseekV32IndexerMetadata": ("seq_lens", "slot_mapping", "positions", "block_table", "prefill"),
    },
    _BREAKS: {"eager_break_during_capture": ("fn",)},
}  # fmt: skip
_OF_LAYER: probes.Needs = {
    MODULE: {
        "sparse_attn_indexer_kpool": _ARGUMENTS, "get_forward_context": (), "_resolve_layer_name": (),
        "mqa_logits_use_mx_scales": (),
    },
}  # fmt: skip


def why_not() -> str | None:
    """Why the indexer over pools of this vLLM cannot be taken over, or None. The layer is asked later."""
    return probes.why_not_call(_OF_BUILDER)


def take_over() -> None:
    """Re-entrant; where there is no reason why not. The layer follows: :func:`layer_is_ours`."""
    builder = import_module(_METADATA).KpoolTailMetadataBuilder
    builder.build = around(builder.build, around_build)
    builder.update_draft_decode_metadata = around(builder.update_draft_decode_metadata, around_update)


def layer_is_ours() -> bool:
    """Takes over the layer's function; False where vLLM has not imported it, or it is another one."""
    module = sys.modules.get(MODULE)
    if module is None:
        return False
    theirs = getattr(module, "sparse_attn_indexer_kpool", None)
    if getattr(theirs, "taken_over_by_mla_fp8", False):
        return True
    reason = probes.why_not_call(_OF_LAYER)
    if reason:
        say_once(f"mla_fp8: the indexer over pools stays vLLM's: {reason}")
        return False
    breaks = import_module(_BREAKS).eager_break_during_capture  # as vLLM's: a graph breaks before it
    ours = breaks(around(unwrap(module.sparse_attn_indexer_kpool), sparse_attn_indexer_kpool))
    module.sparse_attn_indexer_kpool = ours  # type: ignore[attr-defined]
    return True
