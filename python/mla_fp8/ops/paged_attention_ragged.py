import torch

from .._arguments import all_given, expect_tensors, need_tensors
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients
from ..layout import HEAD_DIM_V, KVLayout, get_layout

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

    ================  ===========================================  =============  =========================
    q                 [num_tokens, num_q_heads, head_dim]          bf16 or fp16   a multiple of the KV heads
    k_cache           [num_pages, page_size, num_kv_heads, dim]    q's or FP8     dim: a multiple of 16 up to
    v_cache           the same with its own dim                    k_cache's      256; rows 16-byte aligned
    kv_indptr         [num_requests + 1]                           int32          into kv_indices
    kv_indices        [n]                                          int32          pages; outside: masked
    kv_last_page_len  [num_requests]                               int32          rows of the last page
    k_scale, v_scale  1 or num_kv_heads elements                   fp32           FP8 caches only, required
    attn_sink         [num_q_heads]                                fp32           a logit without a value
    out               [num_tokens, num_q_heads, v_cache's dim]     q's            0 where nothing is attended
    lse               [num_tokens, num_q_heads]                    fp32           natural log, -inf there
    workspace         num_splits * num_tokens * num_q_heads        fp32           only with out and lse
                      * (v_cache's dim + 1) elements
    ================  ===========================================  =============  =========================

    num_tokens is num_requests * ``q_len``: the last query token of a request sees all its keys, each one
    before it one key less (the keys of the query tokens are in the cache). FP8 is e4m3fn or e4m3fnuz, as the
    dtype says; value = e4m3 * scale, never rounded. Scales must be finite and positive (checked on the CPU
    only). An HND cache is passed as ``cache.transpose(1, 2)``. A logit is ``sm_scale * (q . k)``, with
    ``logits_soft_cap`` it is ``cap * tanh(logit / cap)``. lse does not include the sink. kv_indptr is clamped
    to the length of kv_indices, kv_last_page_len to [0, page_size]; ``page_size`` is by default the caches'
    own.

    The keys of a request are worked on in ``num_splits`` parts (0: as many as fill the GPU, or many CPUs; at
    most 128). A given number makes the result independent of the batch. With ``out`` and ``lse`` nothing is
    allocated: without a ``workspace`` there is one part. Returns ``(out, lse)``. Raises RuntimeError naming
    the argument, what was expected and what came; ValueError for one of the two, or a workspace, alone.
    """
    given = _given("paged_attention_ragged", out, lse, workspace)
    expect_tensors("paged_attention_ragged", k_scale=k_scale, v_scale=v_scale, attn_sink=attn_sink)
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
        return torch.ops.mla_fp8.paged_attention_ragged(*tensors, **options)  # type: ignore[no-any-return]
    torch.ops.mla_fp8.paged_attention_ragged_out(*tensors, **options, out=out, lse=lse, workspace=workspace)
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
    """:func:`paged_attention_ragged` over a latent cache: one vector per token, V is its beginning.

    ================  ===========================================  =============  =========================
    q                 [num_tokens, num_q_heads, head_dim_qk]       bf16           num_requests * q_len tokens
    kv_cache          [num_pages, page_bytes]                      any 1-byte     or FlashMLA's 4-D view
    scale             1 element                                    fp32           fp8_e4m3 layouts, required
    out               [num_tokens, num_q_heads, 512]               bf16           0 where nothing is attended
    workspace         num_splits * num_tokens * num_q_heads        fp32           only with out and lse
                      * 514 elements
    ================  ===========================================  =============  =========================

    The other arguments, and the result, are those of :func:`paged_attention_ragged`.
    """
    given = _given("paged_attention_ragged_latent", out, lse, workspace)
    expect_tensors("paged_attention_ragged_latent", scale=scale, attn_sink=attn_sink)
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
    op = torch.ops.mla_fp8
    if not given:
        return op.paged_attention_ragged_latent(*tensors, **options)  # type: ignore[no-any-return]
    op.paged_attention_ragged_latent_out(*tensors, **options, out=out, lse=lse, workspace=workspace)
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
