"""What the tests of norm, RoPE and insert share."""

import torch
from kv_cache_cases import distinct_slots, layer_scale
from torch import Tensor

from mla_fp8 import KVLayout, layer_reference

MAX_POS = 300
EPS = 1e-6


def rope_tables(device: str, half: int = 32, max_pos: int = MAX_POS, form: str = "halves") -> list[Tensor]:
    """cos and sin: parts of one table ``[max_pos, 2 * half]`` as engines have it, or apart."""
    angle = torch.rand(max_pos, half, device=device, dtype=torch.float64) * 7
    cos, sin = angle.cos().float(), angle.sin().float()
    if form == "apart":
        return [cos, sin]
    if form == "alternating":
        table = torch.stack([cos, sin], -1).flatten(1)
        return [table[:, 0::2], table[:, 1::2]]
    table = torch.cat([cos, sin], -1)
    return [table[:, :half], table[:, half:]]


def positions_of(n: int, device: str, dtype: torch.dtype = torch.int64) -> Tensor:
    """Some of them outside the table."""
    at, info = torch.randint(MAX_POS, (n,)), torch.iinfo(dtype)
    for i, hostile in zip(range(3, n, 7), (-1, MAX_POS, info.min, info.max, -MAX_POS), strict=False):
        at[i] = hostile
    return at.to(device, dtype)


def values(*shape: int, device: str, wide: int = 64) -> Tensor:
    """bf16 of every magnitude, in rows of a wider buffer."""
    x = torch.randn(*shape[:-1], shape[-1] + wide, device=device)
    sizes = torch.logspace(-6, 3, shape[0], device=device).view(-1, *[1] * (len(shape) - 1))
    return (x * sizes).bfloat16()[..., : shape[-1]]


def insert_case(
    layout: KVLayout,
    device: str,
    num_tokens: int,
    num_slots: int,
    *,
    half: int | None = None,
    weight: torch.dtype | None = torch.bfloat16,
    form: str = "halves",
    dtype: torch.dtype = torch.int64,
) -> dict[str, Tensor | float | None]:
    """Arguments of k_norm_rope_insert but the cache and its layout, as the layout's model has them."""
    extra = layout.head_dim_qk - 512
    if half is None:
        half = 0 if layout.name == "dsv32_nope" else 32
    cos, sin = rope_tables(device, half, form=form)
    return {
        "kv": values(num_tokens, 512, device=device),
        "kv_weight": None if weight is None else torch.randn(512, device=device).to(weight),
        "cos": cos,
        "sin": sin,
        "positions": positions_of(num_tokens, device, dtype),
        "slot_mapping": distinct_slots(num_tokens, num_slots, device, dtype),
        "k_rope": values(num_tokens, extra, device=device) if extra and half else None,
        "scale": layer_scale(layout, device),
        "eps": EPS,
    }


def expected_q(q: Tensor, arguments: dict, norm_q: bool, num_heads: int) -> Tensor:
    at = (arguments[name] for name in ("cos", "sin", "positions"))
    return layer_reference.prepare_q(q, *at, eps=float(arguments["eps"]), norm_q=norm_q, num_heads=num_heads)


def assert_same_bf16(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype == torch.bfloat16
    assert torch.equal(got.contiguous().view(torch.int16), want.contiguous().view(torch.int16))
