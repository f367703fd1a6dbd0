"""FP4 rows that other packages write, into caches of this one. Named after their maker: two of them have rows
of 384 bytes, two of 368.

========================  ===============================================================================
``flashinfer_nvfp4_384``  FlashInfer. Page: (224 bytes of e2m1, 64 bf16) x page_size, then (28 e4m3, 4
                          bytes of 0) x page_size. Scales are of 16 elements; that of a tile of zeros is 0
``sglang_mxfp4_368``      SGLang. Row: 224 bytes of e2m1, 14 ue8m0 of 32 elements, 2 bytes of nothing, 64
                          bf16
========================  ===============================================================================

Both hold 448 elements in e2m1, the even one in the low half of a byte, and 64 in bf16. Every value is exact
in bf16, so what is lost is what the new layout's writer rounds, byte by byte that of ``quantize_kv``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference
from ..layout import KVLayout, get_layout
from ..ops.quantize_kv import quantize_kv

__all__ = ["Fp4Rows", "convert_kv"]

NOPE_DIM, ROPE_DIM = 448, 64
CODE_BYTES, ROPE_BYTES = NOPE_DIM // 2, ROPE_DIM * 2
ROWS_AT_ONCE = 1 << 16  # bounds the memory of what is between the caches


@dataclass(frozen=True)
class Fp4Rows:
    tile_dim: int
    scale_dtype: torch.dtype
    scale_bytes: int  # of a row, with what follows them
    scales_in_row: bool  # between the codes and rope, else behind the rows of a page

    @property
    def row_bytes(self) -> int:
        return CODE_BYTES + ROPE_BYTES + self.scale_bytes * self.scales_in_row

    @property
    def bytes_per_token(self) -> int:
        return CODE_BYTES + ROPE_BYTES + self.scale_bytes

    def rows(self, kv_cache: Tensor, slots: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """(codes, scales, rope) of slots that are in the cache."""
        page, row = slots // page_size, slots % page_size
        scale_at = row * self.row_bytes + CODE_BYTES
        if not self.scales_in_row:
            scale_at = page_size * self.row_bytes + row * self.scale_bytes
        rope_at = (row + 1) * self.row_bytes - ROPE_BYTES

        def read(first: Tensor, num_bytes: int) -> Tensor:
            return kv_cache[page[:, None], first[:, None] + torch.arange(num_bytes, device=first.device)]

        scales = read(scale_at, NOPE_DIM // self.tile_dim).view(self.scale_dtype)
        codes = read(row * self.row_bytes, CODE_BYTES).view(torch.float4_e2m1fn_x2)
        return codes, scales, read(rope_at, ROPE_BYTES).view(torch.bfloat16)


FP4_ROWS = {
    "flashinfer_nvfp4_384": Fp4Rows(16, torch.float8_e4m3fn, 32, scales_in_row=False),
    "sglang_mxfp4_368": Fp4Rows(32, torch.float8_e8m0fnu, 16, scales_in_row=True),
}


def convert_kv(
    src: Tensor,
    dst: Tensor,
    *,
    src_rows: str,
    layout: str | KVLayout,
    src_page_size: int,
    page_size: int,
    src_slots: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | None = None,
) -> None:
    """Row ``src_slots[i]`` of ``src`` to row ``slot_mapping[i]`` of ``dst``. For once, not for every step: it
    is PyTorch up to ``quantize_kv``, and waits for the GPU.

    ============  =======================  ==============  =================================================
    src           [num_pages, page_bytes]  uint8           any stride of pages, at least their rows
    dst           [num_pages, page_bytes]  uint8           written in place
    src_rows                               str             a name of the table above
    layout                                 str, KVLayout   of ``dst``: 512 dims. ``dsv4`` keeps rope in bf16
    src_slots     [n]                      int64 or int32  outside of ``src``: the row is left out
    slot_mapping  [n]                      int64 or int32  outside of ``dst``: skipped
    scale         one element              fp32            the layer's scale: ``fp8_e4m3*_512`` only
    ============  =======================  ==============  =================================================

    A NaN scale makes its tile NaN. ValueError names the argument, what was expected and what came; what is
    wrong with ``dst`` is the RuntimeError of ``quantize_kv`` about its ``kv_cache``.
    """
    rows, layout = _check(src, src_rows, get_layout(layout), src_page_size, src_slots, slot_mapping)
    real = (src_slots >= 0) & (src_slots < len(src) * src_page_size)
    taken, to = src_slots[real].long(), slot_mapping[real]
    for some, into in zip(taken.split(ROWS_AT_ONCE), to.split(ROWS_AT_ONCE), strict=True):
        codes, scales, rope = rows.rows(src, some, src_page_size)
        tiles = reference.values_of(codes).unflatten(-1, (-1, rows.tile_dim)) * scales.float()[..., None]
        latent = torch.cat([tiles.flatten(-2).bfloat16(), rope], -1)
        quantize_kv(latent, into, dst, layout=layout, page_size=page_size, scale=scale)


def _check(
    src: Tensor, src_rows: str, layout: KVLayout, page_size: int, src_slots: Tensor, slot_mapping: Tensor
) -> tuple[Fp4Rows, KVLayout]:
    def expect(fine: bool, name: str, expected: str, got: object) -> None:
        if not fine:
            raise ValueError(f"convert_kv: {name} must be {expected}, got {got}")

    expect(src_rows in FP4_ROWS, "src_rows", f"one of {', '.join(FP4_ROWS)}", repr(src_rows))
    rows = FP4_ROWS[src_rows]
    expect(layout.head_dim_qk == NOPE_DIM + ROPE_DIM, "layout", "one of 512 dims", layout.name)
    expect(page_size > 0, "src_page_size", "positive", page_size)
    expect(src.dtype == torch.uint8 and src.dim() == 2, "src", "2-d uint8", f"{src.dim()}-d {src.dtype}")
    least = page_size * rows.bytes_per_token
    expect(src.shape[1] >= least, "src", f"pages of at least {least} bytes", src.shape[1])
    for name, slots in (("src_slots", src_slots), ("slot_mapping", slot_mapping)):
        fine = slots.dtype in (torch.int32, torch.int64) and slots.dim() == 1
        expect(fine, name, "1-d int32 or int64", f"{slots.dim()}-d {slots.dtype}")
        expect(slots.device == src.device, name, f"on {src.device}", slots.device)
    count = len(src_slots)
    expect(len(slot_mapping) == count, "slot_mapping", f"of {count} slots", len(slot_mapping))
    return rows, layout
