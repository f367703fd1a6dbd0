"""The specification of a layer's ops around attention: every rounding and its order, in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .index_layout import IndexLayout
from .index_reference import encode, quantize_index_k
from .layout import HEAD_DIM_V, KVLayout
from .reference import quantize_kv, to_bf16, to_fp8

__all__ = ["compress_kv", "inverse_rope", "inverse_rope_quantize", "k_norm_rope_insert", "prepare_q"]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """float32. Sixteen neighbours are squared and added in order (fma), then halves of the 32 sums."""
    lanes, total = x.float().unflatten(-1, (32, -1)).double(), x.new_zeros(*x.shape[:-1], 32).float()
    for i in range(lanes.shape[-1]):
        total = (total.double() + lanes[..., i].square()).float()
    while total.shape[-1] > 1:
        total = total[..., : total.shape[-1] // 2] + total[..., total.shape[-1] // 2 :]
    y = x.float() * (total / x.shape[-1] + eps).double().rsqrt().float()  # the nearest float32
    return y if weight is None else y * weight.float()


def rms_norm_of_any(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """float32, of any number of columns up to a multiple of 8.

    The squares of eight neighbours, and of those 256 further on, are added in order (fma), then halves of the
    32 sums; the mean is a quotient.
    """
    whole = pad(x.float(), (0, -x.shape[-1] % 256)).unflatten(-1, (-1, 32, 8)).transpose(-3, -2).flatten(-2)
    total = x.new_zeros(*x.shape[:-1], 32).float()
    for i in range(whole.shape[-1]):
        total = (total.double() + whole[..., i].double().square()).float()
    mean = halves(total) / x.shape[-1]
    return x.float() * (mean + eps).double().rsqrt().float() * weight.float()


def halves(x: Tensor) -> Tensor:
    """The sum ``[..., 1]`` of the last columns: first and second half, again and again."""
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """float32 of 128 columns, every step rounded. A sum is a tree over eight neighbours, then halves."""

    def mean(y: Tensor) -> Tensor:
        y = y.unflatten(-1, (-1, 8))
        for _ in range(3):
            y = y[..., ::2] + y[..., 1::2]
        return halves(y[..., 0]) / 128

    centred = x.float() - mean(x.float())
    y = centred * (mean(centred * centred) + eps).double().rsqrt().float() * weight.float()
    return y if bias is None else y + bias.float()


def prepare_index_k(
    k: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor,
    slot_mapping: Tensor, index_cache: Tensor, *, eps: float, neox: bool, rope_first: bool,
    layout: IndexLayout, page_size: int, **options: Any,
) -> None:  # fmt: skip
    """LayerNorm -> bf16 -> RoPE -> bf16 -> :func:`index_reference.quantize_index_k`."""
    normed = to_bf16(layer_norm(k, weight, bias, eps))[:, None]
    first = 0 if rope_first else k.shape[-1] - 2 * cos.shape[-1]
    turned = rotated_dims(normed, cos, sin, positions, neox=neox, first=first)[:, 0]
    known = known_positions(cos, positions)[: len(slot_mapping)]
    slots = slot_mapping.long().where(known, -1)
    quantize_index_k(turned, slots, index_cache, layout=layout, page_size=page_size, **options)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """float32, pairs of neighbours in the last columns of ``x [T, ..., D]``; ``cos``, ``sin`` [T, half].

    Each product is rounded, then their sum.
    """
    half, x = cos.shape[-1], x.float().clone()
    shape = (len(x), *[1] * (x.dim() - 2), half)
    cos, sin = (t.reshape(shape) for t in (cos, -sin if inverse else sin))
    a, b = (x[..., x.shape[-1] - 2 * half + i :: 2] for i in (0, 1))
    first, second = a * cos - b * sin, a * sin + b * cos
    a.copy_(first)
    b.copy_(second)
    return x


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
    """bf16 ``x`` with its last dims rotated and rounded. Zeros where the table has no such position."""
    half, known = cos.shape[-1], known_positions(cos, positions)
    at = positions.where(known, 0).long()
    if half == 0 or len(x) == 0 or len(cos) == 0:
        return x.masked_fill(~known.view(-1, *[1] * (x.dim() - 1)), 0)
    turned = to_bf16(rope(x[..., x.shape[-1] - 2 * half :], cos[at], sin[at], inverse=inverse))
    result = torch.cat([x[..., : x.shape[-1] - 2 * half], turned], -1)
    return result.masked_fill(~known.view(-1, *[1] * (x.dim() - 1)), 0)


def rotated_dims(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, neox: bool, first: int = 0
) -> Tensor:
    """bf16 ``x [T, heads, D]`` with the dims from ``first`` on rotated and rounded, as many as the table has.

    Neox: pairs are i and i + half of them; else neighbours. Zeros where the table has no such position.
    """
    half = cos.shape[-1]
    before, part, behind = x.split([first, 2 * half, x.shape[-1] - first - 2 * half], -1)
    order = torch.arange(2 * half).view(2, half).T.flatten() if neox else torch.arange(2 * half)
    turned = rotated(part[..., order], cos, sin, positions)[..., order.argsort()]
    whole = torch.cat([before, turned, behind], -1)
    return whole.masked_fill(~known_positions(cos, positions).view(-1, 1, 1), 0)


def prepare_index_q(
    index_q: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, neox: bool,
    rope_first: bool, layout: IndexLayout, scale_format: str = "ue8m0", amax_floor: float | None = None,
    hadamard: bool = False, reciprocal: bool = False, weight_scale: float = 1.0, head_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(values, weights, scales of e2m1): RoPE -> bf16 -> :func:`index_reference.encode` of each head."""
    first = 0 if rope_first else index_q.shape[-1] - 2 * cos.shape[-1]
    turned = rotated_dims(index_q, cos, sin, positions, neox=neox, first=first).flatten(0, 1)
    options = {"layout": layout, "scale_format": scale_format, "amax_floor": amax_floor}
    codes, scale = encode(turned, hadamard=hadamard, reciprocal=reciprocal, **options)  # type: ignore[arg-type]
    codes, scale = codes.view(*weights.shape, -1), scale.view(*weights.shape, -1)
    by_weight_scale = weights.float() * torch.tensor(weight_scale).float()
    if layout.name == "index_fp8":
        by_weight_scale = by_weight_scale * scale[..., 0]
    product = by_weight_scale * torch.tensor(head_scale).float()
    return codes, product, scale if layout.name == "index_fp4" else None


def known_positions(cos: Tensor, positions: Tensor) -> Tensor:
    """Where a token can be rotated: with no pairs to rotate, everywhere."""
    if cos.shape[-1] == 0:
        return torch.ones_like(positions, dtype=torch.bool)
    return (positions >= 0) & (positions < len(cos))


def k_norm_rope_insert(
    kv: Tensor,
    kv_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    *,
    layout: KVLayout,
    page_size: int,
    eps: float,
    k_rope: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    """norm -> bf16 -> RoPE -> bf16 -> :func:`quantize_kv`."""
    row = kv if kv_weight is None else to_bf16(rms_norm(kv, kv_weight, eps))
    if k_rope is None:
        k_rope = row.new_zeros(
            len(row), layout.head_dim_qk - HEAD_DIM_V
        )  # a NoPE latent in rows with a place
    row = rotated(torch.cat([row, k_rope], -1), cos, sin, positions)[: len(slot_mapping)]
    known = known_positions(cos, positions)[: len(slot_mapping)]
    slots = slot_mapping.long().where(known, -1)
    quantize_kv(row, slots, kv_cache, layout=layout, page_size=page_size, scale=scale)


def prepare_q(
    q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, eps: float, norm_q: bool, num_heads: int
) -> Tensor:
    """norm -> bf16 -> RoPE -> bf16 of each head, zeros for the heads that q has not."""
    y = to_bf16(rms_norm(q, None, eps)) if norm_q else q
    return pad(rotated(y, cos, sin, positions), (0, 0, 0, num_heads - q.shape[1]))


def inverse_rope(o: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    return rotated(o, cos, sin, positions, inverse=True)


def inverse_rope_quantize(
    o: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    num_groups: int,
    tile: int = 128,
    power_of_two: bool = True,
) -> tuple[Tensor, Tensor]:
    """(e4m3 ``[T, G, D]``, scales ``[T, G, D / tile]``) of :func:`inverse_rope`'s bf16."""
    turned = inverse_rope(o, cos, sin, positions)
    tiles = turned.float().reshape(len(o), num_groups, o.shape[1] // num_groups * o.shape[2] // tile, tile)
    magnitude = torch.where(tiles.isfinite(), tiles.abs(), 0.0)
    scale = magnitude.amax(-1).clamp_min(1e-10) / 448
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return to_fp8(tiles / scale[..., None], torch.float8_e4m3fn, 448.0).flatten(-2), scale


def compressed_width(ratio: int) -> int:
    """Columns of a token's row: kv, then score; ratio 4 has both twice, "as previous" and its own."""
    return HEAD_DIM_V * {1: 1, 2: 2, 4: 4, 128: 2}[ratio]


def pooled_window(rows: list[Tensor], ape: Tensor | None, close: int, ratio: int) -> Tensor:
    """The block that the token at ``close`` closes, float64. ``rows``: those of its window's tokens."""
    if ratio == 1:
        return rows[-1].double()
    kv, score = [], []
    for q, row in zip(range(close + 1 - len(rows), close + 1), rows, strict=True):
        part = HEAD_DIM_V if ratio == 4 and q > close - ratio else 0  # its own block: the second half
        kv.append(row[part : part + HEAD_DIM_V].double())
        score.append(row[len(row) // 2 + part :][:HEAD_DIM_V].double())
        if ape is not None:
            score[-1] = score[-1] + ape[q % ratio, part : part + HEAD_DIM_V].double()
    return (torch.stack(kv) * torch.stack(score).softmax(0)).sum(0)


def compressed_rows(
    pooled: Tensor,
    close: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    ratio: int,
    eps: float,
    round_pooled: bool,
) -> tuple[Tensor, Tensor]:
    """(latents before RoPE, what is quantised) of pooled blocks ``[n, 512]`` float32, both bf16."""
    normed = rms_norm(to_bf16(pooled) if round_pooled else pooled, weight, eps)
    latent, first = to_bf16(normed), close + 1 - ratio
    if round_pooled or cos.shape[-1] == 0:
        return latent, rotated(latent, cos, sin, first)
    turned = to_bf16(rope(normed, cos[first], sin[first]))
    return latent, turned


def compress_kv(
    kv_score: Tensor,
    query_start_loc: Tensor,
    start_pos: Tensor,
    state: dict[int, list[Tensor]],
    state_slots: Tensor,
    ape: Tensor | None,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    ratio: int,
    eps: float,
    round_pooled: bool = True,
) -> list[tuple[int, Tensor, Tensor]]:
    """(token, latent, what is quantised) of each closed block.

    ``state`` has all rows of the request in a slot so far, by position, as if a ring could hold them all; a
    call starts at any position that it knows. Online is the same pooling in another order of additions.
    """
    found, window, starts = [], {4: 8}.get(ratio, ratio), (query_start_loc - query_start_loc[0]).tolist()
    for r, (slot, start) in enumerate(zip(state_slots.tolist(), start_pos.tolist(), strict=True)):
        history = state.setdefault(slot, [])
        history[start:] = kv_score[starts[r] : starts[r + 1]].float().clone()
        for p in range(start, len(history)):
            if (p + 1) % ratio == 0:
                pooled = pooled_window(history[max(0, p + 1 - window) : p + 1], ape, p, ratio).float()
                rows = compressed_rows(
                    pooled[None], torch.tensor([p], device=pooled.device), norm_weight, cos, sin,
                    ratio=ratio, eps=eps, round_pooled=round_pooled,
                )  # fmt: skip
                found.append((starts[r] + p - start, rows[0][0], rows[1][0]))
    return found
