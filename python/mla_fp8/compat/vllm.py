"""vLLM's fused ops around the attention of DeepSeek V4, by their names and argument order.

``cos_sin_cache`` is [max_pos, 64] float32: 32 cosines, then 32 sines. Ours round to bf16 between norm and
RoPE, and between RoPE and a cast, as the model does; vLLM's round once, and their elements may be one code
apart. Bad input raises RuntimeError from the op, under our argument names.
"""

import torch

from ..layout import KV_LAYOUTS, KVLayout
from ..ops.inverse_rope import inverse_rope_quantize
from ..ops.norm_rope_insert import k_norm_rope_insert, qk_norm_rope_insert


def _tables(cos_sin_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = cos_sin_cache.shape[-1] // 2
    return cos_sin_cache[..., :half], cos_sin_cache[..., half:]


def _layout(kv_mxfp8: bool) -> KVLayout:
    return KV_LAYOUTS["dsv41" if kv_mxfp8 else "dsv4"]


def fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    position_ids: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_head_padded: int | float,
    eps: float,
    cache_block_size: int | None = None,
    apply_q_norm: bool = True,
    kv_mxfp8: bool = False,
    apply_q_rope: bool = True,
    is_q_interleaved: bool = False,
) -> torch.Tensor | None:
    """:func:`mla_fp8.qk_norm_rope_insert` of latents that are normed already.

    Three forms exist. Eight arguments (the seventh is eps, the eighth the block size): ``q`` is written in
    place, nothing is returned. Nine: q comes back with ``q_head_padded`` heads. Thirteen: the same, with
    V4.1's rows (``kv_mxfp8``) and q without a norm. Raises ValueError for q that is not rotated, or that is
    to be interleaved for another kernel.
    """
    if not apply_q_rope or is_q_interleaved:
        raise ValueError(
            "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert: apply_q_rope must be True and "
            f"is_q_interleaved False, got {apply_q_rope} and {is_q_interleaved}"
        )
    in_place = cache_block_size is None
    result = qk_norm_rope_insert(
        q, kv, None, *_tables(cos_sin_cache), position_ids, slot_mapping, k_cache,
        layout=_layout(kv_mxfp8),
        page_size=int(eps) if cache_block_size is None else cache_block_size,
        eps=float(q_head_padded) if in_place else eps,
        norm_q=apply_q_norm,
        num_heads=None if in_place else int(q_head_padded),
        out_q=q if in_place else None,
    )  # fmt: skip
    return None if in_place else result


def fused_deepseek_v4_kv_rope_quant_insert(
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    position_ids: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    cache_block_size: int,
) -> None:
    """:func:`mla_fp8.k_norm_rope_insert` of latents that are normed already."""
    k_norm_rope_insert(
        kv, None, *_tables(cos_sin_cache), position_ids, slot_mapping, k_cache,
        layout="dsv4", page_size=cache_block_size, eps=0.0,
    )  # fmt: skip


def fused_deepseek_v4_kv_norm_rope_quant_insert(
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    position_ids: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    cache_block_size: int,
) -> None:
    """:func:`mla_fp8.k_norm_rope_insert`."""
    k_norm_rope_insert(
        kv, norm_weight, *_tables(cos_sin_cache), position_ids, slot_mapping, k_cache,
        layout="dsv4", page_size=cache_block_size, eps=eps,
    )  # fmt: skip


def fused_inv_rope_fp8_quant(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int = 448,
    rope_dim: int = 64,
    quant_group_size: int = 128,
    tma_aligned_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`mla_fp8.inverse_rope_quantize`: e4m3 [T, G, D], float32 scales as Hopper's DeepGEMM has them.

    ``o`` may have more heads than the groups: those behind them are padding. Raises ValueError for scales
    packed for Blackwell (``tma_aligned_scales``) and for dims that are not those of ``o``.
    """
    if tma_aligned_scales or nope_dim + rope_dim != o.shape[-1] or rope_dim != cos_sin_cache.shape[-1]:
        raise ValueError(
            "fused_inv_rope_fp8_quant: tma_aligned_scales must be False, nope_dim + rope_dim the last "
            f"dimension of o ({o.shape[-1]}), rope_dim that of cos_sin_cache ({cos_sin_cache.shape[-1]}), "
            f"got {tma_aligned_scales}, {nope_dim} and {rope_dim}"
        )
    heads = o[:, : n_groups * heads_per_group]
    cos, sin = _tables(cos_sin_cache)
    return inverse_rope_quantize(heads, cos, sin, positions, num_groups=n_groups, tile=quant_group_size)
