"""A layer of DeepSeek V3.2 and GLM-5 in SGLang, between its projections: :func:`mla_fp8.prepare_keys` and
:func:`mla_fp8.prepare_queries` in place of some twelve kernels, and queries that nobody concatenates.

With mla_fp8_layer_ops (layer_ops.py), around

==============================  =========================================================================
forward_absorb_prepare          norms of q_a and kv_a, RoPE, rows and index keys into their caches: one
                                launch. Queries of attention and of the indexer: one launch, behind what the
                                batched GEMM wrote of a tensor [tokens, heads, 576]
methods of Indexer              give what is prepared already. Logits, top-k, and what short prompts do
                                without them, are SGLang's. Prompts attend to what the top-k wrote
                                (sglang_choice.py)
RadixAttention.forward          does not write again the rows of a layer
concat_mla_absorb_q_general     parts of one tensor are that tensor
==============================  =========================================================================

Rows have scales that are powers of two, as DeepSeek's and vLLM's; SGLang's own have amax / 448. Index keys
and queries are rounded to bf16 after LayerNorm and RoPE, as the model does, and have SGLang's scales.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .. import probes
from ..index_layout import INDEX_DIM
from ..layout import HEAD_DIM_V, KV_LAYOUTS
from ..ops.prepare_keys import prepare_keys
from ..ops.prepare_queries import PreparedQueries, prepare_queries
from .layer_shared import ROPE_DIM, Refusals, first, of_dims, tables
from .log import say_once
from .sglang_choice import get_topk_ragged

_LAYERS = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla"
_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
_ATTENTION = "sglang.srt.layers.radix_attention"
_CONCAT = "sglang.kernels.ops.attention.utils"
_POOL = "sglang.srt.mem_cache.memory_pool"
_CAPTURE = "sglang.srt.model_executor.runner"
_LAYOUTS = {x.bytes_per_token: x for x in (KV_LAYOUTS["dsv32"], KV_LAYOUTS["bf16"])}
_WRITTEN = "mla_fp8_written"  # attribute of a ForwardBatch: layers whose rows are in the cache
_READY = "mla_fp8_ready"  # attribute of an Indexer: what its next call is given
KNOWN = {  # sources of what _prepare does step by step, and of what calls the Indexer's methods
    f"{_LAYERS}.DeepseekMLAForwardMixin.forward_absorb_prepare": {"0a545db9d4541b80": "0.5.23"},
    f"{_INDEXER}.Indexer.forward_cuda": {"89bb59f2898d287c": "0.5.23"},
    f"{_INDEXER}.Indexer._get_topk_ragged": {"34aecba1fd46538f": "0.5.23"},
}
_NEEDS: probes.Needs = {
    _LAYERS: {
        "DeepseekMLAForwardMixin.forward_absorb_prepare": (
            "positions", "hidden_states", "forward_batch", "zero_allocator", "llama_4_scaling",
            "prev_topk_indices",
        ),
        "get_attn_tp_context": (), "get_token_to_kv_pool": (), "is_in_prefill_graph_scope": (),
        "kv_b_lora_correction": (), "maybe_capture_indexer_topk": (), "is_interleave_extend": (),
    },
    _INDEXER: {
        "Indexer._fused_q_prepare_and_store": (), "Indexer._fused_k_weights": (),
        "Indexer._fused_k_prepare_and_store": (), "is_cp_active": (),
        "Indexer._get_topk_ragged": (
            "enable_dual_stream", "forward_batch", "layer_id", "q_fp8", "weights", "metadata", "topk_result",
        ),
    },
    _ATTENTION: {"RadixAttention.forward": ("q", "k", "v", "forward_batch", "save_kv_cache")},
    _CONCAT: {"concat_mla_absorb_q_general": ("q_nope", "q_rope")},
    _POOL: {"DSATokenToKVPool.get_key_buffer": (), "DSATokenToKVPool.get_index_k_with_scale_buffer": ()},
    _CAPTURE: {"get_is_capture_mode": ()},
}  # fmt: skip


def why_not() -> str | None:
    """Why the layer of this SGLang cannot be ours, or None."""
    reason = probes.why_not_call(_NEEDS)
    if reason:
        return reason
    for target, known in KNOWN.items():
        module, name, method = target.rsplit(".", 2)
        reason = probes.why_not_rewrite(probes.find(import_module(module), f"{name}.{method}"), known)
        if reason:
            return reason
    return None


def why_not_layer(self: Any) -> str | None:
    """What of this layer we do not know, or None. It does not change once weights are loaded."""
    rope: Any = self.rotary_emb
    indexer: Any = getattr(self, "indexer", None)
    refusals: Refusals = {
        "attention without an indexer": lambda: not self.use_dsa,
        "queries without latents": lambda: self.q_lora_rank is None,
        "decode context parallelism": lambda: self.dcp_size > 1,
        "FP8 batched GEMMs by DeepGEMM": lambda: bool(self.use_deep_gemm_bmm),
        "GGUF weights": lambda: getattr(self, "_kimi_split_gguf_kv_b", False),
        "an output gate": lambda: hasattr(self, "prepare_attention_output_gate"),
        f"weights of {self.w_kc.dtype}": lambda: self.w_kc.dtype not in (torch.bfloat16, torch.float8_e4m3fn),
        **of_dims(self.kv_lora_rank, self.qk_rope_head_dim, self.q_lora_rank),
        "no RoPE, or another": lambda: rope is None or rope.is_neox_style or not _is_table(rope),
        "another indexer": lambda: (
            type(indexer).__name__ != "Indexer"
            or indexer.head_dim != INDEX_DIM
            or not _is_table(indexer.rotary_emb)
        ),
        "RMSNorm of index keys": lambda: getattr(indexer.k_norm, "bias", None) is None,
        "weights of LoRA": lambda: bool(getattr(getattr(indexer, "weights_proj", None), "set_lora", False)),
    }  # fmt: skip
    return first(refusals)


def _is_table(rope: Any) -> bool:
    table = rope.cos_sin_cache
    return bool(table.dtype is torch.float32 and table.shape[1] == ROPE_DIM)


def why_not_step(self: Any, hidden_states: Any, forward_batch: Any, llama_4_scaling: Any) -> str | None:
    """What of this step we do not know, or None."""
    module = import_module(_LAYERS)
    pool = module.get_token_to_kv_pool()
    refusals: Refusals = {
        "activations that are quantised": lambda: (
            not isinstance(hidden_states, Tensor) or hidden_states.dtype is not torch.bfloat16
        ),
        "scaled queries": lambda: llama_4_scaling is not None,
        f"caches of {type(pool).__name__}": lambda: (
            type(pool) is not import_module(_POOL).DSATokenToKVPool or getattr(pool, "index_kpool", 1) != 1
        ),
        "rows of another format": lambda: _row_bytes(pool, self.layer_id) not in _LAYOUTS,
        "prompts in graphs": module.is_in_prefill_graph_scope,
        "context parallelism": lambda: (
            module.is_interleave_extend(forward_batch) or import_module(_INDEXER).is_cp_active(forward_batch)
        ),
        "LoRA of kv_b_proj": lambda: (
            module.kv_b_lora_correction(self) or getattr(module, "_SGLANG_EXPERIMENTAL_LORA_OPTI", False)
        ),
        "FP8 queries": lambda: (
            getattr(module, "_ENABLE_DSA_Q8KV8_BORN_FP8_Q", False)
            or self._fuse_rope_for_trtllm_mla(forward_batch)
        ),
    }
    return first(refusals)


def _row_bytes(pool: Any, layer_id: int) -> int:
    rows: Tensor = pool.get_key_buffer(layer_id)
    return rows[0].numel() * rows.element_size()


def forward_absorb_prepare(
    original: Callable[..., Any],
    self: Any,
    positions: Tensor,
    hidden_states: Tensor,
    forward_batch: Any,
    zero_allocator: Any,
    llama_4_scaling: Tensor | None = None,
    prev_topk_indices: Tensor | None = None,
) -> Any:
    kept = vars(self)
    if "mla_fp8_why_not" not in kept:
        kept["mla_fp8_why_not"] = why_not_layer(self)
    reason = kept["mla_fp8_why_not"] or why_not_step(self, hidden_states, forward_batch, llama_4_scaling)
    if reason:
        say_once(f"mla_fp8: layers of {type(self).__name__} stay SGLang's for {reason}")
        return original(
            self, positions, hidden_states, forward_batch, zero_allocator, llama_4_scaling, prev_topk_indices
        )
    say_once("mla_fp8 serves norms, RoPE, caches' writes and queries of DeepSeek V3.2 and GLM-5")
    return _prepare(self, positions, hidden_states, forward_batch, zero_allocator, prev_topk_indices)


def _prepare(
    self: Any, positions: Tensor, hidden_states: Tensor, forward_batch: Any, zero_allocator: Any,
    prev_topk_indices: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    module = import_module(_LAYERS)
    indexer = self.indexer if self.should_run_indexer(prev_topk_indices) else None
    qkv = module.get_attn_tp_context().fetch_qkv_latent()
    index_k = index_weights = None
    if indexer is not None:
        index_k, index_weights = _index_projections(indexer, hidden_states)
    q_lora, k_nope, k_pe = _keys(self, positions, qkv, index_k, indexer, forward_batch)

    q = self.q_b_proj_forward(q_lora)
    q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
    whole = q.new_empty(*q.shape[:2], HEAD_DIM_V + ROPE_DIM)
    asks = indexer if indexer is None or not _takes_all(indexer, forward_batch) else None
    queries = _queries(self, positions, q_pe, whole[..., HEAD_DIM_V:], q_lora, index_weights, asks)
    with _beside(self.alt_stream):
        _absorb(self, q_nope, whole[..., :HEAD_DIM_V], zero_allocator)
    if indexer is None:
        topk_indices = module.maybe_capture_indexer_topk(self.layer_id, prev_topk_indices)
    else:
        topk_indices = _choose(
            indexer, queries, hidden_states, q_lora, positions, forward_batch, self.layer_id
        )
    _join(self.alt_stream)
    return (
        queries.q_pe, k_pe.unsqueeze(1), whole[..., :HEAD_DIM_V], k_nope.unsqueeze(1), forward_batch,
        zero_allocator, positions, topk_indices, None, None,
    )  # fmt: skip


def _takes_all(indexer: Any, forward_batch: Any) -> bool:
    """Whether the indexer chooses without queries: prompts that are no longer than its choice."""
    return bool(not indexer.dsa_enable_prefill_cp and indexer._should_skip_logits_computation(forward_batch))


def _index_projections(indexer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """The key, and the heads' weights as their projection gives them."""
    if indexer.use_dsa_indexer_fusion:
        both: tuple[Tensor, Tensor] = indexer._fused_k_weights(hidden_states)
        return both
    return indexer.wk(hidden_states)[0], indexer._weights_proj_bf16_in_fp32_out(hidden_states)


def _keys(
    self: Any, positions: Tensor, qkv: Tensor, index_k: Tensor | None, indexer: Any, forward_batch: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(q_lora, k_nope, k_pe), all ready; the rows and index keys are in their caches."""
    q_a, kv_a, k_pe = qkv.split([self.q_lora_rank, HEAD_DIM_V, ROPE_DIM], dim=-1)
    pool = import_module(_LAYERS).get_token_to_kv_pool()
    rows = pool.get_key_buffer(self.layer_id).flatten(1)
    slots = forward_batch.out_cache_loc[: len(qkv)]
    more: dict[str, Any] = {}
    if indexer is not None:
        if hasattr(pool, "invalidate_index_buffer_for_layer"):
            pool.invalidate_index_buffer_for_layer(self.layer_id)
        index_cos, index_sin = tables(indexer.rotary_emb)
        more = {
            "index_k": index_k,
            "index_k_weight": indexer.k_norm.weight,
            "index_k_bias": indexer.k_norm.bias,
            "index_eps": indexer.k_norm.variance_epsilon,
            "index_cos": index_cos,
            "index_sin": index_sin,
            "index_cache": pool.get_index_k_with_scale_buffer(layer_id=self.layer_id),
            "index_page_size": pool.index_page_size,
            "index_neox": indexer.is_neox_style,
            "index_rope_first": True,
            "hadamard": not indexer.use_dsa_indexer_fusion,
            "scale_format": "f32",
            "reciprocal": True,
        }
    k_nope, k_rope = torch.empty_like(kv_a), torch.empty_like(k_pe)
    q_lora = prepare_keys(
        kv_a, self.kv_a_layernorm.weight, *tables(self.rotary_emb), positions, slots.contiguous(), rows,
        k_pe, q_a, self.q_a_layernorm.weight, layout=_LAYOUTS[_row_bytes(pool, self.layer_id)], page_size=1,
        eps=self.kv_a_layernorm.variance_epsilon, out_kv=k_nope, out_k_rope=k_rope, **more,
    )  # fmt: skip
    vars(forward_batch).setdefault(_WRITTEN, set()).add(self.layer_id)
    assert q_lora is not None  # for mypy
    return q_lora, k_nope, k_rope


def _queries(
    self: Any, positions: Tensor, q_pe: Tensor, rotated: Tensor, q_lora: Tensor,
    index_weights: Tensor | None, indexer: Any,
) -> PreparedQueries:  # fmt: skip
    index_q = weights = None
    more: dict[str, Any] = {}
    if indexer is not None:
        weights = index_weights
        index_q = indexer.wq_b(q_lora)[0].view(-1, indexer.n_heads, indexer.head_dim)
        index_cos, index_sin = tables(indexer.rotary_emb)
        fused = indexer.use_dsa_indexer_fusion
        constants = (indexer.n_heads**-0.5, indexer.softmax_scale)
        more = {
            "index_cos": index_cos,
            "index_sin": index_sin,
            "index_neox": indexer.is_neox_style,
            "index_rope_first": True,
            "hadamard": not fused,
            "scale_format": "f32" if fused or indexer.scale_fmt is None else "ue8m0",
            "reciprocal": fused,
            # SGLang's order: all constants before the scale, or one before and one behind.
            "weight_scale": constants[0] * constants[1] if fused else constants[0],
            "head_scale": 1.0 if fused else constants[1],
        }
    cos, sin = tables(self.rotary_emb)
    return prepare_queries(q_pe, index_q, weights, cos, sin, positions, out_q_pe=rotated, **more)


def _absorb(self: Any, q_nope: Tensor, out: Tensor, zero_allocator: Any) -> None:
    """q_nope [tokens, heads, ..] times the keys' weights, into ``out`` [tokens, heads, 512]."""
    if self.w_kc.dtype is torch.bfloat16:
        torch.bmm(q_nope.transpose(0, 1), self.w_kc, out=out.transpose(0, 1))
        return
    module = import_module(_LAYERS)
    new = getattr(module, "_is_cublas_ge_129", False)
    zero = q_nope.new_zeros(1, dtype=torch.float32) if new else zero_allocator.allocate(1)
    values, scale = module.per_tensor_quant_mla_fp8(q_nope.transpose(0, 1), zero)
    product = module.bmm_fp8(values, self.w_kc, scale, self.w_scale, torch.bfloat16)
    out.copy_(product.transpose(0, 1))  # which has no `out`


@contextmanager
def _beside(stream: Any) -> Iterator[None]:
    """On SGLang's second stream where it captures a graph: beside the indexer, as SGLang does."""
    if stream is None or not import_module(_CAPTURE).get_is_capture_mode():
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def _join(stream: Any) -> None:
    if stream is not None and import_module(_CAPTURE).get_is_capture_mode():
        torch.cuda.current_stream().wait_stream(stream)


def _choose(
    indexer: Any, queries: PreparedQueries, hidden_states: Tensor, q_lora: Tensor, positions: Tensor,
    forward_batch: Any, layer_id: int,
) -> Any:  # fmt: skip
    """The indexer's choice by SGLang's own method, which finds its queries and keys made."""
    kept = vars(indexer)
    fused = kept.get("use_dsa_indexer_fusion", False)
    weights = queries.index_weights
    kept[_READY] = queries.index_q, None if weights is None else weights.unsqueeze(-1)
    kept["use_dsa_indexer_fusion"] = True  # the way through the methods below
    try:
        return indexer(
            x=hidden_states,
            q_lora=q_lora,
            positions=positions,
            forward_batch=forward_batch,
            layer_id=layer_id,
        )
    finally:
        kept["use_dsa_indexer_fusion"] = fused
        kept.pop(_READY, None)


def fused_q_prepare_and_store(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    ready = vars(self).get(_READY)
    if ready is None:
        return original(self, *args, **options)
    num_tokens = options.get("num_tokens")
    return tuple(x[:num_tokens] for x in ready)


def fused_k_weights(original: Callable[..., Any], self: Any, x: Any) -> Any:
    return original(self, x) if vars(self).get(_READY) is None else (x, None)


def fused_k_prepare_and_store(original: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
    if vars(self).get(_READY) is None:
        original(self, *args, **options)


def attention_forward(
    original: Callable[..., Any], self: Any, q: Any, k: Any, v: Any, forward_batch: Any,
    save_kv_cache: bool = True, *args: Any, **options: Any,
) -> Any:  # fmt: skip
    written = vars(forward_batch).get(_WRITTEN, ())
    save_kv_cache = save_kv_cache and self.layer_id not in written
    return original(self, q, k, v, forward_batch, save_kv_cache, *args, **options)


def concat_mla_absorb_q_general(original: Callable[..., Tensor], q_nope: Tensor, q_rope: Tensor) -> Tensor:
    dims = q_nope.shape[-1] + q_rope.shape[-1]
    behind = q_nope.data_ptr() + q_nope.shape[-1] * q_nope.element_size()
    whole = (
        q_nope.dim() == 3
        and q_nope.stride() == q_rope.stride() == (q_nope.shape[1] * dims, dims, 1)
        and q_rope.data_ptr() == behind
        and q_nope.untyped_storage().data_ptr() == q_rope.untyped_storage().data_ptr()
    )
    if not whole:
        return original(q_nope, q_rope)
    return q_nope.as_strided((*q_nope.shape[:2], dims), q_nope.stride())


HOOKS: dict[str, Callable[..., Any]] = {
    f"{_LAYERS}.DeepseekMLAForwardMixin.forward_absorb_prepare": forward_absorb_prepare,
    f"{_INDEXER}.Indexer._fused_q_prepare_and_store": fused_q_prepare_and_store,
    f"{_INDEXER}.Indexer._fused_k_weights": fused_k_weights,
    f"{_INDEXER}.Indexer._fused_k_prepare_and_store": fused_k_prepare_and_store,
    f"{_INDEXER}.Indexer._get_topk_ragged": get_topk_ragged,
    f"{_ATTENTION}.RadixAttention.forward": attention_forward,
    f"{_CONCAT}.concat_mla_absorb_q_general": concat_mla_absorb_q_general,
}
