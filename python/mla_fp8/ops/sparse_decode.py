import torch

from .._fake import attention_outputs, fake, fake_returns_nothing
from ..call import Scope, SparseCall, second_scope
from ..dispatch import attend, extra_layout_of, layout_of
from ..layout import KVLayout


def sparse_attention_workspace(
    num_tokens: int, *, num_q_heads: int, num_sms: int, batch_invariant: bool = False
) -> int:
    """fp32 elements of ``workspace`` that ``sparse_decode_out`` and ``sparse_prefill*_out`` have use for.

    ``torch.ops.mla_fp8.sparse_*_out`` allocate nothing. Where the portable kernel runs, small batches are
    fast only if several CTAs share a token's keys. They meet in the caller's ``workspace``: as many as it has
    room for, without one a single CTA. With ``batch_invariant`` a workspace that is too small raises
    RuntimeError. ``num_sms`` is the GPU's. On Hopper the portable kernel runs for ``_fnuz`` layouts
    alone, on AMD GPUs one like it for all.
    """
    return torch.ops.mla_fp8.sparse_attention_workspace(  # type: ignore[no-any-return]
        num_tokens, num_q_heads, num_sms, batch_invariant
    )


def sparse_decode(
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
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each query token to the cache slots that it selected. Returns ``(out, lse)``.

    ===========  =======================================  =====  ============================================
    q            [num_tokens, num_q_heads, head_dim_qk]   bf16   1 to 128 heads
    kv_cache     [num_pages, page_bytes]                  uint8  see :class:`mla_fp8.KVLayout`
    indices      [num_tokens, topk]                       int32  slots; outside the cache (-1): masked
    topk_length  [num_tokens]                             int32  only the first n indices count
    attn_sink    [num_q_heads]                            fp32   an extra logit without a value
    extra_*      a second cache with its own indices, page size and layout, attended to jointly
    scale        one element                              fp32   the layer's scale: ``fp8_e4m3*`` only
    out          [num_tokens, num_q_heads, 512]           bf16   0 where nothing is attended
    lse          [num_tokens, num_q_heads]                fp32   natural log, sink excluded, -inf if nothing
    ===========  =======================================  =====  ============================================

    ``extra_layout`` is by default that of the first cache. It may also be ``dsv41_fp4``, next to ``dsv41`` or
    ``dsv4``, and ``dsv4`` next to ``dsv4_fnuz``: see ``KVLayout.extra_of``.

    There is nothing to plan ahead. What several CTAs do for a row is merged in the launch; by the portable
    kernel in a second one and a workspace, which is allocated here (:func:`sparse_attention_workspace`).

    A row's result never depends on what the other rows hold; with ``batch_invariant`` (always so on the
    CPU) neither on how many there are nor on its place among them. ``layout`` may be an engine's name such
    as ``"fp8_ds_mla"``. ``backend`` is a name of the dispatch table; ValueError with every reason if it
    cannot run this, RuntimeError naming the argument for bad input.
    """
    name, layout = "sparse_decode", layout_of(layout, q, kv_cache, page_size, backend)
    extra_kind = extra_layout_of(extra_layout, q, extra_kv_cache, extra_page_size, backend)
    extra = second_scope(
        name, layout, extra_kv_cache, extra_kind, extra_page_size, extra_indices, extra_topk_length
    )
    main = Scope(kv_cache, layout, page_size, indices, topk_length)
    call = SparseCall(name, q, (main, *extra), sm_scale, attn_sink, scale, batch_invariant=batch_invariant)
    return attend(call, backend)  # type: ignore[no-any-return]


fake("sparse_decode")(attention_outputs(2))
fake_returns_nothing("sparse_decode_out")
