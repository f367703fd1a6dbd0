import torch

from .._arguments import expect_tensors, need_tensors
from .._fake import fake_returns_nothing
from .._inference import refuse_gradients
from ..index_layout import IndexLayout, get_index_layout
from ..layout import KVLayout, get_layout


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
    """What lies between a layer's first projections and its second ones, in one launch (V3.2, GLM-5).

    :func:`mla_fp8.k_norm_rope_insert` of the latents; RMSNorm of q_a, the queries' latents; and of the
    indexer's keys LayerNorm, RoPE and :func:`mla_fp8.quantize_index_k`. The arguments are those of the two
    ops, and

    ==================  ======================  ============  ==============================================
    q_a                 [num_tokens, n]         bf16          optional; any row stride; n a multiple of 8, at
                                                              most 2048
    q_a_weight          [n]                     bf16 or fp32  with q_a
    index_k             [num_tokens, 128]       bf16          optional; any row stride
    index_k_weight      [128]                   bf16 or fp32  LayerNorm's, with index_k
    index_k_bias        [128]                   as the        optional
                                                weight
    index_cos           [max_pos, half]         fp32          the indexer's tables, by default cos and sin
    index_slot_mapping  [n], n <= num_tokens    as            by default slot_mapping
                                                slot_mapping
    index_cache                                               with index_k; pages of ``index_page_size``, by
                                                              default ``page_size``
    out_q_a             as q_a                  bf16          optional: q_a itself, or memory apart from it
    out_kv, out_k_rope  [num_tokens, 512 / 64]  bf16          optional: the latent and the rotated rest as
                                                              they were before they were quantised, of tokens
                                                              without a slot too
    ==================  ======================  ============  ==============================================

    RMSNorm of q_a is float32: a lane's squares, those of eight neighbours and of those 256 further on, in
    order, then halves of 32 sums; the mean by division. LayerNorm is float32: sums of 128 are a tree over
    eight neighbours, then halves of sixteen; ``(x - mean) * 1 / sqrt(mean of squares + index_eps) * weight +
    bias``, each step rounded, and the result to bf16. RoPE of the keys, and ``index_neox`` and
    ``index_rope_first``, are those of :func:`mla_fp8.prepare_queries`. A token whose position is outside a
    table is not stored there, and has zeros in out_kv and out_k_rope.

    Returns q_a normed, ``out_q_a`` if it is given; None without q_a. Raises RuntimeError naming the argument,
    what was expected and what came, before anything is written; ValueError for an unknown layout name, and
    for index_k without ``index_neox`` or ``index_rope_first``.
    """
    given = {
        "k_rope": k_rope, "q_a": q_a, "q_a_weight": q_a_weight, "index_k": index_k,
        "index_k_weight": index_k_weight, "index_k_bias": index_k_bias, "index_cos": index_cos,
        "index_sin": index_sin, "index_slot_mapping": index_slot_mapping, "index_cache": index_cache,
    }  # fmt: skip
    kept = {"out_kv": out_kv, "out_k_rope": out_k_rope}
    expect_tensors("prepare_keys", kv_weight=kv_weight, scale=scale, **given, out_q_a=out_q_a, **kept)
    need_tensors("prepare_keys", kv=kv)
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
    torch.ops.mla_fp8.prepare_keys(
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
