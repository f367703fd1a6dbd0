import torch

from ..dispatch import backend_function, layout_of, wanted
from ..layout import KV_LAYOUTS, KVLayout
from ._fake import fake, fake_returns_nothing
from ._inference import refuse_gradients
from .sparse_decode import new_outputs

_ROWS = {layout.head_dim_qk: layout.name for layout in KV_LAYOUTS.values() if layout.nope_format == "bf16"}


def row_layout(q: torch.Tensor) -> str:
    """The layout of bf16 rows that ``q`` can attend to."""
    # Compared, not looked up: a size that the compiler does not know has no hash.
    return next((name for dim, name in _ROWS.items() if dim == q.shape[-1]), "bf16")


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
    refuse_gradients("sparse_prefill", q=q, kv=kv, attn_sink=attn_sink)
    function = backend_function("sparse_prefill", q, row_layout(q), backend)
    options = {"sm_scale": sm_scale, "attn_sink": attn_sink, "topk_length": topk_length}
    return function(q, kv, indices, **options)  # type: ignore[no-any-return]


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
    scale: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`sparse_prefill` straight from packed pages: no workspace, one or two caches in one softmax.

    Arguments as in :func:`mla_fp8.sparse_decode`, results as in :func:`sparse_prefill`.
    """
    refuse_gradients(
        "sparse_prefill_paged",
        q=q,
        kv_cache=kv_cache,
        attn_sink=attn_sink,
        extra_kv_cache=extra_kv_cache,
        scale=scale,
    )
    layout = layout_of(layout, q, kv_cache, page_size, backend)
    features = wanted(two_caches=extra_kv_cache is not None)
    function = backend_function("sparse_prefill_paged", q, layout.name, backend, features)
    return function(  # type: ignore[no-any-return]
        q, kv_cache, indices, layout=layout, page_size=page_size, sm_scale=sm_scale, topk_length=topk_length,
        attn_sink=attn_sink, extra_kv_cache=extra_kv_cache, extra_indices=extra_indices,
        extra_topk_length=extra_topk_length, extra_page_size=extra_page_size, scale=scale,
    )  # fmt: skip


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
    scale: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`sparse_prefill_paged` over each token's sliding window: a page table instead of indices.

    ===============  =========================  =====  ==================================================
    kv_cache         [num_pages, page_bytes]    uint8  of the window; see :class:`mla_fp8.KVLayout`
    page_table       [num_requests, max_pages]  int32  pages of positions 0, page_size, ..; no page: masked
    query_start_loc  [num_requests + 1]         int32  first query of each request; element 0 is subtracted
    seq_lens         [num_requests]             int32  tokens of each request, its queries the last of them
    ===============  =========================  =====  ==================================================

    A query at position p attends to positions ``max(p - window_size + 1, 0) .. p`` of its own request and to
    ``extra_indices`` of ``extra_kv_cache``, in one softmax. Tokens of no request have no window. Other
    arguments and results as in :func:`sparse_prefill_paged`.
    """
    refuse_gradients(
        "sparse_prefill_window",
        q=q,
        kv_cache=kv_cache,
        attn_sink=attn_sink,
        extra_kv_cache=extra_kv_cache,
        scale=scale,
    )
    layout = layout_of(layout, q, kv_cache, page_size, backend)
    features = wanted(two_caches=extra_kv_cache is not None)
    function = backend_function("sparse_prefill_window", q, layout.name, backend, features)
    return function(  # type: ignore[no-any-return]
        q, kv_cache, page_table, query_start_loc, seq_lens, layout=layout, page_size=page_size,
        window_size=window_size, sm_scale=sm_scale, attn_sink=attn_sink, extra_kv_cache=extra_kv_cache,
        extra_indices=extra_indices, extra_topk_length=extra_topk_length, extra_page_size=extra_page_size,
        scale=scale,
    )  # fmt: skip


@fake("sparse_prefill")
@fake("sparse_prefill_paged")
@fake("sparse_prefill_window")
def _(q: torch.Tensor, *args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, lse = new_outputs(q)
    return out, torch.empty_like(lse), lse


fake_returns_nothing("sparse_prefill_out", "sparse_prefill_paged_out", "sparse_prefill_window_out")
