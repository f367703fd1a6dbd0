import torch

from .._arguments import all_given, call_op, need_tensors
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients
from ..layout import HEAD_DIM_V, KVLayout, get_layout

__all__ = ["paged_attention_ragged", "paged_attention_ragged_latent"]

Pair = tuple[torch.Tensor, torch.Tensor]


def _given(op: str, out: torch.Tensor | None, lse: torch.Tensor | None, workspace: object) -> bool:
    """Whether the caller has tensors for the results. ValueError for one of them, or a workspace, alone."""
    given = all_given(op, out=out, lse=lse)
    if workspace is not None and not given:
        raise ValueError(f"mla_fp8.{op}: expected out and lse with a workspace, got neither")
    return given


def paged_attention_ragged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    *,
    sm_scale: float,
    page_size: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    logits_soft_cap: float = 0.0,
    attn_sink: torch.Tensor | None = None,
    q_len: int = 1,
    num_splits: int = 0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> Pair:
    """Attend the last tokens of each request to the keys in its own list of pages.

    The last query token of a request sees all its keys, each one before it one key less. FP8 is e4m3fn or
    e4m3fnuz, as the dtype says, times the scale.

    Args:
        q: [num_requests * q_len, num_q_heads, head_dim] bfloat16 or float16. The heads are a multiple of the
            cache's.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim] of q's dtype or FP8, 16-byte aligned rows;
            head_dim a multiple of 16, at most 256. An HND cache is passed as ``cache.transpose(1, 2)``.
        v_cache: The same with a head_dim of its own.
        kv_indptr: [num_requests + 1] int32, into ``kv_indices``, clamped to its length.
        kv_indices: [n] int32: pages. Those outside the cache are masked.
        kv_last_page_len: [num_requests] int32: rows of the last page, clamped to [0, page_size].
        sm_scale: A logit is sm_scale * (q . k).
        page_size: Rows of a page, by default the caches' own.
        k_scale: 1 or num_kv_heads elements, float32, finite and positive: for an FP8 cache, else None.
        v_scale: As ``k_scale``.
        logits_soft_cap: A logit x becomes ``cap * tanh(x / cap)``; 0: it stays.
        attn_sink: [num_q_heads] float32, an extra logit without a value.
        q_len: Query tokens of a request.
        num_splits: Parts of a request's keys, at most 128; 0: as many as fill the device. With a given number
            the result does not depend on the batch.
        out: [num_tokens, num_q_heads, head_dim of v_cache] of q's dtype, with ``lse``. Nothing is allocated
            then.
        lse: [num_tokens, num_q_heads] float32, contiguous.
        workspace: float32, num_splits * num_tokens * num_q_heads * (head_dim of v_cache + 1) elements, with
            ``out``. Without it there is one part.

    Returns:
        As :func:`sparse_decode`.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`. ValueError for one buffer without the
            other.
    """
    given = _given("paged_attention_ragged", out, lse, workspace)
    refuse_gradients(
        "paged_attention_ragged", q=q, k_cache=k_cache, v_cache=v_cache, k_scale=k_scale, v_scale=v_scale,
        attn_sink=attn_sink, out=out, lse=lse,
    )  # fmt: skip
    tensors = (q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len)
    if page_size is None:  # the op says what is wrong with a cache of another rank
        need_tensors("paged_attention_ragged", k_cache=k_cache)
        page_size = k_cache.shape[1] if k_cache.dim() == 4 else 1
    options = {
        "sm_scale": sm_scale,
        "page_size": page_size,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "logits_soft_cap": logits_soft_cap,
        "attn_sink": attn_sink,
        "q_len": q_len,
        "num_splits": num_splits,
    }
    if not given:
        return call_op("paged_attention_ragged", *tensors, **options)  # type: ignore[no-any-return]
    call_op("paged_attention_ragged_out", *tensors, **options, out=out, lse=lse, workspace=workspace)
    assert out is not None and lse is not None  # for mypy
    return out, lse


def paged_attention_ragged_latent(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    *,
    layout: str | KVLayout,
    page_size: int,
    sm_scale: float,
    scale: torch.Tensor | None = None,
    logits_soft_cap: float = 0.0,
    attn_sink: torch.Tensor | None = None,
    q_len: int = 1,
    num_splits: int = 0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> Pair:
    """Do :func:`paged_attention_ragged` over a latent cache.

    Args:
        q: [num_requests * q_len, num_q_heads, head_dim_qk] bfloat16.
        kv_cache: As in :func:`quantize_kv`.
        kv_indptr: As in :func:`paged_attention_ragged`, and so are all that are not listed here.
        layout: Of the cache.
        page_size: Rows of a page.
        scale: As in :func:`quantize_kv`.
        out: [num_tokens, num_q_heads, 512] bfloat16.
        workspace: float32, num_splits * num_tokens * num_q_heads * 514 elements.

    Returns:
        As :func:`paged_attention_ragged`.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`paged_attention_ragged`.
    """
    given = _given("paged_attention_ragged_latent", out, lse, workspace)
    refuse_gradients(
        "paged_attention_ragged_latent", q=q, kv_cache=kv_cache, scale=scale, attn_sink=attn_sink, out=out,
        lse=lse,
    )  # fmt: skip
    tensors = (q, kv_cache, kv_indptr, kv_indices, kv_last_page_len)
    options = {
        "layout": get_layout(layout).id,
        "page_size": page_size,
        "sm_scale": sm_scale,
        "scale": scale,
        "logits_soft_cap": logits_soft_cap,
        "attn_sink": attn_sink,
        "q_len": q_len,
        "num_splits": num_splits,
    }
    if not given:
        return call_op("paged_attention_ragged_latent", *tensors, **options)  # type: ignore[no-any-return]
    call_op("paged_attention_ragged_latent_out", *tensors, **options, out=out, lse=lse, workspace=workspace)
    assert out is not None and lse is not None  # for mypy
    return out, lse


@fake("paged_attention_ragged")
def _(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    *,
    sm_scale: float,
    page_size: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    logits_soft_cap: float = 0.0,
    attn_sink: torch.Tensor | None = None,
    q_len: int = 1,
    num_splits: int = 0,
) -> Pair:
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return q.new_empty((*q.shape[:2], v_cache.shape[3])), lse


@fake("paged_attention_ragged_latent")
def _(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    *,
    layout: int,
    page_size: int,
    sm_scale: float,
    scale: torch.Tensor | None = None,
    logits_soft_cap: float = 0.0,
    attn_sink: torch.Tensor | None = None,
    q_len: int = 1,
    num_splits: int = 0,
) -> Pair:
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return q.new_empty((*q.shape[:2], HEAD_DIM_V)), lse


fake_returns_nothing("paged_attention_ragged_out", "paged_attention_ragged_latent_out")
