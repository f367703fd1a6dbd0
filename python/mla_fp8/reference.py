"""The specification of every op: plain PyTorch, slow, exact. No kernels, no dispatch."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .layout import KV_LAYOUTS, KVLayout

HEAD_DIM_V = next(iter(KV_LAYOUTS.values())).head_dim_v


def tile_scales(nope: Tensor, layout: KVLayout, fp8_max: float) -> Tensor:
    """The power-of-two scale of each tile, ``[..., num_tiles]`` float32."""
    x = nope.float().unflatten(-1, (-1, layout.tile_dim)).abs()
    amax = torch.where(x.isfinite(), x, 0.0).amax(-1).clamp_min(layout.amax_floor)
    mantissa, exponent = torch.frexp((amax / fp8_max).clamp_min(layout.scale_floor))
    return torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())


def to_fp8(x: Tensor, dtype: torch.dtype, fp8_max: float) -> Tensor:
    """Nearest even, saturating at ``fp8_max``; NaN stays NaN, always the positive one."""
    return torch.where(x.isnan(), torch.nan, x.clamp(-fp8_max, fp8_max)).to(dtype)


def quantize_kv(
    latent: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    *,
    layout: KVLayout,
    page_size: int,
    scale: Tensor | None = None,
    fp8_max: float | None = None,
) -> None:
    nope, rope = latent.bfloat16()[: len(slot_mapping)].split([layout.nope_dim, layout.rope_dim], dim=-1)
    scales = nope[:, :0].float()
    if layout.fp8_dtype:
        limit = fp8_max or torch.finfo(layout.fp8_dtype).max
        if scale is None:
            scales = tile_scales(nope, layout, limit)
            nope = to_fp8(
                nope.float() / scales.repeat_interleave(layout.tile_dim, -1), layout.fp8_dtype, limit
            )
        else:
            nope, rope = (to_fp8(x.float() / scale, layout.fp8_dtype, limit) for x in (nope, rope))

    valid = (slot_mapping >= 0) & (slot_mapping < len(kv_cache) * page_size)
    page, row = slot_mapping[valid] // page_size, slot_mapping[valid] % page_size
    for view, value in zip(layout.views(kv_cache, page_size), (nope, scales, rope), strict=True):
        view.view(torch.uint8)[page, row] = value[valid].to(view.dtype).contiguous().view(torch.uint8)
    if layout.scale_format == "ue8m0":  # the pad byte behind the scales
        start = (
            page * layout.page_bytes(page_size) + page_size * layout.token_stride + row * layout.scale_bytes
        )
        kv_cache.view(-1)[start + layout.num_tiles] = 0


def dequantize_cache(
    kv_cache: Tensor, *, layout: KVLayout, page_size: int, scale: Tensor | None = None
) -> Tensor:
    """Every slot of the cache, ``[num_pages * page_size, head_dim_qk]`` float32, not rounded to bf16."""
    nope, scales, rope = (v.float() for v in layout.views(kv_cache, page_size))
    if layout.num_tiles:
        nope = nope * scales.repeat_interleave(layout.tile_dim, -1)
    latent = torch.cat([nope, rope], -1).flatten(0, 1)
    return latent if scale is None else latent * scale


def dequantize_kv(
    kv_cache: Tensor, slots: Tensor, *, layout: KVLayout, page_size: int, scale: Tensor | None = None
) -> Tensor:
    cache = dequantize_cache(kv_cache, layout=layout, page_size=page_size, scale=scale)
    valid = (slots >= 0) & (slots < len(cache))
    out = torch.zeros(len(slots), layout.head_dim_qk, dtype=torch.bfloat16, device=kv_cache.device)
    out[valid] = cache[slots[valid].long()].bfloat16()
    return out


def sparse_attention(
    q: Tensor,
    scopes: list[tuple[Tensor, Tensor, Tensor | None]],
    *,
    sm_scale: float,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, max_logits, lse) over the scopes (rows, indices, length) jointly, in float32 (float64 if q is).

    Rows that are not selected may hold NaN. out has q's dtype and the first 512 elements of the rows.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    gathered, masked = (torch.cat(x, 1) for x in zip(*(_gather(*s, dtype) for s in scopes), strict=True))
    logits = torch.einsum("thd,tkd->thk", q.to(dtype), gathered) * sm_scale
    logits = logits.masked_fill(masked[:, None], float("-inf"))
    lse = logits.logsumexp(-1)
    total = lse if attn_sink is None else torch.logaddexp(lse, attn_sink.to(dtype).expand_as(lse))
    weights = (logits - total[..., None]).exp().masked_fill(lse.isneginf()[..., None], 0.0)
    out = torch.einsum("thk,tkd->thd", weights, gathered[..., :HEAD_DIM_V]).to(q.dtype)
    return out, logits.amax(-1) if logits.shape[-1] else lse, lse


def _gather(
    rows: Tensor, indices: Tensor, length: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    masked = (indices < 0) | (indices >= len(rows))
    if length is not None:
        masked |= torch.arange(indices.shape[1], device=rows.device) >= length[:, None]
    if len(rows) == 0:
        return torch.zeros(*indices.shape, rows.shape[1], dtype=dtype, device=rows.device), masked
    selected = rows[indices.masked_fill(masked, 0).long()].to(dtype)
    return selected.masked_fill(masked[..., None], 0.0), masked


def pad_q_heads(q: Tensor, attn_sink: Tensor | None, *, num_heads: int) -> tuple[Tensor, Tensor | None]:
    extra = num_heads - q.shape[1]
    sink = None if attn_sink is None else pad(attn_sink, (0, extra), value=-torch.inf)
    return pad(q, (0, 0, 0, extra)), sink


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    merged = torch.zeros_like(out_a, dtype=torch.promote_types(out_a.dtype, torch.float32))
    for out, side_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = (side_lse - lse).exp()[..., None]
        merged += torch.where(side_lse[..., None] == -torch.inf, 0.0, out.to(merged.dtype) * weight)
    return merged.to(out_a.dtype), lse
