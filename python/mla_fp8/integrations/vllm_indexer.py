"""vLLM's lightning indexer with :func:`mla_fp8.index_topk` in place of DeepGEMM's logits and vLLM's top-k
(DeepSeek V3.2, GLM-5, layers of ratio 4 of V4, V4.1). Off unless VLLM_PLUGINS names ``mla_fp8_index_topk``.

vLLM's function of the indexer gets logits from one function and hands them to another, which chooses. Here
the first gives :class:`Logits`, which nobody has computed, and the second chooses without them. What lies
between and around is vLLM's as it was: metadata, the gather of a chunk's keys, packed drafts, the buffer of
positions. V4.1's functions of candidate blocks, which come between, say which blocks are published or chosen
among. Whoever else asks for the logits gets vLLM's.

=====================  ======================================================================================
keys of decode         vLLM's cache as it is: the keys of a page, then their scales; any distance of pages
keys of a chunk        vLLM's gather, of which each row sees cu_seqlen_ks to cu_seqlen_ke
lengths                vLLM's on the device, one of a row or one of a request; 0 for rows that pad a graph
positions              within the request, ascending, then -1, into vLLM's buffer; of decode their slots
                       besides (vllm_slots.py). Of others attention makes slots, as of vLLM's
of ranks               with vllm_context_parallel.py: each rank chooses among its own keys, then they merge
memory                 of vLLM's workspace where a graph may be captured: decode
V4.1's blocks          vLLM's buffer of them, a list of each row: what layer 20 published
=====================  ======================================================================================
"""

import functools
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import probes
from .._index_buffers import counters
from ..index_layout import INDEX_DIM, INDEX_LAYOUTS, IndexLayout
from ..ops.index_topk import index_topk_workspace
from . import vllm_context_parallel, vllm_slots
from .flash_mla_calls import around, take_over
from .log import say_once
from .vllm_logits import Level, Logits

NAME = "mla_fp8_index_topk"
MODULE = "vllm.model_executor.layers.sparse_attn_indexer"
_CALLS, _CHOICE = "vllm._custom_ops", "vllm.model_executor.layers.indexer_topk"
_WORKSPACE = "vllm.v1.worker.workspace"
_FP8, _FP4 = INDEX_LAYOUTS["index_fp8"], INDEX_LAYOUTS["index_fp4"]
_MAX_TOPK, _MAX_HEADS = 4096, 64  # of index_topk
_MAX_BLOCKS, _BLOCK_SIZE = 4096, 8
_LOGGER = logging.getLogger("mla_fp8")


def fp8_fp4_paged_mqa_logits(
    original: Callable[[], Tensor],
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    max_model_len: int,
    indices: Tensor | None = None,
) -> Tensor:
    """Logits of decode: q [requests, next_n, heads, 128 or 64], kv_cache [pages, page_size, 1, 132 or 68]."""
    queries, q_scale = q
    requests, next_n = queries.shape[:2]
    rows = requests * next_n
    layout = _layout(queries)
    reason = _why_not(queries, q_scale, weights) or _why_not_pages(kv_cache, layout, indices)
    per_row = context_lens.numel() == rows
    if reason is None and (
        context_lens.dtype is not torch.int32 or context_lens.numel() not in (rows, requests)
    ):
        reason = f"lengths of {context_lens.dtype} that are not of rows or requests"
    if reason:
        return _vllms(original, reason)
    table = block_tables[:requests]

    def choose(out: Tensor, topk: int, level: Level | None, scores: Tensor | None) -> None:
        lens = context_lens.flatten()
        _choose(
            "index_topk",
            (queries.flatten(0, 1), weights, kv_cache, table, None if per_row else lens),
            {
                "row_lens": lens if per_row else None,
                "layout": layout.id,
                "page_size": kv_cache.shape[1],
                "next_n": next_n,
                "q_scale": None if q_scale is None else q_scale.flatten(0, 1),
            },
            out,
            topk,
            level,
            width=table.shape[1] * kv_cache.shape[1],
            slots=None if scores is not None else vllm_slots.room(out, block_tables, kv_cache.shape[1]),
            scores=scores,
            captured=True,
        )

    logits = Logits.of(rows, max_model_len, original, choose)
    logits.pages = block_tables, kv_cache.shape[1], next_n
    return logits


def fp8_fp4_mqa_logits(
    original: Callable[[], Tensor],
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
) -> Tensor:
    """Logits of a chunk of prompts: q [rows, heads, 128], kv: [keys, 128] and their scales; FP4: 64."""
    queries, q_scale = q
    keys, scales = kv
    is_fp4 = _layout(queries) is _FP4
    reason = _why_not(queries, q_scale, weights)
    if reason is None and scales.dtype is not (torch.int32 if is_fp4 else torch.float32):
        reason = f"scales of {scales.dtype}"
    if reason:
        return _vllms(original, reason)

    def choose(out: Tensor, topk: int, level: Level | None, scores: Tensor | None) -> None:
        _choose(
            "index_topk_ragged",
            (queries, weights, keys, scales.flatten(), cu_seqlen_ks, cu_seqlen_ke),
            {"q_scale": q_scale},
            out,
            topk,
            level,
            width=len(keys),
            slots=None,
            scores=scores,
            captured=False,
        )

    return Logits.of(len(queries), len(keys), original, choose)


def _choose(
    op: str,
    tensors: tuple[Tensor | None, ...],
    options: dict[str, Any],
    out: Tensor,
    topk: int,
    level: Level | None,
    *,
    width: int,
    slots: Tensor | None,
    scores: Tensor | None,
    captured: bool,
) -> None:
    """The op into ``out``: plainly, among the level's blocks, or with blocks to publish.

    Plainly, too, where no row sees more entries than the blocks hold, by ``width``: every block is published
    there, and the plain call is faster. Layers of a step have one width, so nobody reads the blocks then.
    """
    sizes = {}
    if level is not None and width <= level.blocks.shape[1] * _BLOCK_SIZE:
        level = None
    if level is not None and level.publishes:
        op, sizes = f"{op}_blocks", {"num_positions": width}
        options = options | {"num_blocks": level.blocks.shape[1], "out_blocks": level.blocks}
    elif level is not None:
        options, sizes = (
            options | {"candidate_blocks": level.blocks},
            {"num_candidates": level.blocks.shape[1]},
        )
    chosen, workspace = _scratch(len(out), topk, out.device, captured=captured, **sizes)
    getattr(torch.ops.mla_fp8, f"{op}_out")(
        *tensors,
        **options,
        topk=topk,
        out_positions=out,
        out_slots=slots,
        out_lens=chosen,
        out_scores=scores,
        workspace=workspace,
        counters=counters(out.device),
    )


def _layout(q: Tensor) -> IndexLayout:
    return _FP8 if q.dtype is torch.float8_e4m3fn else _FP4


def _why_not(q: Tensor, q_scale: Tensor | None, weights: Tensor) -> str | None:
    """Why ``index_topk`` is not for these queries, or None."""
    is_fp8 = q.dtype is torch.float8_e4m3fn
    packed = q.dtype in (torch.int8, torch.uint8) and q.shape[-1] == INDEX_DIM // 2 and q_scale is not None
    if not packed and (not is_fp8 or q_scale is not None or q.shape[-1] != INDEX_DIM):
        return f"queries of {q.dtype}, {q.shape[-1]} wide" + (", with scales" if q_scale is not None else "")
    if q.shape[-2] > _MAX_HEADS:
        return f"{q.shape[-2]} heads"
    if weights.dtype not in (torch.float32, torch.bfloat16):
        return f"weights of {weights.dtype}"
    if weights.shape != (q.shape[:-2].numel(), q.shape[-2]):
        return "weights of other rows than the queries"
    ranks = vllm_context_parallel.num_ranks()
    merged = ranks == 1 or vllm_context_parallel.merges()
    return None if merged else f"decode context parallel on {ranks} ranks"


def _why_not_pages(cache: Tensor, layout: IndexLayout, indices: Tensor | None) -> str | None:
    if indices is not None:
        return "rows that name their requests"
    packed = cache.element_size() == 1 and cache.shape[-1] == layout.bytes_per_entry
    return None if packed else f"entries of {cache.shape[-1]} x {cache.dtype}"


def _vllms(original: Callable[[], Tensor], reason: str) -> Tensor:
    say_once(f"mla_fp8: the indexer's logits and top-k stay vLLM's for {reason}")
    return original()


def _scratch(
    rows: int, topk: int, device: torch.device, *, captured: bool, **sizes: int
) -> tuple[Tensor, Tensor | None]:
    """(int32 [rows] for the lengths, which vLLM does not want; index_topk's workspace).

    ``captured``: of vLLM's workspace, whose address stays. Prompts have memory of their own: the keys of a
    chunk lie there.
    """
    if device.type == "cpu":
        return torch.empty(rows, dtype=torch.int32), None
    size = index_topk_workspace(rows, topk=topk, device=device, **sizes)
    if captured:
        try:
            manager = import_module(_WORKSPACE).current_workspace_manager()
            workspace, lens = manager.get_simultaneous(((size,), torch.uint8), ((rows,), torch.int32))
            return lens, workspace
        except AssertionError:  # vLLM's: none, or locked before one as large was asked for
            say_once("mla_fp8: index_topk allocates its workspace: vLLM's is smaller")
    lens = torch.empty(rows, dtype=torch.int32, device=device)
    return lens, torch.empty(size, dtype=torch.uint8, device=device)


def around_logits(
    ours: Callable[..., Tensor], original: Callable[..., Tensor], *args: Any, **options: Any
) -> Tensor:
    """One of the two functions above in place of vLLM's of that name."""
    given = dict(zip(probes.parameters(original) or (), args, strict=False)) | options
    known = {name: x for name, x in given.items() if name not in _NOT_LOOKED_AT}
    return ours(lambda: original(*args, **options), **known)


def around_get_indexer_topk(original: Callable[..., Any], backend: str) -> Callable[..., None]:
    """The top-k of decode: of a kind of vLLM's, and called as that is."""

    def choose(
        logits: Tensor,
        seq_lens: Tensor,
        next_n: int,
        topk_indices: Tensor,
        topk_tokens: int,
        max_seq_len: int,
    ) -> None:
        if not _chosen(logits, topk_indices, topk_tokens, vllm_context_parallel.merges_decode(seq_lens)):
            logits = _as_made(logits)
            original(backend)(logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len)

    return choose


def around_top_k_per_row_prefill(original: Callable[..., None], *args: Any, **options: Any) -> None:
    given = dict(zip(probes.parameters(original) or (), args, strict=False)) | options
    logits = given["logits"]
    if not isinstance(logits, Logits):
        original(*args, **options)
    elif not _chosen(
        logits, given["raw_topk_indices"], given["topk_tokens"], vllm_context_parallel.num_ranks() > 1
    ):
        logits = _as_made(logits)
        original(**given | {"logits": logits, "stride0": logits.stride(0), "stride1": logits.stride(1)})


def _chosen(logits: Tensor, out: Tensor, topk: int, merged: bool) -> bool:
    """Whether ``out`` has the positions: not if there are logits, which may have been masked.

    ``merged``: the merge of the ranks will write them.
    """
    if not isinstance(logits, Logits) or logits.made is not None or topk > _MAX_TOPK:
        return False
    out, scores = out[: logits.shape[0], :topk], None
    if merged:
        logits.candidates = torch.empty((2, *out.shape), dtype=torch.int32, device=out.device)
        scores, out = logits.candidates[0].view(torch.float32), logits.candidates[1]
    logits.choose(out, topk, logits.level, scores)
    return True


def around_blocks(names: tuple[str, bool], original: Callable[..., None], *args: Any, **options: Any) -> None:
    """One of V4.1's functions of blocks: put off to the choice, which publishes or consumes them itself."""
    blocks_name, publishes = names
    given = dict(zip(probes.parameters(original) or (), args, strict=False)) | options
    logits, blocks = given["logits"], given[blocks_name]
    if not isinstance(logits, Logits):
        return original(**given)
    fits = given["block_size"] == _BLOCK_SIZE and blocks.dtype is torch.int32
    fits &= blocks.shape[1] <= _MAX_BLOCKS and len(blocks) == logits.shape[0]
    if not fits or logits.made is not None:
        return original(**given | {"logits": _as_made(logits)})
    return logits.put_off(Level(blocks, publishes), lambda made: original(**given | {"logits": made}))


def _as_made(logits: Tensor) -> Tensor:
    return logits.looked_at("vLLM's top-k") if isinstance(logits, Logits) else logits


_LOGITS: dict[str, tuple[Callable[..., Tensor], set[str]]] = {
    "fp8_fp4_paged_mqa_logits": (fp8_fp4_paged_mqa_logits, {"schedule_metadata", "clean_logits"}),
    "fp8_fp4_mqa_logits": (fp8_fp4_mqa_logits, {"max_seqlen_k", "clean_logits"}),
}
# Where the blocks are, and whether they are published.
_BLOCKS = {"_select_candidate_blocks": ("out", True), "_apply_candidate_mask": ("candidate_blocks", False)}
_NOT_LOOKED_AT = set().union(*(names for _, names in _LOGITS.values()))
_NEEDS: probes.Needs = {
    "vllm.envs": {}, "vllm.logger": {"init_logger": ("name",)},
    MODULE: {**dict.fromkeys(_LOGITS, ()), "get_indexer_topk": ("backend",), "get_dcp_group": ()},
    _CALLS: {"top_k_per_row_prefill": (
        "logits", "raw_topk_indices", "stride0", "stride1", "topk_tokens",
    )},
    _CHOICE: {"SparseIndexerTopk.forward": (
        "logits", "seq_lens", "next_n", "topk_indices", "topk_tokens", "max_seq_len",
    )},
    _WORKSPACE: {"current_workspace_manager": (), "WorkspaceManager.get_simultaneous": ()},
}  # fmt: skip


def why_not() -> str | None:
    """Why the indexer of this vLLM cannot be taken over, or None."""
    reason = probes.why_not_call(_NEEDS)
    if reason:
        return reason
    module = import_module(MODULE)
    for name, (ours, known) in _LOGITS.items():
        reason = probes.why_not_replace(getattr(module, name), ours, known)
        if reason:
            return f"{name} {reason}"
    same = module.ops is import_module(_CALLS)
    return None if same else f"{MODULE}.ops is not {_CALLS}"


def serves() -> bool:
    """Whether the indexer's top-k is ours: it writes whole rows, -1 behind what it chose."""
    module = sys.modules.get(MODULE)
    return bool(getattr(getattr(module, "get_indexer_topk", None), "taken_over_by_mla_fp8", False))


def register() -> None:
    """Entry point: takes over the indexer, or logs why not. Re-entrant."""
    reason = why_not()
    if reason:
        _LOGGER.warning("%s is not used in vLLM: %s", NAME, reason)
        return
    take_over_indexer()
    pools = import_module(f"{__package__}.vllm_pools")  # which imports this module
    reason = pools.why_not()
    if reason:
        say_once(f"mla_fp8: the indexer over pools of keys (GLM-5.3-Flash) stays vLLM's: {reason}")
    else:
        pools.take_over()


def take_over_indexer() -> None:
    """Re-entrant; where there is no reason why not."""
    module: ModuleType = import_module(MODULE)
    for name, (ours, _) in _LOGITS.items():
        setattr(module, name, around(getattr(module, name), functools.partial(around_logits, ours)))
    module.get_indexer_topk = around(module.get_indexer_topk, around_get_indexer_topk)  # type: ignore[attr-defined]
    for name, names in _BLOCKS.items():  # vLLM without V4.1 has none
        if (theirs := getattr(module, name, None)) is not None and "block_size" in (
            probes.parameters(theirs) or ()
        ):
            setattr(module, name, around(theirs, functools.partial(around_blocks, names)))
    merge = getattr(module, "_merge_dcp_topk_global", None)
    if merge is not None:
        module._merge_dcp_topk_global = around(merge, vllm_context_parallel.around_merge)  # type: ignore[attr-defined]
    if take_over(import_module(_CALLS), {"top_k_per_row_prefill": around_top_k_per_row_prefill}):
        say_once("mla_fp8 serves the indexer's logits and top-k, by index_topk: decode and prompts")
