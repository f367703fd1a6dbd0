"""Problems for `sparse_prefill_window`, with the slots of the windows spelt out."""

from dataclasses import dataclass, replace

import pytest
import torch
from sparse_cases import INT_MAX, INT_MIN, Case, case_over, filled_scope, make_scope

import mla_fp8
from mla_fp8 import KV_LAYOUTS, KVLayout, reference

PAGED = ("dsv32", "dsv4", "bf16", "bf16_512")
paged_layouts = pytest.mark.parametrize("layout", [KV_LAYOUTS[name] for name in PAGED], ids=PAGED)
few_heads_on_cpu = pytest.mark.only(lambda device, num_q_heads, **_: device != "cpu" or num_q_heads == 8)
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class WindowCase:
    case: Case  # with the slots of the window spelt out, for its expected()
    geometry: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # page_table, query_start_loc, seq_lens
    window_size: int
    entry_pages: torch.Tensor | None = None  # in place of the second cache's indices

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.case.q, self.case.scopes[0].kv_cache, *self.geometry

    def options(self) -> dict:
        return self._of_window(self.case.options())

    def op_options(self) -> dict:
        return self._of_window(self.case.op_options())

    def _of_window(self, options: dict) -> dict:
        del options["topk_length"]
        if self.entry_pages is not None:
            options |= {"extra_indices": None, "extra_page_table": self.entry_pages}
        return options | {"window_size": self.window_size}

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
    scopes = [filled_scope(layout, device, slots, None, num_pages, page_size)]
    if extra is not None:
        second = {"layout": layout} | extra
        scopes.append(make_scope(device=device, num_tokens=num_tokens, **second))
    return WindowCase(case_over(scopes, num_q_heads), (table, starts, lens), window_size)


def make_entries_case(
    layout: KVLayout,
    device: str,
    *,
    query_lens: list[int],
    seq_lens: list[int],
    ratio: int = 4,
    page_size: int = 2,
    room: int = 0,
    extra_layout: KVLayout | None = None,
    lens: torch.Tensor | None = None,
    **window,
) -> WindowCase:
    """The same over all entries of each token's past: entry e of a request is seen from position
    ``(e + 1) * ratio - 1`` on.

    Pages of entries in random order, some missing; ``room`` more of them than the longest request fills.
    ``lens`` are other lengths than those of the positions.
    """
    case = make_window_case(layout, device, query_lens=query_lens, seq_lens=seq_lens, **window)
    extra = extra_layout or layout
    num_tokens, requests = len(case.case.q), len(seq_lens)
    max_pages = -(-max((n // ratio for n in seq_lens), default=0) // page_size) + room
    num_pages = max(requests * max_pages, 1)
    table = torch.randperm(num_pages, device=device)[: requests * max_pages].int().view(requests, max_pages)
    hostile = torch.tensor([-1, INT_MIN, INT_MAX, num_pages], dtype=torch.int32, device=device)
    holes = torch.rand(table.shape, device=device) < 0.1
    table[holes] = hostile[torch.randint(len(hostile), table.shape, device=device)][holes]
    if lens is None:
        lens = torch.full((num_tokens,), INT_MAX, dtype=torch.int32, device=device)  # of no request
        ends = torch.tensor(query_lens).cumsum(0).tolist()
        for end, queries, length in zip(ends, query_lens, seq_lens, strict=True):
            position = torch.arange(length - queries, length, device=device)
            lens[end - queries : end] = ((position + 1).clamp_min(0) // ratio).int()
    slots = reference.entry_slots(
        table.where((table >= 0) & (table < num_pages), -1), case.geometry[1], lens,
        num_tokens=num_tokens, page_size=page_size,
    )  # fmt: skip
    entries = filled_scope(extra, device, slots, None, num_pages, page_size)
    case.case.scopes.append(replace(entries, length=lens))
    case.entry_pages = table
    return case
