"""What the tests of caches share."""

import pytest
import torch
from torch import Tensor

from mla_fp8 import KV_LAYOUTS, KVLayout

POISON = 0xA5  # bytes an op must not touch keep this value
INT32, INT64 = torch.iinfo(torch.int32), torch.iinfo(torch.int64)

all_layouts = pytest.mark.parametrize("layout", KV_LAYOUTS.values(), ids=KV_LAYOUTS)
tiled_layouts = pytest.mark.parametrize(
    "layout", [x for x in KV_LAYOUTS.values() if x.num_tiles], ids=lambda x: x.name
)
e4m3_tiles = pytest.mark.parametrize(
    "layout", [x for x in KV_LAYOUTS.values() if x.num_tiles and x.fp8_dtype], ids=lambda x: x.name
)
page_sizes = pytest.mark.parametrize("page_size", [1, 2, 61, 64, 256])


def layer_scale(layout: KVLayout, device: str, value: float = 0.37) -> Tensor | None:
    """The `scale` argument; by default no power of two, so a multiplication by its reciprocal shows."""
    return torch.tensor([value], device=device) if layout.needs_scale else None


def poisoned_cache(layout: KVLayout, num_pages: int, page_size: int, device: str, gap: int = 0) -> Tensor:
    """``[num_pages, page_bytes]`` of a buffer whose pages lie `gap` bytes apart, every byte of it 0xA5."""
    page_bytes = layout.page_bytes(page_size)
    wide = torch.full((num_pages, page_bytes + gap), POISON, dtype=torch.uint8, device=device)
    return wide[:, :page_bytes]


def whole_buffer(kv_cache: Tensor) -> Tensor:
    """All bytes under a cache of poisoned_cache(), the gaps too."""
    return torch.tensor([], dtype=torch.uint8, device=kv_cache.device).set_(kv_cache.untyped_storage())


def lazy_cache(layout: KVLayout, page_size: int, device: str) -> Tensor:
    """A cache of a little over 2^31 bytes whose pages are memory only once they are touched."""
    page_bytes = layout.page_bytes(page_size)
    return torch.empty(2**31 // page_bytes + 3, page_bytes, dtype=torch.uint8, device=device)


def latents(layout: KVLayout, num_tokens: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of every magnitude, strided."""
    wide = torch.randn(num_tokens, layout.head_dim_qk + 64, device=device)
    wide *= torch.logspace(-6, 3, num_tokens, device=device)[:, None]
    return wide.to(dtype)[:, : layout.head_dim_qk]


def distinct_slots(n: int, num_slots: int, device: str, dtype: torch.dtype = torch.int64) -> Tensor:
    """n distinct slots, with ones that name no slot in between."""
    slots = torch.randperm(num_slots, device=device)[:n].to(dtype)
    info = torch.iinfo(dtype)
    hostile = [-1, num_slots, info.min, info.max, num_slots + 1, -num_slots]
    for i, slot in zip(range(2, n, 5), hostile, strict=False):
        slots[i] = slot
    return slots


def assert_same_values(got: Tensor, want: Tensor) -> None:
    """Bit for bit equal, except that any NaN equals any NaN."""
    assert got.dtype == want.dtype and got.shape == want.shape
    integer = {2: torch.int16, 4: torch.int32}[got.element_size()]
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got.view(integer)[~nan], want.view(integer)[~nan])
