import torch

from .._arguments import all_given, call_op
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients

__all__ = ["merge_attention_states"]


def merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join two attention results over disjoint keys into that over all of them.

    :func:`merge_partial_states` of two. Where a side's lse is -inf, +inf or NaN, or its weight is 0, the
    result is the other side's bits; where both are, out is 0 and lse -inf. Computed in float32, rounded once.

    Args:
        out_a: [num_tokens, num_heads, d] bfloat16, float16 or float32, any strides of tokens and heads.
        lse_a: [num_tokens, num_heads] float32, contiguous, a natural logarithm.
        out_b: As ``out_a``.
        lse_b: As ``lse_a``.
        out: [num_tokens, num_heads, d] of out_a's dtype, with ``lse``.
        lse: [num_tokens, num_heads] float32.

    Returns:
        (out, lse).

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`. ValueError for one buffer without the
            other.
    """
    refuse_gradients(
        "merge_attention_states", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse
    )
    sides = (out_a, lse_a, out_b, lse_b)
    if not all_given("merge_attention_states", out=out, lse=lse):
        return call_op("merge_attention_states", *sides)  # type: ignore[no-any-return]
    call_op("merge_attention_states_out", *sides, out=out, lse=lse)
    assert out is not None and lse is not None  # for mypy
    return out, lse


@fake("merge_attention_states")
def _(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


fake_returns_nothing("merge_attention_states_out")
