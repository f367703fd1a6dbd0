import torch

from .._arguments import expect_tensors
from .._fake import attention_outputs, fake, fake_returns_nothing
from ..call import Scope, SparseCall, Window, second_scope
from ..dispatch import attend, extra_layout_of, layout_of
from ..layout import KVLayout, row_layout


def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend each query token to rows of a bf16 workspace. Returns ``(out, max_logits, lse)``.

    ===========  =======================================  =====  ==========================================
    q            [num_tokens, num_q_heads, head_dim_qk]   bf16   1 to 128 heads, head_dim_qk 512 or 576
    kv           [num_rows, head_dim_qk]                  bf16   any row stride; V is the first 512 columns
    indices      [num_tokens, width]                      int32  rows; outside ``kv`` (-1): masked
    topk_length  [num_tokens]                             int32  only the first n indices count
    attn_sink    [num_q_heads]                            fp32   an extra logit without a value
    out          [num_tokens, num_q_heads, 512]           bf16   0 where nothing is attended
    max_logits   [num_tokens, num_q_heads]                fp32   largest sm_scale * q.k, -inf if nothing
    lse          [num_tokens, num_q_heads]                fp32   natural log, sink excluded, -inf if nothing
    ===========  =======================================  =====  ==========================================

    Raises RuntimeError naming the argument, what was expected and what came; ValueError for a ``backend``
    that cannot run this.
    """
    rows = Scope(kv, row_layout(q), 1, indices, topk_length)
    call = SparseCall("sparse_prefill", q, (rows,), sm_scale, attn_sink)
    return attend(call, backend)  # type: ignore[no-any-return]


def sparse_prefill_paged(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    layout: str | KVLayout,
    page_size: int,
    sm_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    extra_page_size: int | None = None,
    extra_layout: str | KVLayout | None = None,
    scale: torch.Tensor | None = None,
    query_groups: int = 1,
    shared_keys: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`sparse_prefill` straight from packed pages: no workspace, one or two caches in one softmax.

    Arguments as in :func:`mla_fp8.sparse_decode`, results as in :func:`sparse_prefill`. Neighbours in a
    prompt choose mostly the same keys, too: with 8 heads ``query_groups=8`` fills a tile.
    """
    name, layout = "sparse_prefill_paged", layout_of(layout, q, kv_cache, page_size, backend)
    extra_kind = extra_layout_of(extra_layout, q, extra_kv_cache, extra_page_size, backend)
    extra = second_scope(
        name, layout, extra_kv_cache, extra_kind, extra_page_size, extra_indices, extra_topk_length
    )
    main = Scope(kv_cache, layout, page_size, indices, topk_length)
    expect_tensors(name, shared_keys=shared_keys)
    call = SparseCall(
        name, q, (main, *extra), sm_scale, attn_sink, scale, None, False, query_groups, shared_keys
    )
    return attend(call, backend)  # type: ignore[no-any-return]


def sparse_prefill_window(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    layout: str | KVLayout,
    page_size: int,
    window_size: int,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    extra_page_size: int | None = None,
    extra_layout: str | KVLayout | None = None,
    scale: torch.Tensor | None = None,
    extra_page_table: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`sparse_prefill_paged` over each token's sliding window: a page table instead of indices.

    =================  =========================  =====  ==================================================
    kv_cache           [num_pages, page_bytes]    uint8  of the window; see :class:`mla_fp8.KVLayout`
    page_table         [num_requests, max_pages]  int32  pages of positions 0, page_size, ..; no page: masked
    query_start_loc    [num_requests + 1]         int32  first query of each request; element 0 is subtracted
    seq_lens           [num_requests]             int32  tokens of each request, its queries the last of them
    extra_page_table   [num_requests, max_pages]  int32  in place of ``extra_indices``: pages of a request's
                                                         entries 0, extra_page_size, ..; no page: masked
    extra_topk_length  [num_tokens]               int32  with it required: the query's first n entries count
    =================  =========================  =====  ==================================================

    A query at position p attends to positions ``max(p - window_size + 1, 0) .. p`` of its own request and to
    ``extra_indices`` of ``extra_kv_cache``, in one softmax. Layers that attend to every compressed entry of
    their past (V4's of ratio 128) name the entries by ``extra_page_table``: ``extra_topk_length`` is then
    ``(p + 1) // ratio``, and no index is written or read. Tokens of no request have no keys of either kind,
    but those of ``extra_indices``. Other arguments and results as in :func:`sparse_prefill_paged`.
    """
    name, layout = "sparse_prefill_window", layout_of(layout, q, kv_cache, page_size, backend)
    extra_kind = extra_layout_of(extra_layout, q, extra_kv_cache, extra_page_size, backend)
    extra = second_scope(
        name, layout, extra_kv_cache, extra_kind, extra_page_size, extra_indices, extra_topk_length,
        extra_page_table,
    )  # fmt: skip
    window = Window(page_table, query_start_loc, seq_lens, window_size)
    main = Scope(kv_cache, layout, page_size, None)
    call = SparseCall(name, q, (main, *extra), sm_scale, attn_sink, scale, window)
    return attend(call, backend)  # type: ignore[no-any-return]


for _op in ("sparse_prefill", "sparse_prefill_paged", "sparse_prefill_window"):
    fake(_op)(attention_outputs(3))
fake_returns_nothing("sparse_prefill_out", "sparse_prefill_paged_out", "sparse_prefill_window_out")
