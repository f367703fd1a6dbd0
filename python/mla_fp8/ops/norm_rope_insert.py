import torch

from .._arguments import call_op
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients
from ..layout import KVLayout, get_layout

__all__ = ["k_norm_rope_insert", "qk_norm_rope_insert"]


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
    """Norm latents, rotate them, quantise and store them in the cache: one launch, in place.

    The bytes are those of ``quantize_kv(bf16(rope(bf16(norm(kv)))))``, on every device. RMSNorm is float32
    over all 512, with the order of additions of ``mla_fp8.layer_reference``. RoPE is float32 on the last 2 *
    half dims, pairs of neighbours: ``a cos - b sin, a sin + b cos``. V4 and V4.1 rotate 64 of 512, V3.2 all
    of ``k_rope``.

    Args:
        kv: [num_tokens, 512] bfloat16, any row stride: a slice of a projection.
        kv_weight: [512] bfloat16 or float32, of RMSNorm; None if ``kv`` is normed already.
        cos: [max_pos, half] float32, any strides. half is a multiple of 4, at most 128; with half 0 nothing
            is rotated, and ``positions`` are not looked at. Of one table t [max_pos, 64], cos and sin are
            ``t[:, :32], t[:, 32:]``, or if they alternate ``t[:, 0::2], t[:, 1::2]``.
        sin: As ``cos``.
        positions: [num_tokens] int64 or int32. A token outside the table is not stored.
        slot_mapping: As in :func:`quantize_kv`.
        kv_cache: As in :func:`quantize_kv`.
        layout: Of the cache.
        page_size: Rows of a page.
        eps: Of RMSNorm.
        k_rope: [num_tokens, 64] bfloat16, of layouts with 576 dims: rotated, not normed. None stores zeros
            there, and half must be 0.
        scale: As in :func:`quantize_kv`.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`.
    """
    refuse_gradients(
        "k_norm_rope_insert", kv=kv, kv_weight=kv_weight, cos=cos, sin=sin, kv_cache=kv_cache, k_rope=k_rope,
        scale=scale,
    )  # fmt: skip
    call_op(
        "k_norm_rope_insert",
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
    """Do :func:`k_norm_rope_insert`, and norm and rotate the query heads of the same tokens in its launch.

    The last 2 * half dims of a head are rotated, so a slice of q with those alone works. A token whose
    position is outside the table has zeros. In place and without a norm only the rotated dims are touched.

    Args:
        q: [num_tokens, num_q_heads, dim] bfloat16, any strides of tokens and heads.
        kv: As in :func:`k_norm_rope_insert`, and so are all that are not listed here.
        norm_q: RMSNorm of each head, without a weight (V4); dim is then 512. V4.1 and V3.2: False.
        num_heads: Heads of the result, at least num_q_heads, the default. Those beyond are zero.
        out_q: [num_tokens, num_heads, dim] bfloat16; q itself, or memory apart from it.

    Returns:
        [num_tokens, num_heads, dim] bfloat16.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`.
    """
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
        return call_op("qk_norm_rope_insert", *tensors, **options)  # type: ignore[no-any-return]
    call_op("qk_norm_rope_insert_out", *tensors, **options, out_q=out_q)
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
