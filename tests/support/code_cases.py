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
