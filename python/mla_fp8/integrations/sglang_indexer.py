"""SGLang's lightning indexer with :func:`mla_fp8.index_topk` in place of logits and top-k. Off unless
SGLANG_PLUGINS names ``mla_fp8_index_topk`` besides ``mla_fp8``, or SGLang is deterministic (same_bits.py).

==============  =========================================================================================
V3.2, GLM-5     over pages for decode and prompts, with pinned tokens
GLM-5.3-Flash   over pages of pools for decode, drafts and prompts; the pools are SGLang's
V4              in place of DeepGEMM's logits and SGLang's top-k
V4.1, Hopper    all eight index layers, over FP4 keys: two levels of blocks (compat/sglang_indexer.py).
                Consumers of blocks read these entries alone; SGLang scores all entries and masks them
==============  =========================================================================================
"""

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mla_fp8_plugins import named_in_sglang

from .. import probes
from .._index_buffers import one_page
from ..compat import sglang_indexer as ours
from ..index_layout import INDEX_DIM, INDEX_LAYOUTS
from ..ops.index_topk import index_topk
from ..ops.topk_to_slots import topk_to_slots
from . import replay, same_bits
from .flash_mla_calls import take_over
from .log import say_once
from .vllm_logits import Level, Logits

NAME = "mla_fp8_index_topk"
_LOGGER = logging.getLogger("sglang.mla_fp8")
_V32_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
_POOLS_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer_kpool"
_V4_INDEXER = "sglang.srt.layers.attention.dsv4.indexer"
_V41 = "sglang.srt.layers.attention.dsv4.v41_indexer"
_FULL, _BLOCKS = f"{_V41}.full_topk.FullTopKIndexer", f"{_V41}.dense_blocks.DenseBlocksBackend"
_LAYOUT, _PAGE, _MOST_HEADS, _MOST = INDEX_LAYOUTS["index_fp8"], 64, 64, 4096
_ONE_PAGE = 1 << 24  # tokens of a request: all in one page
_switch = SimpleNamespace(on=False)


def serves() -> bool:
    """Whether the indexer is ours."""
    return bool(_switch.on) or same_bits.on()


def switch(on: bool) -> None:
    _switch.on = on


def get_topk_paged(
    original: Callable[..., Tensor], self: Any, forward_batch: Any, layer_id: int, q_fp8: Tensor,
    weights: Tensor, metadata: Any,
) -> Tensor:  # fmt: skip
    reason = _why_not(self, q_fp8) if serves() else "no switch"
    if reason:
        return original(self, forward_batch, layer_id, q_fp8, weights, metadata)
    return _choose(self, layer_id, q_fp8, weights, metadata, None)


def get_topk_ragged(
    original: Callable[..., Tensor], self: Any, enable_dual_stream: bool, forward_batch: Any, layer_id: int,
    q_fp8: Tensor, weights: Tensor, metadata: Any, topk_result: Tensor | None = None,
) -> Tensor:  # fmt: skip
    reason = _why_not(self, q_fp8) if serves() else "no switch"
    if reason:
        return original(
            self, enable_dual_stream, forward_batch, layer_id, q_fp8, weights, metadata, topk_result
        )
    chosen = _choose(self, layer_id, q_fp8, weights, metadata, metadata.attn_metadata.cu_seqlens_q)
    if topk_result is None:
        return chosen
    topk_result[: len(chosen)] = chosen  # SGLang's tensor may have more rows, which pad
    return topk_result


def _why_not(indexer: Any, q: Tensor) -> str | None:
    page_size = import_module(_V32_INDEXER).get_token_to_kv_pool().index_page_size
    reason = None
    if q.dtype is not torch.float8_e4m3fn or q.shape[1] > _MOST_HEADS or q.shape[2] != INDEX_DIM:
        reason = f"index queries of {q.dtype}, {q.shape[1]} heads of {q.shape[2]} dims"
    elif page_size != _PAGE or type(indexer).__name__ not in ("Indexer", "IndexerKPool"):
        reason = f"{type(indexer).__name__} over pages of {page_size} index keys"
    if reason:
        say_once(f"mla_fp8: the indexer stays SGLang's, which may choose otherwise in a batch, for {reason}")
    return reason


def _choose(
    indexer: Any, layer_id: int, q: Tensor, weights: Tensor, metadata: Any, starts: Tensor | None
) -> Tensor:
    """[rows of q, topk] int32, as SGLang's top-k with its transform leaves them; -1 for rows that pad."""
    module = import_module(_V32_INDEXER)
    row_lens, table = metadata.get_seqlens_expanded(), metadata.get_page_table_64()
    rows, requests = len(row_lens), len(table)
    cache = indexer._get_index_k_read_buffer(module.get_token_to_kv_pool(), layer_id)
    geometry: dict[str, Any] = {}
    if rows != requests and starts is not None:
        geometry["query_start_loc"] = starts[: requests + 1]
    elif rows != requests:
        geometry["next_n"] = rows // requests
    positions, slots, _ = index_topk(
        q[:rows], weights[:rows].squeeze(-1), cache.flatten(1), table, None, row_lens=row_lens.flatten(),
        layout=_LAYOUT, page_size=_PAGE, topk=indexer.index_topk, pin_first=indexer.num_init_tokens,
        pin_last=indexer.num_local_tokens, **geometry,
    )  # fmt: skip
    if replay.wanted():
        request = torch.arange(rows, dtype=torch.int32, device=q.device)
        if "query_start_loc" in geometry:
            request = torch.searchsorted(geometry["query_start_loc"][1:], request, right=True, out_int32=True)
        elif rows != requests:
            request //= geometry["next_n"]
        replay.chosen(str(layer_id), positions, request)
        slots, _ = topk_to_slots(positions, table, page_size=_PAGE, row_to_request=request)
    backend = import_module("sglang.srt.layers.attention.dsa.dsa_topk_backend")
    chosen = positions
    if backend.envs.SGLANG_DSA_FUSE_TOPK.get() and not metadata.force_unfused_topk:
        assert slots is not None  # for mypy
        chosen = slots
        if metadata.topk_transform_method == backend.TopkTransformMethod.RAGGED:
            offsets = metadata.attn_metadata.topk_indices_offset[:rows, None]
            chosen = torch.where(positions < 0, -1, positions + offsets).int()
    return torch.nn.functional.pad(chosen, (0, 0, 0, len(q) - rows), value=-1)


def get_pools_paged(
    original: Callable[..., Tensor], self: Any, forward_batch: Any, layer_id: int, q_fp8: Tensor,
    weights: Tensor, metadata: Any,
) -> Tensor:  # fmt: skip
    """Of GLM-5.3-Flash: decode and drafts, a row of the page table for each query."""
    if not serves() or _why_not(self, q_fp8):
        return original(self, forward_batch, layer_id, q_fp8, weights, metadata)
    mode = forward_batch.forward_mode
    expanded = mode.is_target_verify() or mode.is_draft_extend_v2()
    tokens = metadata.get_seqlens_expanded() if expanded else metadata.get_seqlens_int32()
    lens, _, table, *_ = self._get_kpool_decode_metadata(
        metadata=metadata, block_tables=metadata.get_page_table_64(), seqlens_32=tokens, blocksize=_PAGE,
        build_schedule_metadata=False,
    )  # fmt: skip
    to_tokens = self._kpool_fused_topk_mapping(metadata)
    return _choose_pools(self, layer_id, q_fp8, weights, (table[: len(lens)], lens, None), tokens, to_tokens)


def get_pools_ragged(
    original: Callable[..., Tensor], self: Any, forward_batch: Any, layer_id: int, q_fp8: Tensor,
    weights: Tensor, metadata: Any,
) -> Tensor:  # fmt: skip
    """Of prompts, which SGLang scores over gathered keys."""
    found = metadata.attn_metadata
    plan = found.kpool_extend_plan
    if not serves() or plan.cp is not None or _why_not(self, q_fp8):
        return original(self, forward_batch, layer_id, q_fp8, weights, metadata)
    table = metadata.get_page_table_64()[:, :: self.index_kpool] // self.index_kpool
    to_tokens = self._kpool_fused_topk_mapping(
        metadata, plan.ragged_paged_page_table, plan.ragged_paged_page_table_row_index
    )
    rows = (table, plan.pooled_seq_lens_expanded, found.cu_seqlens_q[: len(table) + 1])
    return _choose_pools(self, layer_id, q_fp8, weights, rows, plan.seq_lens_expanded, to_tokens)


def _choose_pools(
    indexer: Any, layer_id: int, q: Tensor, weights: Tensor, rows: tuple[Tensor, Tensor, Tensor | None],
    tokens: Tensor, to_tokens: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Tensor:  # fmt: skip
    """[rows of q, topk + kpool - 1] int32: tokens of the pools, those behind the last whole one, then -1.

    rows: pages of pools, how many pools each row sees, where requests begin (a row each without it).
    to_tokens: SGLang's table of tokens, or what it adds to positions; and the table's row of each query.
    """
    table, lens, starts = rows
    n, group = len(lens), indexer.index_kpool
    pool = import_module(_V32_INDEXER).get_token_to_kv_pool()
    cache = indexer._get_index_k_read_buffer(pool, layer_id)
    pools, _, chosen = index_topk(
        q[:n], weights[:n].flatten(1), cache.flatten(1), table, None, row_lens=lens.int(), layout=_LAYOUT,
        page_size=_PAGE, topk=indexer.index_topk // group, query_start_loc=starts,
    )  # fmt: skip
    page_table, offsets, row_index = to_tokens
    options = {"group_size": group, "token_lens": tokens.int(), "lens": chosen}
    if page_table is None:
        found, _ = topk_to_slots(pools, one_page(q.device), page_size=_ONE_PAGE, next_n=max(n, 1), **options)
    else:
        row_index = None if row_index is None else row_index[:n].int()
        found, _ = topk_to_slots(pools, page_table, page_size=1, row_to_request=row_index, **options)
    if offsets is not None:
        found = torch.where(found < 0, -1, found + offsets[:n, None]).int()
    return torch.nn.functional.pad(found, (0, 0, 0, len(q) - n), value=-1)


def forward_c4_indexer(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    """V4's, which imports DeepGEMM's function when it is called."""
    if serves():
        take_over(import_module("deep_gemm"), {"fp8_paged_mqa_logits": fp8_paged_mqa_logits})
    return original(self, *args, **options)


def fp8_paged_mqa_logits(original: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """DeepGEMM's, where V4 asks for a row of each query: logits that nobody has computed."""
    q, cache, weights = args[:3]
    ours = q.dtype is torch.float8_e4m3fn and q.shape[1] == 1 and q.shape[2] <= _MOST_HEADS
    if not ours or cache.shape[1:] != (_PAGE, 1, _LAYOUT.bytes_per_entry):
        return original(*args, **options)
    logits = Logits.of(len(q), cache.shape[0] * _PAGE, lambda: original(*args, **options), _nowhere)
    vars(logits)["inputs"] = q.squeeze(1), weights, cache.flatten(1)
    return logits


def _nowhere(out: Tensor, topk: int, level: Level | None) -> None:
    raise AssertionError("mla_fp8: V4's top-k has slots")


def topk_transform_paged(original: Callable[..., None], *args: Any, **options: Any) -> None:
    """V4's top-k, of both versions."""
    given = dict(zip(probes.parameters(original) or (), args, strict=False)) | options
    scores, page_indices = given["scores"], given["out_page_indices"]
    if not isinstance(scores, Logits) or scores.made is not None:
        given["scores"] = scores.made if isinstance(scores, Logits) else scores
        original(**given)
        return
    q, weights, cache = vars(scores)["inputs"]
    positions, slots, _ = index_topk(
        q, weights, cache, given["page_tables"], None, row_lens=given["seq_lens"].flatten().int(),
        layout=_LAYOUT, page_size=_PAGE, topk=page_indices.shape[1], slot_page_table=given["page_tables"],
        slot_page_size=given["page_size"],
    )  # fmt: skip
    assert slots is not None  # for mypy
    page_indices.copy_(slots)
    if given.get("out_raw_indices") is not None:
        given["out_raw_indices"].copy_(positions)


def no_plan(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    """Of one long prompt over gathered keys: all go over pages."""
    return None if serves() else original(self, *args, **options)


def v41_topk(name: str, original: Callable[..., None], self: Any, inputs: Any) -> None:
    """``topk_decode`` and ``topk_prefill`` of V4.1."""
    if _serves_v41(self, inputs):
        getattr(ours.FullTopKIndexer, name)(self, inputs)
    else:
        original(self, inputs)


def v41_publish(name: str, original: Callable[..., Any], self: Any, inputs: Any) -> Any:
    """``publish_decode`` and ``publish_prefill``."""
    if not _serves_v41(self, inputs):
        return original(self, inputs)
    published = getattr(ours.DenseBlocksBackend, name)(self, inputs)
    return import_module(f"{_V41}.dense_blocks").BlockIds(**published._asdict())


def v41_consume(name: str, original: Callable[..., None], self: Any, inputs: Any, published: Any) -> None:
    """``consume_decode`` and ``consume_prefill``."""
    if _serves_v41(self, inputs):
        getattr(ours.DenseBlocksBackend, name)(self, inputs, published)
    else:
        original(self, inputs, published)


def _serves_v41(self: Any, inputs: Any) -> bool:
    """The same for all layers of a model: what one publishes another consumes."""
    if not serves():
        return False
    indexer = inputs.indexer
    blocks = getattr(self, "topk_blocks", 0), getattr(self, "block_size", ours.BLOCK_SIZE)
    reason = None
    if getattr(self, "use_deep_gemm_prefill", False) or getattr(self, "use_deep_gemm_decode", False):
        reason = "DeepGEMM's kernels of Blackwell"
    elif indexer.n_local_heads > _MOST_HEADS or indexer.n_local_heads % 4 or indexer.index_topk > _MOST:
        reason = f"{indexer.n_local_heads} heads and a topk of {indexer.index_topk}"
    elif indexer.index_head_dim != INDEX_DIM or blocks[1] != ours.BLOCK_SIZE or blocks[0] > _MOST:
        reason = f"heads of {indexer.index_head_dim} dims and {blocks[0]} blocks of {blocks[1]} entries"
    say_once(
        f"mla_fp8: the index layers of DeepSeek V4.1 stay SGLang's for {reason}"
        if reason
        else "mla_fp8: index_topk serves the index layers of DeepSeek V4.1"
    )
    return reason is None


Hook = Callable[..., Any]
# By model: target, and what runs around it with what of it is called by which parameters.
_V4_TOPK = ("scores", "seq_lens", "page_tables", "out_page_indices", "page_size", "out_raw_indices")
_AROUND: dict[str, dict[str, tuple[Hook, tuple[str, ...]]]] = {
    "V3.2": {
        f"{_V32_INDEXER}.Indexer._get_topk_paged": (
            get_topk_paged, ("forward_batch", "layer_id", "q_fp8", "weights", "metadata"),
        ),
        f"{_V32_INDEXER}.Indexer._get_topk_ragged": (
            get_topk_ragged,
            (
                "enable_dual_stream", "forward_batch", "layer_id", "q_fp8", "weights", "metadata",
                "topk_result",
            ),
        ),
    },
    "GLM-5.3-Flash": {
        f"{_POOLS_INDEXER}.IndexerKPool.{name}": (
            hook, ("forward_batch", "layer_id", "q_fp8", "weights", "metadata"),
        )
        for name, hook in (
            ("_get_topk_paged", get_pools_paged), ("_get_topk_ragged_kpool_plan", get_pools_ragged),
        )
    },
    "V4": {
        f"{_V4_INDEXER}.C4IndexerBackendMixin.forward_c4_indexer": (forward_c4_indexer, ()),
        f"{_V4_INDEXER}.C4IndexerBackendMixin._get_nonpaged_indexer_plan": (no_plan, ()),
        f"{_V4_INDEXER}.topk_transform_paged": (topk_transform_paged, _V4_TOPK),
        f"{_V4_INDEXER}.topk_transform_paged_v2": (topk_transform_paged, _V4_TOPK),
    },
    "V4.1": {
        f"{holder}.{name}_{step}": (functools.partial(hook, f"{name}_{step}"), passed)
        for step in ("decode", "prefill")
        for holder, name, hook, passed in (
            (_FULL, "topk", v41_topk, ("inputs",)),
            (_BLOCKS, "publish", v41_publish, ("inputs",)),
            (_BLOCKS, "consume", v41_consume, ("inputs", "published")),
        )
    },
}  # fmt: skip
HOOKS: dict[str, dict[str, Hook]] = {
    model: {target: hook for target, (hook, _) in hooks.items()} for model, hooks in _AROUND.items()
}
# What of its inputs and of its pool compat/sglang_indexer.py reads.
_V41_NEEDS: probes.Needs = {
    f"{_V41}.types": {
        "PrefillInputs.index_plans": (), "PrefillInputs.kv_page_table": (),
        "PrefillInputs.rows_per_request_device": (), "PrefillInputs.seq_lens_cpu": (),
        "DecodeInputs.paged_metadata": (), "DecodeInputs.req_rows": (),
    },
    f"{_V41}.dense_blocks": {"BlockIds": ("blocks", "rows_per_request")},
    "sglang.srt.layers.attention.dsv4.dsv41_sparse": {
        "DeepseekV41Indexer.queries": ("q_lora", "freqs", "positions"),
        "DeepseekV41Indexer.head_weights": ("x",),
    },
    "sglang.srt.layers.attention.dsv4.metadata": {"PagedIndexerMetadata.max_compressed_seq_len": ()},
    "sglang.srt.mem_cache.deepseek_v4_memory_pool": {
        "DeepSeekV4TokenToKVPool.get_index_k_page_size": (),
        "DeepSeekV4TokenToKVPool.get_index_k_with_scale_buffer": (),
    },
}  # fmt: skip


def why_not(model: str) -> str | None:
    """Why the indexer of a model cannot be ours, or None."""
    needs: dict[str, dict[str, tuple[str, ...]]] = {}
    for target, (_, passed) in _AROUND[model].items():
        module, _, path = target.rpartition(".")
        if module.rpartition(".")[2][0].isupper():  # a method
            module, _, name = module.rpartition(".")
            path = f"{name}.{path}"
        needs.setdefault(module, {})[path] = passed
    return probes.why_not_call(needs) or (probes.why_not_call(_V41_NEEDS) if model == "V4.1" else None)


def register() -> None:
    """Entry point: index_topk chooses, or it says why not.

    The hooks are those of ``mla_fp8``, which look at the switch.
    """
    if "mla_fp8" not in named_in_sglang():
        _LOGGER.warning("%s is not used in SGLang: SGLANG_PLUGINS has to name mla_fp8, too", NAME)
        return
    switch(True)
    refused = {model: why_not(model) for model in HOOKS}
    _LOGGER.info(
        "mla_fp8: index_topk is the indexer of %s",
        ", ".join(f"{model}{f' (not: {reason})' if reason else ''}" for model, reason in refused.items()),
    )
