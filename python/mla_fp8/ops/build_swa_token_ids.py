import torch

from .._arguments import all_given, call_op
from .._fake import fake, fake_returns_nothing

__all__ = ["build_swa_token_ids"]


def build_swa_token_ids(
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_swa: torch.Tensor,
    *,
    window_size: int,
    capacity: int,
    out_ids: torch.Tensor | None = None,
    out_first_pos: torch.Tensor | None = None,
    out_gather_lens: torch.Tensor | None = None,
    out_offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the window cache's slots of the tokens that a chunk's windows reach, request after request.

    Request r has ``gather_lens[r] = min(seq_len, extend_len + window_size - 1)`` ids from ``ids[offsets[r]]``
    on, from position ``first_pos[r] = seq_len - gather_len`` on. An id is -1 where a table lacks the entry,
    and behind the last request.

    Args:
        seq_lens: [num_requests] int32: tokens that are cached, those of the chunk too.
        extend_seq_lens: [num_requests] int32: tokens of the chunk.
        req_pool_indices: [num_requests] int64 or int32: rows of ``req_to_token``.
        req_to_token: [num_pool_rows, max_tokens] int32, any row stride: from position to slot.
        full_to_swa: [num_slots] int64: from slot to slot of the window's cache.
        window_size: Tokens of a window, its query's among them.
        capacity: Length of ids, from the host's lengths. Ids past it are dropped.
        out_ids: [capacity] int32, with the next three.
        out_first_pos: [num_requests] int32.
        out_gather_lens: [num_requests] int32.
        out_offsets: [num_requests + 1] int32.

    Returns:
        (ids, first_pos, gather_lens, offsets), all int32.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`. ValueError for one buffer without the
            other.
    """
    inputs = (seq_lens, extend_seq_lens, req_pool_indices, req_to_token, full_to_swa)
    options = {"window_size": window_size, "capacity": capacity}
    buffers = {
        "out_ids": out_ids,
        "out_first_pos": out_first_pos,
        "out_gather_lens": out_gather_lens,
        "out_offsets": out_offsets,
    }
    if not all_given("build_swa_token_ids", **buffers):
        return call_op("build_swa_token_ids", *inputs, **options)  # type: ignore[no-any-return]
    call_op("build_swa_token_ids_out", *inputs, **options, **buffers)
    return tuple(buffers.values())  # type: ignore[return-value]


@fake("build_swa_token_ids")
def _(
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_swa: torch.Tensor,
    *,
    window_size: int,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_requests = seq_lens.shape[0]
    ids, first_pos, gather_lens, offsets = (
        seq_lens.new_empty((n,), dtype=torch.int32)
        for n in (capacity, num_requests, num_requests, num_requests + 1)
    )
    return ids, first_pos, gather_lens, offsets


fake_returns_nothing("build_swa_token_ids_out")
