import math

import torch

from .._arguments import all_given, call_op
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients

__all__ = ["merge_partial_states"]


def merge_partial_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    attn_sink: torch.Tensor | None = None,
    base: float = math.e,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention results over disjoint keys, such as those of ranks, into that over all of them.

    A state whose lse is -inf, +inf or NaN, or whose weight is 0, does not count, whatever its ``outs`` hold.
    Where none is left, out is 0 and lse -inf. Computed in float32 in the order of states, rounded once.

    Args:
        outs: [num_states, num_tokens, num_heads, d] bfloat16, float16 or float32, any strides but of d.
        lses: [num_states, num_tokens, num_heads] float32, any strides.
        attn_sink: [num_heads] float32, an extra logit without a value, in base e: for results that were
            computed without one, for it may count once.
        base: Of the lse, e or 2.
        out: [num_tokens, num_heads, d] of the dtype of ``outs``, any strides of tokens and heads.
        lse: [num_tokens, num_heads] float32, contiguous; with ``out``. It leaves the sink out.

    Returns:
        (out, lse).

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`. ValueError for one buffer without the
            other.
    """
    refuse_gradients("merge_partial_states", outs=outs, lses=lses, attn_sink=attn_sink, out=out, lse=lse)
    options = {"attn_sink": attn_sink, "base": base}
    if not all_given("merge_partial_states", out=out, lse=lse):
        return call_op("merge_partial_states", outs, lses, **options)  # type: ignore[no-any-return]
    call_op("merge_partial_states_out", outs, lses, **options, out=out, lse=lse)
    assert out is not None and lse is not None  # for mypy
    return out, lse


@fake("merge_partial_states")
def _(
    outs: torch.Tensor, lses: torch.Tensor, *, attn_sink: torch.Tensor | None = None, base: float = math.e
) -> tuple[torch.Tensor, torch.Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


fake_returns_nothing("merge_partial_states_out")
