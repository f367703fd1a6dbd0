import torch

from .._arguments import call_op
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients
from ..index_layout import IndexLayout, get_index_layout

__all__ = ["index_logits", "index_logits_ragged"]


def flat_queries(q: torch.Tensor) -> torch.Tensor:
    """``[requests, next_n, heads, dim]`` as rows; what is not of four dimensions as it is."""
    return q.flatten(0, 1) if isinstance(q, torch.Tensor) and q.dim() == 4 else q


def over_pages(
    layout: str | IndexLayout,
    page_size: int,
    q_scale: torch.Tensor | None,
    row_lens: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    next_n: int,
    compress_ratio: int,
) -> dict[str, object]:
    """What ops over pages have in common: the layout's id, and the rules of rows."""
    return {
        "layout": get_index_layout(layout).id,
        "page_size": page_size,
        "q_scale": q_scale,
        "row_lens": row_lens,
        "query_start_loc": query_start_loc,
        "next_n": next_n,
        "compress_ratio": compress_ratio,
    }


def index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor | None,
    *,
    layout: str | IndexLayout,
    page_size: int,
    width: int,
    q_scale: torch.Tensor | None = None,
    row_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    next_n: int = 1,
    compress_ratio: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Find the logits of the lightning indexer: of each row (a query token) and each entry that it sees.

    Experimental. ``logit = k_scale * sum over heads of weight * relu(q . k)``, with the stored numbers of
    both. Row j of a request's m rows sees ``seq_lens - m + 1 + j`` tokens, ``// compress_ratio`` entries:
    none if negative, at most what ``page_table`` has. What it does not see, and an entry of no page, has
    -inf. On each device a logit depends on its row and its entry alone, bit for bit. Every NaN is the same
    one, and there is no -0.

    Args:
        q: [num_rows, heads, 128] float8_e4m3fn, 1 to 64 heads, 16-byte aligned rows; or [num_requests,
            next_n, heads, 128]. Over FP4 keys also e2m1: [num_rows, heads, 64] uint8, with ``q_scale``.
        weights: [num_rows, heads] float32 or bfloat16.
        index_cache: As in :func:`quantize_index_k`, 4-byte aligned.
        page_table: [num_requests, max_pages] int32, at most 2^24 entries a request.
        seq_lens: [num_requests] int32: tokens, the rows' too; None with ``row_lens``.
        layout: Of the cache: a name of ``INDEX_LAYOUTS``.
        page_size: Entries of a page.
        width: Columns of the result.
        q_scale: [num_rows, heads] float32: multiplied into the weights. Of e2m1: [num_rows, heads, 4] uint8,
            or [num_rows, heads] int32: ue8m0 of 32 elements each.
        row_lens: [num_rows] int32: entries that each row sees, in place of the rule above.
        query_start_loc: [num_requests + 1] int32: the first row of each request. Element 0 is subtracted.
        next_n: Rows of a request, without ``query_start_loc``.
        compress_ratio: Tokens that an entry stands for.
        out: [num_rows, width] float32, any row stride.

    Returns:
        [num_rows, width] float32.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`.
    """
    refuse_gradients("index_logits", q=q, weights=weights, q_scale=q_scale, out=out)
    inputs = (flat_queries(q), weights, index_cache, page_table, seq_lens)
    pages = over_pages(layout, page_size, q_scale, row_lens, query_start_loc, next_n, compress_ratio)
    if out is None:
        return call_op("index_logits", *inputs, **pages, width=width)  # type: ignore[no-any-return]
    call_op("index_logits_out", *inputs, **pages, width=width, out=out)
    return out


def index_logits_ragged(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    k_start: torch.Tensor,
    k_end: torch.Tensor,
    *,
    q_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Find the logits of :func:`index_logits` over gathered keys: row r sees k_start[r] to k_end[r] - 1.

    Experimental.

    Args:
        q: As in :func:`index_logits`, and so are ``weights`` and ``q_scale``.
        k: [num_keys, 128] float8_e4m3fn, 16-byte aligned rows, at most 2^24 keys; or e2m1: [num_keys, 64]
            uint8.
        k_scale: [num_keys] float32. Of e2m1 as ``q_scale``: [num_keys, 4] uint8, or [num_keys] int32.
        k_start: [num_rows] int32, clamped to [0, num_keys].
        k_end: As ``k_start``.
        out: [num_rows, num_keys] float32, any row stride.

    Returns:
        [num_rows, num_keys] float32, -inf outside the range.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`.
    """
    refuse_gradients(
        "index_logits_ragged", q=q, weights=weights, k=k, k_scale=k_scale, q_scale=q_scale, out=out
    )
    inputs = (q, weights, k, k_scale, k_start, k_end)
    if out is None:
        return call_op("index_logits_ragged", *inputs, q_scale=q_scale)  # type: ignore[no-any-return]
    call_op("index_logits_ragged_out", *inputs, q_scale=q_scale, out=out)
    return out


@fake("index_logits")
def _(q: torch.Tensor, *tensors: object, width: int, **options: object) -> torch.Tensor:
    return q.new_empty((q.shape[0], width), dtype=torch.float32)


@fake("index_logits_ragged")
def _(
    q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, *tensors: object, **options: object
) -> torch.Tensor:
    return q.new_empty((q.shape[0], k.shape[0]), dtype=torch.float32)


fake_returns_nothing("index_logits_out", "index_logits_ragged_out")
