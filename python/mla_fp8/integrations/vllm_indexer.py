"""vLLM's lightning indexer with :func:`mla_fp8.index_topk` in place of DeepGEMM's logits and vLLM's top-k
(DeepSeek V3.2, GLM-5, layers of ratio 4 of V4). Off unless VLLM_PLUGINS names ``mla_fp8_index_topk``.

vLLM's function of the indexer gets logits from one function and hands them to another, which chooses. Here
the first gives :class:`Logits`, which nobody has computed, and the second chooses without them. What lies
between and around is vLLM's as it was: metadata, the gather of a chunk's keys, packed drafts, the buffer of
positions. Whoever else asks for the logits, as V4.1's candidate blocks do, gets vLLM's.

=====================  ======================================================================================
keys of decode         vLLM's cache as it is: the keys of a page, then their scales; any distance of pages
keys of a chunk        vLLM's gather, of which each row sees cu_seqlen_ks to cu_seqlen_ke
lengths                vLLM's on the device, one of a row or one of a request; 0 for rows that pad a graph
positions              within the request, ascending, then -1, into vLLM's buffer; of decode their slots
                       besides (vllm_slots.py). Of others attention makes slots, as of vLLM's
memory                 of vLLM's workspace where a graph may be captured: decode
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
from torch.utils._pytree import tree_map

from mla_fp8_plugins import named_in_vllm

from .. import probes
from .._torch_private import without_torch_function
from ..index_layout import INDEX_DIM, INDEX_LAYOUTS
from ..ops.index_topk import index_topk_counters, index_topk_workspace
from . import vllm_slots
from .flash_mla_calls import around, take_over
from .log import say_once

NAME = "mla_fp8_index_topk"
MODULE = "vllm.model_executor.layers.sparse_attn_indexer"
_CALLS, _CHOICE = "vllm._custom_ops", "vllm.model_executor.layers.indexer_topk"
_WORKSPACE = "vllm.v1.worker.workspace"
_LAYOUT = INDEX_LAYOUTS["index_fp8"]
_MAX_TOPK, _MAX_HEADS = 4096, 64  # of index_topk
_LOGGER = logging.getLogger("mla_fp8")
_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}  # of device and stream


class Logits(Tensor):
    """``[rows, width]`` float32 logits that nobody has computed yet. A meta tensor: it has shape and dtype.

    ``choose(out, topk)`` writes the positions of each row's best entries. ``make()`` computes the logits:
    whatever is done with them other than asking for their shape does so first, and then works on those.
    """

    make: Callable[[], Tensor]
    choose: Callable[[Tensor, int], None]
    made: Tensor | None

    @classmethod
    def of(
        cls, rows: int, width: int, make: Callable[[], Tensor], choose: Callable[[Tensor, int], None]
    ) -> "Logits":
        self = torch.empty((rows, width), dtype=torch.float32, device="meta").as_subclass(cls)
        self.make, self.choose, self.made = make, choose, None
        return self

    def looked_at(self, by: str) -> Tensor:
        if self.made is None:
            say_once(f"mla_fp8: the indexer's logits are DeepGEMM's where {by} looks at them")
            self.made = self.make()
        return self.made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with without_torch_function():
            if func in _OF_SHAPE and args[0].made is None:
                return func(*args, **(kwargs or {}))
            by = getattr(func, "__name__", str(func))
            by = func.__self__.__name__ if by == "__get__" else by  # of an attribute
            given = tree_map(lambda x: x.looked_at(by) if isinstance(x, cls) else x, (args, kwargs or {}))
            return func(*given[0], **given[1])


_OF_SHAPE = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim")),
    *(getattr(Tensor, name) for name in ("size", "stride", "dim", "numel", "element_size", "__len__")),
}  # fmt: skip


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
    """Logits of decode: q [requests, next_n, heads, 128], kv_cache [pages, page_size, 1, 132]."""
    queries, q_scale = q
    requests, next_n = queries.shape[:2]
    rows = requests * next_n
    reason = _why_not(queries, q_scale, weights) or _why_not_pages(kv_cache, indices)
    per_row = context_lens.numel() == rows
    if reason is None and (
        context_lens.dtype is not torch.int32 or context_lens.numel() not in (rows, requests)
    ):
        reason = f"lengths of {context_lens.dtype} that are not of rows or requests"
    if reason:
        return _vllms(original, reason)

    def choose(out: Tensor, topk: int) -> None:
        lens = context_lens.flatten()
        chosen, workspace = _scratch(rows, topk, queries.device, captured=True)
        torch.ops.mla_fp8.index_topk_out(
            queries.flatten(0, 1),
            weights,
            kv_cache,
            block_tables[:requests],
            None if per_row else lens,
            row_lens=lens if per_row else None,
            layout=_LAYOUT.id,
            page_size=kv_cache.shape[1],
            next_n=next_n,
            topk=topk,
            out_positions=out,
            out_slots=vllm_slots.room(out, block_tables, kv_cache.shape[1]),
            out_lens=chosen,
            workspace=workspace,
            counters=_counters(queries.device),
        )

    return Logits.of(rows, max_model_len, original, choose)


def fp8_fp4_mqa_logits(
    original: Callable[[], Tensor],
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
) -> Tensor:
    """Logits of a chunk of prompts: q [rows, heads, 128], kv: [keys, 128] and their scales."""
    queries, q_scale = q
    keys, scales = kv
    reason = _why_not(queries, q_scale, weights)
    if reason is None and scales.dtype is not torch.float32:
        reason = f"scales of {scales.dtype}"
    if reason:
        return _vllms(original, reason)

    def choose(out: Tensor, topk: int) -> None:
        chosen, workspace = _scratch(len(queries), topk, queries.device, captured=False)
        torch.ops.mla_fp8.index_topk_ragged_out(
            queries,
            weights,
            keys,
            scales.flatten(),
            cu_seqlen_ks,
            cu_seqlen_ke,
            topk=topk,
            out_positions=out,
            out_slots=None,
            out_lens=chosen,
            workspace=workspace,
            counters=_counters(queries.device),
        )

    return Logits.of(len(queries), len(keys), original, choose)


def _why_not(q: Tensor, q_scale: Tensor | None, weights: Tensor) -> str | None:
    """Why ``index_topk`` is not for these queries, or None."""
    if q_scale is not None or q.dtype is not torch.float8_e4m3fn or q.shape[-1] != INDEX_DIM:
        return f"queries of {q.dtype}, {q.shape[-1]} wide" + (", with scales" if q_scale is not None else "")
    if q.shape[-2] > _MAX_HEADS:
        return f"{q.shape[-2]} heads"
    if weights.dtype not in (torch.float32, torch.bfloat16):
        return f"weights of {weights.dtype}"
    if weights.shape != (q.shape[:-2].numel(), q.shape[-2]):
        return "weights of other rows than the queries"
    world = _decode_context_parallel()
    return None if world == 1 else f"decode context parallel on {world} ranks"


def _why_not_pages(cache: Tensor, indices: Tensor | None) -> str | None:
    if indices is not None:
        return "rows that name their requests"
    packed = cache.element_size() == 1 and cache.shape[-1] == _LAYOUT.bytes_per_entry
    return None if packed else f"entries of {cache.shape[-1]} x {cache.dtype}"


def _vllms(original: Callable[[], Tensor], reason: str) -> Tensor:
    say_once(f"mla_fp8: the indexer's logits and top-k stay vLLM's for {reason}")
    return original()


def _decode_context_parallel() -> int:
    try:
        return int(import_module(MODULE).get_dcp_group().world_size)
    except AssertionError:  # vLLM's, where nothing is distributed
        return 1


def _scratch(rows: int, topk: int, device: torch.device, *, captured: bool) -> tuple[Tensor, Tensor | None]:
    """(int32 [rows] for the lengths, which vLLM does not want; index_topk's workspace).

    ``captured``: of vLLM's workspace, whose address stays. Prompts have memory of their own: the keys of a
    chunk lie there.
    """
    if device.type == "cpu":
        return torch.empty(rows, dtype=torch.int32), None
    size = index_topk_workspace(rows, topk=topk, device=device)
    if captured:
        try:
            manager = import_module(_WORKSPACE).current_workspace_manager()
            workspace, lens = manager.get_simultaneous(((size,), torch.uint8), ((rows,), torch.int32))
            return lens, workspace
        except AssertionError:  # vLLM's: none, or locked before one as large was asked for
            say_once("mla_fp8: index_topk allocates its workspace: vLLM's is smaller")
    lens = torch.empty(rows, dtype=torch.int32, device=device)
    return lens, torch.empty(size, dtype=torch.uint8, device=device)


def _counters(device: torch.device) -> Tensor | None:
    """What index_topk counts with, of the current stream: calls of one stream come one after the other.

    A graph that is captured before its stream has any gets none: it would fill them at each replay.
    """
    if device.type == "cpu":
        return None
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _COUNTERS and not torch.cuda.is_current_stream_capturing():
        _COUNTERS[key] = torch.zeros(index_topk_counters(device), dtype=torch.int32, device=device)
    return _COUNTERS.get(key)


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
        if not _chosen(logits, topk_indices, topk_tokens):
            logits = _as_made(logits)
            original(backend)(logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len)

    return choose


def around_top_k_per_row_prefill(original: Callable[..., None], *args: Any, **options: Any) -> None:
    given = dict(zip(probes.parameters(original) or (), args, strict=False)) | options
    logits = given["logits"]
    if isinstance(logits, Logits) and not _chosen(logits, given["raw_topk_indices"], given["topk_tokens"]):
        logits = _as_made(logits)
        original(**given | {"logits": logits, "stride0": logits.stride(0), "stride1": logits.stride(1)})
    elif not isinstance(logits, Logits):
        original(*args, **options)


def _chosen(logits: Tensor, out: Tensor, topk: int) -> bool:
    """Whether ``out`` has the positions: not if there are logits, which may have been masked."""
    if not isinstance(logits, Logits) or logits.made is not None or topk > _MAX_TOPK:
        return False
    logits.choose(out[: logits.shape[0], :topk], topk)
    return True


def _as_made(logits: Tensor) -> Tensor:
    return logits.looked_at("vLLM's top-k") if isinstance(logits, Logits) else logits


_LOGITS: dict[str, tuple[Callable[..., Tensor], set[str]]] = {
    "fp8_fp4_paged_mqa_logits": (fp8_fp4_paged_mqa_logits, {"schedule_metadata", "clean_logits"}),
    "fp8_fp4_mqa_logits": (fp8_fp4_mqa_logits, {"max_seqlen_k", "clean_logits"}),
}
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
    """Entry point: takes over the indexer if VLLM_PLUGINS names us, or logs why not. Re-entrant."""
    if NAME not in named_in_vllm():
        return
    reason = why_not()
    if reason:
        _LOGGER.warning("%s is not used in vLLM: %s", NAME, reason)
        return
    take_over_indexer()


def take_over_indexer() -> None:
    """Re-entrant; where there is no reason why not."""
    module: ModuleType = import_module(MODULE)
    for name, (ours, _) in _LOGITS.items():
        setattr(module, name, around(getattr(module, name), functools.partial(around_logits, ours)))
    module.get_indexer_topk = around(module.get_indexer_topk, around_get_indexer_topk)  # type: ignore[attr-defined]
    if take_over(import_module(_CALLS), {"top_k_per_row_prefill": around_top_k_per_row_prefill}):
        say_once("mla_fp8 serves the indexer's logits and top-k, by index_topk: decode and prompts, FP8 keys")
