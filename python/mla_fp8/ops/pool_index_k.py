import torch

from .._arguments import call_op
from .._fake import fake_returns_nothing
from .._inference import refuse_gradients

__all__ = ["pool_index_k"]


def pool_index_k(
    k: torch.Tensor,
    score: torch.Tensor,
    query_start_loc: torch.Tensor,
    start_pos: torch.Tensor,
    state_k: torch.Tensor,
    state_score: torch.Tensor,
    state_slots: torch.Tensor,
    ape: torch.Tensor,
    slot_mapping: torch.Tensor,
    index_cache: torch.Tensor,
    *,
    page_size: int,
) -> None:
    """Pool every four consecutive index keys of a request into one entry of the indexer's cache, in place.

    Experimental; for GLM-5.3-Flash (``index_kpool``). One launch for any mix of prompts, decode and drafts.
    The token at position p closes a pool if ``(p + 1) % 4 == 0``. Per dim, a pool is the mean of its keys,
    weighted by the softmax of ``score + ape``, rounded to bf16; then :func:`quantize_index_k` with
    ``hadamard=True``, layout ``index_fp8``. The bits are the same on every device.

    The state holds key and score of the last tokens, position p in row ``p % depth``. One call over positions
    [a, b) gives the bits of every chain of calls over them, rejected drafts included, if depth is at least
    3 + n. Here n is the most rejected tokens of a call, at least 1. At a prefix hit of length a the state
    must hold positions ``a - a % 4`` to a - 1.

    Args:
        k: [num_tokens, 128] bfloat16, any row stride: keys of all requests, after LayerNorm and RoPE.
        score: As ``k``: what the gate gives.
        query_start_loc: As in :func:`compress_kv`.
        start_pos: As in :func:`compress_kv`.
        state_k: [num_states, depth, 128] bfloat16, any strides of slots and rows.
        state_score: As ``state_k``.
        state_slots: As in :func:`compress_kv`.
        ape: [4, 128] float32, added to the scores.
        slot_mapping: As in :func:`compress_kv`.
        index_cache: As in :func:`quantize_index_k`, of ``index_fp8``.
        page_size: Entries of a page.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`.
    """
    refuse_gradients(
        "pool_index_k", k=k, score=score, state_k=state_k, state_score=state_score, ape=ape,
        index_cache=index_cache,
    )  # fmt: skip
    call_op(
        "pool_index_k",
        k,
        score,
        query_start_loc,
        start_pos,
        state_k,
        state_score,
        state_slots,
        ape,
        slot_mapping,
        index_cache,
        page_size=page_size,
    )


fake_returns_nothing("pool_index_k")
