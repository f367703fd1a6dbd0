import torch

from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients
from ..index_layout import IndexLayout
from .index_logits import flat_queries, over_pages
from .index_topk import choose, new_results

__all__ = ["index_topk_blocks", "index_topk_ragged_blocks"]

Published = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def index_topk_blocks(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor | None,
    *,
    layout: str | IndexLayout,
    page_size: int,
    topk: int,
    num_blocks: int,
    block_size: int = 8,
    q_scale: torch.Tensor | None = None,
    row_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    next_n: int = 1,
    compress_ratio: int = 1,
    slot_page_table: torch.Tensor | None = None,
    slot_page_size: int | None = None,
    out_positions: torch.Tensor | None = None,
    out_slots: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
    out_blocks: torch.Tensor | None = None,
    out_scores: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> Published:
    """Do :func:`index_topk`, and publish the best blocks of each row, in one pass over the keys.

    Experimental. Later layers choose among the entries of these blocks: ``candidate_blocks`` of
    :func:`index_topk`. A block is as good as the largest logit of the entries that the row sees in it. The
    block of the newest entry comes first, then larger ones, equal ones by number. A block without a logit
    above -inf is not published, the newest one apart: NaN is no such logit, where vLLM's maximum is NaN.

    Args:
        q: As in :func:`index_topk`, and so are all that are not listed here.
        num_blocks: At most 4096.
        block_size: Entries of a block: 8.
        out_blocks: [num_rows, num_blocks] int32: with ``out_positions`` and ``out_lens``, the results.
        workspace: As in :func:`index_topk`, with ``num_positions`` of :func:`index_topk_workspace`.

    Returns:
        (positions, slots, lens) as :func:`index_topk`, then blocks: [num_rows, num_blocks] int32, ascending,
        then -1.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`index_topk`.
    """
    refuse_gradients("index_topk_blocks", q=q, weights=weights, q_scale=q_scale)
    inputs = (flat_queries(q), weights, index_cache, page_table, seq_lens)
    pages = over_pages(layout, page_size, q_scale, row_lens, query_start_loc, next_n, compress_ratio)
    options: dict[str, object] = {
        **pages,
        "topk": topk,
        "num_blocks": num_blocks,
        "block_size": block_size,
        "slot_page_table": slot_page_table,
        "slot_page_size": slot_page_size,
    }
    results = {"out_positions": out_positions, "out_lens": out_lens, "out_blocks": out_blocks}
    return choose(  # type: ignore[no-any-return]
        "index_topk_blocks", inputs, options, results, out_slots, out_scores, workspace, counters
    )


def index_topk_ragged_blocks(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    k_start: torch.Tensor,
    k_end: torch.Tensor,
    *,
    topk: int,
    num_blocks: int,
    block_size: int = 8,
    q_scale: torch.Tensor | None = None,
    k_slots: torch.Tensor | None = None,
    out_positions: torch.Tensor | None = None,
    out_slots: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
    out_blocks: torch.Tensor | None = None,
    out_scores: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> Published:
    """Do :func:`index_topk_blocks` over the keys of :func:`index_topk_ragged`.

    Experimental. Blocks count from ``k_start``, as positions do.

    Args:
        q: As in :func:`index_topk_ragged`, and so are all that are not listed here.
        num_blocks: As in :func:`index_topk_blocks`, and so are ``block_size``, ``out_blocks`` and
            ``workspace``.

    Returns:
        (positions, slots, lens) as :func:`index_topk_ragged`, then blocks as :func:`index_topk_blocks`.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`index_topk`.
    """
    refuse_gradients("index_topk_ragged_blocks", q=q, weights=weights, k=k, k_scale=k_scale, q_scale=q_scale)
    inputs = (q, weights, k, k_scale, k_start, k_end)
    options = {
        "topk": topk,
        "num_blocks": num_blocks,
        "block_size": block_size,
        "q_scale": q_scale,
        "k_slots": k_slots,
    }
    results = {"out_positions": out_positions, "out_lens": out_lens, "out_blocks": out_blocks}
    return choose(  # type: ignore[no-any-return]
        "index_topk_ragged_blocks", inputs, options, results, out_slots, out_scores, workspace, counters
    )


def _new_results(
    q: torch.Tensor, *tensors: object, topk: int, num_blocks: int, **options: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return *new_results(q, topk), q.new_empty((q.shape[0], num_blocks), dtype=torch.int32)


for _op in ("index_topk_blocks", "index_topk_ragged_blocks"):
    fake(_op)(_new_results)
    fake_returns_nothing(f"{_op}_out")
