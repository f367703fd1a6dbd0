"""What caches and attention are measured against: float64, and how much the formats may round."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ... import reference
from ...layout import HEAD_DIM_V, KVLayout

BF16_ROUNDOFF = torch.finfo(torch.bfloat16).eps / 2
F32_ROUNDOFF = torch.finfo(torch.float32).eps / 2


def attention(q: Tensor, rows: Tensor, indices: Tensor, attn_sink: Tensor, sm_scale: float) -> Tensor:
    """reference.sparse_attention of one scope in float64, faster. An index of -1 is nothing."""
    blocks = _blocks(q, rows, indices, attn_sink, sm_scale)
    return torch.cat([weights @ kv[..., :HEAD_DIM_V] for _, weights, kv in blocks])


def attention_and_bound(
    q: Tensor, rows: Tensor, indices: Tensor, attn_sink: Tensor, sm_scale: float, *, bf16_rows: bool
) -> tuple[Tensor, Tensor]:
    """The same, and how far from it a kernel may be that multiplies bf16 numbers and sums in float32.

    Softmax weights and the result are rounded to bf16. A logit is a float32 sum over head_dim_qk; its error
    moves its weight by as much, and again through the normalisation. Rows that are no bf16 numbers (a cache
    with an arbitrary scale) may be rounded to bf16 first, which moves logits and values.
    """
    row_roundoff = 0.0 if bf16_rows else BF16_ROUNDOFF
    sum_roundoff = (q.shape[-1] + indices.shape[1]) * F32_ROUNDOFF
    outs, bounds = [], []
    for queries, weights, kv in _blocks(q, rows, indices, attn_sink, sm_scale):
        v = kv[..., :HEAD_DIM_V]
        outs.append(weights @ v)
        largest = sm_scale * (queries.abs() @ kv.abs().mT).amax(-1, keepdim=True)
        weight_error = BF16_ROUNDOFF + sum_roundoff + 2 * largest * (sum_roundoff + row_roundoff)
        bounds.append((weight_error + row_roundoff) * (weights @ v.abs()) + BF16_ROUNDOFF * outs[-1].abs())
    return torch.cat(outs), torch.cat(bounds)


def _blocks(
    q: Tensor, rows: Tensor, indices: Tensor, attn_sink: Tensor, sm_scale: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(queries, softmax weights, keys) in float64, few tokens at a time: the keys stay in the cache."""
    for here in (slice(begin, begin + 8) for begin in range(0, len(q), 8)):
        queries, masked = q[here].double(), (indices[here] < 0)[:, None]
        kv = rows[indices[here].clamp_min(0)].double().masked_fill_(masked.mT, 0)  # else 0 * NaN
        logits = (sm_scale * (queries @ kv.mT)).masked_fill_(masked, float("-inf"))
        sink = attn_sink.double().expand(len(kv), -1)[..., None]
        yield queries, torch.cat([logits, sink], -1).softmax(-1)[..., :-1], kv


def storage_bound(latent: Tensor, layout: KVLayout, scale: Tensor | None) -> Tensor:
    """How far the layout's nearest representable value may be from each element of ``latent`` (float64).

    Half a step of the format at ``|x| / scale``, times scale; beyond its largest value, the distance to that.
    Dividing and multiplying by a scale that is no power of two rounds too: in float32, then once to bf16.
    """
    x = latent.double().abs()
    if layout.fp8_dtype is None and layout.nope_format != "e2m1":
        return torch.zeros_like(x)
    eps, tiny, largest = 0.5, 1.0, reference.E2M1[-1]
    if layout.fp8_dtype:
        info = torch.finfo(layout.fp8_dtype)
        eps, tiny, largest = info.eps, info.tiny, info.max
    if scale is None:
        scales = reference.tile_scales(latent[:, : layout.nope_dim], layout, largest).double()
        scales = scales.repeat_interleave(layout.tile_dim, -1)
    else:
        scales = scale.double().expand(x.shape)
    x = x[:, : scales.shape[1]]
    exponent = (x / scales).clamp_min(tiny).log2().floor()
    half_step = 0.5 * eps * exponent.exp2() * scales
    error = torch.maximum(half_step, x - largest * scales)
    if scale is not None:
        error += (BF16_ROUNDOFF + 4 * F32_ROUNDOFF) * (x + half_step)
    return torch.nn.functional.pad(error, (0, latent.shape[1] - x.shape[1]))  # rope is kept as it is
