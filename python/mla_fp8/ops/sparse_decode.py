import torch

from ..dispatch import backend_function, layout_of, wanted
from ..layout import KV_LAYOUTS, KVLayout
from ._fake import fake, fake_returns_nothing
from ._inference import refuse_gradients


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
    extra_*      a second cache of the same layout with its own indices and page size, attended to jointly
    scale        one element                              fp32   the layer's scale: ``fp8_e4m3*`` only
    out          [num_tokens, num_q_heads, 512]           bf16   0 where nothing is attended
    lse          [num_tokens, num_q_heads]                fp32   natural log, sink excluded, -inf if nothing
    ===========  =======================================  =====  ============================================

    There is no workspace and nothing to plan ahead: what several CTAs do for a row is merged in the launch.

    A row's result never depends on what the other rows hold; with ``batch_invariant`` (always so on the
    CPU) not on how many there are either. ``layout`` may be an engine's name such as ``"fp8_ds_mla"``.
    ``backend`` is a name of the dispatch table; ValueError with every reason if it cannot run this,
    RuntimeError naming the argument for bad input.
    """
    refuse_gradients(
        "sparse_decode",
        q=q,
        kv_cache=kv_cache,
        attn_sink=attn_sink,
        extra_kv_cache=extra_kv_cache,
        scale=scale,
    )
    layout = layout_of(layout, q, kv_cache, page_size, backend)
    features = wanted(two_caches=extra_kv_cache is not None, batch_invariant=batch_invariant)
    function = backend_function("sparse_decode", q, layout.name, backend, features)
    return function(  # type: ignore[no-any-return]
        q, kv_cache, indices, layout=layout, page_size=page_size, sm_scale=sm_scale, topk_length=topk_length,
        attn_sink=attn_sink, extra_kv_cache=extra_kv_cache, extra_indices=extra_indices,
        extra_topk_length=extra_topk_length, extra_page_size=extra_page_size, scale=scale,
        batch_invariant=batch_invariant,
    )  # fmt: skip


def new_outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty (out, lse) for queries of this shape."""
    head_dim_v = next(iter(KV_LAYOUTS.values())).head_dim_v
    out = q.new_empty((q.shape[0], q.shape[1], head_dim_v), dtype=torch.bfloat16)
    return out, q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32)


@fake("sparse_decode")
def _(q: torch.Tensor, *args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return new_outputs(q)


fake_returns_nothing("sparse_decode_out")
