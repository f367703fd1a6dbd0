"""Every code of a layout's e4m3, read by attention."""

from collections.abc import Callable

import pytest
import torch
from assertions import assert_same
from kv_cache_cases import layer_scale
from torch import Tensor

from mla_fp8 import KV_LAYOUTS, KVLayout

e4m3_layouts = pytest.mark.parametrize(
    "layout",
    [x for x in KV_LAYOUTS.values() if x.fp8_dtype and not x.extra_only],
    ids=lambda x: x.name,
)


def assert_reads_every_code(
    layout: KVLayout, device: str, attend: Callable[[Tensor, Tensor, dict], tuple[Tensor, Tensor]]
) -> None:
    """``attend(q, kv_cache, options)`` of query i to slot i alone, in pages of one: its weight is 1, so out
    is v. Each code stands in each byte of a word. A NaN makes all of its query's results NaN, no other's."""
    count, dim = 4, layout.nope_dim
    cache = torch.zeros(count, layout.page_bytes(1), dtype=torch.uint8, device=device)
    nope, scales, rope = layout.views(cache, 1)
    shifted = (torch.arange(dim) + torch.arange(count)[:, None]).to(torch.uint8).view(layout.fp8_dtype)
    values = shifted.float().nan_to_num(0.0)
    nope.copy_(values.to(device)[:, None].to(layout.fp8_dtype))
    minus_zero = values.view(torch.int32) == -(2**31)
    assert layout.fp8_dtype != torch.float8_e4m3fn or minus_zero.any()
    scales.view(torch.uint8).fill_(127) if scales.element_size() == 1 else scales.fill_(1.0)
    rope.copy_(rope.float() + 0.5)
    q = torch.zeros(count, 16, layout.head_dim_qk, dtype=torch.bfloat16, device=device)
    latent = torch.cat([values, torch.full((count, layout.rope_dim), 0.5)], 1)[:, :512].bfloat16().to(device)
    scale = layer_scale(layout, device, 1.0)
    options = {"layout": layout, "page_size": 1, "scale": scale, "sm_scale": 0.1}
    expected = attend(q, cache, options)
    assert_same(expected, (latent[:, None].expand(count, 16, 512), torch.zeros_like(expected[1])))
    nans = [0x80] if "fnuz" in layout.name else [0x7F, 0xFF]
    for position, nan in [(p, x) for p in (0, 1, 2, 3, 130, dim - 1) for x in nans]:
        broken = cache.clone()
        layout.views(broken, 1)[0].view(torch.uint8)[2, 0, position] = nan
        got = attend(q, broken, options)
        assert all(x[2].isnan().all() for x in got), (position, nan)
        others = [0, 1, 3]
        assert_same([x[others] for x in got], [x[others] for x in expected])


def assert_reads_the_largest_scales(
    layout: KVLayout,
    device: str,
    scale: float,
    attend: Callable[[Tensor, Tensor, dict], tuple[Tensor, Tensor]],
) -> None:
    """``attend(q, kv_cache, options)`` of query i to the four slots of page i. Their codes are small, so that
    values and sums are finite, and so are the queries, so that logits are; nothing is subnormal."""
    count, keys, dim = 3, 4, layout.nope_dim
    cache = torch.zeros(count, layout.page_bytes(keys), dtype=torch.uint8, device=device)
    nope, scales, rope = layout.views(cache, keys)
    codes = (torch.rand(count, keys, dim) / 4 - 1 / 8).to(layout.fp8_dtype)
    nope.copy_(codes.to(device))
    if layout.num_tiles:
        largest = float.fromhex("0x1p127") if scales.element_size() == 1 else scale
        tiles = torch.full(scales.shape, largest)
        tiles[:, 1, 0] = 2.0**126
        exponents = (tiles.view(torch.int32) >> 23).to(torch.uint8)
        scales.view(torch.uint8).copy_(exponents) if scales.element_size() == 1 else scales.copy_(tiles)
        factors = tiles.double().repeat_interleave(layout.tile_dim, -1)
    else:
        factors = torch.tensor(scale).double()
    in_codes = rope.element_size() == 1
    other = (torch.rand(count, keys, layout.rope_dim) / 4 - 1 / 8).to(rope.dtype)
    rope.copy_(other.to(device))
    rope_factor = torch.tensor(scale if in_codes else 1.0).double()
    latents = torch.cat([codes.double() * factors, other.double() * rope_factor], -1)
    q = torch.randn(count, 16, layout.head_dim_qk) * 2.0**-100
    if not in_codes:
        q[..., dim:] *= 2.0**127
    q = q.bfloat16()
    options = {"layout": layout, "page_size": keys, "sm_scale": 2.0**-27}
    options["scale"] = layer_scale(layout, device, scale)
    out, lse = (x.cpu().double() for x in attend(q.to(device), cache, options))
    logits = torch.einsum("qhd,qkd->qhk", q.double(), latents) * options["sm_scale"]
    assert 0.2 < logits.std() < 5
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=0, atol=0.05)  # latents may be rounded to bf16
    exact = logits.softmax(-1) @ latents[..., :512]
    unit = latents[..., :512].abs().amax((0, 1))
    torch.testing.assert_close(out / unit, exact / unit, rtol=2**-7, atol=2**-8)


largest_scales = pytest.mark.parametrize(
    "scale", [float.fromhex(x) for x in ("0x1p127", "0x1.fffffep127")], ids=["2^127", "largest"]
)
