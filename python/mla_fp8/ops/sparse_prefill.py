import torch

from .._arguments import need_tensors
from .._fake import attention_outputs, fake, fake_returns_nothing
from ..dispatch import attend
from ..layout import KVLayout

__all__ = ["sparse_prefill", "sparse_prefill_paged", "sparse_prefill_window"]

Attended = tuple[torch.Tensor, ...]  # of three, or two


def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    return_max_logits: bool = True,
    backend: str = "auto",
) -> Attended:
    """Attend each query token to rows of a bf16 workspace.

    Args:
        q: [num_tokens, num_q_heads, head_dim_qk] bfloat16, 1 to 128 heads, head_dim_qk 512 or 576.
        kv: [num_rows, head_dim_qk] bfloat16, any row stride. V is the first 512 columns.
        indices: [num_tokens, width] int32, rows of ``kv``. Those outside it, such as -1, are masked.
        sm_scale: A logit is sm_scale * (q . k).
        attn_sink: [num_q_heads] float32, an extra logit without a value.
        topk_length: [num_tokens] int32. Only the first n indices of a token count.
        batch_invariant: As in :func:`sparse_decode`, with ``return_max_logits=False``.
        out: [num_tokens, num_q_heads, 512] bfloat16, any strides of tokens and heads.
        lse: [num_tokens, num_q_heads] float32, contiguous.
        workspace: float32, of :func:`sparse_attention_workspace` elements. With ``out``, ``lse`` and no
            max_logits nothing is allocated.
        return_max_logits: Without them calls may be faster.
        backend: ``"auto"``, or a name that :func:`explain` lists. Others than ours allocate in any case.

    Returns:
        (out, max_logits, lse), or (out, lse) with ``return_max_logits=False``. max_logits is the largest
        logit, lse a natural logarithm, both [num_tokens, num_q_heads] float32 without the sink. Where a token
        attends to nothing out is 0, and they are -inf.

    Raises:
        TypeError: For what is no tensor.
        ValueError: For a backend that cannot run this: with every reason.
        RuntimeError: For any other argument: its name, what was expected, what came.
    """
    name = "sparse_prefill"
    if not isinstance(q, torch.Tensor):
        need_tensors(name, q=q)
    given = {
        "q": q, "kv": kv, "indices": indices, "sm_scale": sm_scale, "attn_sink": attn_sink,
        "topk_length": topk_length,
        "batch_invariant": _asked(name, return_max_logits) if batch_invariant else None,
    }  # fmt: skip
    return attend(name, given, backend, out=out, lse=lse, workspace=workspace, max_logits=return_max_logits)  # type: ignore[no-any-return]


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
    batch_invariant: bool = False,
    query_groups: int = 1,
    shared_keys: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    return_max_logits: bool = True,
    backend: str = "auto",
) -> Attended:
    """Attend each query token to cache slots, as :func:`sparse_prefill` does to rows: no bf16 copy is made.

    Args:
        q: As in :func:`sparse_decode`, and so are all that are not listed here.
        batch_invariant: As in :func:`sparse_prefill`.
        query_groups: Experimental. So many neighbours in a prompt choose mostly the same keys. With 8 heads
            8 fill a tile.
        return_max_logits: As in :func:`sparse_prefill`.

    Returns:
        As :func:`sparse_prefill`.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`sparse_decode`.
    """
    name = "sparse_prefill_paged"
    if not (isinstance(q, torch.Tensor) and isinstance(kv_cache, torch.Tensor)):
        need_tensors(name, q=q, kv_cache=kv_cache)
    given = {
        "q": q, "kv_cache": kv_cache, "indices": indices, "layout": layout, "page_size": page_size,
        "sm_scale": sm_scale, "topk_length": topk_length, "attn_sink": attn_sink,
        "extra_kv_cache": extra_kv_cache, "extra_indices": extra_indices,
        "extra_topk_length": extra_topk_length, "extra_page_size": extra_page_size,
        "extra_layout": extra_layout, "scale": scale,
        "query_groups": None if query_groups == 1 else query_groups, "shared_keys": shared_keys,
        "query_start_loc": query_start_loc,
        "batch_invariant": _asked(name, return_max_logits) if batch_invariant else None,
    }  # fmt: skip
    return attend(name, given, backend, out=out, lse=lse, workspace=workspace, max_logits=return_max_logits)  # type: ignore[no-any-return]


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
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    return_max_logits: bool = True,
    backend: str = "auto",
) -> Attended:
    """Attend each query token to its sliding window, which a page table names, and to chosen entries.

    A query at position p attends to positions max(p - window_size + 1, 0) to p of its own request, and to
    entries of a second cache, in one softmax. ``extra_indices`` names the entries. Layers that attend to all
    entries of their past (V4's of ratio 128) give ``extra_page_table`` instead. A token of no request has no
    keys but those of ``extra_indices``.

    Args:
        q: As in :func:`sparse_decode`, and so are all that are not listed here.
        kv_cache: The cache of the window.
        page_table: [num_requests, max_pages] int32: the pages of positions 0, page_size, 2 * page_size ... of
            a request. A number that is no page is masked.
        query_start_loc: [num_requests + 1] int32: the first row of each request. Element 0 is subtracted.
        seq_lens: [num_requests] int32: tokens of each request. Its queries are the last of them.
        window_size: Tokens of a window, its query's among them.
        extra_topk_length: [num_tokens] int32, required with ``extra_page_table``: the query's first n entries
            count, (p + 1) // ratio of them.
        extra_page_table: [num_requests, max_pages] int32, in place of ``extra_indices``: the pages of entries
            0, extra_page_size ... of a request.
        batch_invariant: As in :func:`sparse_prefill`.
        return_max_logits: As in :func:`sparse_prefill`.

    Returns:
        As :func:`sparse_prefill`.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`sparse_decode`.
    """
    name = "sparse_prefill_window"
    if not (isinstance(q, torch.Tensor) and isinstance(kv_cache, torch.Tensor)):
        need_tensors(name, q=q, kv_cache=kv_cache)
    given = {
        "q": q, "kv_cache": kv_cache, "page_table": page_table, "query_start_loc": query_start_loc,
        "seq_lens": seq_lens, "layout": layout, "page_size": page_size, "window_size": window_size,
        "sm_scale": sm_scale, "attn_sink": attn_sink, "extra_kv_cache": extra_kv_cache,
        "extra_indices": extra_indices, "extra_topk_length": extra_topk_length,
        "extra_page_size": extra_page_size, "extra_layout": extra_layout, "scale": scale,
        "extra_page_table": extra_page_table,
        "batch_invariant": _asked(name, return_max_logits) if batch_invariant else None,
    }  # fmt: skip
    return attend(name, given, backend, out=out, lse=lse, workspace=workspace, max_logits=return_max_logits)  # type: ignore[no-any-return]


def _asked(name: str, return_max_logits: bool) -> bool:
    """batch_invariant."""
    if return_max_logits:
        raise ValueError(
            f"mla_fp8.{name}: return_max_logits must be False with batch_invariant, got {return_max_logits!r}"
        )
    return True


for _op in ("sparse_prefill", "sparse_prefill_paged", "sparse_prefill_window", "_flash_mla_prefill"):
    fake(_op)(attention_outputs(3))
fake_returns_nothing("sparse_prefill_out", "sparse_prefill_paged_out", "sparse_prefill_window_out")
