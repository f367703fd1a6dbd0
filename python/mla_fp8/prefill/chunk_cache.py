"""What the layers of a prefill chunk share, and one layer's attention in three ways."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arch import arch_of
from ..dispatch import can_run, select_name
from ..layout import get_layout, row_layout
from ..ops.build_swa_token_ids import build_swa_token_ids
from ..ops.combine_topk_swa_indices import combine_topk_swa_indices
from ..ops.dequantize_kv import dequantize_kv, dequantize_kv_paged
from ..ops.sparse_prefill import sparse_prefill, sparse_prefill_paged, sparse_prefill_window
from .costs import LayerShape, count_keys, predict
from .layer import LayerCaches, PagedCache
from .workspace import STRATEGIES, PrefillWorkspace, capturing, check_strategy, num_entries, num_window_rows

_MAX_SLOT = 2**31 - 1


class SparsePrefillChunkCache:
    """A chunk's geometry, window slots and layer-invariant index rows, for all layers of one forward.

    ================  ===========================  =====  ================================================
    seq_lens          [num_requests]               int32  tokens cached, those of the chunk too
    query_lens        [num_requests]               int32  tokens of the chunk
    page_table        [num_requests, max_pages]    int32  pages of the caches of entries
    req_pool_indices  [num_requests]               int64  with a window: see :func:`build_swa_token_ids`
    req_to_token      [num_pool_rows, max_tokens]  int32
    full_to_swa       [num_slots]                  int64
    query_start_loc   [num_requests + 1]           int32  optional: the rows of q, if not the whole chunk
    query_pos         [num_tokens]                 int32  optional: their positions
    ================  ===========================  =====  ================================================

    ``*_host`` are the lengths as the host knows them; they may be upper bounds, so a forward captured in a
    CUDA graph may be replayed with shorter requests. ``num_tokens`` (rows of q) is their sum by default.

    The cache is stale, and its use raises RuntimeError, once a newer chunk was built on the workspace, after
    :meth:`invalidate`, when one of the tensors above was written since (not seen in inference mode, where
    tensors have no version), and outside the CUDA graph capture that it was built in: a replay has written
    other numbers into it. Whoever replays a graph that writes the tensors above calls :meth:`invalidate`.
    """

    def __init__(
        self,
        workspace: PrefillWorkspace,
        seq_lens: Tensor,
        query_lens: Tensor,
        page_table: Tensor,
        req_pool_indices: Tensor | None = None,
        req_to_token: Tensor | None = None,
        full_to_swa: Tensor | None = None,
        *,
        window_size: int,
        seq_lens_host: Sequence[int],
        query_lens_host: Sequence[int],
        query_start_loc: Tensor | None = None,
        query_pos: Tensor | None = None,
        num_tokens: int | None = None,
    ) -> None:
        self.workspace, self.window_size = workspace, window_size
        self.seq_lens, self.page_table, self.query_pos = seq_lens, page_table, query_pos
        self.num_tokens = sum(query_lens_host) if num_tokens is None else num_tokens
        self._seq_lens_host, self._query_lens_host = list(seq_lens_host), list(query_lens_host)
        _expect_lengths(len(seq_lens), seq_lens_host=seq_lens_host, query_lens_host=query_lens_host)
        if query_start_loc is None:
            query_start_loc = torch.nn.functional.pad(query_lens.cumsum(0), (1, 0)).int()
        self.query_start_loc = query_start_loc
        if window_size:
            if req_pool_indices is None or req_to_token is None or full_to_swa is None:
                raise ValueError(
                    "SparsePrefillChunkCache: expected req_pool_indices, req_to_token and full_to_swa with "
                    "a window, got None"
                )
            self.swa_ids, self.swa_first_pos, self.swa_gather_lens, self.swa_offsets = build_swa_token_ids(
                seq_lens, query_lens, req_pool_indices, req_to_token, full_to_swa, window_size=window_size,
                capacity=num_window_rows(seq_lens_host, query_lens_host, window_size),
            )  # fmt: skip
        else:
            self.swa_gather_lens = torch.zeros_like(seq_lens)
            self.swa_offsets = torch.zeros_like(query_start_loc)
            self.swa_ids = self.swa_offsets[:0]
        self._num_keys: dict[tuple[int, int, int], int] = {}  # by compress_ratio, topk and window
        self._regions: dict[int, _Region] = {}  # by compress_ratio
        self._entry_slots: dict[tuple[int, int], Tensor] = {}  # by compress_ratio and page size
        self._rows: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}  # what has no topk_indices
        self._held: dict[tuple[int | None, ...], Tensor] = {}  # by what slots and caches depend on
        self._held_rows: dict[tuple[int | None, ...], Tensor] = {}  # the same, of what has no topk_indices
        self._tables: dict[tuple[int | None, ...], Tensor] = {}  # the same, of windows alone
        self._window: tuple[Tensor, Tensor] | None = None  # each token's slots and how many they are
        self._built_in_capture = capturing()
        sources = {
            "seq_lens": seq_lens, "query_lens": query_lens, "page_table": page_table,
            "req_pool_indices": req_pool_indices, "req_to_token": req_to_token, "full_to_swa": full_to_swa,
            "query_start_loc": query_start_loc, "query_pos": query_pos,
        }  # fmt: skip
        self._versions = {
            name: (x, x._version) for name, x in sources.items() if x is not None and not x.is_inference()
        }
        workspace.chunk = self

    def invalidate(self) -> None:
        """Makes every later use raise."""
        if self.workspace.chunk is self:
            self.workspace.chunk = None

    def attend(
        self,
        q: Tensor,
        layer: LayerCaches,
        topk_indices: Tensor | None = None,
        *,
        sm_scale: float,
        attn_sink: Tensor | None = None,
        strategy: str = "auto",
        backend: str = "auto",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One layer's attention: (out, max_logits, lse) of :func:`mla_fp8.sparse_prefill`.

        ``topk_indices`` [num_tokens, topk] int32 are request-local entries, negative: none; None selects all
        entries of a token's past. ``strategy`` is a name of the module's table or auto.
        """
        check_strategy(strategy, ("auto", *STRATEGIES))
        self._check_usable(q)
        self._check_layer(layer, topk_indices)
        shape = self._shape(q, layer, topk_indices)
        if strategy == "auto":
            strategy = self._choose(q, layer, shape, backend)
        options: dict[str, Any] = {"sm_scale": sm_scale, "attn_sink": attn_sink, "backend": backend}
        if strategy == "direct":
            return self._attend_pages(q, layer, topk_indices, options)
        if layer.entries is None and self._takes_geometry(q, backend):
            return self._attend_window(q, layer, shape, options)
        rows, lens = self._combine(layer.compress_ratio, topk_indices, window=layer.window is not None)
        if strategy == "selected" and layer.entries:
            kv, rows = self._gather_selected(layer, layer.entries, rows, shape)
        else:
            kv = self._gather_whole(layer, shape)
            rows = self._rows_of_slots(layer, rows, cached=topk_indices is None)
        return sparse_prefill(q, kv, rows, topk_length=lens, **options)

    def predict(self, q: Tensor, layer: LayerCaches, topk_indices: Tensor | None = None) -> dict[str, float]:
        """Nanoseconds of each strategy, as the cost table has it."""
        self._check_layer(layer, topk_indices)
        return predict(self._shape(q, layer, topk_indices), arch_of(q.device.type, q.device.index))

    def _choose(self, q: Tensor, layer: LayerCaches, shape: LayerShape, backend: str) -> str:
        nanoseconds = predict(shape, arch_of(q.device.type, q.device.index))
        if not can_run("sparse_prefill_paged", q, get_layout(layer.layout).name, backend):
            del nanoseconds["direct"]
        return min(nanoseconds, key=nanoseconds.__getitem__)

    def _shape(self, q: Tensor, layer: LayerCaches, topk_indices: Tensor | None) -> LayerShape:
        ratio, window_size = layer.compress_ratio, self.window_size if layer.window else 0
        topk = self._max_entries(ratio) if topk_indices is None else topk_indices.shape[1]
        return LayerShape(
            num_tokens=self.num_tokens,
            num_q_heads=q.shape[1],
            topk=topk,
            window_size=window_size,
            num_entries=num_entries(self._seq_lens_host, ratio),
            num_window_rows=len(self.swa_ids) if layer.window else 0,
            num_keys=self._count_keys(ratio, topk, window_size),
        )

    def _count_keys(self, ratio: int, topk: int, window_size: int) -> int:
        """By the host's lengths; a part of the chunk's tokens has that part of its keys."""
        key = (ratio, topk, window_size)
        if key not in self._num_keys:
            lengths = zip(self._seq_lens_host, self._query_lens_host, strict=True)
            keys, tokens = count_keys(lengths, ratio, topk, window_size), sum(self._query_lens_host)
            self._num_keys[key] = keys * min(self.num_tokens, tokens) // max(tokens, 1)
        return self._num_keys[key]

    def _gather_whole(self, layer: LayerCaches, shape: LayerShape) -> Tensor:
        kv = self.workspace.reserve(shape.num_entries + shape.num_window_rows)
        if layer.entries:
            region = self._region(layer.compress_ratio)
            dequantize_kv_paged(
                layer.entries.data, self.page_table, region.lens, region.lens, region.offsets,
                layout=layer.layout, page_size=layer.entries.page_size, scale=layer.scale,
                out=kv[: shape.num_entries],
            )  # fmt: skip
        self._gather_window(layer, kv[shape.num_entries :])
        return kv

    def _gather_selected(
        self, layer: LayerCaches, cache: PagedCache, rows: Tensor, shape: LayerShape
    ) -> tuple[Tensor, Tensor]:
        """A workspace of the entries that ``rows`` refer to, then the window; and ``rows`` renumbered."""
        entries, room, window = shape.num_entries, shape.max_selected, shape.num_window_rows
        none = entries + window  # where the holes go
        used = torch.zeros(none + 1, dtype=torch.int32, device=rows.device)
        used.scatter_(0, torch.where(rows < 0, none, rows).flatten().long(), 1)
        used = used[:entries]
        place = used.cumsum(0) - 1
        slots = torch.full((room + 1,), -1, dtype=torch.int32, device=rows.device)
        slots.scatter_(0, torch.where(used > 0, place, room), self._slots_of_entries(layer, cache)[:-1])
        kv = self.workspace.reserve(room + window)
        dequantize_kv(
            cache.data, slots[:room], layout=layer.layout, page_size=cache.page_size, scale=layer.scale,
            out=kv[:room],
        )  # fmt: skip
        self._gather_window(layer, kv[room:])
        in_window = torch.arange(room, room + window, device=rows.device)
        renumbered = _with_none(torch.cat([place, in_window]).int())
        return kv, torch.where(self._held_or_none(layer) < 0, -1, renumbered)[rows]

    def _gather_window(self, layer: LayerCaches, out: Tensor) -> None:
        if layer.window:
            dequantize_kv(
                layer.window.data, self.swa_ids, layout=layer.layout, page_size=layer.window.page_size,
                scale=layer.scale, out=out,
            )  # fmt: skip

    def _takes_geometry(self, q: Tensor, backend: str) -> bool:
        """Whether the backend of a workspace finds windows by itself: it need not look at them one by one."""
        layout = row_layout(q).name
        name = select_name("sparse_prefill", q.device.type, q.device.index, layout, q.shape[1], (), backend)
        in_order = self.query_pos is None and self.window_size > 0
        return in_order and can_run("sparse_prefill_window", q, layout, name)

    def _attend_window(
        self, q: Tensor, layer: LayerCaches, shape: LayerShape, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """To the workspace as a cache of pages of one row, where requests begin with what was gathered."""
        rows = self._gather_whole(layer, shape)
        return sparse_prefill_window(
            q, rows, self._window_table(layer), self.query_start_loc, self.swa_gather_lens,
            layout=row_layout(q), page_size=1, window_size=self.window_size, **options,
        )  # fmt: skip

    def _window_table(self, layer: LayerCaches) -> Tensor:
        key = layer.geometry
        if key not in self._tables:
            lengths = zip(self._seq_lens_host, self._query_lens_host, strict=True)
            longest = max((num_window_rows([n], [m], self.window_size) for n, m in lengths), default=0)
            columns = torch.arange(longest, dtype=torch.int32, device=self.seq_lens.device)
            rows = (self.swa_offsets[:-1, None] + columns).clamp_max(len(self.swa_ids))
            self._tables[key] = self._held_or_none(layer)[rows]
        return self._tables[key]

    def _held_or_none(self, layer: LayerCaches) -> Tensor:
        """[rows of the workspace + 1] int32: each row's own number, -1 where no slot of the layer's caches is
        behind it, and -1 at the end. What ``direct`` masks is then masked in a workspace too."""
        key = layer.geometry
        if key not in self._held:
            slots = (
                []
                if layer.entries is None
                else [(self._slots_of_entries(layer, layer.entries)[:-1], layer.entries)]
            )
            slots += [(self.swa_ids, layer.window)] if layer.window else []
            held = torch.cat([(ids >= 0) & (ids < cache.num_slots) for ids, cache in slots])
            row = torch.arange(len(held), dtype=torch.int32, device=held.device)
            self._held[key] = _with_none(torch.where(held, row, -1))
        return self._held[key]

    def _rows_of_slots(self, layer: LayerCaches, rows: Tensor, *, cached: bool) -> Tensor:
        """``rows`` with -1 for those without a slot."""
        if not cached:
            return self._held_or_none(layer)[rows]
        key = layer.geometry
        if key not in self._held_rows:
            self._held_rows[key] = self._held_or_none(layer)[rows]
        return self._held_rows[key]

    def _attend_pages(
        self, q: Tensor, layer: LayerCaches, topk_indices: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        scopes: list[tuple[PagedCache, Tensor, Tensor]] = []
        if layer.window:
            scopes.append((layer.window, *self._window_slots()))
        if layer.entries:
            rows, lens = self._combine(layer.compress_ratio, topk_indices, window=False)
            scopes.append((layer.entries, self._slots_of_entries(layer, layer.entries)[rows], lens))
        (main, indices, lens), *extra = scopes
        for cache, extra_indices, extra_lens in extra:
            options = options | {
                "extra_kv_cache": cache.data, "extra_page_size": cache.page_size,
                "extra_indices": extra_indices, "extra_topk_length": extra_lens,
            }  # fmt: skip
        return sparse_prefill_paged(
            q, main.data, indices, layout=layer.layout, page_size=main.page_size, topk_length=lens,
            scale=layer.scale, **options,
        )  # fmt: skip

    def _window_slots(self) -> tuple[Tensor, Tensor]:
        if self._window is None:
            rows, lens = self._combine(0, None, window=True)
            self._window = _with_none(self.swa_ids)[rows], lens
        return self._window

    def _combine(self, ratio: int, topk_indices: Tensor | None, *, window: bool) -> tuple[Tensor, Tensor]:
        """Each token's rows (entries of all requests first, then the window) and how many they are."""
        key = (ratio, window)
        if topk_indices is None and key in self._rows:
            return self._rows[key]
        chosen = topk_indices
        if chosen is None:
            every = torch.arange(self._max_entries(ratio), dtype=torch.int32, device=self.seq_lens.device)
            chosen = every.expand(self.num_tokens, -1).contiguous()
        region = self._region(ratio)
        result = combine_topk_swa_indices(
            chosen, self.query_start_loc, self.seq_lens,
            self.swa_gather_lens if window else torch.zeros_like(self.seq_lens),
            region.offsets, region.num_rows + self.swa_offsets[:-1],
            window_size=self.window_size if window else 0, compress_ratio=max(ratio, 1),
            topk=chosen.shape[1], query_pos=self.query_pos, compressed_lens=region.lens,
        )  # fmt: skip
        if topk_indices is None:
            self._rows[key] = result
        return result

    def _max_entries(self, ratio: int) -> int:
        return max((n // ratio for n in self._seq_lens_host), default=0) if ratio else 0

    def _region(self, ratio: int) -> "_Region":
        if ratio not in self._regions:
            room = num_entries(self._seq_lens_host, ratio)
            lens = self.seq_lens // ratio if ratio else torch.zeros_like(self.seq_lens)
            offsets = (lens.cumsum(0) - lens).clamp_max(room).int()
            # Lengths beyond those that the host promised must not reach into the window's rows.
            self._regions[ratio] = _Region(room, torch.minimum(lens, room - offsets), offsets)
        return self._regions[ratio]

    def _slots_of_entries(self, layer: LayerCaches, cache: PagedCache) -> Tensor:
        """[num_entries + 1] int32: the slot of each row of the region, then -1."""
        key = (layer.compress_ratio, cache.page_size)
        if key not in self._entry_slots:
            region = self._region(layer.compress_ratio)
            row = torch.arange(region.num_rows, device=self.seq_lens.device)
            ends = region.offsets + region.lens
            request = torch.searchsorted(ends, row.int(), right=True).clamp_max(len(ends) - 1)
            pos = row - region.offsets[request]
            column = pos // cache.page_size
            held = (pos < region.lens[request]) & (column < self.page_table.shape[1])
            page = self.page_table[request, torch.where(held, column, 0)].long()
            slot = page * cache.page_size + pos % cache.page_size
            slot = torch.where(held & (page >= 0) & (slot <= _MAX_SLOT), slot, -1)
            self._entry_slots[key] = _with_none(slot.int())
        return self._entry_slots[key]

    def _check_usable(self, q: Tensor) -> None:
        if self.workspace.chunk is not self:
            raise RuntimeError(
                "SparsePrefillChunkCache is stale: it was invalidated, or a newer chunk uses its workspace"
            )
        if capturing() != self._built_in_capture:
            raise RuntimeError(
                "SparsePrefillChunkCache is stale: build and use must be inside the same CUDA graph capture, "
                "or both outside"
            )
        for name, (tensor, version) in self._versions.items():
            if tensor._version != version:
                raise RuntimeError(f"SparsePrefillChunkCache is stale: {name} was written after it was built")
        if q.dim() != 3 or len(q) != self.num_tokens:
            raise ValueError(
                f"SparsePrefillChunkCache: q must have shape [{self.num_tokens}, *, *], got {[*q.shape]}"
            )

    def _check_layer(self, layer: LayerCaches, topk_indices: Tensor | None) -> None:
        if layer.window and not self.window_size:
            raise ValueError(
                "SparsePrefillChunkCache: window_size must be positive for a layer with a window, got 0"
            )
        if topk_indices is not None and (topk_indices.dim() != 2 or len(topk_indices) != self.num_tokens):
            raise ValueError(
                f"SparsePrefillChunkCache: topk_indices must have shape [{self.num_tokens}, *], "
                f"got {[*topk_indices.shape]}"
            )


@dataclass(frozen=True)
class _Region:
    """The entries of all requests, one request after another."""

    num_rows: int
    lens: Tensor  # [num_requests] int32
    offsets: Tensor  # [num_requests] int32


def _with_none(table: Tensor) -> Tensor:
    """The table with -1 at its end, which is where row -1 looks."""
    return torch.nn.functional.pad(table, (0, 1), value=-1)


def _expect_lengths(num_requests: int, **lengths: Sequence[int]) -> None:
    for name, values in lengths.items():
        if len(values) != num_requests or min(values, default=0) < 0:
            raise ValueError(
                f"SparsePrefillChunkCache: {name} must be {num_requests} lengths >= 0, got {list(values)}"
            )
