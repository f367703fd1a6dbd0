"""The index tables that the layers of a prefill chunk share; each is made when the first layer asks for it.

A workspace holds the entries of all requests, one request after another, then the window's rows. Tables are
kept by what they depend on: the compress ratio, or a layer's geometry.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ops.combine_topk_swa_indices import combine_topk_swa_indices
from .costs import LayerShape, count_keys
from .layer import LayerCaches, PagedCache
from .workspace import num_entries, num_window_rows

_MAX_SLOT = 2**31 - 1


@dataclass(frozen=True)
class Region:
    """The entries of all requests, one request after another."""

    num_rows: int
    lens: Tensor  # [num_requests] int32
    offsets: Tensor  # [num_requests] int32


@dataclass(frozen=True)
class Tables:
    """The geometry of a chunk, and what follows from it."""

    window_size: int
    num_tokens: int  # rows of q
    seq_lens: Tensor  # [num_requests] int32, each in [0, seq_lens_host[r]]
    page_table: Tensor  # [num_requests, max_pages] int32, of the caches of entries
    query_start_loc: Tensor  # [num_requests + 1] int32
    query_pos: Tensor | None  # [num_tokens] int32
    seq_lens_host: Sequence[int]
    query_lens_host: Sequence[int]
    swa_ids: Tensor  # what build_swa_token_ids gives, nothing without a window
    swa_gather_lens: Tensor
    swa_offsets: Tensor
    _made: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def _once(self, *key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def max_entries(self, ratio: int) -> int:
        return max((n // ratio for n in self.seq_lens_host), default=0) if ratio else 0

    def shape(
        self, q: Tensor, layer: LayerCaches, topk_indices: Tensor | None, by_geometry: bool = False,
        grouped: bool = False,
    ) -> LayerShape:  # fmt: skip
        """What the prices of the layer depend on. A part of the chunk's tokens has that part of its keys."""
        ratio, window_size = layer.compress_ratio, self.window_size if layer.window else 0
        topk = self.max_entries(ratio) if topk_indices is None else topk_indices.shape[1]

        def num_keys() -> int:
            lengths = zip(self.seq_lens_host, self.query_lens_host, strict=True)
            keys, tokens = count_keys(lengths, ratio, topk, window_size), sum(self.query_lens_host)
            return keys * min(self.num_tokens, tokens) // max(tokens, 1)

        return LayerShape(
            num_tokens=self.num_tokens,
            num_q_heads=q.shape[1],
            topk=topk,
            window_size=window_size,
            num_entries=num_entries(self.seq_lens_host, ratio),
            num_window_rows=len(self.swa_ids) if layer.window else 0,
            num_keys=self._once("keys", ratio, topk, window_size, make=num_keys),
            all_entries=by_geometry and layer.entries is not None,
            grouped=grouped,
        )

    def region(self, ratio: int) -> Region:
        def make() -> Region:
            room = num_entries(self.seq_lens_host, ratio)
            lens = self.seq_lens // ratio if ratio else torch.zeros_like(self.seq_lens)
            return Region(room, lens, (lens.cumsum(0) - lens).int())

        return self._once("region", ratio, make=make)  # type: ignore[no-any-return]

    def combined(self, ratio: int, topk_indices: Tensor | None, *, window: bool) -> tuple[Tensor, Tensor]:
        """Each token's rows (entries of all requests first, then the window) and how many they are.

        Without ``topk_indices``: all entries of its past.
        """

        def combine(chosen: Tensor) -> tuple[Tensor, Tensor]:
            region = self.region(ratio)
            return combine_topk_swa_indices(
                chosen, self.query_start_loc, self.seq_lens,
                self.swa_gather_lens if window else torch.zeros_like(self.seq_lens),
                region.offsets, region.num_rows + self.swa_offsets[:-1],
                window_size=self.window_size if window else 0, compress_ratio=max(ratio, 1),
                topk=chosen.shape[1], query_pos=self.query_pos, compressed_lens=region.lens,
            )  # fmt: skip

        def every() -> tuple[Tensor, Tensor]:
            entry = torch.arange(self.max_entries(ratio), dtype=torch.int32, device=self.seq_lens.device)
            return combine(entry.expand(self.num_tokens, -1).contiguous())

        if topk_indices is not None:
            return combine(topk_indices)
        return self._once("combined", ratio, window, make=every)  # type: ignore[no-any-return]

    def slots_of_entries(self, ratio: int, cache: PagedCache) -> Tensor:
        """[num_entries + 1] int32: the slot of each row of the region, then -1."""

        def make() -> Tensor:
            region = self.region(ratio)
            row = torch.arange(region.num_rows, device=self.seq_lens.device)
            ends = region.offsets + region.lens
            request = torch.searchsorted(ends, row.int(), right=True).clamp_max(len(ends) - 1)
            pos = row - region.offsets[request]
            column = pos // cache.page_size
            held = (pos < region.lens[request]) & (column < self.page_table.shape[1])
            page = with_none(self.page_table)[request, torch.where(held, column, -1)].long()
            slot = page * cache.page_size + pos % cache.page_size
            slot = torch.where(held & (page >= 0) & (slot <= _MAX_SLOT), slot, -1)
            return with_none(slot.int())

        return self._once("slots", ratio, cache.page_size, make=make)  # type: ignore[no-any-return]

    def window_slots(self) -> tuple[Tensor, Tensor]:
        """Each token's slots of the window's cache, and how many they are."""

        def make() -> tuple[Tensor, Tensor]:
            rows, lens = self.combined(0, None, window=True)
            return with_none(self.swa_ids)[rows], lens

        return self._once("window", make=make)  # type: ignore[no-any-return]

    def held(self, layer: LayerCaches) -> Tensor:
        """[rows of the workspace + 1] int32: each row's own number, -1 where no slot of the layer's caches is
        behind it, and -1 at the end. What ``direct`` masks is then masked in a workspace too."""

        def make() -> Tensor:
            slots = []
            if layer.entries:
                slots.append((self.slots_of_entries(layer.compress_ratio, layer.entries)[:-1], layer.entries))
            if layer.window:
                slots.append((self.swa_ids, layer.window))
            held = torch.cat([(ids >= 0) & (ids < cache.num_slots) for ids, cache in slots])
            row = torch.arange(len(held), dtype=torch.int32, device=held.device)
            return with_none(torch.where(held, row, -1))

        return self._once("held", *layer.geometry, make=make)  # type: ignore[no-any-return]

    def workspace_rows(self, layer: LayerCaches, topk_indices: Tensor | None) -> tuple[Tensor, Tensor]:
        """Each token's rows of a workspace of all entries, -1 for those without a slot, and how many."""
        window = layer.window is not None
        rows, lens = self.combined(layer.compress_ratio, topk_indices, window=window)
        if topk_indices is not None:
            return self.held(layer)[rows], lens
        made = self._once("rows", *layer.geometry, make=lambda: self.held(layer)[rows])
        return made, lens

    def window_table(self, layer: LayerCaches) -> Tensor:
        """The page table of a layer's window: pages of one row, those of a workspace, where requests begin
        with what was gathered."""

        def make() -> Tensor:
            lengths = zip(self.seq_lens_host, self.query_lens_host, strict=True)
            longest = max((num_window_rows([n], [m], self.window_size) for n, m in lengths), default=0)
            columns = torch.arange(longest, dtype=torch.int32, device=self.seq_lens.device)
            rows = (self.swa_offsets[:-1, None] + columns).clamp_max(len(self.swa_ids))
            return self.held(layer)[rows + self.region(layer.compress_ratio).num_rows]

        return self._once("table", *layer.geometry, make=make)  # type: ignore[no-any-return]

    def entries_table(self, layer: LayerCaches) -> Tensor:
        """The page table of a layer's entries: pages of one row, those of a workspace of all of them."""

        def make() -> Tensor:
            region = self.region(layer.compress_ratio)
            columns = torch.arange(
                self.max_entries(layer.compress_ratio), dtype=torch.int32, device=self.seq_lens.device
            )
            rows = region.offsets[:, None] + columns
            inside = columns < region.lens[:, None]
            return self.held(layer)[torch.where(inside, rows, -1)]  # the last one is -1

        return self._once("entries", *layer.geometry, make=make)  # type: ignore[no-any-return]

    def num_past_entries(self, ratio: int) -> Tensor:
        """[num_tokens] int32: entries of each token's past, where the chunk's tokens are its requests' last;
        0 of a token of no request."""

        def make() -> Tensor:
            begin = self.query_start_loc.long() - self.query_start_loc[:1]
            token = torch.arange(self.num_tokens, device=begin.device)
            past = torch.zeros_like(token, dtype=torch.int32)
            if len(self.seq_lens) == 0:
                return past
            request = torch.searchsorted(begin[1:], token, right=True)
            found = request < len(self.seq_lens)
            request = torch.where(found, request, 0)
            seen = self.seq_lens[request] - begin[1:][request] + token + 1
            past = torch.minimum(seen.clamp_min(0) // ratio, self.region(ratio).lens[request])
            return torch.where(found, past, 0).int()

        return self._once("past", ratio, make=make)  # type: ignore[no-any-return]


def with_none(table: Tensor) -> Tensor:
    """The table with -1 at its end, which is where row -1 looks."""
    return torch.nn.functional.pad(table, (0, 1), value=-1)
