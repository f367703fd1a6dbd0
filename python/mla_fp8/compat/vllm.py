"""vLLM's fused ops around the attention of DeepSeek V4 and V4.1, by their names and argument order.

``cos_sin_cache`` is [max_pos, 64] float32: 32 cosines, then 32 sines. Ours round to bf16 between norm and
RoPE, and between RoPE and a cast, as the model does; vLLM's round once, and their elements may be one code
apart. Bad input raises the op's RuntimeError, with the caller's names. V4's own compressor is not here: its
state is paged through block tables and holds scores with their bias.
"""

import torch

from ..layout import KV_LAYOUTS
from ..ops.compress_kv import compress_kv
from ..ops.inverse_rope import inverse_rope, inverse_rope_quantize
from ..ops.norm_rope_insert import k_norm_rope_insert, qk_norm_rope_insert
from ._names import caller_names, expect_rows
from .vllm_hisparse import (
    hisparse_gather_compact,
    hisparse_gather_plan,
    hisparse_invalidate_written_slots,
    hisparse_resolve_residency,
)

_ROTATION = {"cos": "cos_sin_cache", "sin": "cos_sin_cache"}
_INSERT = _ROTATION | {
    "positions": "position_ids", "kv_cache": "k_cache", "page_size": "cache_block_size",
    "num_heads": "q_head_padded", "out_q": "q", "norm_q": "apply_q_norm", "kv_weight": "norm_weight",
}  # fmt: skip

__all__ = [
    "fused_deepseek_v4_kv_norm_rope_quant_insert",
    "fused_deepseek_v4_kv_rope_quant_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    "fused_inv_rope_fp8_quant",
    "fused_save_compress_norm",
    "hisparse_gather_compact",
    "hisparse_gather_plan",
    "hisparse_invalidate_written_slots",
    "hisparse_resolve_residency",
    "rope_quant_insert",
]


def _tables(cos_sin_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = cos_sin_cache.shape[-1] // 2
    return cos_sin_cache[..., :half], cos_sin_cache[..., half:]


@caller_names(**_INSERT)
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
    place, nothing is returned. Nine: q comes back with ``q_head_padded`` heads. Thirteen: the same, if wanted
    with q without a norm. Raises ValueError for V4.1's own rows (``kv_mxfp8``), whose scales vLLM 0.33 keeps
    behind each row's values, for q that is not rotated, or that is to be interleaved for another kernel.
    """
    if kv_mxfp8 or not apply_q_rope or is_q_interleaved:
        raise ValueError(
            "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert: kv_mxfp8 must be False, apply_q_rope True, "
            f"is_q_interleaved False, got {kv_mxfp8}, {apply_q_rope} and {is_q_interleaved}"
        )
    in_place = cache_block_size is None
    result = qk_norm_rope_insert(
        q, kv, None, *_tables(cos_sin_cache), position_ids, slot_mapping, k_cache,
        layout="dsv4",
        page_size=int(eps) if cache_block_size is None else cache_block_size,
        eps=float(q_head_padded) if in_place else eps,
        norm_q=apply_q_norm,
        num_heads=None if in_place else int(q_head_padded),
        out_q=q if in_place else None,
    )  # fmt: skip
    return None if in_place else result


@caller_names(**_INSERT)
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


@caller_names(**_INSERT)
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


@caller_names(**_ROTATION, num_groups="n_groups", tile="quant_group_size")
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
    quantize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`mla_fp8.inverse_rope_quantize`: e4m3 [T, G, D], float32 scales as Hopper's DeepGEMM has them.

    Without ``quantize`` bf16 [T, G, D] of :func:`mla_fp8.inverse_rope` and no scales. ``o`` may have more
    heads than the groups: those behind them are padding. Raises ValueError for scales packed for Blackwell
    (``tma_aligned_scales``) and for dims that are not those of ``o``.
    """
    if tma_aligned_scales or nope_dim + rope_dim != o.shape[-1] or rope_dim != cos_sin_cache.shape[-1]:
        raise ValueError(
            "fused_inv_rope_fp8_quant: tma_aligned_scales must be False, nope_dim + rope_dim the last "
            f"dimension of o ({o.shape[-1]}), rope_dim that of cos_sin_cache ({cos_sin_cache.shape[-1]}), "
            f"got {tma_aligned_scales}, {nope_dim} and {rope_dim}"
        )
    used = n_groups * heads_per_group
    if o.dim() != 3 or o.shape[1] < used:
        raise ValueError(
            f"fused_inv_rope_fp8_quant: o must have shape [num_tokens, at least {used} heads, "
            f"{nope_dim + rope_dim}], got {[*o.shape]}"
        )
    heads = o[:, :used]
    cos, sin = _tables(cos_sin_cache)
    if not quantize:
        rotated = inverse_rope(heads, cos, sin, positions)
        return rotated.view(len(o), n_groups, heads_per_group * o.shape[-1]), o.new_empty(0).float()
    return inverse_rope_quantize(heads, cos, sin, positions, num_groups=n_groups, tile=quant_group_size)


_ROWS = {torch.bfloat16: "bf16_512", torch.float8_e4m3fn: "fp8_e4m3_512"}  # of caches without packed rows


@caller_names(
    start_pos="positions", state="state_cache", state_slots="slot_mapping", norm_weight="rms_norm_weight",
    ratio="compress_ratio", eps="rms_norm_eps", out_latent="latent_out",
)  # fmt: skip
def fused_save_compress_norm(
    kv_score: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    token_to_req_indices: torch.Tensor | None,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    compress_ratio: int,
    latent_out: torch.Tensor,
    prev_rows: torch.Tensor | None = None,
    prev_row_indices: torch.Tensor | None = None,
) -> None:
    """:func:`mla_fp8.compress_kv` without a cache: V4.1's latents of ratio 1 or 2, and the ring of ratio 2.

    ``state_cache`` is a ring per request, [blocks, capacity, 1024], and ``slot_mapping`` of a request's first
    token says which: block * capacity + row; negative: the request is skipped. For ratio 1 it marks the
    tokens that count. Raises ValueError for rows of other ranks (``prev_rows``).
    """
    if prev_rows is not None or prev_row_indices is not None:
        raise ValueError("fused_save_compress_norm: prev_rows must be None, got rows of other ranks")
    num_tokens, device = slot_mapping.numel(), kv_score.device
    expect_rows(
        "fused_save_compress_norm", num_tokens, device, kv_score=kv_score, positions=positions,
        slot_mapping=slot_mapping, latent_out=latent_out,
    )  # fmt: skip
    if compress_ratio == 1 or state_cache is None or query_start_loc is None:  # a request per token
        starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
        start_pos = torch.where(slot_mapping >= 0, positions[:num_tokens], -1)
        state_slots = starts[:num_tokens]
    else:
        starts, capacity = query_start_loc.int(), state_cache.shape[1]
        first = starts[:-1].long().clamp(0, max(num_tokens - 1, 0))  # a request may have no token
        if num_tokens:
            start_pos, slots = positions[first], slot_mapping[first]
        else:
            start_pos = slots = torch.full_like(first, -1)
        state_slots = torch.where(slots >= 0, slots // capacity, -1)
    nowhere, table = torch.full_like(slot_mapping, -1), torch.empty(1, 0, device=device)
    compress_kv(
        kv_score[:num_tokens], starts, start_pos.int(), state_cache if compress_ratio > 1 else None,
        state_slots, None, rms_norm_weight, table, table, nowhere,
        KV_LAYOUTS["bf16_512"].empty(0, 1, device), ratio=compress_ratio, layout="bf16_512", page_size=1,
        eps=rms_norm_eps, round_pooled=False, out_latent=latent_out[:num_tokens],
    )  # fmt: skip


@caller_names(**_ROTATION, kv="latent", scale="fp8_scale", page_size="kv_cache")
def rope_quant_insert(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
    fp8_scale: torch.Tensor | None = None,
) -> None:
    """:func:`mla_fp8.k_norm_rope_insert` of the latents that close an entry, at its first token's position.

    ``kv_cache`` is [blocks, rows, bytes]: V4's rows, bfloat16, or e4m3 with ``fp8_scale``. Raises ValueError
    for V4.1's own rows, whose scales vLLM keeps behind each row's values, as kernels for Blackwell read them.
    """
    packed = kv_cache.dtype is torch.uint8 and kv_cache.shape[-1] == KV_LAYOUTS["dsv4"].bytes_per_token
    layout = "dsv4" if packed else _ROWS.get(kv_cache.dtype)
    if layout is None:
        raise ValueError(
            "rope_quant_insert: kv_cache must have V4's rows, or be bfloat16 or float8_e4m3fn, "
            f"got rows of {kv_cache.shape[-1]} of {kv_cache.dtype}"
        )
    device = latent.device
    expect_rows(
        "rope_quant_insert", slot_mapping.numel(), device, positions=positions, slot_mapping=slot_mapping
    )
    at = positions[: slot_mapping.numel()]
    closes = (at + 1) % compress_ratio == 0
    k_norm_rope_insert(
        latent[: slot_mapping.numel()], None, *_tables(cos_sin_cache), at + 1 - compress_ratio,
        torch.where(closes, slot_mapping, -1), kv_cache, layout=layout, page_size=kv_cache.shape[1],
        eps=0.0, scale=fp8_scale if layout == "fp8_e4m3_512" else None,
    )  # fmt: skip
