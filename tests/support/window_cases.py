"""Problems for `sparse_prefill_window`, with the slots of the windows spelt out."""

from dataclasses import dataclass

import pytest
import torch
from sparse_cases import GRID, INT_MAX, INT_MIN, SIZE, Case, filled_scope, make_scope

import mla_fp8
from mla_fp8 import KV_LAYOUTS, KVLayout, reference

PAGED = ("dsv32", "dsv4", "bf16", "bf16_512")
paged_layouts = pytest.mark.parametrize("layout", [KV_LAYOUTS[name] for name in PAGED], ids=PAGED)
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class WindowCase:
    case: Case  # with the slots of the window spelt out, for its expected()
    geometry: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # page_table, query_start_loc, seq_lens
    window_size: int

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.case.q, self.case.scopes[0].kv_cache, *self.geometry

    def options(self) -> dict:
        options = self.case.options() | {"window_size": self.window_size}
        del options["topk_length"]
        return options

    def op_options(self) -> dict:
        options = self.case.op_options() | {"window_size": self.window_size}
        del options["topk_length"]
        return options

    def run(self, **changes) -> Results:
        return mla_fp8.sparse_prefill_window(*self.arguments(), **(self.options() | changes))


def make_window_case(
    layout: KVLayout,
    device: str,
    *,
    query_lens: list[int],
    seq_lens: list[int],
    window_size: int = 33,
    page_size: int = 16,
    num_q_heads: int = 16,
    padding: int = 2,
    extra: dict | None = None,
) -> WindowCase:
    """Pages in random order, some missing; query_start_loc begins at 7; `padding` tokens of no request."""
    num_tokens = sum(query_lens) + padding
    max_pages = -(-max(seq_lens, default=1) // page_size) or 1
    num_pages = max(len(seq_lens) * max_pages, 1)
    table = torch.randperm(num_pages, device=device)[: len(seq_lens) * max_pages]
    table = table.int().view(len(seq_lens), max_pages)
    hostile = torch.tensor([-1, INT_MIN, INT_MAX, num_pages], dtype=torch.int32, device=device)
    holes = torch.rand(table.shape, device=device) < 0.1
    table[holes] = hostile[torch.randint(len(hostile), table.shape, device=device)][holes]
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int() + 7
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    slots = reference.window_slots(
        table.where((table >= 0) & (table < num_pages), -1), starts, lens,
        num_tokens=num_tokens, page_size=page_size, window_size=window_size,
    )  # fmt: skip
    scale = torch.tensor([GRID], device=device) if layout.needs_scale else None
    scopes = [filled_scope(layout, device, scale, slots, None, num_pages, page_size)]
    if extra is not None:
        second = {"layout": layout} | extra
        scopes.append(make_scope(device=device, scale=scale, num_tokens=num_tokens, **second))
    case = Case(
        layout=layout,
        q=torch.randn(num_tokens, num_q_heads, layout.head_dim_qk, device=device).bfloat16(),
        scopes=scopes,
        attn_sink=torch.randn(num_q_heads, device=device),
        sm_scale=layout.head_dim_qk**-0.5 / SIZE,
        scale=scale,
    )
    return WindowCase(case, (table, starts, lens), window_size)
