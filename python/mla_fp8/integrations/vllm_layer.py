"""A layer of DeepSeek V3.2 and GLM-5 in vLLM, between its projections: :func:`mla_fp8.prepare_keys` and
:func:`mla_fp8.prepare_queries` in place of vLLM's fused kernels, and queries that nobody concatenates.

Instead of ``DeepseekV32Attention.forward``, with mla_fp8_layer_ops (layer_ops.py):

=============  ==========================================================================================
projections    vLLM's, the indexer's too; so are collectives, what is captured, and where a graph breaks
keys, caches   one launch: norms of q_a and kv_a, RoPE of k_pe, row; the indexer's key into its cache
queries        one tensor [tokens, heads, 576]: the batched GEMM writes its first 512 columns, the launch
               that prepares the indexer's queries the other 64. Attention gets it as it is
the rest       vLLM's own method: indexer, attention, dense attention of short prompts
=============  ==========================================================================================

Indexer keys and queries are rounded to bf16 after norm and RoPE, as the model does and vLLM's kernels do not.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .. import probes
from ..index_layout import INDEX_DIM, INDEX_LAYOUTS
from ..layout import HEAD_DIM_V, KV_LAYOUTS, KVLayout
from ..ops.prepare_keys import prepare_keys
from ..ops.prepare_queries import prepare_queries
from . import vllm_context_parallel, vllm_indexer, vllm_slots, vllm_sparse
from .flash_mla_calls import around
from .layer_shared import ROPE_DIM, Refusals, first, of_dims, tables
from .log import say_once

MODULE = "vllm.models.deepseek_v32.attention"
LAYER = "DeepseekV32Attention"
_INDEX = INDEX_LAYOUTS["index_fp8"]
_LAYOUTS = {
    "fp8_ds_mla": KV_LAYOUTS["dsv32"], "auto": KV_LAYOUTS["bf16"], "bfloat16": KV_LAYOUTS["bf16"],
}  # fmt: skip
KNOWN = {  # sources of what _forward does step by step, and of what it hands on to
    f"{LAYER}.forward": {"9a56898869b40f89": "0.33.0"},
    f"{LAYER}._sparse_indexer_and_attn": {"72439f088e75d4db": "0.33.0"},
}
_NEEDS: probes.Needs = {
    MODULE: {
        f"{LAYER}.forward": ("positions", "hidden_states"),
        f"{LAYER}._should_prepare_mqa_query": (),
        f"{LAYER}._sparse_indexer_and_attn": (
            "positions", "q_c", "q_nope", "q_pe", "index_q_fp8", "index_k", "index_weights_out", "kv_c",
            "k_pe", "ql_nope", "mqa_q", "output",
        ),
        "get_forward_context": (), "get_attention_context": ("layer_name",),
    },
    vllm_sparse.MODULE: {
        "FlashMLASparseImpl.forward_mqa": ("q",), "FlashMLASparseImpl.record_logical_topk_ready": (),
    },
    vllm_indexer.MODULE: {"unpack_seq_triton": ()},
    "vllm.utils.deep_gemm": {"mqa_logits_use_mx_scales": ()},
}  # fmt: skip


def why_not() -> str | None:
    """Why the layer of this vLLM cannot be ours, or None."""
    reason = probes.why_not_call(_NEEDS)
    if reason:
        return reason
    for name, known in KNOWN.items():
        reason = probes.why_not_rewrite(probes.find(import_module(MODULE), name), known)
        if reason:
            return reason
    return None


def take_over() -> bool:
    """Re-entrant; returns whether anything was left to do."""
    layer = getattr(import_module(MODULE), LAYER)
    impl = import_module(vllm_sparse.MODULE).FlashMLASparseImpl
    wrapped = around(layer.forward, forward)
    if wrapped is layer.forward:
        return False
    layer.forward = wrapped
    impl.forward_mqa = around(impl.forward_mqa, forward_mqa)
    indexer = import_module(vllm_indexer.MODULE)
    indexer.unpack_seq_triton = around(indexer.unpack_seq_triton, vllm_slots.void)  # type: ignore[attr-defined]
    vllm_slots.switch(True)
    return True


def why_not_layer(self: Any) -> str | None:
    """What of this layer we do not know, or None. It does not change once a layer is built."""
    impl = import_module(vllm_sparse.MODULE).FlashMLASparseImpl
    indexer = self.indexer
    refusals: Refusals = {
        f"attention of {type(self.impl).__name__}": lambda: not isinstance(self.impl, impl),
        "prefill context parallelism": lambda: self.use_pcp,
        f"decode context parallelism without {vllm_context_parallel.NAME}": lambda: (
            _of_ranks(self)
            and not (isinstance(self.impl, vllm_sparse.RankImpl) and vllm_context_parallel.serves(self.impl))
        ),
        "an exchange of ranks by vLLM": lambda: (
            _of_ranks(self) and vllm_context_parallel.why_vllms(self, self._vllm_config) is not None
        ),
        "HiSparse": lambda: self.hisparse_cache is not None,
        "FP8 queries": lambda: self._fp8_query,
        f"caches of {self.kv_cache_dtype}": lambda: self.kv_cache_dtype not in _LAYOUTS,
        **of_dims(self.kv_lora_rank, self.qk_rope_head_dim, self.q_lora_rank),
        "other RoPE of attention": lambda: (
            self.rotary_emb.is_neox_style or self.rotary_emb.cos_sin_cache.shape[1] != ROPE_DIM
        ),
    }
    if indexer is not None:
        scales = import_module("vllm.utils.deep_gemm").mqa_logits_use_mx_scales
        refusals |= {
            f"index keys of {indexer.head_dim} dims": lambda: indexer.head_dim != INDEX_DIM,
            "another RoPE of the indexer": lambda: self.indexer_rope_emb.cos_sin_cache.shape[1] != ROPE_DIM,
            "shuffled index keys": lambda: indexer.k_cache.uses_shuffled_layout,
            "index scales of Blackwell": scales,
        }
    return first(refusals)


def _of_ranks(self: Any) -> bool:
    return bool(getattr(self.impl, "dcp_world_size", 1) > 1)


def forward(original: Any, self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
    reason = vars(self).get("mla_fp8_why_not", self)
    if reason is self:  # not asked yet
        reason = why_not_layer(self)
        if hidden_states.dtype is not torch.bfloat16:
            reason = f"activations of {hidden_states.dtype}"
        vars(self)["mla_fp8_why_not"] = reason
        say_once(
            f"mla_fp8: layers of {LAYER} stay vLLM's for {reason}"
            if reason
            else "mla_fp8 serves norms, RoPE, caches' writes and queries of DeepSeek V3.2 and GLM-5"
        )
    return original(self, positions, hidden_states) if reason else _forward(self, positions, hidden_states)


def forward_mqa(original: Any, self: Any, q: Any, *args: Any, **options: Any) -> Any:
    """Queries that are whole already: ``_forward`` passes them as the first of vLLM's two parts."""
    if isinstance(q, tuple) and q[0].shape[-1] == HEAD_DIM_V + q[1].shape[-1]:
        q = q[0]
    return original(self, q, *args, **options)


def _forward(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
    module = import_module(MODULE)
    context = module.get_forward_context()
    metadata = module.get_attention_context(self.layer_name)[0]
    self.impl.prepare_for_batch(metadata)
    absorbed = self._should_prepare_mqa_query(metadata, context.cudagraph_runtime_mode)
    indexer = self.indexer if self.indexer is not None and not self.skip_topk else None
    num_tokens, heads = len(hidden_states), self.num_local_heads

    qkv = self.fused_qkv_a_proj(hidden_states)[0]
    index_k = index_weights = None
    if indexer is not None:
        index = indexer.wk_weights_proj(hidden_states)[0]
        index_k, index_weights = index[:, : indexer.head_dim], index[:, indexer.head_dim :]
    q_c, kv_c, k_pe = _keys(self, positions, qkv, index_k, indexer, context)
    if indexer is not None and not vllm_indexer.serves():  # whose top-k leaves nothing as it was
        self.topk_indices_buffer[:num_tokens] = -1

    q = self.q_b_proj(q_c)[0].view(-1, heads, self.qk_head_dim)
    q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
    whole = q_nope  # of dense attention
    rotated = None
    if absorbed:
        whole = q.new_empty(num_tokens, heads, HEAD_DIM_V + self.qk_rope_head_dim)
        rotated = whole[..., HEAD_DIM_V:]
        torch.bmm(q_nope.transpose(0, 1), self.W_UK_T, out=whole[..., :HEAD_DIM_V].transpose(0, 1))
    queries = _queries(self, positions, q_pe, rotated, q_c, index_weights, indexer)
    if absorbed and _of_ranks(self):
        whole = whole.as_subclass(vllm_context_parallel.Whole)

    output = q.new_empty(num_tokens, heads * self.v_head_dim)
    self._sparse_indexer_and_attn(
        positions, q_c, q_nope, q_pe, queries.index_q, None, queries.index_weights, kv_c, k_pe, whole,
        queries.q_pe, output,
    )  # fmt: skip
    return self.o_proj(output)[0]  # type: ignore[no-any-return]


def _keys(
    self: Any, positions: Tensor, qkv: Tensor, index_k: Tensor | None, indexer: Any, context: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(q_c, kv_c, k_pe), all ready; the rows and index keys are in their caches."""
    num_tokens = len(qkv)
    q_c, kv_c, k_pe = qkv.split([self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
    layout = _LAYOUTS[self.kv_cache_dtype]
    no_slots = positions[:0]
    kv_cache, slots = self.kv_cache, no_slots
    if context.attn_metadata is None:  # a profiling run
        kv_cache = layout.empty(0, 1, qkv.device)
    else:
        slots = _of_tokens(context.slot_mapping.get(self.layer_name), no_slots, num_tokens)
    out_kv, out_pe = torch.empty_like(kv_c), torch.empty_like(k_pe)  # dense attention of short prompts
    more: dict[str, Any] = {}
    if indexer is not None and context.attn_metadata is not None:
        cache = indexer.k_cache.kv_cache
        index_cos, index_sin = tables(self.indexer_rope_emb)
        more = {
            "index_k": index_k,
            "index_k_weight": indexer.k_norm.weight,
            "index_k_bias": indexer.k_norm.bias,
            "index_eps": indexer.k_norm.eps,
            "index_cos": index_cos,
            "index_sin": index_sin,
            "index_slot_mapping": _of_tokens(
                context.slot_mapping.get(indexer.k_cache.prefix), slots, num_tokens
            ),
            "index_cache": cache[:, :, None],
            "index_page_size": cache.shape[1],
            "index_neox": not self._index_rope_interleave,
            "index_rope_first": True,
        }
    q_c = prepare_keys(
        kv_c, self.kv_a_layernorm.weight, *tables(self.rotary_emb), positions, slots, kv_cache, k_pe, q_c,
        self.q_a_layernorm.weight, layout=layout, page_size=_page_size(kv_cache, layout),
        eps=self.kv_a_layernorm.variance_epsilon, out_kv=out_kv, out_k_rope=out_pe, **more,
    )  # fmt: skip
    assert q_c is not None  # for mypy
    return q_c, out_kv, out_pe


def _queries(
    self: Any, positions: Tensor, q_pe: Tensor, rotated: Tensor | None, q_c: Tensor,
    index_weights: Tensor | None, indexer: Any,
) -> Any:  # fmt: skip
    index_q = weights = None
    more: dict[str, Any] = {}
    if indexer is not None:
        weights = index_weights
        index_q = indexer.wq_b(q_c)[0].view(-1, indexer.n_head, indexer.head_dim)
        index_cos, index_sin = tables(self.indexer_rope_emb)
        more = {
            "index_cos": index_cos,
            "index_sin": index_sin,
            "index_neox": not self._index_rope_interleave,
            "index_rope_first": True,
            "weight_scale": indexer.softmax_scale,
            "head_scale": indexer.n_head**-0.5,
        }
    cos, sin = tables(self.rotary_emb)
    return prepare_queries(q_pe, index_q, weights, cos, sin, positions, out_q_pe=rotated, **more)


def _of_tokens(slots: Tensor | None, otherwise: Tensor, num_tokens: int) -> Tensor:
    return otherwise if slots is None else slots[:num_tokens]


def _page_size(kv_cache: Tensor, layout: KVLayout) -> int:
    return kv_cache.shape[1] if kv_cache.dim() > 2 else 1
