"""vLLM's sparse MLA backend (DeepSeek V3.2, GLM-5) with our kernels: mixed in before vLLM's own classes.

Taken over: the kernels, the padding of query heads around them, and for FP8 caches the way to them. Prompts
of few heads are read straight from the pages; of many heads from rows that vLLM gathers, into vLLM's output.
vLLM's own: indexer, cache writes, dense attention of short prompts, and what context parallelism does with
the results, unless vllm_context_parallel.py is switched on.
"""

import functools
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor

from .. import probes
from ..layout import HEAD_DIM_V, KV_LAYOUTS, KVLayout, row_layout
from . import attend, drafts, log, replay, same_bits, vllm_context_parallel, vllm_same_bits, vllm_slots

MODULE = "vllm.v1.attention.backends.mla.flashmla_sparse"
CACHE_DTYPES = ("auto", "bfloat16", "fp8_ds_mla", "fp8")
_PACKED = KV_LAYOUTS["dsv32"]
KNOWN = {"f4b45639050f9df0": "0.33.0"}  # sources of the method that _attend_prompts does step by step
_PROMPT_ROWS = 256  # of a bf16 cache: from here on `sparse_prefill` is as fast or faster than `sparse_decode`


class SparseImpl:
    """Methods in place of those of vLLM's FlashMLASparseImpl."""

    theirs: ClassVar[ModuleType]
    knows_prompts: ClassVar[bool]  # whether the steps of vLLM's method for prompts of many heads are known
    softmax_scale: float
    dcp_world_size: int
    sinks: Tensor | None = None  # [heads] float32, of HY V4

    @staticmethod
    def _compute_fp8_decode_padded_heads(num_heads: int) -> int:
        return num_heads

    def _forward_fp8_kv_mixed_batch(
        self,
        q: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        topk_indices: Tensor,
        attn_metadata: Any,
        kernel_metadata: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        if self.dcp_world_size > 1:
            return super()._forward_fp8_kv_mixed_batch(  # type: ignore[misc, no-any-return]
                q, kv_c_and_k_pe_cache, topk_indices, attn_metadata, kernel_metadata
            )
        return _attend_slots(self, q, kv_c_and_k_pe_cache, topk_indices, attn_metadata), None

    def _forward_fp8_kv_separate_prefill_decode(
        self, q: Tensor, kv_c_and_k_pe_cache: Tensor, topk_indices: Tensor, attn_metadata: Any
    ) -> tuple[Tensor, Tensor | None]:
        group = getattr(self, "index_group", None)
        on_host = isinstance(group, self.theirs.HiSparseMLAIndexGroup)
        if on_host and same_bits.on():  # prompts from FP8 rows: as vLLM has it for bf16, staged as they are
            return super()._forward_bf16_kv(  # type: ignore[misc, no-any-return]
                q, kv_c_and_k_pe_cache, topk_indices, attn_metadata, q.shape[1]
            )
        # Requests of few tokens, as of other numbers of drafts, are not worth a copy of all their keys.
        prompts = len(q) > attn_metadata.fp8_extra_metadata.num_decode_tokens and not same_bits.on()
        prompts = prompts and attn_metadata.max_query_len > drafts.MOST
        if on_host or self.dcp_world_size > 1 or (prompts and not self.knows_prompts):
            return super()._forward_fp8_kv_separate_prefill_decode(  # type: ignore[misc, no-any-return]
                q, kv_c_and_k_pe_cache, topk_indices, attn_metadata
            )
        attend_to = _attend_prompts if prompts else _attend_slots
        return attend_to(self, q, kv_c_and_k_pe_cache, topk_indices, attn_metadata), None

    def _fp8_flash_mla_kernel(
        self, q: Tensor, kv_c_and_k_pe_cache: Tensor, topk_indices: Tensor, kernel_metadata: object
    ) -> tuple[Tensor, Tensor]:
        batch, s_q, heads, _ = q.shape
        slots = topk_indices.flatten(0, 1)
        group = drafts.ALONE if self.dcp_world_size > 1 else drafts.of_call(batch, s_q)
        out, lse = _over_pages(self, q.flatten(0, 1), kv_c_and_k_pe_cache, slots, group)
        return out.view(batch, s_q, heads, HEAD_DIM_V), lse.view(batch, s_q, heads).mT

    def _bf16_flash_mla_kernel(
        self,
        q: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        topk_indices: Tensor,
        topk_length: Tensor | None = None,
        actual_num_heads: int | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        q = q[:, :actual_num_heads]
        if kv_c_and_k_pe_cache.dtype != q.dtype:  # FP8: pages, or rows that were staged
            rows = kv_c_and_k_pe_cache
            pages = rows if rows.dim() == 3 else rows[:, None]
            return _over_pages(self, q, pages, topk_indices.flatten(1), drafts.ALONE, lens=topk_length)
        rows = kv_c_and_k_pe_cache.view(-1, q.shape[2])
        options: dict[str, Any] = {
            "sm_scale": self.softmax_scale, "topk_length": topk_length, "attn_sink": _sinks(self),
            "out": None if out is None else out[:, : q.shape[1]],
        }  # fmt: skip
        indices = topk_indices.flatten(1)  # [tokens, 1, topk] of vLLM
        if len(q) < _PROMPT_ROWS:
            return attend.over_pages(q, rows, indices, layout=row_layout(q), page_size=1, **options)
        result, lse = attend.over_rows(q, rows, indices, **options)
        return result, lse


class RankImpl:
    """Before SparseImpl, where ranks have a part of the keys each (vllm_context_parallel.py)."""

    need_to_return_lse_for_decode: bool

    def _forward_fp8_kv_mixed_batch(
        self,
        q: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        topk_indices: Tensor,
        attn_metadata: Any,
        kernel_metadata: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        if not vllm_context_parallel.serves(self):
            return super()._forward_fp8_kv_mixed_batch(  # type: ignore[misc, no-any-return]
                q, kv_c_and_k_pe_cache, topk_indices, attn_metadata, kernel_metadata
            )
        slots, lens = vllm_context_parallel.slots_of_rank(self, topk_indices, attn_metadata)
        group = _group_of_step(self, len(q), attn_metadata)
        return _over_pages(self, q, kv_c_and_k_pe_cache, slots, group, lens=lens)

    def _forward_bf16_kv(
        self,
        q: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        topk_indices: Tensor,
        attn_metadata: Any,
        actual_num_heads: int,
    ) -> tuple[Tensor, Tensor | None]:
        if not vllm_context_parallel.serves(self):
            return super()._forward_bf16_kv(  # type: ignore[misc, no-any-return]
                q, kv_c_and_k_pe_cache, topk_indices, attn_metadata, actual_num_heads
            )
        slots, lens = vllm_context_parallel.slots_of_rank(self, topk_indices, attn_metadata)
        q = q[:, :actual_num_heads]
        return _over_pages(self, q, kv_c_and_k_pe_cache, slots, drafts.ALONE, lens=lens, layout=row_layout(q))


class SparseBackend:
    """Methods in place of those of vLLM's FlashMLASparseBackend. Its name stays: vLLM goes by it."""

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True


def make_backend(module: str) -> type:
    """The backend as a class that vLLM finds by ``module`` and its name."""
    found = import_module(MODULE)
    vllm_same_bits.prepare("DeepSeek V3.2")
    of_ranks = vllm_context_parallel.switched_on()
    bases = (*([RankImpl] if of_ranks else []), SparseImpl, found.FlashMLASparseImpl)
    builder = vllm_context_parallel.make_builder(found) if of_ranks else None

    class Impl(*bases):  # type: ignore[misc]
        theirs = found
        knows_prompts = (
            probes.why_not_rewrite(found.FlashMLASparseImpl._forward_fp8_kv_separate_prefill_decode, KNOWN)
            is None
        )

        def __init__(self, num_heads: int, *args: Any, sinks: Tensor | None = None, **options: Any) -> None:
            if same_bits.asked():
                vllm_same_bits.prepare_layer()
            wants_lse = getattr(self, "need_to_return_lse_for_decode", False)
            if wants_lse and vllm_context_parallel.serves(self):
                self.need_to_return_lse_for_decode = False  # or vLLM refuses bf16 caches
            super().__init__(num_heads, *args, **options)
            self.need_to_return_lse_for_decode = wants_lse
            self.sinks = sinks
            log_once(num_heads, getattr(self, "kv_cache_dtype", "auto"))

        def record_logical_topk_ready(self) -> None:  # of vLLM from 0.33 on
            in_a_group = self.index_group is not None
            if in_a_group:
                vllm_slots.take(self.index_group, self.index_group_index)
            if replay.wanted() and _choice(self) and in_a_group:
                vllm_slots.take(self.index_group, self.index_group_index)  # none: other positions
            super().record_logical_topk_ready()

    class Backend(SparseBackend, found.FlashMLASparseBackend):  # type: ignore[misc, name-defined]
        supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)

        @staticmethod
        def get_impl_cls() -> type:
            return Impl

        @staticmethod
        def get_builder_cls() -> type:
            return builder or found.FlashMLASparseBackend.get_builder_cls()

    Backend.__module__, Backend.__qualname__, Backend.__name__ = module, "SparseBackend", "SparseBackend"
    return Backend


def _choice(impl: Any) -> bool:
    """A layer's choice, if it has an indexer and the step is no profiling run: whether it was replaced."""
    context = import_module("vllm.forward_context").get_forward_context()
    layers: dict[str, Any] = context.no_compile_layers
    name = next((name for name, x in layers.items() if getattr(x, "impl", None) is impl), None)
    if name is None or not isinstance(context.attn_metadata, dict):
        return False
    if getattr(layers[name], "indexer", None) is None or getattr(layers[name], "skip_topk", False):
        return False
    metadata = context.attn_metadata[name]
    rows = metadata.num_actual_tokens
    positions: Tensor = impl.topk_indices_buffer
    return replay.chosen(name, positions[:rows], metadata.req_id_per_token[:rows])


def _attend_slots(impl: Any, q: Tensor, kv_cache: Tensor, topk_indices: Tensor, metadata: Any) -> Tensor:
    """All tokens as rows of their own. vLLM leaves -1 where it is: its counts of slots are no lengths."""
    if metadata.num_decode_tokens == metadata.num_actual_tokens == len(topk_indices):
        group_of_layers = getattr(impl, "index_group", None)
        slots = vllm_slots.of(group_of_layers, len(q), metadata.block_table, metadata.block_size)
        if slots is None:
            slots = impl._convert_logical_to_physical_topk(
                topk_indices, metadata, block_stride_rows=None, return_valid_counts=False
            )
    else:
        slots = impl.theirs.triton_convert_req_index_to_global_index(
            metadata.req_id_per_token[: len(topk_indices)],
            metadata.block_table,
            topk_indices,
            BLOCK_SIZE=metadata.block_size,
            NUM_TOPK_TOKENS=topk_indices.shape[1],
            return_valid_counts=False,
        )
    return _over_pages(impl, q, kv_cache, slots, _group_of_step(impl, len(q), metadata))[0]


def _attend_prompts(impl: Any, q: Tensor, kv_cache: Tensor, topk_indices: Tensor, metadata: Any) -> Tensor:
    """vLLM's steps without its copies: decode over the pages, prompts over rows, each into its place in the
    output, which lies in vLLM's workspace."""
    theirs, parts = impl.theirs, metadata.fp8_extra_metadata
    _, gathered, *_, out = theirs.current_workspace_manager().get_simultaneous(*impl.workspace_specs)
    out = out[: len(q)]
    slots, lens = theirs.triton_convert_req_index_to_global_index(
        metadata.req_id_per_token[: len(topk_indices)],
        metadata.block_table,
        topk_indices,
        BLOCK_SIZE=metadata.block_size,
        NUM_TOPK_TOKENS=topk_indices.shape[1],
        HAS_PREFILL_WORKSPACE=True,
        prefill_workspace_request_ids=parts.prefill.request_ids,
        prefill_workspace_starts=parts.prefill.workspace_starts,
        return_valid_counts=True,
    )
    decodes = parts.num_decode_tokens
    if decodes > 0:
        group = drafts.of_call(parts.num_decodes, decodes // parts.num_decodes)
        _over_pages(impl, q[:decodes], kv_cache, slots[:decodes], group, out[:decodes])
    for chunk in parts.prefill.chunks:
        rows, tokens = gathered[: chunk.chunk_tot_seqlen], chunk.tokens_slice
        theirs.ops.cp_gather_and_upconvert_fp8_kv_cache(
            kv_cache, rows, chunk.block_table, chunk.workspace_starts, len(chunk.block_table)
        )
        impl._bf16_flash_mla_kernel(q[tokens], rows, slots[tokens], lens[tokens], out=out[tokens])
    return out  # type: ignore[no-any-return]


def _group_of_step(impl: Any, num_rows: int, metadata: Any) -> drafts.Group:
    """Of a step without long prompts: vLLM takes requests with other than the first one's number of drafts
    for prompts. Layers of an index group have the same slots: vLLM converts them once."""
    if not drafts.switched_on():
        return drafts.ALONE
    group, layers = getattr(impl, "index_group", None), None
    if getattr(group, "num_layers", 1) > 1:
        layers = drafts.Layers(metadata, "index group", id(group), id(impl))
    return drafts.of_requests(
        num_rows, metadata.num_reqs, metadata.max_query_len, metadata.query_start_loc, layers
    )


def _over_pages(
    impl: Any,
    q: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    group: drafts.Group,
    out: Tensor | None = None,
    *,
    lens: Tensor | None = None,
    layout: KVLayout = _PACKED,
) -> tuple[Tensor, Tensor]:
    return attend.over_pages(
        q, kv_cache, slots, layout=layout, page_size=kv_cache.shape[1], sm_scale=impl.softmax_scale,
        topk_length=lens, attn_sink=_sinks(impl), group=group, out=out,
    )  # fmt: skip


def _sinks(impl: Any) -> Tensor | None:
    """Of the layer's heads; with heads of other ranks they would count once a rank."""
    sinks: Tensor | None = impl.sinks
    if sinks is not None and impl.dcp_world_size > 1:
        raise ValueError("mla_fp8: attention sinks are not served with decode context parallelism")
    return sinks


@functools.cache
def log_once(num_heads: int, cache_dtype: str) -> None:
    log.logger().info(
        "mla_fp8 attends in place of FlashMLA: %d query heads as they are, cache %s, decode and prefill. "
        "vLLM's own: the indexer unless mla_fp8_index_topk is named, cache writes, dense attention of short "
        "prompts, context parallelism's exchange unless mla_fp8_context_parallel is named.",
        num_heads,
        cache_dtype,
    )
