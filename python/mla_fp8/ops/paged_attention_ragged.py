import torch

from ._fake import fake, fake_returns_nothing


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
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend one query token per request to the keys in its own list of pages.

    ================  ===========================================  =============  =========================
    q                 [num_requests, num_q_heads, head_dim]        bf16 or fp16   a multiple of the KV heads
    k_cache           [num_pages, page_size, num_kv_heads, dim]    q's or FP8     dim: a multiple of 16 up to
    v_cache           the same with its own dim                    k_cache's      576; rows 16-byte aligned
    kv_indptr         [num_requests + 1]                           int32          into kv_indices
    kv_indices        [n]                                          int32          pages; outside: masked
    kv_last_page_len  [num_requests]                               int32          rows of the last page
    k_scale, v_scale  1 or num_kv_heads elements                   fp32           FP8 caches only, required
    out               [num_requests, num_q_heads, v_cache's dim]   q's            0 where nothing is attended
    lse               [num_requests, num_q_heads]                  fp32           natural log, -inf there
    ================  ===========================================  =============  =========================

    FP8 is e4m3fn or e4m3fnuz, as the dtype says; value = e4m3 * scale, never rounded. Scales must be finite
    and positive (checked on the CPU only). An HND cache is passed as ``cache.transpose(1, 2)``. With
    ``logits_soft_cap`` the logits are ``cap * tanh(logits / cap)``. kv_indptr is clamped to the length of
    kv_indices, kv_last_page_len to [0, page_size]; ``page_size`` is by default the caches' own. Returns
    ``(out, lse)``, which may be passed in, both or neither (ValueError). Raises RuntimeError naming the
    argument, what was expected and what came.
    """
    if (out is None) != (lse is None):
        raise ValueError("paged_attention_ragged: expected both or neither of out and lse, got one")
    tensors = (q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len)
    if page_size is None:  # the op says what is wrong with a cache of another rank
        page_size = k_cache.shape[1] if k_cache.dim() == 4 else 1
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    options = {"sm_scale": sm_scale, "page_size": page_size, "logits_soft_cap": logits_soft_cap, **scales}
    if out is None or lse is None:
        return torch.ops.mla_fp8.paged_attention_ragged(*tensors, **options)  # type: ignore[no-any-return]
    torch.ops.mla_fp8.paged_attention_ragged_out(*tensors, **options, out=out, lse=lse)
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
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return q.new_empty((*q.shape[:2], v_cache.shape[3])), lse


fake_returns_nothing("paged_attention_ragged_out")
