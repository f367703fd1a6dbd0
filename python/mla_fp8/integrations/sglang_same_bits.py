"""SGLang with --enable-deterministic-inference (same_bits.py): its refusal, the ways of prompts, the indexer.

=============  ==========================================================================================
refusal        SGLang knows no deterministic `dsa` and `dsv4`: the two are put in its lists
prompts        V3.2: over FP8 pages (`flashmla_kv`) in place of a bf16 copy, never dense; V4: never a copy
indexer        V3.2: :func:`mla_fp8.index_topk` over pages for decode and prompts, with pinned tokens.
               V4: the same, in place of DeepGEMM's logits and SGLang's top-k
=============  ==========================================================================================

Positions ascend, so attention adds in the same order, which SGLang's top-k does not keep.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .. import probes
from ..index_layout import INDEX_DIM, INDEX_LAYOUTS
from ..ops.index_topk import index_topk
from ..ops.topk_to_slots import topk_to_slots
from . import replay, same_bits
from .flash_mla_calls import take_over
from .log import say_once
from .vllm_logits import Level, Logits

_CHOICES = "sglang.srt.arg_groups.choices"
_LISTS = ("DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND")
_BACKENDS = ("dsa", "dsv4")
_V32_BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
_V32_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
_V4_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend"
_V4_INDEXER = "sglang.srt.layers.attention.dsv4.indexer"
_LAYOUT, _PAGE, _MOST_HEADS = INDEX_LAYOUTS["index_fp8"], 64, 64


def lift_refusal() -> None:
    """Re-entrant. The lists are read only where deterministic inference is asked for."""
    choices = import_module(_CHOICES)
    for name in _LISTS:
        known = getattr(choices, name)
        known.extend(x for x in _BACKENDS if x not in known)


def set_dsa_prefill_impl(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    if same_bits.on():
        self.supports_mha_one_shot = False
        if self.dsa_kv_cache_store_fp8 and self.dsa_prefill_impl in ("flashmla_sparse", "flashmla_auto"):
            self.dsa_prefill_impl, self.enable_auto_select_prefill_impl = "flashmla_kv", False
    return original(self, *args, **options)


def use_sparse_prefill(original: Callable[..., bool], self: Any, *args: Any, **options: Any) -> bool:
    return not same_bits.on() and original(self, *args, **options)


def get_topk_paged(
    original: Callable[..., Tensor], self: Any, forward_batch: Any, layer_id: int, q_fp8: Tensor,
    weights: Tensor, metadata: Any,
) -> Tensor:  # fmt: skip
    reason = _why_not(self, q_fp8) if same_bits.on() else "no switch"
    if reason:
        return original(self, forward_batch, layer_id, q_fp8, weights, metadata)
    return _choose(self, layer_id, q_fp8, weights, metadata, None)


def get_topk_ragged(
    original: Callable[..., Tensor], self: Any, enable_dual_stream: bool, forward_batch: Any, layer_id: int,
    q_fp8: Tensor, weights: Tensor, metadata: Any, topk_result: Tensor | None = None,
) -> Tensor:  # fmt: skip
    reason = _why_not(self, q_fp8) if same_bits.on() else "no switch"
    if reason:
        return original(
            self, enable_dual_stream, forward_batch, layer_id, q_fp8, weights, metadata, topk_result
        )
    chosen = _choose(self, layer_id, q_fp8, weights, metadata, metadata.attn_metadata.cu_seqlens_q)
    return chosen if topk_result is None else topk_result.copy_(chosen)


def _why_not(indexer: Any, q: Tensor) -> str | None:
    page_size = import_module(_V32_INDEXER).get_token_to_kv_pool().index_page_size
    reason = None
    if q.dtype is not torch.float8_e4m3fn or q.shape[1] > _MOST_HEADS or q.shape[2] != INDEX_DIM:
        reason = f"index queries of {q.dtype}, {q.shape[1]} heads of {q.shape[2]} dims"
    elif page_size != _PAGE or type(indexer).__name__ != "Indexer":
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


def forward_c4_indexer(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    """V4's, which imports DeepGEMM's function when it is called."""
    if same_bits.on():
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
    return None if same_bits.on() else original(self, *args, **options)


_TOPK = ("scores", "seq_lens", "page_tables", "out_page_indices", "page_size", "out_raw_indices")
# target: (what runs around it, what of it is called by which parameters)
HOOKS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    f"{_V32_BACKEND}.set_dsa_prefill_impl": (set_dsa_prefill_impl, ()),
    f"{_V32_INDEXER}.Indexer._get_topk_paged": (
        get_topk_paged, ("forward_batch", "layer_id", "q_fp8", "weights", "metadata"),
    ),
    f"{_V32_INDEXER}.Indexer._get_topk_ragged": (
        get_topk_ragged,
        ("enable_dual_stream", "forward_batch", "layer_id", "q_fp8", "weights", "metadata", "topk_result"),
    ),
    f"{_V4_BACKEND}._use_sparse_prefill": (use_sparse_prefill, ()),
    f"{_V4_INDEXER}.C4IndexerBackendMixin.forward_c4_indexer": (forward_c4_indexer, ()),
    f"{_V4_INDEXER}.C4IndexerBackendMixin._get_nonpaged_indexer_plan": (no_plan, ()),
    f"{_V4_INDEXER}.topk_transform_paged": (topk_transform_paged, _TOPK),
    f"{_V4_INDEXER}.topk_transform_paged_v2": (topk_transform_paged, _TOPK),
}  # fmt: skip


def why_not() -> str | None:
    """Why this mode of SGLang cannot be served, or None."""
    needs: dict[str, dict[str, tuple[str, ...]]] = {_CHOICES: dict.fromkeys(_LISTS, ())}
    for target, (_, passed) in HOOKS.items():
        module, _, path = target.rpartition(".")
        if module.rpartition(".")[2][0].isupper():  # a method
            module, _, name = module.rpartition(".")
            path = f"{name}.{path}"
        needs.setdefault(module, {})[path] = passed
    return probes.why_not_call(needs)
