import torch

from .._arguments import expect_tensors
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients
from ..layout import KVLayout, get_layout


def k_norm_rope_insert(
    kv: torch.Tensor,
    kv_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    layout: str | KVLayout,
    page_size: int,
    eps: float,
    k_rope: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Norm the latents of a layer, rotate them, quantise and store them: one launch, in place.

    ============  ========================  ===============  =================================================
    kv            [num_tokens, 512]         bf16             any row stride: a slice of a projection
    kv_weight     [512] or None             bf16 or fp32     RMSNorm's; None: kv is normed already
    cos, sin      [max_pos, half]           fp32             any strides; half 0: nothing is rotated (NoPE)
    positions     [num_tokens]              int64 or int32   outside the table: not stored
    slot_mapping  [n], n <= num_tokens      int64 or int32   page * page_size + row; outside the cache:
                                                             skipped; rows of kv past n are padding
    kv_cache      [num_pages, page_bytes]   uint8 (or view)  see :class:`mla_fp8.KVLayout`
    k_rope        [num_tokens, 64] or None  bf16             of layouts with 576 dims: rotated, not normed
    scale         one element               fp32             the layer's scale: ``fp8_e4m3*`` only
    ============  ========================  ===============  =================================================

    The bytes are those of ``quantize_kv(bf16(rope(bf16(norm(kv)))))``, on every device. RMSNorm is float32
    over all 512 (squares of sixteen neighbours in order, then halves), times the nearest 1 / sqrt of their
    mean plus ``eps``, times the weight.
    RoPE is float32 on the last 2 * half dims, pairs of neighbours: ``a cos - b sin, a sin + b cos``. How
    many dims rotate is the model's, not the layout's: V4 and V4.1 rotate 64 of 512, V3.2 all of
    ``k_rope``. Without ``k_rope`` a layout with 576 dims gets zeros there; then half must be 0.

    ``cos`` and ``sin`` of one table ``[max_pos, 64]``: ``t[:, :32], t[:, 32:]``, or if they alternate
    ``t[:, 0::2], t[:, 1::2]``. half is a multiple of 4, at most 128. With half 0 positions are not looked at.

    Raises RuntimeError naming the argument, what was expected and what came, before anything is written;
    ValueError for an unknown layout name.
    """
    expect_tensors("k_norm_rope_insert", kv_weight=kv_weight, k_rope=k_rope, scale=scale)
    refuse_gradients(
        "k_norm_rope_insert", kv=kv, kv_weight=kv_weight, cos=cos, sin=sin, kv_cache=kv_cache, k_rope=k_rope,
        scale=scale,
    )  # fmt: skip
    torch.ops.mla_fp8.k_norm_rope_insert(
        kv,
        kv_weight,
        cos,
        sin,
        positions,
        slot_mapping,
        kv_cache,
        layout=get_layout(layout).id,
        page_size=page_size,
        eps=eps,
        k_rope=k_rope,
        scale=scale,
    )


def qk_norm_rope_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    layout: str | KVLayout,
    page_size: int,
    eps: float,
    norm_q: bool,
    k_rope: torch.Tensor | None = None,
    num_heads: int | None = None,
    scale: torch.Tensor | None = None,
    out_q: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`k_norm_rope_insert`, and the query heads of the same tokens, in the same launch.

    =========  ==============================  ====  =========================================================
    q          [num_tokens, num_q_heads, dim]  bf16  any strides of tokens and heads
    norm_q                                           RMSNorm of each head, without a weight (V4); dim is then
                                                     512. V4.1 and V3.2: False
    num_heads                                        at least num_q_heads, the default; what q has not is zero
    out_q      [num_tokens, num_heads, dim]    bf16  optional; q itself, or memory apart from it
    =========  ==============================  ====  =========================================================

    The last 2 * half dims of a head are rotated, so a slice of q with those alone works. A token whose
    position is outside the table has zeros. In place and without a norm only the rotated dims are touched.

    Returns q prepared: ``out_q`` if it is given. Raises as :func:`k_norm_rope_insert` does.
    """
    expect_tensors("qk_norm_rope_insert", kv_weight=kv_weight, k_rope=k_rope, scale=scale, out_q=out_q)
    refuse_gradients(
        "qk_norm_rope_insert", q=q, kv=kv, kv_weight=kv_weight, cos=cos, sin=sin, kv_cache=kv_cache,
        k_rope=k_rope, scale=scale, out_q=out_q,
    )  # fmt: skip
    tensors = (q, kv, kv_weight, cos, sin, positions, slot_mapping, kv_cache)
    options = {
        "layout": get_layout(layout).id,
        "page_size": page_size,
        "eps": eps,
        "norm_q": norm_q,
        "k_rope": k_rope,
        "num_heads": num_heads,
        "scale": scale,
    }
    if out_q is None:
        return torch.ops.mla_fp8.qk_norm_rope_insert(*tensors, **options)  # type: ignore[no-any-return]
    torch.ops.mla_fp8.qk_norm_rope_insert_out(*tensors, **options, out_q=out_q)
    return out_q


@fake("qk_norm_rope_insert")
def _(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    layout: int,
    page_size: int,
    eps: float,
    norm_q: bool,
    k_rope: torch.Tensor | None = None,
    num_heads: int | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[1] if num_heads is None else num_heads, q.shape[2]))


fake_returns_nothing("k_norm_rope_insert", "qk_norm_rope_insert_out")
