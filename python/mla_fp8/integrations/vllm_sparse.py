"""vLLM's sparse MLA backend (DeepSeek V3.2, GLM-5) with our kernels: mixed in before vLLM's own classes.

Taken over: the kernels, the padding of query heads around them, and for FP8 caches the way to them, so that
prompts of few heads are read straight from the pages. vLLM's own: indexer,
cache writes, dense attention of short prompts, the gather before prefill with many heads, and what context
parallelism does with the results.
"""

import functools
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor

from ..layout import HEAD_DIM_V, KV_LAYOUTS, row_layout
from . import attend, drafts, log

MODULE = "vllm.v1.attention.backends.mla.flashmla_sparse"
CACHE_DTYPES = ("auto", "bfloat16", "fp8_ds_mla", "fp8")
_PACKED = KV_LAYOUTS["dsv32"]
_PROMPT_ROWS = 256  # of a bf16 cache: from here on `sparse_prefill` is as fast or faster than `sparse_decode`


class SparseImpl:
    """Methods in place of those of vLLM's FlashMLASparseImpl."""

    theirs: ClassVar[ModuleType]
    softmax_scale: float
    dcp_world_size: int

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
        prompts = len(q) > attn_metadata.fp8_extra_metadata.num_decode_tokens
        if prompts or on_host or self.dcp_world_size > 1:
            return super()._forward_fp8_kv_separate_prefill_decode(  # type: ignore[misc, no-any-return]
                q, kv_c_and_k_pe_cache, topk_indices, attn_metadata
            )
        return _attend_slots(self, q, kv_c_and_k_pe_cache, topk_indices, attn_metadata), None

    def _fp8_flash_mla_kernel(
        self, q: Tensor, kv_c_and_k_pe_cache: Tensor, topk_indices: Tensor, kernel_metadata: object
    ) -> tuple[Tensor, Tensor]:
        batch, s_q, heads, _ = q.shape
        slots = topk_indices.flatten(0, 1)
        group = drafts.ALONE if self.dcp_world_size > 1 else drafts.of_call(batch, s_q)
        out, lse = _over_pages(q.flatten(0, 1), kv_c_and_k_pe_cache, slots, self.softmax_scale, group)
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
        rows = kv_c_and_k_pe_cache.view(-1, q.shape[2])
        options: dict[str, Any] = {
            "sm_scale": self.softmax_scale, "topk_length": topk_length,
            "out": None if out is None else out[:, : q.shape[1]],
        }  # fmt: skip
        indices = topk_indices.flatten(1)  # [tokens, 1, topk] of vLLM
        if len(q) < _PROMPT_ROWS:
            return attend.over_pages(q, rows, indices, layout=row_layout(q), page_size=1, **options)
        result, lse = attend.over_rows(q, rows, indices, **options)
        return result, lse


class SparseBackend:
    """Methods in place of those of vLLM's FlashMLASparseBackend. Its name stays: vLLM goes by it."""

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)


def make_backend(module: str) -> type:
    """The backend as a class that vLLM finds by ``module`` and its name."""
    found = import_module(MODULE)

    class Impl(SparseImpl, found.FlashMLASparseImpl):  # type: ignore[misc, name-defined]
        theirs = found

        def __init__(self, num_heads: int, *args: Any, **options: Any) -> None:
            super().__init__(num_heads, *args, **options)
            log_once(num_heads, getattr(self, "kv_cache_dtype", "auto"))

    class Backend(SparseBackend, found.FlashMLASparseBackend):  # type: ignore[misc, name-defined]
        supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)

        @staticmethod
        def get_impl_cls() -> type:
            return Impl

    Backend.__module__, Backend.__qualname__, Backend.__name__ = module, "SparseBackend", "SparseBackend"
    return Backend


def _attend_slots(impl: Any, q: Tensor, kv_cache: Tensor, topk_indices: Tensor, metadata: Any) -> Tensor:
    """All tokens as rows of their own. vLLM leaves -1 where it is: its counts of slots are no lengths."""
    group = drafts.ALONE
    if metadata.num_decode_tokens == metadata.num_actual_tokens == len(topk_indices):
        slots = impl._convert_logical_to_physical_topk(
            topk_indices, metadata, block_stride_rows=None, return_valid_counts=False
        )
        group = _group_of_step(impl, len(q), metadata)
    else:
        slots = impl.theirs.triton_convert_req_index_to_global_index(
            metadata.req_id_per_token[: len(topk_indices)],
            metadata.block_table,
            topk_indices,
            BLOCK_SIZE=metadata.block_size,
            NUM_TOPK_TOKENS=topk_indices.shape[1],
            return_valid_counts=False,
        )
    return _over_pages(q, kv_cache, slots, impl.softmax_scale, group)[0]


def _group_of_step(impl: Any, num_rows: int, metadata: Any) -> drafts.Group:
    """Of a step of decode alone. Layers of an index group have the same slots: vLLM converts them once."""
    if not drafts.switched_on():
        return drafts.ALONE
    queries = drafts.queries(num_rows, metadata.num_decodes, metadata.decode_max_query_len)
    group = getattr(impl, "index_group", None)
    if queries == 1 or getattr(group, "num_layers", 1) == 1:
        return drafts.Group(queries)
    return drafts.Group(queries, drafts.Layers(metadata, "index group", id(group), id(impl)))


def _over_pages(
    q: Tensor, kv_cache: Tensor, slots: Tensor, sm_scale: float, group: drafts.Group
) -> tuple[Tensor, Tensor]:
    return attend.over_pages(
        q, kv_cache, slots, layout=_PACKED, page_size=kv_cache.shape[1], sm_scale=sm_scale, group=group
    )


@functools.cache
def log_once(num_heads: int, cache_dtype: str) -> None:
    log.logger().info(
        "mla_fp8 attends in place of FlashMLA: %d query heads as they are, cache %s, decode and prefill. "
        "vLLM's own: the indexer unless mla_fp8_index_topk is named, cache writes, dense attention of short "
        "prompts, context parallelism's merge.",
        num_heads,
        cache_dtype,
    )
