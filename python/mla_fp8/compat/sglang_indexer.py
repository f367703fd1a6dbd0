"""SGLang's choice for the index layers of DeepSeek V4.1, by the names of its classes, over ``index_topk``.

Layers of ratio 1 and 2: :class:`FullTopKIndexer` chooses among all entries, :class:`DenseBlocksBackend`
publishes blocks and chooses among theirs. Keys are FP4 and are read where SGLang's pool has them. Queries are
those of SGLang's indexer, packed without a rounding: they hold FP4 values. Neither logits nor masks are made.

``inputs`` are SGLang's PrefillInputs and DecodeInputs; their ``out_raw_indices`` and ``out_page_indices`` are
written: ascending, then -1. ``token_to_kv_pool`` is SGLang's. Bad input raises RuntimeError from the op.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._index_buffers import index_buffers
from ..index_layout import INDEX_LAYOUTS
from ..ops.index_topk import index_topk
from ..ops.index_topk_blocks import index_topk_blocks
from ..ops.quantize_index_k import quantize_index_k

__all__ = ["BlockIds", "DenseBlocksBackend", "FullTopKIndexer", "pack_queries"]

BLOCK_SIZE = 8  # entries
_LAYOUT = INDEX_LAYOUTS["index_fp4"]
_numbers: dict[torch.device, Tensor] = {}  # 0, 1, ..


class BlockIds(NamedTuple):
    """What a source publishes: int32 ``[rows, n]``, ascending, then -1. Without columns every block is."""

    blocks: Tensor
    rows_per_request: list[int] | None = None  # of prompts


class FullTopKIndexer:
    """The ``index_topk`` best entries of all that a row sees."""

    def __init__(self, *, token_to_kv_pool: Any, **unused: Any) -> None:
        self.token_to_kv_pool = token_to_kv_pool

    def topk_decode(self, inputs: Any) -> None:
        """One row of a request, or as many as ``inputs.paged_metadata.rows_per_request``."""
        _decode(self.token_to_kv_pool, inputs)

    def topk_prefill(self, inputs: Any) -> None:
        """``inputs.rows_per_request`` rows of each request, one request behind the other."""
        _prefill(self.token_to_kv_pool, inputs)


class DenseBlocksBackend:
    """V4.1's two levels: blocks of 8 entries, of which a source publishes ``topk_blocks`` for each row.

    Up to ``topk_blocks * 8`` entries every block is published. Where the host knows of no longer request, by
    the width of the page table or by the lengths of prompts, a source publishes no columns, and consumers
    choose among all entries, which is faster and the same.
    """

    def __init__(
        self,
        *,
        token_to_kv_pool: Any,
        candidate_topk_blocks: int,
        candidate_block_size: int,
        **unused: Any,
    ) -> None:
        if candidate_block_size != BLOCK_SIZE:
            raise ValueError(
                f"DenseBlocksBackend: candidate_block_size must be {BLOCK_SIZE}, got {candidate_block_size}"
            )
        self.token_to_kv_pool = token_to_kv_pool
        self.topk_blocks, self.block_size = candidate_topk_blocks, candidate_block_size

    def publish_decode(self, inputs: Any) -> BlockIds:
        """Choose as :class:`FullTopKIndexer`, and return the best blocks of each row."""
        return BlockIds(_decode(self.token_to_kv_pool, inputs, publish=self.topk_blocks))

    def consume_decode(self, inputs: Any, published: Any) -> None:
        """Choose among the entries of ``published.blocks``."""
        _decode(self.token_to_kv_pool, inputs, _blocks_of(published))

    def publish_prefill(self, inputs: Any) -> BlockIds:
        """As :meth:`publish_decode`, for prompts."""
        blocks = _prefill(self.token_to_kv_pool, inputs, publish=self.topk_blocks)
        return BlockIds(blocks, inputs.rows_per_request)

    def consume_prefill(self, inputs: Any, published: Any) -> None:
        """As :meth:`consume_decode`, for prompts."""
        _prefill(self.token_to_kv_pool, inputs, _blocks_of(published))


def _blocks_of(published: Any) -> Tensor:
    if published is None:
        raise RuntimeError("DenseBlocksBackend: published must be what a source returned, got None")
    blocks: Tensor = published.blocks
    return blocks


def pack_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """(e2m1 [rows, heads, 64], ue8m0 [rows, heads, 4]) of ``q`` [rows, heads, 128], by the writer of keys."""
    rows, heads, _ = q.shape
    packed = _LAYOUT.empty(rows, heads, q.device)
    slots = _count(rows * heads, q.device)
    quantize_index_k(q.flatten(0, 1), slots, packed, layout=_LAYOUT, page_size=heads)
    return _LAYOUT.views(packed, heads)


def _count(n: int, device: torch.device) -> Tensor:
    """int64 0 to n - 1, kept: but for a graph that is captured, which would fill them at each replay."""
    kept = _numbers.get(device)
    if kept is None or len(kept) < n:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.arange(n, device=device)
        kept = _numbers[device] = torch.arange(1 << max(n - 1, 1).bit_length(), device=device)
    return kept[:n]


def _decode(pool: Any, inputs: Any, blocks: Tensor | None = None, *, publish: int = 0) -> Tensor:
    metadata, rows = inputs.paged_metadata, len(inputs.req_rows)
    next_n = metadata.rows_per_request if rows % metadata.rows_per_request == 0 else 1
    if inputs.compress_ratio == 1:  # at least 1, as a row sees itself
        row_lens = metadata.compressed_seq_lens.flatten()[:rows]
    else:
        row_lens = _entries(inputs)
    topk = inputs.indexer.index_topk
    return _choose(
        pool, inputs, metadata.page_table[:rows:next_n], row_lens, blocks, publish,
        page_size=metadata.compressed_page_size,
        most=metadata.max_compressed_seq_len,
        next_n=next_n,
        out_positions=torch.empty((rows, topk), dtype=torch.int32, device=row_lens.device),
        out_slots=inputs.out_page_indices[:rows, :topk],
    )  # fmt: skip


def _prefill(pool: Any, inputs: Any, blocks: Tensor | None = None, *, publish: int = 0) -> Tensor:
    rows, topk = len(inputs.positions), inputs.indexer.index_topk
    if inputs.out_raw_indices.shape != (rows, topk):
        inputs.reset_outputs()
    if rows == 0:
        return inputs.out_raw_indices.new_empty((0, 0))  # type: ignore[no-any-return]
    starts, table, row_lens = _plan(pool, inputs)
    slots = inputs.out_page_indices
    return _choose(
        pool, inputs, table, row_lens, blocks, publish,
        page_size=pool.get_index_k_page_size(inputs.compress_ratio),
        most=max(inputs.seq_lens_cpu, default=0) // inputs.compress_ratio,
        query_start_loc=starts,
        out_positions=inputs.out_raw_indices[:rows, :topk],
        out_slots=None if slots is None else slots[:rows, :topk],
    )  # fmt: skip


def _choose(
    pool: Any, inputs: Any, table: Tensor, row_lens: Tensor, blocks: Tensor | None, publish: int, *,
    page_size: int, most: int, **options: Any,
) -> Tensor:  # fmt: skip
    """The choice into the buffers of ``options``; returns what is published, [rows, 0] if nothing is."""
    indexer, rows = inputs.indexer, len(row_lens)
    q, q_scale = pack_queries(indexer.queries(inputs.q_lora, inputs.freqs_cis, inputs.positions))
    cache = pool.get_index_k_with_scale_buffer(inputs.layer_id)
    op: Any = index_topk
    sizes: dict[str, int] = {}
    published = row_lens.new_empty((rows, 0))
    if blocks is not None and blocks.shape[1] > 0:
        options |= {"candidate_blocks": blocks}
        sizes = {"num_candidates": blocks.shape[1]}
    elif most > publish * BLOCK_SIZE > 0:
        op, published = index_topk_blocks, row_lens.new_empty((rows, publish))
        options |= {"num_blocks": publish, "out_blocks": published}
        sizes = {"num_positions": table.shape[1] * page_size}
    topk = indexer.index_topk
    op(
        q, indexer.head_weights(inputs.x), cache, table, None, row_lens=row_lens, layout=_LAYOUT,
        page_size=page_size, topk=topk, q_scale=q_scale, **options,
        **index_buffers(rows, topk, q.device, **sizes),
    )  # fmt: skip
    return published


def _entries(inputs: Any) -> Tensor:
    """int32 [rows]: the entries that each row sees."""
    return torch.div(inputs.positions + 1, inputs.compress_ratio, rounding_mode="floor").int()


def _plan(pool: Any, inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(first row of each request, its index pages, entries of each row): the same for layers of a ratio."""
    kept, key = inputs.index_plans, ("mla_fp8", inputs.compress_ratio)
    if kept is not None and key in kept:
        plan: tuple[Tensor, Tensor, Tensor] = kept[key]
        return plan
    starts = torch.nn.functional.pad(inputs.rows_per_request_device.cumsum(0), (1, 0)).int()
    pages = inputs.kv_page_table
    pages = pages[starts[:-1].clamp_max(len(pages) - 1).long()]
    parts = pool.page_size // inputs.compress_ratio // pool.get_index_k_page_size(inputs.compress_ratio)
    if parts > 1:
        part = torch.arange(parts, dtype=torch.int32, device=pages.device)
        pages = (pages[..., None] * parts + part).flatten(1)
    plan = starts, pages, _entries(inputs)
    if kept is not None:
        kept[key] = plan
    return plan
