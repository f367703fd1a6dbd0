"""FP8 latent KV caches and sparse MLA attention for PyTorch, compiled ahead of time."""

import sys
from typing import TYPE_CHECKING

from . import _libraries, _version

try:
    _libraries.load_all()
except ImportError as error:
    if sys.argv[:2] != ["-m", "doctor"]:
        raise
    from .tools import environment  # `python -m mla_fp8 doctor` says what is wrong, without a traceback

    print(environment.of_a_failure(error, sys.argv))
    sys.exit(1)

from .dispatch import explain
from .hot_rows import decode_hot_rows
from .index_layout import INDEX_LAYOUTS, IndexLayout
from .kv_cache_dtype import hisparse_backend, resolve_kv_cache_dtype
from .layout import KV_LAYOUTS, KVLayout
from .ops.build_swa_token_ids import build_swa_token_ids
from .ops.combine_topk_swa_indices import combine_topk_swa_indices, combine_topk_swa_indices_ragged
from .ops.compress_kv import compress_kv
from .ops.copy_host_rows import copy_host_rows, store_host_rows
from .ops.dequantize_kv import dequantize_kv, dequantize_kv_paged
from .ops.forget_rows import forget_rows
from .ops.index_logits import index_logits, index_logits_ragged
from .ops.index_topk import index_topk, index_topk_counters, index_topk_ragged, index_topk_workspace
from .ops.index_topk_blocks import index_topk_blocks, index_topk_ragged_blocks
from .ops.inverse_rope import inverse_rope, inverse_rope_quantize
from .ops.merge_attention_states import merge_attention_states
from .ops.merge_partial_states import merge_partial_states
from .ops.merge_topk import merge_topk
from .ops.norm_rope_insert import k_norm_rope_insert, qk_norm_rope_insert
from .ops.pad_q_heads import pad_q_heads
from .ops.paged_attention_ragged import paged_attention_ragged, paged_attention_ragged_latent
from .ops.pool_index_k import pool_index_k
from .ops.prepare_keys import prepare_keys
from .ops.prepare_queries import PreparedQueries, prepare_queries
from .ops.quantize_index_k import quantize_index_k
from .ops.quantize_kv import quantize_kv
from .ops.resolve_hot_rows import resolve_hot_rows
from .ops.sparse_decode import plan_shared_keys, sparse_attention_workspace, sparse_decode
from .ops.sparse_prefill import sparse_prefill, sparse_prefill_paged, sparse_prefill_window
from .ops.topk_to_slots import topk_to_slots
from .prefill import LayerCaches, PagedCache, PrefillWorkspace, SparsePrefillChunkCache, workspace_rows
from .tools.doctor import doctor
from .warmup import warmup

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        if name == "__version__":  # git is asked for it in a checkout: not in every import
            return _version.find()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "INDEX_LAYOUTS",
    "KV_LAYOUTS",
    "IndexLayout",
    "KVLayout",
    "LayerCaches",
    "PagedCache",
    "PrefillWorkspace",
    "PreparedQueries",
    "SparsePrefillChunkCache",
    "build_swa_token_ids",
    "combine_topk_swa_indices",
    "combine_topk_swa_indices_ragged",
    "compress_kv",
    "copy_host_rows",
    "decode_hot_rows",
    "dequantize_kv",
    "dequantize_kv_paged",
    "doctor",
    "explain",
    "forget_rows",
    "hisparse_backend",
    "index_logits",
    "index_logits_ragged",
    "index_topk",
    "index_topk_blocks",
    "index_topk_counters",
    "index_topk_ragged",
    "index_topk_ragged_blocks",
    "index_topk_workspace",
    "inverse_rope",
    "inverse_rope_quantize",
    "k_norm_rope_insert",
    "merge_attention_states",
    "merge_partial_states",
    "merge_topk",
    "pad_q_heads",
    "paged_attention_ragged",
    "paged_attention_ragged_latent",
    "plan_shared_keys",
    "pool_index_k",
    "prepare_keys",
    "prepare_queries",
    "qk_norm_rope_insert",
    "quantize_index_k",
    "quantize_kv",
    "resolve_hot_rows",
    "resolve_kv_cache_dtype",
    "sparse_attention_workspace",
    "sparse_decode",
    "sparse_prefill",
    "sparse_prefill_paged",
    "sparse_prefill_window",
    "store_host_rows",
    "topk_to_slots",
    "warmup",
    "workspace_rows",
]
