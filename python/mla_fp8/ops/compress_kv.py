import torch

from .._arguments import call_op
from .._fake import fake_returns_nothing
from .._inference import refuse_gradients
from ..layout import KVLayout, get_layout

__all__ = ["compress_kv"]


def compress_kv(
    kv_score: torch.Tensor,
    query_start_loc: torch.Tensor,
    start_pos: torch.Tensor,
    state: torch.Tensor | None,
    state_slots: torch.Tensor,
    ape: torch.Tensor | None,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    ratio: int,
    layout: str | KVLayout,
    page_size: int,
    eps: float,
    online: bool = False,
    round_pooled: bool = True,
    scale: torch.Tensor | None = None,
    out_latent: torch.Tensor | None = None,
) -> None:
    """Pool every ``ratio`` consecutive tokens of a request into one cache row: one launch, in place.

    Experimental. The token at position p closes a block if ``(p + 1) % ratio == 0``. RoPE takes the position
    of the block's first token; where the table has none the row is not stored. Per dim, a row is the mean of
    kv weighted by the softmax of score + ape, then RMSNorm, RoPE, and the row of :func:`quantize_kv`. The
    bits are the same on every device.

    The state holds the raw rows of the last tokens, position p in row ``p % depth``; online: max, sum and
    mean after each token, in another order of additions. One call over positions [a, b) gives the bits of
    every chain of calls over them, rejected drafts included, if depth is at least window - 1 + n, online n +
    1. The window has 2 tokens for ratio 2, 8 for 4, 128 for 128; n is the most rejected tokens of a call, at
    least 1. At a prefix hit of length a the state must hold positions a - window + 1 to a - 1.

    Args:
        kv_score: [num_tokens, width] float32, ratio 1 also bfloat16, any row stride: rows of all requests.
            Ratio 1 (width 512): kv, nothing is pooled. Ratios 2 and 128 (1024): kv, score. Ratio 4 (2048): kv
            as previous, kv, score as previous, score; it pools the block before as well.
        query_start_loc: [num_requests + 1] int32: the first row of each request. Element 0 is subtracted.
            Must not decrease.
        start_pos: [num_requests] int32: the position of a request's first row.
        state: [num_states, depth, width] float32, online [num_states, depth, 1536]; None for ratio 1.
        state_slots: [num_requests] int64 or int32. A request whose slot is outside the state is skipped. No
            two may share one.
        ape: [ratio, width / 2] float32, added to scores of ratios 4 and 128, or None.
        norm_weight: [512] bfloat16 or float32, of RMSNorm.
        cos: As in :func:`k_norm_rope_insert`.
        sin: As in :func:`k_norm_rope_insert`.
        slot_mapping: [num_tokens] int64 or int32: the slot of the row that a token closes, outside the cache
            not stored; not looked at for other tokens.
        kv_cache: [num_pages, page_bytes] uint8, of a layout with 512 dims.
        ratio: 1, 2, 4 or 128.
        layout: Of the cache.
        page_size: Rows of a page.
        eps: Of RMSNorm.
        online: Keep max, sum and mean in place of rows (ratio 128 alone).
        round_pooled: Round to bf16 after pooling, norm and RoPE each; else once.
        scale: As in :func:`quantize_kv`.
        out_latent: [num_tokens, 512] bfloat16: closing tokens' rows before RoPE.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`.
    """
    refuse_gradients(
        "compress_kv", kv_score=kv_score, state=state, ape=ape, norm_weight=norm_weight, cos=cos, sin=sin,
        kv_cache=kv_cache, scale=scale, out_latent=out_latent,
    )  # fmt: skip
    call_op(
        "compress_kv",
        kv_score,
        query_start_loc,
        start_pos,
        state,
        state_slots,
        ape,
        norm_weight,
        cos,
        sin,
        slot_mapping,
        kv_cache,
        ratio=ratio,
        layout=get_layout(layout).id,
        page_size=page_size,
        eps=eps,
        online=online,
        round_pooled=round_pooled,
        scale=scale,
        out_latent=out_latent,
    )


fake_returns_nothing("compress_kv")
