import torch

from .._arguments import call_op, expect_tensors
from .._fake import fake_returns_nothing
from .._inference import refuse_gradients
from ..index_layout import IndexLayout, get_index_layout
from ..layout import KVLayout, get_layout

__all__ = ["prepare_keys"]


def prepare_keys(
    kv: torch.Tensor,
    kv_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    k_rope: torch.Tensor | None = None,
    q_a: torch.Tensor | None = None,
    q_a_weight: torch.Tensor | None = None,
    index_k: torch.Tensor | None = None,
    index_k_weight: torch.Tensor | None = None,
    index_k_bias: torch.Tensor | None = None,
    index_cos: torch.Tensor | None = None,
    index_sin: torch.Tensor | None = None,
    index_slot_mapping: torch.Tensor | None = None,
    index_cache: torch.Tensor | None = None,
    *,
    layout: str | KVLayout,
    page_size: int,
    eps: float,
    scale: torch.Tensor | None = None,
    index_layout: str | IndexLayout = "index_fp8",
    index_page_size: int | None = None,
    index_eps: float = 1e-6,
    index_neox: bool | None = None,
    index_rope_first: bool | None = None,
    hadamard: bool = False,
    scale_format: str = "ue8m0",
    amax_floor: float | None = None,
    reciprocal: bool = False,
    out_q_a: torch.Tensor | None = None,
    out_kv: torch.Tensor | None = None,
    out_k_rope: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Prepare the keys of a layer between its first projections and its second ones, in one launch.

    Experimental; for V3.2 and GLM-5. :func:`k_norm_rope_insert` of the latents; RMSNorm of ``q_a``, the
    queries' latents; LayerNorm, RoPE and :func:`quantize_index_k` of the indexer's keys.

    Norms are float32, with the order of additions of ``mla_fp8.layer_reference``. LayerNorm is ``(x - mean) /
    sqrt(mean of squares + index_eps) * weight + bias``, each step rounded, and the result to bf16. RoPE of
    the keys is that of :func:`prepare_queries`. A token outside a table is not stored.

    Args:
        kv: As in :func:`k_norm_rope_insert`.
        kv_weight: As in :func:`k_norm_rope_insert`.
        cos: As in :func:`k_norm_rope_insert`.
        sin: As in :func:`k_norm_rope_insert`.
        positions: As in :func:`k_norm_rope_insert`.
        slot_mapping: As in :func:`k_norm_rope_insert`.
        kv_cache: As in :func:`k_norm_rope_insert`.
        k_rope: As in :func:`k_norm_rope_insert`.
        q_a: [num_tokens, n] bfloat16, any row stride; n is a multiple of 8, at most 2048.
        q_a_weight: [n] bfloat16 or float32, of RMSNorm, with ``q_a``.
        index_k: [num_tokens, 128] bfloat16, any row stride.
        index_k_weight: [128] bfloat16 or float32, of LayerNorm, with ``index_k``.
        index_k_bias: [128] of the weight's dtype, or None.
        index_cos: The indexer's ``cos``, by default that of attention.
        index_sin: The indexer's ``sin``, with ``index_cos``.
        index_slot_mapping: Of the index cache, by default ``slot_mapping``.
        index_cache: As in :func:`quantize_index_k`, with ``index_k``.
        layout: Of the cache.
        page_size: Rows of a page.
        eps: Of both RMSNorms.
        scale: As in :func:`quantize_kv`.
        index_layout: Of the index cache.
        index_page_size: Entries of its pages, by default ``page_size``.
        index_eps: Of LayerNorm.
        index_neox: As in :func:`prepare_queries`.
        index_rope_first: As in :func:`prepare_queries`.
        hadamard: As in :func:`quantize_index_k`.
        scale_format: As in :func:`quantize_index_k`.
        amax_floor: As in :func:`quantize_index_k`.
        reciprocal: As in :func:`quantize_index_k`.
        out_q_a: As ``q_a``: the result; q_a itself, or memory apart from it.
        out_kv: [num_tokens, 512] bfloat16, any row stride: the latent before it was quantised, of tokens
            without a slot too; zeros where the table has no such position.
        out_k_rope: [num_tokens, 64] bfloat16, the same of ``k_rope``, with ``out_kv``.

    Returns:
        q_a normed, [num_tokens, n] bfloat16; None without ``q_a``.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`.
    """
    given = {
        "k_rope": k_rope, "q_a": q_a, "q_a_weight": q_a_weight, "index_k": index_k,
        "index_k_weight": index_k_weight, "index_k_bias": index_k_bias, "index_cos": index_cos,
        "index_sin": index_sin, "index_slot_mapping": index_slot_mapping, "index_cache": index_cache,
    }  # fmt: skip
    kept = {"out_kv": out_kv, "out_k_rope": out_k_rope}
    expect_tensors("prepare_keys", q_a=q_a)
    refuse_gradients(
        "prepare_keys", kv=kv, kv_weight=kv_weight, cos=cos, sin=sin, kv_cache=kv_cache, scale=scale, **given,
        out_q_a=out_q_a, **kept,
    )  # fmt: skip
    if index_k is not None and (index_neox is None or index_rope_first is None):
        raise ValueError(
            "mla_fp8.prepare_keys: expected index_neox and index_rope_first with index_k, got "
            f"{index_neox} and {index_rope_first}"
        )
    if q_a is not None and out_q_a is None:
        out_q_a = torch.empty_like(q_a, memory_format=torch.contiguous_format)
    call_op(
        "prepare_keys",
        kv,
        kv_weight,
        cos,
        sin,
        positions,
        slot_mapping,
        kv_cache,
        *given.values(),
        layout=get_layout(layout).id,
        page_size=page_size,
        eps=eps,
        scale=scale,
        index_layout=get_index_layout(index_layout).id,
        index_page_size=index_page_size,
        index_eps=index_eps,
        index_neox=bool(index_neox),
        index_rope_first=bool(index_rope_first),
        hadamard=hadamard,
        scale_format=scale_format,
        amax_floor=amax_floor,
        reciprocal=reciprocal,
        out_q_a=out_q_a,
        **kept,
    )
    return out_q_a if q_a is not None else None


fake_returns_nothing("prepare_keys")
