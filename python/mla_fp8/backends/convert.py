"""What adapters do to indices, heads and results to get from our conventions to others' and back."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call import Scope
from ..layout import KVLayout


def refuse_capture(q: Tensor, backend: str, does: str) -> None:
    """RuntimeError in a CUDA graph's capture, before the package fails half-way into it."""
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"mla_fp8: {backend} {does}, which a CUDA graph cannot capture")


def masked(scope: Scope, num_slots: int) -> Tensor:
    """The scope's indices, -1 in place of every one that does not count: others follow what we mask."""
    indices = scope.indices
    assert indices is not None  # no peer has the op whose first scope is a window
    counts = (indices >= 0) & (indices < num_slots)
    if scope.length is not None:
        counts &= torch.arange(indices.shape[1], device=indices.device) < scope.length[:, None]
    return torch.where(counts, indices, -1)


def to_multiple(indices: Tensor, multiple: int) -> Tensor:
    """At least one column, a multiple of so many, with -1 in the new ones."""
    width = max(-(-indices.shape[1] // multiple), 1) * multiple
    return pad(indices, (0, width - indices.shape[1]), value=-1)


def packed(indices: Tensor) -> tuple[Tensor, Tensor]:
    """(indices with the holes of each row behind the others, how many others), in order."""
    counts = indices >= 0
    place = torch.where(counts, counts.cumsum(1) - 1, indices.shape[1])
    rows = pad(torch.full_like(indices, -1), (0, 1), value=-1)
    return rows.scatter_(1, place, indices)[:, :-1].contiguous(), counts.sum(1, dtype=torch.int32)


def ragged(indices: Tensor) -> tuple[Tensor, Tensor]:
    """(indptr, indices) without holes, one row after another; the rest of indices is 0."""
    counts = indices >= 0
    indptr = pad(counts.sum(1).cumsum(0), (1, 0)).int()
    place = torch.where(counts.flatten(), counts.flatten().cumsum(0) - 1, indices.numel())
    flat = indices.new_zeros(indices.numel() + 1)
    return indptr, flat.scatter_(0, place, indices.flatten())[:-1]


def with_dummies(indices: Tensor) -> tuple[Tensor, Tensor]:
    """(indices, empty): rows without any get slot 0, for kernels that cannot attend to nothing."""
    empty = (indices < 0).all(1)
    first = torch.where(empty, 0, indices[:, 0])
    return torch.cat([first[:, None], indices[:, 1:]], 1), empty


def nothing_where(empty: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Our result of rows that attend to nothing, in place of what came."""
    return out.masked_fill(empty[:, None, None], 0), lse.masked_fill(empty[:, None], float("-inf"))


def empty_is_minus_inf(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse.isposinf(), float("-inf"))


def apply_sink(out: Tensor, lse: Tensor, attn_sink: Tensor | None, scale: float = 1.0) -> Tensor:
    """``scale`` times the output with the sink in the softmax's denominator; lse stays without it."""
    if attn_sink is None:
        return out if scale == 1.0 else out * scale
    share = torch.sigmoid(lse - attn_sink).masked_fill(lse.isneginf(), 0) * scale
    return (out * share[..., None]).to(out.dtype)


def padded(q: Tensor, attn_sink: Tensor | None, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """q and sink with the next number of heads that a kernel takes (SGLang #22372)."""
    num_heads = min(n for n in sizes if n >= q.shape[1])
    if num_heads == q.shape[1]:
        return q, attn_sink
    q, sink = torch.ops.mla_fp8.pad_q_heads(q, attn_sink, num_heads=num_heads)
    return q, None if attn_sink is None else sink


def rows_view(kv_cache: Tensor, page_size: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A cache without scales as ``[num_slots, dim]``. ValueError if its pages are not next to each other."""
    row_bytes = dim * dtype.itemsize
    page_bytes = kv_cache.stride(0) * kv_cache.element_size()
    if len(kv_cache) > 1 and page_bytes != page_size * row_bytes:
        raise ValueError(
            f"kv_cache must have pages {page_size * row_bytes} bytes apart for this backend, got {page_bytes}"
        )
    size = (len(kv_cache) * page_size, row_bytes // kv_cache.element_size())
    return kv_cache.as_strided(size, (size[1], 1)).view(dtype)


def pages_view(kv_cache: Tensor, layout: KVLayout, page_size: int) -> Tensor:
    """A packed cache as bytes ``[num_pages, page_size, 1, bytes_per_token]``."""
    kv_cache = kv_cache.view(torch.uint8)
    return kv_cache if kv_cache.dim() == 4 else layout.flash_mla_view(kv_cache, page_size)


def to_fp8_queries(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(q / scale in FP8, scale), one scale for all of them."""
    limit = torch.finfo(dtype).max
    scale = (q.abs().amax().float() / limit).clamp_min(torch.finfo(torch.float32).tiny).reshape(1)
    return (q / scale).clamp(-limit, limit).to(dtype), scale
