"""The three ways through a prefill layer: functions of a chunk's tables, workspace, layer and queries.

Each returns (out, max_logits, lse), the same up to rounding. ``options`` are those of the ops: sm_scale,
attn_sink, backend, and of `direct` query_groups.
"""

from typing import Any

import torch
from torch import Tensor

from ..dispatch import can_run, select_name
from ..layout import row_layout
from ..ops.dequantize_kv import dequantize_kv, dequantize_kv_paged
from ..ops.sparse_prefill import sparse_prefill, sparse_prefill_paged, sparse_prefill_window
from . import plans
from .layer import LayerCaches
from .tables import Tables, with_none
from .workspace import PrefillWorkspace

Attended = tuple[Tensor, ...]  # out, max_logits, lse


def whole(
    tables: Tables, workspace: PrefillWorkspace, layer: LayerCaches, q: Tensor, topk_indices: Tensor | None,
    options: dict[str, Any],
) -> Attended:  # fmt: skip
    """Dequantises all entries of the chunk's requests, and the window, and attends to those rows."""
    if needs_no_indices(tables, layer, q, topk_indices, options["backend"]):
        kv = _gather(tables, workspace, layer)
        if layer.entries:
            options = options | {
                "extra_kv_cache": kv, "extra_page_size": 1,
                "extra_page_table": tables.entries_table(layer),
                "extra_topk_length": tables.num_past_entries(layer.compress_ratio),
            }  # fmt: skip
        return sparse_prefill_window(
            q, kv, tables.window_table(layer), tables.query_start_loc, tables.swa_gather_lens,
            layout=row_layout(q), page_size=1, window_size=tables.window_size, **options,
        )  # fmt: skip
    rows, lens = tables.workspace_rows(layer, topk_indices)
    return sparse_prefill(q, _gather(tables, workspace, layer), rows, topk_length=lens, **options)


def selected(
    tables: Tables, workspace: PrefillWorkspace, layer: LayerCaches, q: Tensor, topk_indices: Tensor | None,
    options: dict[str, Any],
) -> Attended:  # fmt: skip
    """The same with those entries only that the chunk refers to, each once."""
    if layer.entries is None or needs_no_indices(tables, layer, q, topk_indices, options["backend"]):
        return whole(tables, workspace, layer, q, topk_indices, options)
    shape, cache = tables.shape(q, layer, topk_indices), layer.entries
    entries, room, window = shape.num_entries, shape.max_selected, shape.num_window_rows
    rows, lens = tables.combined(layer.compress_ratio, topk_indices, window=layer.window is not None)
    none = entries + window  # where the holes go
    used = torch.zeros(none + 1, dtype=torch.int32, device=rows.device)
    used.scatter_(0, torch.where(rows < 0, none, rows).flatten().long(), 1)
    used = used[:entries]
    place = used.cumsum(0) - 1
    slots = torch.full((room + 1,), -1, dtype=torch.int32, device=rows.device)
    of_entries = tables.slots_of_entries(layer.compress_ratio, cache)[:-1]
    slots.scatter_(0, torch.where(used > 0, place, room), of_entries)
    kv = workspace.reserve(room + window)
    dequantize_kv(
        cache.data, slots[:room], layout=layer.layout_of_entries, page_size=cache.page_size,
        scale=layer.scale, out=kv[:room],
    )  # fmt: skip
    _gather_window(tables, layer, kv[room:])
    in_window = torch.arange(room, room + window, device=rows.device)
    renumbered = with_none(torch.cat([place, in_window]).int())
    rows = torch.where(tables.held(layer) < 0, -1, renumbered)[rows]
    return sparse_prefill(q, kv, rows, topk_length=lens, **options)


def direct(
    tables: Tables, workspace: PrefillWorkspace, layer: LayerCaches, q: Tensor, topk_indices: Tensor | None,
    options: dict[str, Any],
) -> Attended:  # fmt: skip
    """Attends to the FP8 pages: window and entries as two caches of one softmax. Needs no workspace."""
    scopes = []
    if layer.window:
        scopes.append((layer.window, *tables.window_slots()))
    if layer.entries:
        rows, lens = tables.combined(layer.compress_ratio, topk_indices, window=False)
        slots = tables.slots_of_entries(layer.compress_ratio, layer.entries)[rows]
        scopes.append((layer.entries, slots, lens))
    (main, indices, lens), *extra = scopes
    for cache, extra_indices, extra_lens in extra:
        options = options | {
            "extra_kv_cache": cache.data, "extra_page_size": cache.page_size,
            "extra_indices": extra_indices, "extra_topk_length": extra_lens,
            "extra_layout": layer.entries_layout,
        }  # fmt: skip
    return sparse_prefill_paged(
        q, main.data, indices, layout=layer.layout if layer.window else layer.layout_of_entries,
        page_size=main.page_size, topk_length=lens, scale=layer.scale, **options,
    )  # fmt: skip


WAYS = {"whole": whole, "selected": selected, "direct": direct}


def needs_no_indices(
    tables: Tables, layer: LayerCaches, q: Tensor, topk_indices: Tensor | None, backend: str
) -> bool:
    """Whether the backend of a workspace finds a layer's keys by itself: windows, all entries of the past."""
    if layer.window is None or (layer.entries is not None and topk_indices is not None):
        return False
    layout, in_order = row_layout(q).name, tables.query_pos is None and tables.window_size > 0
    if not in_order or not can_run("sparse_prefill", q, layout, backend):
        return False
    name = select_name("sparse_prefill", q.device.type, q.device.index, layout, q.shape[1], (), backend)
    features = ("two caches",) if layer.entries else ()
    return can_run("sparse_prefill_window", q, layout, name, features)


def fills_tiles(layer: LayerCaches, q: Tensor, query_groups: int, backend: str) -> bool:
    """Whether groups of so many neighbours fill tiles, for which `direct` has a kernel and a price."""
    is_ours = backend in ("auto", "native")
    return is_ours and plans.fills_tiles(layer.layout_name, q.shape[1], query_groups)


def _gather(tables: Tables, workspace: PrefillWorkspace, layer: LayerCaches) -> Tensor:
    """All entries of the requests, then the window's rows."""
    region = tables.region(layer.compress_ratio)
    kv = workspace.reserve(region.num_rows + (len(tables.swa_ids) if layer.window else 0))
    if layer.entries:
        dequantize_kv_paged(
            layer.entries.data, tables.page_table, region.lens, region.lens, region.offsets,
            layout=layer.layout_of_entries, page_size=layer.entries.page_size, scale=layer.scale,
            out=kv[: region.num_rows],
        )  # fmt: skip
    _gather_window(tables, layer, kv[region.num_rows :])
    return kv


def _gather_window(tables: Tables, layer: LayerCaches, out: Tensor) -> None:
    if layer.window:
        dequantize_kv(
            layer.window.data, tables.swa_ids, layout=layer.layout, page_size=layer.window.page_size,
            scale=layer.scale, out=out,
        )  # fmt: skip
