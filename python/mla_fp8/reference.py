"""The specification of every op: plain PyTorch, slow, exact. No kernels, no dispatch."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from .layout import HEAD_DIM_V, KVLayout

__all__ = [
    "build_swa_token_ids", "combine_topk_swa_indices", "dequantize_cache", "dequantize_kv",
    "dequantize_kv_paged", "merge_attention_states", "merge_partial_states", "pad_q_heads",
    "paged_attention_ragged", "paged_attention_ragged_latent", "quantize_kv", "sparse_attention",
]  # fmt: skip


def tile_scales(nope: Tensor, layout: KVLayout, largest: float) -> Tensor:
    """The scale of each tile as it is stored, ``[..., num_tiles]`` float32.

    The smallest power of two with ``amax / largest <= scale``; an e4m3 scale is the nearest, and NaN if the
    tile has a NaN.
    """
    x = nope.float().unflatten(-1, (-1, layout.tile_dim)).abs()
    amax = torch.where(x.isfinite(), x, 0.0).amax(-1).clamp_min(layout.amax_floor)
    scale = (amax / largest).clamp_min(layout.scale_floor)
    if layout.scale_format == "e4m3":
        return to_fp8(torch.where(x.isnan().any(-1), torch.nan, scale), torch.float8_e4m3fn, 448.0).float()
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())


def to_bf16(x: Tensor) -> Tensor:
    """Nearest even; every NaN of another dtype becomes the one that GPUs write."""
    if x.dtype is torch.bfloat16:
        return x
    return x.bfloat16().view(torch.int16).masked_fill(x.isnan(), 0x7FFF).view(torch.bfloat16)


def to_fp8(x: Tensor, dtype: torch.dtype, fp8_max: float) -> Tensor:
    """Nearest even, saturating at ``fp8_max``; NaN stays NaN, always the positive one."""
    return torch.where(x.isnan(), torch.nan, x.clamp(-fp8_max, fp8_max)).to(dtype)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; bit 3 is the sign


def e2m1_codes(x: Tensor, of_nan: int) -> Tensor:
    """Nearest, ties to the even code, saturating; the sign of a zero is kept, e2m1 has no NaN."""
    values = torch.tensor(E2M1, device=x.device)
    middles, magnitude = (values[1:] + values[:-1]) / 2, x.abs()[..., None]
    odd = torch.arange(7, device=x.device) % 2 == 1  # the code below the middle
    code = ((magnitude > middles) | (odd & (magnitude == middles))).sum(-1) + 8 * x.signbit()
    return torch.where(x.isnan(), of_nan, code).to(torch.uint8)


def to_e2m1(x: Tensor) -> Tensor:
    """Two codes a byte, the even element low; NaN is 0, its tile's scale says it."""
    low, high = e2m1_codes(x, of_nan=0).unflatten(-1, (-1, 2)).unbind(-1)
    packed: Tensor = low | high << 4
    return packed.view(torch.float4_e2m1fn_x2)


def values_of(stored: Tensor) -> Tensor:
    """What is stored as float32."""
    if stored.dtype is not torch.float4_e2m1fn_x2:
        return stored.float()
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=stored.device)
    codes = stored.view(torch.uint8)
    return values[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]


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
    latent = pad(to_bf16(latent)[: len(slot_mapping)], (0, layout.head_dim_qk - latent.shape[1]))  # dsv32
    nope, rope = latent.split([layout.nope_dim, layout.rope_dim], dim=-1)
    scales, largest = nope[:, :0], fp8_max or (torch.finfo(layout.fp8_dtype).max if layout.fp8_dtype else 6.0)
    if layout.num_tiles:
        scales = tile_scales(nope, layout, largest)
        nope = nope.float() / scales.repeat_interleave(layout.tile_dim, -1)
        nope = to_fp8(nope, layout.fp8_dtype, largest) if layout.fp8_dtype else to_e2m1(nope)
    elif layout.fp8_dtype:
        nope, rope = (to_fp8(x.float() / scale, layout.fp8_dtype, largest) for x in (nope, rope))

    valid = (slot_mapping >= 0) & (slot_mapping < len(kv_cache) * page_size)
    page, row = slot_mapping[valid] // page_size, slot_mapping[valid] % page_size
    for view, value in zip(layout.views(kv_cache, page_size), (nope, scales, rope), strict=True):
        view.view(torch.uint8)[page, row] = value.to(view.dtype).contiguous().view(torch.uint8)[valid]
    if layout.scale_format == "ue8m0" and layout.num_tiles < layout.scale_bytes:  # dsv4 has a byte more
        kv_cache[page, page_size * layout.token_stride + row * layout.scale_bytes + layout.num_tiles] = 0


def dequantize_cache(
    kv_cache: Tensor, *, layout: KVLayout, page_size: int, scale: Tensor | None = None
) -> Tensor:
    """Every slot of the cache, ``[num_pages * page_size, head_dim_qk]`` float32, not rounded to bf16."""
    nope, scales, rope = (values_of(v) for v in layout.views(kv_cache, page_size))
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


def dequantize_kv_paged(
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    row_offsets: Tensor,
    *,
    layout: KVLayout,
    page_size: int,
    out: Tensor,
    scale: Tensor | None = None,
) -> None:
    none = page_table.shape[1]  # the column that says: no page
    table = torch.nn.functional.pad(page_table, (0, 1), value=-1).long()
    slots = torch.full((len(out),), -1, device=out.device)
    written = torch.zeros(len(out), dtype=torch.bool, device=out.device)
    numbers = zip(table, seq_lens.tolist(), gather_lens.tolist(), row_offsets.tolist(), strict=True)
    for pages, seq_len, gather_len, first in numbers:
        rows = torch.arange(
            max(first, 0), max(first, 0, min(first + gather_len, len(out))), device=out.device
        )
        pos = rows - first + seq_len - gather_len
        page = pages[torch.where((pos >= 0) & (pos // page_size < none), pos // page_size, none)]
        slots[rows], written[rows] = torch.where(page >= 0, page * page_size + pos % page_size, -1), True
    out[written] = dequantize_kv(kv_cache, slots[written], layout=layout, page_size=page_size, scale=scale)


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


def combine_topk_swa_indices(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    compressed_base: Tensor,
    swa_base: Tensor,
    *,
    window_size: int,
    compress_ratio: int,
    topk: int,
    query_pos: Tensor | None = None,
    compressed_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    indices = topk_indices.new_full((len(topk_indices), -(-(topk + window_size) // 128) * 128), -1)
    lens = topk_indices.new_zeros(len(topk_indices))
    starts = query_start_loc.long() - query_start_loc[0]
    begin, *per_request = (x.tolist() for x in (starts, seq_lens, gather_lens, compressed_base, swa_base))
    for r, (seq_len, gather_len, base, swa) in enumerate(zip(*per_request, strict=True)):
        first, limit = seq_len - gather_len, 2**31 if compressed_lens is None else int(compressed_lens[r])
        for t in range(max(begin[r], 0), min(begin[r + 1], len(lens))):
            pos = seq_len - begin[r + 1] + t if query_pos is None else int(query_pos[t])
            if 0 <= pos < seq_len:
                entries = topk_indices[t, : min((pos + 1) // compress_ratio, topk)].tolist()
                row = [base + e if 0 <= e < limit else -1 for e in entries]
                row += [swa + p - first for p in range(max(pos - window_size + 1, first, 0), pos + 1)]
                lens[t] = len(row)
                indices[t, : len(row)] = lens.new_tensor([x if 0 <= x < 2**31 else -1 for x in row])
    return indices, lens


def without_holes(indices: Tensor, *, capacity: int) -> tuple[Tensor, Tensor]:
    """The rows of combine_topk_swa_indices as those of combine_topk_swa_indices_ragged."""
    kept = indices >= 0
    indptr = pad(kept.sum(1).cumsum(0), (1, 0)).int()
    return indptr, pad(indices[kept], (0, capacity - int(indptr[-1])), value=-1)


def look_up(table: Tensor, *index: Tensor) -> Tensor:
    """``table[index]``, -1 where an index is outside the table."""
    valid = torch.stack([(i >= 0) & (i < n) for i, n in zip(index, table.shape, strict=True)]).all(0)
    found = torch.full_like(index[0], -1)
    found[valid] = table[tuple(i[valid] for i in index)].to(found.dtype)
    return found


def window_slots(
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    num_tokens: int,
    page_size: int,
    window_size: int,
) -> Tensor:
    """[num_tokens, window_size] int32: the slots of each query's sliding window, -1 where there is none."""
    starts = (query_start_loc.long() - query_start_loc[0]).tolist()
    slots = page_table.new_full((num_tokens, window_size), -1)
    for r, seq_len in enumerate(seq_lens.tolist()):
        for t in range(max(starts[r], 0), min(starts[r + 1], num_tokens)):
            end = seq_len - starts[r + 1] + t + 1
            pos = torch.arange(max(end - window_size, 0), max(end, 0), device=page_table.device)
            page = look_up(page_table[r], pos // page_size).long()
            slots[t, : len(pos)] = torch.where(page >= 0, page * page_size + pos % page_size, -1).int()
    return slots


def entry_slots(
    page_table: Tensor, query_start_loc: Tensor, lens: Tensor, *, num_tokens: int, page_size: int
) -> Tensor:
    """[num_tokens, width] int32: the slots of the first ``lens[t]`` entries of each query's request, then -1;
    -1 as well where there is no page. ``width`` is what the page table holds."""
    starts = (query_start_loc.long() - query_start_loc[0]).tolist()
    entry = torch.arange(page_table.shape[1] * page_size, device=page_table.device)
    slots = page_table.new_full((num_tokens, len(entry)), -1)
    for r, pages in enumerate(page_table.long()):
        page = pages[entry // page_size]
        held = torch.where(page >= 0, page * page_size + entry % page_size, -1)
        first, end = max(starts[r], 0), max(min(starts[r + 1], num_tokens), 0)
        slots[first:end] = torch.where(entry < lens[first:end, None], held, -1).int()
    return slots


def build_swa_token_ids(
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    full_to_swa: Tensor,
    *,
    window_size: int,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gather_lens = torch.minimum(seq_lens.long(), extend_seq_lens.long() + window_size - 1).clamp_min(0)
    first_pos, offsets = seq_lens - gather_lens, pad(gather_lens.cumsum(0), (1, 0))
    j = torch.arange(capacity, device=seq_lens.device)
    request = torch.searchsorted(offsets[1:], j, right=True)  # past the last one: found in no table
    slot = look_up(
        req_to_token, look_up(req_pool_indices, request), look_up(first_pos - offsets[:-1], request) + j
    )
    ids = look_up(full_to_swa, slot)
    ids = torch.where((ids >= 0) & (ids < 2**31), ids, -1)
    return ids.int(), first_pos.int(), gather_lens.int(), offsets.clamp_max(2**31 - 1).int()


def pad_q_heads(q: Tensor, attn_sink: Tensor | None, *, num_heads: int) -> tuple[Tensor, Tensor | None]:
    extra = num_heads - q.shape[1]
    sink = None if attn_sink is None else pad(attn_sink, (0, extra), value=-torch.inf)
    return pad(q, (0, 0, 0, extra)), sink


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    return merge_partial_states(torch.stack([out_a, out_b]), torch.stack([lse_a, lse_b]))


def merge_partial_states(
    outs: Tensor, lses: Tensor, *, attn_sink: Tensor | None = None, base: float = math.e
) -> tuple[Tensor, Tensor]:
    lses = lses.where(lses < torch.inf, -torch.inf) * math.log(base)
    lse = lses.logsumexp(0)
    total = lse if attn_sink is None else torch.logaddexp(lse, attn_sink.to(lse.dtype))
    weights = torch.where(lses == -torch.inf, 0.0, (lses - total).exp())[..., None]
    products = outs.to(torch.promote_types(outs.dtype, torch.float32)) * weights
    return torch.where(weights == 0, 0.0, products).sum(0).to(outs.dtype), lse / math.log(base)


def ragged_slots(
    kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, *, num_pages: int, page_size: int,
    q_len: int,
) -> list[Tensor]:  # fmt: skip
    """For each query token the slots of the keys that it sees, in order."""
    found, bounds = [], kv_indptr.clamp(0, len(kv_indices)).tolist()
    for r, last_page_len in enumerate(kv_last_page_len.clamp(0, page_size).tolist()):
        pages = kv_indices[bounds[r] : bounds[r + 1]].long()
        position = torch.arange(len(pages) * page_size, device=pages.device)
        slots = pages.repeat_interleave(page_size) * page_size + position % page_size
        exists = (slots >= 0) & (slots < num_pages * page_size)
        num_keys = (len(pages) - 1) * page_size + last_page_len
        found += [slots[exists & (position < num_keys - hidden)] for hidden in reversed(range(q_len))]
    return found


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: list[Tensor],
    *,
    sm_scale: float,
    logits_soft_cap: float,
    attn_sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Each token to its own slots of k and v, ``[num_slots, num_kv_heads, dim]``, in their dtype."""
    out, lse = q.new_empty((*q.shape[:2], v.shape[-1])), q.new_empty(q.shape[:2], dtype=k.dtype)
    for t, selected in enumerate(slots):
        heads = q[t].to(k.dtype).unflatten(0, (k.shape[1], -1))
        logits = sm_scale * torch.einsum("hgd,nhd->hgn", heads, k[selected])
        if logits_soft_cap:
            logits = logits_soft_cap * (logits / logits_soft_cap).tanh()
        lse[t] = logits.logsumexp(-1).flatten()
        total = lse[t] if attn_sink is None else torch.logaddexp(lse[t], attn_sink.to(k.dtype))
        weights = (logits - total.view(*logits.shape[:2], 1)).exp()
        out[t] = torch.einsum("hgn,nhd->hgd", weights, v[selected]).flatten(0, 1)
    return out, lse


def paged_attention_ragged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    *,
    sm_scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    logits_soft_cap: float = 0.0,
    attn_sink: Tensor | None = None,
    q_len: int = 1,
) -> tuple[Tensor, Tensor]:
    num_pages, page_size = k_cache.shape[:2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (cache.to(dtype).flatten(0, 1) for cache in (k_cache, v_cache))
    k, v = (x if scale is None else x * scale.view(-1, 1) for x, scale in ((k, k_scale), (v, v_scale)))
    pages = (kv_indptr, kv_indices, kv_last_page_len)
    slots = ragged_slots(*pages, num_pages=num_pages, page_size=page_size, q_len=q_len)
    return ragged_attention(
        q, k, v, slots, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap, attn_sink=attn_sink
    )


def paged_attention_ragged_latent(
    q: Tensor,
    kv_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    *,
    layout: KVLayout,
    page_size: int,
    sm_scale: float,
    scale: Tensor | None = None,
    logits_soft_cap: float = 0.0,
    attn_sink: Tensor | None = None,
    q_len: int = 1,
) -> tuple[Tensor, Tensor]:
    latents = dequantize_cache(kv_cache, layout=layout, page_size=page_size, scale=scale)
    k = latents.to(torch.promote_types(q.dtype, torch.float32)).unsqueeze(1)
    pages = (kv_indptr, kv_indices, kv_last_page_len)
    slots = ragged_slots(*pages, num_pages=len(kv_cache), page_size=page_size, q_len=q_len)
    v = k[..., :HEAD_DIM_V]
    return ragged_attention(
        q, k, v, slots, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap, attn_sink=attn_sink
    )
