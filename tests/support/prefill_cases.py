"""Prefill chunks over paged caches whose attended rows a test lists by plain loops."""

from dataclasses import dataclass, field

import pytest
import torch
from sparse_cases import GRID, SIZE, exact_latents
from torch import Tensor

import mla_fp8
from mla_fp8 import KV_LAYOUTS, KVLayout, LayerCaches, PagedCache, reference
from mla_fp8.prefill import STRATEGIES
from mla_fp8.testing import assert_within_flash_mla_tolerance

all_strategies = pytest.mark.parametrize("strategy", STRATEGIES)
LAYERS = {  # what a layer has: (entries, window, whether an indexer chose)
    "window alone": (False, True, False),
    "selected entries": (True, True, True),
    "all entries": (True, True, False),
    "entries alone": (True, False, True),
}


def assert_right(got, want):
    out, max_logits, lse = got
    assert_within_flash_mla_tolerance(out, lse, want[0], want[2])
    torch.testing.assert_close(max_logits.double(), want[1], rtol=1e-4, atol=1e-4)


WINDOW_PAGE = 8
FNUZ_NAN, NAN = 0x80, 0xFF
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
NEGATIVE, BEYOND = (-1, -50, INT_MIN), (INT_MAX, INT_MAX - 50, 1 << 30)


def negative(lengths: list[int]) -> list[int]:
    """The same lengths, with a negative number for each 0."""
    return [n or NEGATIVE[r % 3] for r, n in enumerate(lengths)]


def garbage(lengths: list[int], host: list[int]) -> list[int]:
    """What a device may hold in place of these: of 0 any negative number, of the host's any above."""
    pairs = zip(negative(lengths), host, strict=True)
    return [BEYOND[r % 3] if n == most else n for r, (n, most) in enumerate(pairs)]


@dataclass
class Chunk:
    """Requests that have ``seq_lens`` tokens, of which the last ``query_lens`` are the chunk: the host
    says so, the device's lengths are garbage."""

    layout: KVLayout
    device: str
    seq_lens: list[int]
    query_lens: list[int]
    ratio: int  # of the layer that has entries
    window: int
    topk: int
    entries_layout: KVLayout | None = None  # by default that of the window
    num_q_heads: int = 4
    page_tokens: int = 16  # a page of entries holds page_tokens / ratio
    max_len: int = 96
    latents: Tensor = field(init=False)  # [num_requests, max_len, dim]: of the window
    entries: Tensor = field(init=False)  # [num_requests, max_len // ratio, dim]
    lost_latents: Tensor = field(init=False)  # [num_requests, max_len] bool: what no slot holds any more
    lost_entries: Tensor = field(init=False)  # [num_requests, max_len // ratio] bool

    def __post_init__(self) -> None:
        num_requests, dim = len(self.seq_lens), self.layout.head_dim_qk
        entries = self.max_len // self.ratio
        self.latents = exact_latents(self.layout, num_requests * self.max_len, self.device).view(
            num_requests, self.max_len, dim
        )
        self.entries = exact_latents(
            self.entries_layout or self.layout, num_requests * entries, self.device
        ).view(num_requests, entries, dim)
        self.lost_latents = torch.zeros(self.latents.shape[:2], dtype=torch.bool)
        self.lost_entries = torch.zeros(self.entries.shape[:2], dtype=torch.bool)
        pages = torch.randperm(num_requests * self.max_len // self.page_tokens + 3, device=self.device).int()
        self.page_table = pages[3:].view(num_requests, self.max_len // self.page_tokens).contiguous()
        positions = torch.arange(self.max_len, device=self.device)
        full = (
            self.page_table[:, positions // self.page_tokens] * self.page_tokens
            + positions % self.page_tokens
        )
        self.req_pool_indices = torch.randperm(num_requests + 2, device=self.device)[:num_requests]
        self.req_to_token = torch.zeros(num_requests + 2, self.max_len, dtype=torch.int32, device=self.device)
        self.req_to_token[self.req_pool_indices] = full.int()
        self.full_to_swa = torch.randperm(len(pages) * self.page_tokens, device=self.device)
        self.set_lengths(self.seq_lens, self.query_lens)
        num_tokens = sum(self.query_lens)
        self.q = torch.randn(num_tokens, self.num_q_heads, dim, device=self.device).bfloat16()
        self.attn_sink = torch.randn(self.num_q_heads, device=self.device)
        self.topk_indices = torch.randint(-2, entries + 5, (num_tokens, self.topk), device=self.device).int()
        self.scale = torch.tensor([GRID], device=self.device) if self.layout.needs_scale else None
        self.sm_scale = dim**-0.5 / SIZE

    def set_lengths(self, seq_lens: list[int], query_lens: list[int]) -> None:
        """New lengths, on the device garbage wherever that counts as these, in new tensors. The caches hold
        what these lengths hold and NaN elsewhere."""
        self.live_seq_lens, self.live_query_lens = seq_lens, query_lens
        device = garbage(seq_lens, self.seq_lens), garbage(query_lens, self.query_lens)
        self.seq_lens_device, self.query_lens_device = (
            torch.tensor(x, dtype=torch.int32, device=self.device) for x in device
        )

    def lose_slots(self, seed: int) -> None:
        """Writes what no table should hold over some of its numbers. Call it once the layers are stored."""
        generator = torch.Generator().manual_seed(seed)
        num_slots, per_page = len(self.full_to_swa), self.page_tokens // self.ratio
        outside = [-1, -(2**31), 2**31 - 1]

        def spoil(table: Tensor, values: list[int]) -> Tensor:
            lost = torch.rand(table.shape, generator=generator) < 0.3
            chosen = torch.randint(len(values), table.shape, generator=generator)
            spoilt = torch.where(lost, torch.tensor(values)[chosen], table.cpu().long())
            table.copy_(spoilt.to(table))
            return lost

        positions = torch.arange(self.max_len)
        full = self.req_to_token[self.req_pool_indices].long()  # before it is spoilt
        pages = spoil(self.page_table, [*outside, num_slots // self.page_tokens, 1 << 30])
        self.lost_entries |= pages[:, torch.arange(self.lost_entries.shape[1]) // per_page]
        self.lost_latents |= spoil(self.full_to_swa, [*outside, num_slots, 2**32, -(2**63)])[full.cpu()]
        tokens = spoil(self.req_to_token, [*outside, num_slots])
        self.lost_latents |= tokens[self.req_pool_indices.cpu()][:, positions]

    def _store(
        self, held: list[tuple[Tensor, Tensor]], num_pages: int, page_size: int, layout: KVLayout
    ) -> PagedCache:
        none = (self.q[:0, 0], torch.arange(0, device=self.device))
        rows, slots = (torch.cat(x) for x in zip(none, *held, strict=True))
        data = layout.empty(num_pages, page_size, self.device)
        data.fill_(FNUZ_NAN if layout.nope_format == "e4m3fnuz" else NAN)
        mla_fp8.quantize_kv(
            rows.contiguous(), slots, data, layout=layout, page_size=page_size, scale=self.scale
        )
        return PagedCache(data, page_size)

    def entry_cache(self, page_size: int) -> PagedCache:
        held = []
        for r, n in enumerate(self.live_seq_lens):
            e = torch.arange(n // self.ratio, device=self.device)
            page = self.page_table[r][e // page_size].long()
            held.append((self.entries[r, e], page * page_size + e % page_size))
        return self._store(
            held, len(self.full_to_swa) // self.page_tokens, page_size, self.entries_layout or self.layout
        )

    def layer(self, *, entries: bool = True, window: bool = True) -> LayerCaches:
        num_slots = len(self.full_to_swa)
        reached = []
        for r, (n, queries) in enumerate(zip(self.live_seq_lens, self.live_query_lens, strict=True)):
            p = torch.arange(min(max(n - queries - self.window + 1, 0), n), n, device=self.device)
            full = self.req_to_token[self.req_pool_indices[r], p].long()
            reached.append((self.latents[r, p], self.full_to_swa[full]))
        return LayerCaches(
            layout=self.layout,
            compress_ratio=self.ratio if entries else 0,
            entries=self.entry_cache(self.page_tokens // self.ratio) if entries else None,
            window=self._store(reached, num_slots // WINDOW_PAGE, WINDOW_PAGE, self.layout)
            if window
            else None,
            scale=self.scale,
            entries_layout=self.entries_layout,
        )

    def build(self, workspace: mla_fp8.PrefillWorkspace | None = None, **changes: object):
        """The chunk cache; the host knows ``seq_lens`` and ``query_lens``."""
        options = {
            "window_size": self.window, "seq_lens_host": self.seq_lens, "query_lens_host": self.query_lens,
        }  # fmt: skip
        return mla_fp8.SparsePrefillChunkCache(
            workspace or mla_fp8.PrefillWorkspace(self.layout.head_dim_qk, self.device),
            self.seq_lens_device, self.query_lens_device, self.page_table,
            *((self.req_pool_indices, self.req_to_token, self.full_to_swa) if self.window else ()),
            **(options | changes),
        )  # fmt: skip

    def attended(self, layer: LayerCaches, topk_indices: Tensor | None) -> list[Tensor]:
        """The rows of each token of the live chunk, one by one."""
        found = []
        token = 0
        for r, (n, queries) in enumerate(zip(self.live_seq_lens, self.live_query_lens, strict=True)):
            for pos in range(n - queries, n):
                rows = []
                if layer.entries:
                    past = (pos + 1) // self.ratio
                    if topk_indices is None:
                        chosen = list(range(past))
                    else:  # the indexer's first `past` columns count
                        chosen = topk_indices[token].tolist()[:past]
                    held = [e for e in chosen if 0 <= e < n // self.ratio and not self.lost_entries[r, e]]
                    rows += list(self.entries[r][held])
                if layer.window:
                    held = [
                        p
                        for p in range(max(pos - self.window + 1, 0), pos + 1)
                        if not self.lost_latents[r, p]
                    ]
                    rows += list(self.latents[r][held])
                found.append(torch.stack(rows) if rows else self.q.new_empty(0, self.q.shape[2]))
                token += 1
        return found

    def expected(self, layer: LayerCaches, topk_indices: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(out, max_logits, lse) in float64 from the rows that the test kept."""
        results = []
        for q, rows in zip(self.q.double(), self.attended(layer, topk_indices), strict=False):
            indices = torch.arange(len(rows), device=self.device)[None]
            results.append(
                reference.sparse_attention(
                    q[None], [(rows, indices, None)], sm_scale=self.sm_scale, attn_sink=self.attn_sink
                )
            )
        return tuple(torch.cat(x) for x in zip(*results, strict=True))

    def attend(self, cache, layer: LayerCaches, topk_indices: Tensor | None, strategy: str = "auto", **more):
        return cache.attend(
            self.q, layer, topk_indices, sm_scale=self.sm_scale, attn_sink=self.attn_sink, strategy=strategy,
            **more,
        )  # fmt: skip


def make_chunk(layout: str, device: str, **changes: object) -> Chunk:
    """Six requests: long, within the window, without queries, of one token, empty, page-crossing."""
    shape = {
        "seq_lens": [90, 7, 30, 1, 0, 33], "query_lens": [20, 7, 0, 1, 0, 9], "ratio": 4, "window": 12,
        "topk": 10,
    }  # fmt: skip
    first, _, second = layout.partition("+")  # "dsv41+dsv41_fp4": of the window and of the entries
    return Chunk(KV_LAYOUTS[first], device, entries_layout=KV_LAYOUTS.get(second), **(shape | changes))
