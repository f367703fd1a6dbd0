"""Problems for the sparse attention ops whose right answer the test knows without reading any cache."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from kv_cache_cases import layer_scale

import mla_fp8
from mla_fp8 import KV_LAYOUTS, KVLayout, reference

GRID, FP4_GRID = 2.0**-10, 2.0**-4  # the scales that the quantiser must find
SIZE = 1 / 8  # of the latents, about that in FlashMLA's tests, whose tolerances are used
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
V4_SCOPES = {"topk": 37, "page_size": 2, "num_slots": 300}  # of the second cache: few keys, pages of 2

all_layouts = pytest.mark.parametrize(
    "layout", [x for x in KV_LAYOUTS.values() if not x.extra_only], ids=lambda x: x.name
)
mixed_pairs = pytest.mark.parametrize(
    "layout, extra_layout",
    [(KV_LAYOUTS[first], x) for x in KV_LAYOUTS.values() for first in x.extra_of],
    ids=lambda x: x.name,
)
packed_layouts = pytest.mark.parametrize(
    "layout", [KV_LAYOUTS["dsv32"], KV_LAYOUTS["dsv4"]], ids=["dsv32", "dsv4"]
)


def exact_latents(layout: KVLayout, num_rows: int, device: str) -> torch.Tensor:
    """bf16 latents that the layout stores without error: e4m3 values, amax at the format's top."""
    x = torch.randn(num_rows, layout.head_dim_qk, device=device) * SIZE
    if layout.nope_format == "e2m1":
        values = reference.values_of(reference.to_e2m1(x / FP4_GRID))
        values[:, :: layout.tile_dim] = reference.E2M1[-1]
        return (values * FP4_GRID).bfloat16()
    if layout.fp8_dtype is None:
        return x.bfloat16()
    top = torch.finfo(layout.fp8_dtype).max
    on_grid = (x / GRID).clamp(-top, top).to(layout.fp8_dtype).float() * GRID
    tile = layout.tile_dim or layout.nope_dim
    on_grid[:, : layout.nope_dim : tile] = top * GRID  # fixes the scale of each tile
    if layout.rope_format == "bf16":
        on_grid[:, layout.nope_dim :] = x[:, layout.nope_dim :]
    return on_grid.bfloat16()


def bf16_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in bf16, whose sums are floats, for CPUs that have no instruction for it: those are ten
    times slower in bf16."""
    return (a.float() @ b.float()).bfloat16()


@dataclass
class Scope:
    """A cache with NaN in every slot that is not selected, and what its selected rows hold."""

    kv_cache: torch.Tensor
    rows: torch.Tensor  # [num_slots, head_dim_qk] bf16, kept by the test
    indices: torch.Tensor
    length: torch.Tensor | None
    page_size: int
    layout: KVLayout


@dataclass
class Case:
    layout: KVLayout
    q: torch.Tensor
    scopes: list[Scope]
    attn_sink: torch.Tensor | None
    sm_scale: float
    scale: torch.Tensor | None = field(default=None)

    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.scopes[0].kv_cache, self.scopes[0].indices

    def options(self) -> dict:
        main = self.scopes[0]
        options = {
            "layout": self.layout,
            "page_size": main.page_size,
            "sm_scale": self.sm_scale,
            "topk_length": main.length,
            "attn_sink": self.attn_sink,
            "scale": self.scale,
        }
        if len(self.scopes) > 1:
            extra = self.scopes[1]
            options |= {
                "extra_kv_cache": extra.kv_cache,
                "extra_indices": extra.indices,
                "extra_topk_length": extra.length,
                "extra_page_size": extra.page_size,
                "extra_layout": None if extra.layout is self.layout else extra.layout,
            }
        return options

    def op_options(self) -> dict:
        """For torch.ops.mla_fp8.*, which takes the layout as an int."""
        ids = {name: x.id for name, x in self.options().items() if isinstance(x, KVLayout)}
        return self.options() | ids

    def decode(self, **changes) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_fp8.sparse_decode(*self.arguments(), **(self.options() | changes))

    def prefill(self, **changes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return mla_fp8.sparse_prefill_paged(*self.arguments(), **(self.options() | changes))

    def nan_outputs(self) -> dict[str, torch.Tensor]:
        """For the _out form of a prefill op."""
        tokens, heads = self.q.shape[:2]
        rows = self.q.new_full((tokens, heads), float("nan"), dtype=torch.float32)
        out = self.q.new_full((tokens, heads, self.layout.head_dim_v), float("nan"))
        return {"out": out, "max_logits": rows, "lse": rows.clone()}

    def workspace(self) -> torch.Tensor:
        """As much as any GPU has use for, so that an _out form splits as the functional form does."""
        tokens, heads = self.q.shape[:2]
        size = torch.ops.mla_fp8.sparse_attention_workspace(tokens, heads, 512)
        return self.q.new_full((size,), float("nan"), dtype=torch.float32)

    def prefill_into_nan(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        outs = self.nan_outputs()
        torch.ops.mla_fp8.sparse_prefill_paged_out(
            *self.arguments(), **self.op_options(), **outs, workspace=self.workspace()
        )
        return outs["out"], outs["max_logits"], outs["lse"]

    def run_by(self, kernel: str, **named) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """By the GPU kernel of that name: ``schedule``, ``heads`` (of a CTA), ``splits``, ``producers``,
        ``max_logits`` (False: it has no elements)."""
        return torch.ops.mla_fp8._sparse_attention(
            *self.arguments(), **self.op_options(), kernel=kernel, **named
        )

    def expected(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out, max_logits, lse) in ``dtype``, from the rows that the test kept."""
        scopes = [(s.rows, s.indices, s.length) for s in self.scopes]
        return reference.sparse_attention(
            self.q.to(dtype), scopes, sm_scale=self.sm_scale, attn_sink=self.attn_sink
        )

    def rounded(self) -> torch.Tensor:
        """What eager PyTorch in bf16 makes of it: bf16 products, bf16 weights."""
        outs = []
        for t in range(len(self.q)):
            keys = []
            for s in self.scopes:
                i = s.indices[t] if s.length is None else s.indices[t, : max(int(s.length[t]), 0)]
                keys.append(s.rows[i[(i >= 0) & (i < len(s.rows))].long()])
            k = torch.cat(keys)
            logits = bf16_product(self.q[t], k.T).float() * self.sm_scale
            if self.attn_sink is not None:
                logits = torch.cat([logits, self.attn_sink[:, None]], 1)
            weights = logits.softmax(-1)[:, : len(k)].bfloat16()
            outs.append(bf16_product(weights, k[:, : self.layout.head_dim_v]))
        return torch.stack(outs)

    def tokens(self, which: slice | torch.Tensor) -> "Case":
        """The same problem with some of its query tokens."""
        scopes = [
            replace(s, indices=s.indices[which], length=None if s.length is None else s.length[which])
            for s in self.scopes
        ]
        return replace(self, q=self.q[which], scopes=scopes)


def make_scope(layout: KVLayout, device: str, *, num_tokens, topk, page_size, num_slots) -> Scope:
    """Random slots with holes and hostile entries; token 1 is empty, token 2 has five keys."""
    num_pages = -(-num_slots // page_size)
    num_slots = num_pages * page_size
    usable = torch.randperm(num_slots, device=device)[: max(num_slots * 3 // 4, 1)]
    indices = usable[torch.randint(len(usable), (num_tokens, topk), device=device)].int()
    hostile = torch.tensor([-1, INT_MIN, INT_MAX, num_slots, -num_slots], dtype=torch.int32, device=device)
    holes = torch.rand(num_tokens, topk, device=device) < 0.15
    indices[holes] = hostile[torch.randint(len(hostile), indices.shape, device=device)][holes]
    length = torch.randint(topk // 2, topk + 1, (num_tokens,), device=device, dtype=torch.int32)
    length[:1] = topk
    if num_tokens > 1:
        indices[1] = -1
    if num_tokens > 2:
        length[2] = min(5, topk)
        indices[2, 5:] = 1 << 30
    if num_tokens > 4:
        length[3], length[4] = INT_MAX, INT_MIN

    return filled_scope(layout, device, indices, length, num_pages, page_size)


def filled_scope(layout: KVLayout, device: str, indices, length, num_pages, page_size) -> Scope:
    """Latents in the slots that are selected, NaN in all others."""
    num_slots = num_pages * page_size
    chosen = (indices >= 0) & (indices < num_slots)
    if length is not None:
        chosen &= torch.arange(indices.shape[1], device=device) < length[:, None]
    chosen = indices[chosen].long().unique()
    kv_cache = layout.empty(num_pages, page_size, device).fill_(0xFF)  # NaN in e4m3fn, ue8m0 and bf16
    if layout.nope_format == "e4m3fnuz":
        kv_cache.fill_(0x80)
    rows = torch.full((num_slots, layout.head_dim_qk), float("nan"), device=device).bfloat16()
    rows[chosen] = exact_latents(layout, len(chosen), device)
    mla_fp8.quantize_kv(
        rows[chosen].contiguous(), chosen, kv_cache, layout=layout, page_size=page_size,
        scale=layer_scale(layout, device, GRID),
    )  # fmt: skip
    return Scope(kv_cache, rows, indices, length, page_size, layout)


def make_case(
    layout: KVLayout,
    device: str,
    *,
    num_tokens: int = 6,
    num_q_heads: int = 16,
    topk: int = 100,
    page_size: int = 64,
    num_slots: int = 500,
    sink: bool = True,
    extra: dict | None = None,
) -> Case:
    """``extra`` overrides topk, page_size, num_slots and, where it has another, layout for a second cache."""
    shape = {"topk": topk, "page_size": page_size, "num_slots": num_slots}
    scopes = [make_scope(layout, device, num_tokens=num_tokens, **shape)]
    if extra is not None:
        second = {"layout": layout} | shape | extra
        scopes.append(make_scope(device=device, num_tokens=num_tokens, **second))
    return case_over(scopes, num_q_heads, sink=sink)


def case_over(scopes: list[Scope], num_q_heads: int, *, sink: bool = True) -> Case:
    """Random queries, as many as the indices have rows."""
    layout, indices = scopes[0].layout, scopes[0].indices
    device = indices.device
    return Case(
        layout=layout,
        q=torch.randn(len(indices), num_q_heads, layout.head_dim_qk, device=device).bfloat16(),
        scopes=scopes,
        attn_sink=torch.randn(num_q_heads, device=device) if sink else None,
        sm_scale=layout.head_dim_qk**-0.5 / SIZE,
        scale=layer_scale(layout, device, GRID),
    )
