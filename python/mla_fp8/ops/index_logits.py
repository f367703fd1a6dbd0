import torch

from .._arguments import expect_tensors
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients
from ..index_layout import IndexLayout, get_index_layout


def flat_queries(q: torch.Tensor) -> torch.Tensor:
    """``[requests, next_n, heads, dim]`` as rows; what is not of four dimensions as it is."""
    return q.flatten(0, 1) if isinstance(q, torch.Tensor) and q.dim() == 4 else q


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
    """Logits of the lightning indexer: what each row (query token) gives to each entry that it sees.

    ===============  ==============================  ===================  ===================================
    q                [num_rows, heads, 128]          e4m3fn               1 to 64 heads one after another,
                                                                          16-byte aligned rows; or
                                                                          [num_requests, next_n, heads, 128]
    (as e2m1)        [num_rows, heads, 64]           uint8                needs ``q_scale``
    weights          [num_rows, heads]               fp32 or bf16
    index_cache      [num_pages, page_bytes]         one-byte dtype       see :class:`mla_fp8.IndexLayout`; or
                                                                          [num_pages, page_size, 1,
                                                                          bytes_per_entry]; 4-byte aligned
    page_table       [num_requests, max_pages]       int32                at most 2^24 entries a request; of
                                                                          pages outside the cache: absent
    seq_lens         [num_requests]                  int32                tokens, those of the rows included;
                                                                          None with ``row_lens``
    q_scale          [num_rows, heads]               fp32                 optional: multiplied into weights
    (of e2m1)        [num_rows, heads, 4] or         uint8 or             ue8m0 of 32 elements each
                     [num_rows, heads]               int32
    row_lens         [num_rows]                      int32                optional: entries that each row sees
    query_start_loc  [num_requests + 1]              int32                first row of each request; element 0
                                                                          is subtracted; else it is row //
                                                                          ``next_n``
    out              [num_rows, width]               fp32                 optional; any row stride
    ===============  ==============================  ===================  ===================================

    ``logit = k_scale * sum over heads of weight * relu(q . k)`` with the stored numbers of both. Row j of a
    request's m rows sees ``seq_lens - m + 1 + j`` tokens, that is ``// compress_ratio`` entries: none if
    that is negative, at most what its row of page_table has. What a row does not see, and absent entries,
    have -inf. On each device a logit depends on its row and its entry alone, bit for bit; every NaN is the
    same one, and there is no -0.

    Returns the logits. Raises RuntimeError naming the argument, what was expected and what came;
    ValueError for an unknown layout name.
    """
    expect_tensors(
        "index_logits", q_scale=q_scale, row_lens=row_lens, query_start_loc=query_start_loc, out=out
    )
    refuse_gradients("index_logits", q=q, weights=weights, q_scale=q_scale, out=out)
    inputs = (flat_queries(q), weights, index_cache, page_table, seq_lens)
    options = {
        "layout": get_index_layout(layout).id,
        "page_size": page_size,
        "q_scale": q_scale,
        "row_lens": row_lens,
        "query_start_loc": query_start_loc,
        "next_n": next_n,
        "compress_ratio": compress_ratio,
        "width": width,
    }
    if out is None:
        return torch.ops.mla_fp8.index_logits(*inputs, **options)  # type: ignore[no-any-return]
    torch.ops.mla_fp8.index_logits_out(*inputs, **options, out=out)
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
    """:func:`index_logits` over gathered keys: row r sees keys ``k_start[r]`` .. ``k_end[r] - 1``.

    ==============  =======================  =================  ===========================================
    k               [num_keys, 128]          e4m3fn             rows 16-byte aligned; at most 2^24 keys
    (as e2m1)       [num_keys, 64]           uint8
    k_scale         [num_keys]               fp32
    (of e2m1)       [num_keys, 4] or         uint8 or int32     ue8m0 of 32 elements each
                    [num_keys]
    k_start, k_end  [num_rows]               int32              clamped to [0, num_keys]
    out             [num_rows, num_keys]     fp32               optional; any row stride
    ==============  =======================  =================  ===========================================

    q, weights and q_scale are those of :func:`index_logits`. Returns the logits, -inf outside the range.
    """
    expect_tensors("index_logits_ragged", q_scale=q_scale, out=out)
    refuse_gradients(
        "index_logits_ragged", q=q, weights=weights, k=k, k_scale=k_scale, q_scale=q_scale, out=out
    )
    inputs = (q, weights, k, k_scale, k_start, k_end)
    if out is None:
        return torch.ops.mla_fp8.index_logits_ragged(*inputs, q_scale=q_scale)  # type: ignore[no-any-return]
    torch.ops.mla_fp8.index_logits_ragged_out(*inputs, q_scale=q_scale, out=out)
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
