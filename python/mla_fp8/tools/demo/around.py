"""What a layer does around attention, in float64, and how far from it the ops may be.

A :class:`Near` is an exact value and what the ops may add to it: a rounding to bf16 is half an ulp, what
float32 does in between a few of its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...layout import HEAD_DIM_V, KVLayout
from .exact import BF16_ROUNDOFF, F32_ROUNDOFF, storage_bound
from .model import EPS, Constants, Layer

# An FP8 matrix instruction keeps about 13 bits of a sum, relative to its largest product.
INDEX_ROUNDOFF = 2.0**-12
E4M3_ROUNDOFF, E4M3_LARGEST, E4M3_LEAST = 2.0**-4, 448.0, 2.0**-10  # half a step of 1, and of subnormals


@dataclass(frozen=True)
class Near:
    """Float64 values and absolute errors of one shape."""

    value: Tensor
    error: Tensor

    @staticmethod
    def exactly(x: Tensor) -> "Near":
        return Near(x.double(), torch.zeros_like(x, dtype=torch.float64))

    def to_bf16(self) -> "Near":
        return Near(self.value, self.error + BF16_ROUNDOFF * (self.value.abs() + self.error))

    def __getitem__(self, rows: Tensor | slice) -> "Near":
        return Near(self.value[rows], self.error[rows])

    def stored(self, layout: KVLayout, scale: Tensor | None) -> Tensor:
        """How far from the value what a cache holds may be: its own step is added.

        A tile's largest element decides its scale, and may be on the other side of a power of two.
        """
        ends = (self.value.abs() + side * self.error for side in (-1, 0, 1))
        steps = [storage_bound(x.clamp_min(0), layout, scale) for x in ends]
        return torch.stack(steps).amax(0) + self.error


def norm(x: Near, weight: Tensor | None) -> Near:
    """RMSNorm over the last dim. An error of x moves its element, and all of them through the factor."""
    factor = (x.value.square().mean(-1, keepdim=True) + EPS).rsqrt()
    moved = x.error.square().mean(-1, keepdim=True).sqrt() * factor
    scale = factor if weight is None else factor * weight.double().abs()
    signed = factor if weight is None else factor * weight.double()
    float32 = 32 * F32_ROUNDOFF * x.value.abs()
    return Near(x.value * signed, scale * (x.error + float32 + 1.01 * moved * (x.value.abs() + x.error)))


def rope(x: Near, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Near:
    """Of the last dims; cos, sin [tokens, half]."""
    first = x.value.shape[-1] - 2 * cos.shape[-1]
    shape = (len(cos), *[1] * (x.value.dim() - 2), cos.shape[-1])
    c, s = cos.double().view(shape), sin.double().view(shape) * (-1 if inverse else 1)

    def turned(v: Tensor, c: Tensor, s: Tensor, minus: int) -> Tensor:
        a, b = v[..., first::2], v[..., first + 1 :: 2]
        return torch.stack([a * c + minus * b * s, a * s + b * c], -1).flatten(-2)

    size = turned(x.value.abs(), c.abs(), s.abs(), 1)
    error = turned(x.error, c.abs(), s.abs(), 1) + 3 * F32_ROUNDOFF * size
    return Near(
        torch.cat([x.value[..., :first], turned(x.value, c, s, -1)], -1),
        torch.cat([x.error[..., :first], error], -1),
    )


def rotated(x: Near, constants: Constants, pos: Tensor, *, inverse: bool = False) -> Near:
    """As the ops have it: the last dims of a bf16 ``x``, rounded again; the others as they are."""
    half = constants.cos.shape[1]
    turned = rope(x, constants.cos[pos], constants.sin[pos], inverse=inverse)
    rounded, first = turned.to_bf16().error, x.value.shape[-1] - 2 * half
    return Near(turned.value, torch.cat([x.error[..., :first], rounded[..., first:]], -1))


def query(q: Tensor, constants: Constants, pos: Tensor, *, norm_q: bool) -> Near:
    x = Near.exactly(q)
    return rotated(norm(x, None).to_bf16() if norm_q else x, constants, pos)


def latent(kv: Tensor, constants: Constants, pos: Tensor) -> Near:
    """Rows of the window, or of V3.2: the first 512 normed, the last of all rotated."""
    normed = norm(Near.exactly(kv[:, :HEAD_DIM_V]), constants.kv_weight).to_bf16()
    rest = Near.exactly(kv[:, HEAD_DIM_V:])
    row = Near(torch.cat([normed.value, rest.value], -1), torch.cat([normed.error, rest.error], -1))
    return rotated(row, constants, pos)


def pooled(scores: Tensor, close: Tensor, constants: Constants, layer: Layer) -> Near:
    """Entries that tokens at ``close`` close, before the norm.

    ``scores`` [n, pooled_tokens, score_width]: the compressor's rows of the tokens up to each; what is before
    the sequence is not looked at.
    """
    if layer.ratio == 1:
        return Near.exactly(scores[:, 0])
    n, half = scores.shape[1], layer.score_width // 2
    pos = close[:, None] + torch.arange(1 - n, 1, device=close.device)
    rows = scores.double()
    if constants.ape is not None:
        rows = torch.cat([rows[..., :half], rows[..., half:] + constants.ape.double()[pos % layer.ratio]], -1)
    kv, score = rows[..., :half], rows[..., half:]
    if layer.ratio == 4:  # the block before by the first half of its columns
        own = torch.arange(n, device=close.device)[:, None] >= layer.ratio
        kv, score = (torch.where(own, x[..., HEAD_DIM_V:], x[..., :HEAD_DIM_V]) for x in (kv, score))
    missing = (pos < 0)[..., None]
    largest = score.masked_fill(missing, 0).abs().amax(1)
    weight = score.masked_fill(missing, float("-inf")).softmax(1)
    kv = kv.masked_fill(missing, 0)
    # A float32 sum with ape, a difference to the largest, exp2; then sums over the window.
    roundoff = F32_ROUNDOFF * (16 * largest + 2 * n + 32)
    return Near((weight * kv).sum(1), roundoff * (weight * kv.abs()).sum(1))


def entry(pooled: Near, close: Tensor, constants: Constants, layer: Layer) -> tuple[Near, Near]:
    """(latent before RoPE, row) of pooled blocks: bf16 after pooling, norm and RoPE each."""
    normed = norm(pooled.to_bf16(), constants.entry_weight).to_bf16()
    return normed, rotated(normed, constants, close + 1 - layer.ratio)


def index_key_bound(k: Tensor) -> Tensor:
    """Of keys ``[n, INDEX_DIM]`` in e4m3 with a power of two as their scale."""
    scale = (k.double().abs().amax(-1, keepdim=True).clamp_min(1e-4) / E4M3_LARGEST).log2().ceil().exp2()
    return torch.maximum(k.double().abs() * E4M3_ROUNDOFF, E4M3_LEAST * scale)


def index_logits(q: Tensor, weights: Tensor, k: Tensor) -> Near:
    """``[rows, keys]`` of the indexer: sum over heads of weight * relu(q . k), all as they are stored."""
    q, weights, k = q.double(), weights.double(), k.double()
    products = torch.einsum("rhd,nd->rhn", q, k)
    sizes = torch.einsum("rhd,nd->rhn", q.abs(), k.abs())
    return Near(
        torch.einsum("rhn,rh->rn", products.relu(), weights),
        INDEX_ROUNDOFF * torch.einsum("rhn,rh->rn", sizes, weights.abs()),
    )
