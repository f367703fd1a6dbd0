"""The same work as Triton kernels in the shapes that serving engines use today: one program per token for the
cache ops, two rows per program for the index rows. Baselines of bench_*.py, nothing else.
"""

import torch
import triton
import triton.language as tl

from mla_fp8 import KVLayout


@triton.jit
def dequantize_kernel(
    out, cache, slots, num_slots, page_stride, page_size, out_stride,
    NOPE: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr, NOPE_BLOCK: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, ROPE_OFFSET: tl.constexpr, SCALE_BYTES: tl.constexpr, INLINE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i).to(tl.int64)
    valid = (slot >= 0) & (slot < num_slots)
    page = slot // page_size
    row = slot % page_size
    token = cache + page * page_stride + row * TOKEN_STRIDE
    nope = tl.arange(0, NOPE_BLOCK)
    wanted = valid & (nope < NOPE)
    codes = tl.load((token + nope).to(tl.pointer_type(tl.float8e4nv)), mask=wanted, other=0.0)
    if INLINE:
        scales = (token + NOPE).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + nope // TILE, mask=wanted, other=0.0)
    else:
        scales = cache + page * page_stride + page_size * TOKEN_STRIDE + row * SCALE_BYTES
        exponent = tl.load(scales + nope // TILE, mask=wanted, other=127)
        scale = tl.exp2(exponent.to(tl.float32) - 127.0)
    value = codes.to(tl.float32) * scale
    tl.store(out + i * out_stride + nope, value.to(tl.bfloat16), mask=nope < NOPE)
    rope = tl.arange(0, ROPE)
    bf16 = tl.load((token + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16)) + rope, mask=valid, other=0.0)
    tl.store(out + i * out_stride + NOPE + rope, bf16)


def dequantize_kv(
    kv_cache: torch.Tensor, slots: torch.Tensor, layout: KVLayout, page_size: int, out: torch.Tensor
):
    dequantize_kernel[(len(slots),)](
        out, kv_cache, slots, len(kv_cache) * page_size, kv_cache.stride(0), page_size, out.stride(0),
        NOPE=layout.nope_dim, ROPE=layout.rope_dim, TILE=layout.tile_dim,
        NOPE_BLOCK=triton.next_power_of_2(layout.nope_dim), TOKEN_STRIDE=layout.token_stride,
        ROPE_OFFSET=layout.rope_offset, SCALE_BYTES=layout.scale_bytes, INLINE=bool(layout.scale_inline),
    )  # fmt: skip


@triton.jit
def quantize_kernel(
    latent, slots, cache, num_slots, page_stride, page_size, latent_stride, amax_floor, scale_floor,
    NOPE: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr, TILES_BLOCK: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, ROPE_OFFSET: tl.constexpr, SCALE_BYTES: tl.constexpr, INLINE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        page = slot // page_size
        row = slot % page_size
        token = cache + page * page_stride + row * TOKEN_STRIDE
        tile = tl.arange(0, TILES_BLOCK)
        column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        x = tl.load(latent + i * latent_stride + column, mask=column < NOPE, other=0.0).to(tl.float32)
        amax = tl.maximum(tl.max(tl.abs(x), axis=1), amax_floor)
        exponent = tl.ceil(tl.log2(tl.maximum(amax / 448.0, scale_floor)))
        codes = (x * tl.exp2(-exponent)[:, None]).to(tl.float8e4nv)
        tl.store((token + column).to(tl.pointer_type(tl.float8e4nv)), codes, mask=column < NOPE)
        if INLINE:
            scales = (token + NOPE).to(tl.pointer_type(tl.float32))
            tl.store(scales + tile, tl.exp2(exponent), mask=tile < NOPE // TILE)
        else:
            scales = cache + page * page_stride + page_size * TOKEN_STRIDE + row * SCALE_BYTES
            byte = tl.where(tile < NOPE // TILE, exponent + 127.0, 0.0).to(tl.uint8)
            tl.store(scales + tile, byte, mask=tile < SCALE_BYTES)
        rope = tl.arange(0, ROPE)
        bf16 = tl.load(latent + i * latent_stride + NOPE + rope)
        tl.store((token + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16)) + rope, bf16)


def quantize_kv(
    latent: torch.Tensor, slots: torch.Tensor, kv_cache: torch.Tensor, layout: KVLayout, page_size: int
):
    quantize_kernel[(len(slots),)](
        latent, slots, kv_cache, len(kv_cache) * page_size, kv_cache.stride(0), page_size, latent.stride(0),
        layout.amax_floor, layout.scale_floor,
        NOPE=layout.nope_dim, ROPE=layout.rope_dim, TILE=layout.tile_dim,
        TILES_BLOCK=triton.next_power_of_2(layout.num_tiles), TOKEN_STRIDE=layout.token_stride,
        ROPE_OFFSET=layout.rope_offset, SCALE_BYTES=layout.scale_bytes, INLINE=bool(layout.scale_inline),
    )  # fmt: skip


@triton.jit
def combine_kernel(
    out, lens, topk_indices, query_start_loc, seq_lens, gather_lens, compressed_base, swa_base,
    num_tokens, num_requests, topk_stride, width, WINDOW: tl.constexpr, RATIO: tl.constexpr,
    TOPK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    for j in tl.static_range(ROWS):
        t = tl.program_id(0) * ROWS + j
        if t < num_tokens:
            first = tl.load(query_start_loc)
            low = 0
            high = num_requests
            while high - low > 1:
                middle = (low + high) // 2
                below = tl.load(query_start_loc + middle) - first <= t
                low = tl.where(below, middle, low)
                high = tl.where(below, high, middle)
            seq_len = tl.load(seq_lens + low)
            pos = seq_len - (tl.load(query_start_loc + low + 1) - first) + t
            num_topk = tl.minimum((pos + 1) // RATIO, TOPK)
            gathered = seq_len - tl.load(gather_lens + low)
            start = tl.maximum(tl.maximum(pos - WINDOW + 1, gathered), 0)
            num_window = pos - start + 1
            column = tl.arange(0, BLOCK)
            entry = tl.load(
                topk_indices + t.to(tl.int64) * topk_stride + column, mask=column < num_topk, other=-1
            )
            entry = tl.where(entry >= 0, entry + tl.load(compressed_base + low), -1)
            window = tl.load(swa_base + low) + start - gathered + column - num_topk
            value = tl.where(column < num_topk, entry, tl.where(column < num_topk + num_window, window, -1))
            tl.store(out + t.to(tl.int64) * width + column, value, mask=column < width)
            tl.store(lens + t, num_topk + num_window)


def combine_topk_swa_indices(
    inputs: tuple[torch.Tensor, ...], window: int, ratio: int, out: torch.Tensor, lens: torch.Tensor
):
    """`inputs` in the order of mla_fp8.combine_topk_swa_indices."""
    topk_indices, query_start_loc, *per_request = inputs
    rows = 2
    combine_kernel[(triton.cdiv(len(out), rows),)](
        out, lens, topk_indices, query_start_loc, *per_request, len(out), len(per_request[0]),
        topk_indices.stride(0), out.shape[1], WINDOW=window, RATIO=ratio, TOPK=topk_indices.shape[1],
        BLOCK=triton.next_power_of_2(out.shape[1]), ROWS=rows,
    )  # fmt: skip
