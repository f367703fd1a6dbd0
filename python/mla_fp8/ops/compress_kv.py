import torch

from .._arguments import expect_tensors
from .._fake import fake_returns_nothing
from .._inference import refuse_gradients
from ..layout import KVLayout, get_layout


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

    ===============  ==========================  ==============  =============================================
    kv_score         [num_tokens, width]         fp32            rows of all requests, one after another;
                                                                 any row stride; ratio 1: or bf16
    query_start_loc  [num_requests + 1]          int32           first token of each request; element 0 is
                                                                 subtracted; must not decrease
    start_pos        [num_requests]              int32           position of the request's first row here
    state            [num_states, depth, width]  fp32            None for ratio 1; online [.., depth, 1536]
    state_slots      [num_requests]              int64 or int32  outside the state: the request is skipped
    ape              [ratio, width / 2] or None  fp32            added to scores; ratios 4 and 128
    norm_weight      [512]                       bf16 or fp32    of RMSNorm
    cos, sin         [max_pos, half]             fp32            any strides; half 0: nothing is rotated
    slot_mapping     [num_tokens]                int64 or int32  of the row that a token closes; ignored
                                                                 elsewhere; outside the cache: not stored
    kv_cache         [num_pages, page_bytes]     uint8           of a layout with 512 dims
    scale            one element                 fp32            the layer's scale: ``fp8_e4m3_512*`` only
    out_latent       [num_tokens, 512]           bf16            optional; closing tokens' rows before RoPE
    ===============  ==========================  ==============  =============================================

    The token at position p closes a block if ``(p + 1) % ratio == 0``; RoPE takes the position of the block's
    first token, p + 1 - ratio, and where the table has none the row is not stored. Ratio 2 (width 1024: kv,
    score) and 128 (1024) pool the block itself, ratio 4 (2048: kv as previous, kv, score as previous, score)
    the block before through its "as previous" halves too; ratio 1 (512: kv) pools nothing. Per dim, the mean
    of kv weighted by the softmax of score + ape; then RMSNorm with ``eps``, RoPE, :func:`quantize_kv`'s row.
    ``round_pooled``: bf16 after pooling, norm and RoPE each. Else float32 up to one rounding.

    The state holds the raw rows of the last tokens, position p in row ``p % depth``; online (ratio 128 alone)
    max, sum and mean after each token, another order of additions and 6 KiB a row. One call over [a, b)
    gives the bits of every chain of calls over it, rejected drafts in between included, if depth is at least
    window - 1 + n (ratio 2 has a window of 2 tokens, 4 of 8, 128 of 128; online: n + 1), n >= 1 being the
    most tokens of a call that are rejected.
    At a prefix hit of length a the rows of positions a - window + 1 .. a - 1 must be in the slot. No two
    requests of a call may share a slot. The bits are the same on every device.

    Raises RuntimeError naming the argument, what was expected and what came, before anything is written;
    ValueError for an unknown layout name.
    """
    expect_tensors("compress_kv", state=state, ape=ape, scale=scale, out_latent=out_latent)
    refuse_gradients(
        "compress_kv", kv_score=kv_score, state=state, ape=ape, norm_weight=norm_weight, cos=cos, sin=sin,
        kv_cache=kv_cache, scale=scale, out_latent=out_latent,
    )  # fmt: skip
    torch.ops.mla_fp8.compress_kv(
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
