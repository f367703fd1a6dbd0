"""Who attends in an engine: calls counted; and attention replaced by exact arithmetic, the yardstick."""

import collections
import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

CALLS = collections.Counter()
_SAVED: list[Path] = []  # files that hold CALLS
HOST_ROWS = "resolve_hot_rows", "resolve_hot_rows_out", "copy_host_rows", "_copy_rows_at"
FOUND, LOADED = "rows found", "rows loaded"
OURS = [
    f"{op}{form}"
    for op in ("sparse_decode", "sparse_prefill", "sparse_prefill_paged", "sparse_prefill_window",
               "index_topk", "index_topk_ragged", "index_topk_blocks", "index_topk_ragged_blocks")
    for form in ("", "_out")
] + ["pool_index_k", *HOST_ROWS]  # fmt: skip
INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
POOLS = "vllm.models.glm5next.nvidia.sparse_indexer"  # has them by name, too
LOGITS = "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"  # there, of DeepGEMM


def count_calls(ours: bool, pools: bool = False) -> None:
    """Calls of FlashMLA's kernels, of DeepGEMM's logits and of our ops, from Python.

    A graph's kernels were calls at its capture. To be called before plug-ins are loaded: what they leave out
    is then not counted. ``pools``: the model chooses pools of keys.
    """
    for indexer in map(import_module, (INDEXER, POOLS)[: 1 + pools]):
        for name in LOGITS:
            setattr(indexer, name, _counted(f"DeepGEMM.{name}", getattr(indexer, name)))
    theirs = import_module("vllm.third_party.flashmla.flash_mla_interface")
    theirs.flash_mla_cuda = _Counted("FlashMLA", theirs.flash_mla_cuda)
    _count_ours(ours)


def count_sglang_calls(ours: bool) -> None:
    """The same in SGLang, but for the logits."""
    package, interface = import_module("flash_mla"), import_module("flash_mla.flash_mla_interface")
    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        counted = _counted(f"FlashMLA.{name}", getattr(interface, name))
        setattr(package, name, counted)
        setattr(interface, name, counted)
    _count_ours(ours)


def count_sglang_rows() -> None:
    """The rows of V4's and V4.1's pools by their bytes."""
    pool = import_module("sglang.srt.mem_cache.deepseek_v4_memory_pool").DeepSeekV4SingleKVPool
    original = pool.create_buffer

    @functools.wraps(original)
    def create_buffer(self, *, num_pages: int) -> torch.Tensor:
        buffer = original(self, num_pages=num_pages)
        _count(f"rows of {buffer.shape[1] / self.page_size:g} bytes", num_pages * self.page_size)
        return buffer

    pool.create_buffer = create_buffer


def count_sglang_host_rows() -> None:
    """Rows that our lookups found in a hot buffer and had loaded, also in a graph's replays.

    Read whenever a request ends: the steps that run then may be missing.
    """
    compat = import_module("mla_fp8.compat.sglang_hisparse")
    coordinator = import_module("sglang.srt.managers.hisparse_coordinator").HiSparseCoordinator
    resolve, finished, counters = compat.resolve_hot_rows, coordinator.request_finished, []

    def resolve_hot_rows(entries, *args, **options):
        if not counters:
            counters.append(torch.zeros(2, dtype=torch.int64, device=entries.device))
        return resolve(entries, *args, **options, counters=counters[0])

    def request_finished(self, req) -> None:
        finished(self, req)
        if counters:
            for label, rows in zip((FOUND, LOADED), counters[0].tolist(), strict=True):
                _count(label, rows - CALLS[label])

    compat.resolve_hot_rows, coordinator.request_finished = resolve_hot_rows, request_finished


def save_calls(folder: Path) -> None:
    """For other processes: each writes a file of its own into ``folder`` at every call."""
    _SAVED.append(folder / str(os.getpid()))


def saved_calls(folder: Path) -> dict[str, int]:
    """Of all processes."""
    each = [collections.Counter(json.loads(path.read_text())) for path in folder.iterdir()]
    return dict(sum(each, collections.Counter()))


def _count_ours(ours: bool) -> None:
    if ours:
        import_module("mla_fp8")
        ops = torch.ops.mla_fp8
        counted = _Counted("mla_fp8", ops)
        for name in OURS:
            setattr(ops, name, getattr(counted, name))


def _counted(label: str, function: Callable) -> Callable:
    @functools.wraps(function, updated=())
    def counted(*args, **options):
        _count(label)
        if options.get("query_groups", 1) > 1:
            _count(f"in groups: {label}")
            if _uneven(options.get("query_start_loc")):
                _count(f"in uneven groups: {label}")
        return function(*args, **options)

    return counted


def _uneven(starts: torch.Tensor | None) -> bool:
    """Whether requests have other numbers of queries; a graph's change with each replay."""
    if starts is None or (starts.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return len(starts.diff().unique()) > 1


def _count(label: str, many: int = 1) -> None:
    CALLS[label] += many
    for path in _SAVED:
        path.write_text(json.dumps(CALLS))


class _Counted:
    def __init__(self, label: str, functions: object) -> None:
        self.label, self.functions = label, functions

    def __getattr__(self, name: str):
        return _counted(f"{self.label}.{name}", getattr(self.functions, name))


@dataclass
class Scope:
    """Rows that a call attends to: slots [tokens, k], of which ``lengths`` [tokens] count, all or none."""

    gather: Callable[[torch.Tensor], torch.Tensor]  # slots to rows
    num_slots: int
    indices: torch.Tensor
    lengths: torch.Tensor | None

    def rows(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(float32 rows [tokens, k, head_dim], which of them are attended to)."""
        chosen = self.indices[tokens].long()
        valid = (chosen >= 0) & (chosen < self.num_slots)
        if self.lengths is not None:
            valid &= torch.arange(chosen.shape[1], device=chosen.device) < self.lengths[tokens][:, None]
        return self.gather(chosen.where(valid, 0)).float().masked_fill(~valid[:, :, None], 0), valid


def attend_exactly(q, scopes: list[Scope], sm_scale: float, out=None, sink=None, head_dim_v: int = 512):
    """(out, lse) of q [tokens, heads, head_dim] in float32: one softmax over all scopes, and the sink."""
    torch.backends.cuda.matmul.allow_tf32 = False
    result = q.new_empty(*q.shape[:2], head_dim_v) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for tokens in torch.arange(len(q), device=q.device).split(48):
        each = [scope.rows(tokens) for scope in scopes]
        rows, valid = torch.cat([r for r, _ in each], 1), torch.cat([v for _, v in each], 1)
        logits = torch.einsum("thd,tkd->thk", q[tokens].float(), rows) * sm_scale
        logits.masked_fill_(~valid[:, None], float("-inf"))
        lse[tokens] = logits.logsumexp(2)
        base = lse[tokens] if sink is None else torch.logaddexp(lse[tokens], sink.expand_as(lse[tokens]))
        weights = (logits - base[:, :, None]).exp().nan_to_num(0)
        result[tokens] = torch.einsum("thk,tkd->thd", weights, rows[..., :head_dim_v]).bfloat16()
    return result, lse


def exact_attention() -> None:
    """Our plug-in's calls in plain PyTorch and float32, from the bytes of the cache as specified."""
    attend = import_module("mla_fp8.integrations.attend")

    def over_pages(
        q, kv_cache, indices, *, layout, page_size, sm_scale, topk_length=None, attn_sink=None, out=None,
        extra_kv_cache=None, extra_indices=None, extra_topk_length=None, extra_page_size=0, extra_layout=None,
        **unused,
    ):  # fmt: skip
        scopes = [of_pages(kv_cache, layout, page_size, indices, topk_length)]
        if extra_kv_cache is not None:
            entries = extra_layout or layout
            scopes.append(
                of_pages(extra_kv_cache, entries, extra_page_size, extra_indices, extra_topk_length)
            )
        return attend_exactly(q, scopes, sm_scale, out, attn_sink)

    def over_rows(q, kv, indices, *, sm_scale, topk_length=None, attn_sink=None, out=None, max_logits=False):
        scope = Scope(lambda slots: kv[slots], len(kv), indices, topk_length)
        result, lse = attend_exactly(q, [scope], sm_scale, out, attn_sink)
        return (result, lse, lse) if max_logits else (result, lse)

    attend.over_pages, attend.over_rows = over_pages, over_rows


def of_pages(kv_cache, layout, page_size: int, indices, lengths) -> Scope:
    """What a call attends to in the pages of a cache."""
    mla_fp8, reference = import_module("mla_fp8"), import_module("mla_fp8.reference")
    pages = kv_cache.view(-1, page_size, kv_cache.shape[-1])

    def gather(slots):
        if layout.name in ("dsv4", "dsv41", "dsv41_fp4"):  # exact in bf16: few bits of value and scale
            rows = mla_fp8.dequantize_kv(kv_cache, slots.flatten(), layout=layout, page_size=page_size)
            return rows.view(*slots.shape, -1)
        rows = pages[slots // page_size, slots % page_size]
        if layout.fp8_dtype is None:
            return rows
        flat = rows.view(torch.uint8).flatten(0, 1)  # pages of one row
        return reference.dequantize_cache(flat, layout=layout, page_size=1).view(*slots.shape, -1)

    return Scope(gather, len(pages) * page_size, indices, lengths)


def exact_v4() -> None:
    """FlashMLA's calls in vLLM's V4 layer, padded heads and all, in the same arithmetic."""
    layer = import_module("vllm.models.deepseek_v4.nvidia.flashmla")
    dsv4 = import_module("mla_fp8").KV_LAYOUTS["dsv4"]

    def scope(cache, indices, lengths):
        return of_pages(cache, dsv4, cache.shape[1], indices.flatten(0, 1), lengths)

    def decode(*, q, k_cache, indices, topk_length, softmax_scale, attn_sink, out, **options):
        scopes = [scope(k_cache, indices, topk_length)]
        extra = options["extra_k_cache"]
        if extra is not None:
            scopes.append(scope(extra, options["extra_indices_in_kvcache"], options["extra_topk_length"]))
        return attend_exactly(q[:, 0], scopes, softmax_scale, out[:, 0], attn_sink)

    def prefill(*, q, kv, indices, sm_scale, attn_sink, topk_length, out):
        rows = Scope(lambda slots: kv[slots, 0], len(kv), indices[:, 0], topk_length)
        return attend_exactly(q, [rows], sm_scale, out, attn_sink)

    layer.flash_mla_with_kvcache, layer.flash_mla_sparse_fwd = decode, prefill
