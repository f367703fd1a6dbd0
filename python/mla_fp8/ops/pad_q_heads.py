import torch

from .._arguments import all_given, call_op
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients

__all__ = ["pad_q_heads"]


def pad_q_heads(
    q: torch.Tensor,
    attn_sink: torch.Tensor | None,
    *,
    num_heads: int,
    out_q: torch.Tensor | None = None,
    out_attn_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pad the heads of ``q`` with zeros, and ``attn_sink`` with -inf, in one launch.

    For a kernel of others; slice its output and lse to ``[:, :num_q_heads]``.

    Args:
        q: [num_tokens, num_q_heads, dim] bfloat16 or float16, any strides of tokens and heads.
        attn_sink: [num_q_heads] float32, or None.
        num_heads: Heads of the result, at least num_q_heads.
        out_q: [num_tokens, num_heads, dim] of q's dtype, contiguous; with ``out_attn_sink``.
        out_attn_sink: [num_heads] float32; all -inf if there is no sink.

    Returns:
        (q, attn_sink), padded. attn_sink is None if None came.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`. ValueError for one buffer without the
            other.
    """
    refuse_gradients("pad_q_heads", q=q, attn_sink=attn_sink, out_q=out_q, out_attn_sink=out_attn_sink)
    if all_given("pad_q_heads", out_q=out_q, out_attn_sink=out_attn_sink):
        call_op(
            "pad_q_heads_out", q, attn_sink, num_heads=num_heads, out_q=out_q, out_attn_sink=out_attn_sink
        )
    else:
        out_q, out_attn_sink = call_op("pad_q_heads", q, attn_sink, num_heads=num_heads)
    assert out_q is not None  # for mypy
    return out_q, None if attn_sink is None else out_attn_sink


@fake("pad_q_heads")
def _(
    q: torch.Tensor, attn_sink: torch.Tensor | None, *, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    padded = q.new_empty((q.shape[0], num_heads, q.shape[2]))
    return padded, q.new_empty((num_heads,), dtype=torch.float32)


fake_returns_nothing("pad_q_heads_out")
