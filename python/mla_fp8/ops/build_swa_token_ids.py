import torch

from .._arguments import all_given
from .._fake import fake, fake_returns_nothing


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
    """The SWA-cache slots of the tokens that a chunk's windows reach, request after request.

    ================  ===========================  ==============  ========================================
    seq_lens          [num_requests]               int32           tokens cached, those of the chunk too
    extend_seq_lens   [num_requests]               int32           tokens of the chunk
    req_pool_indices  [num_requests]               int64 or int32  rows of req_to_token
    req_to_token      [num_pool_rows, max_tokens]  int32           position -> slot; any row stride
    full_to_swa       [num_slots]                  int64           slot -> slot of the SWA cache
    ================  ===========================  ==============  ========================================

    Request r contributes ``gather_lens[r] = min(seq_len, extend_len + window_size - 1)`` ids, from position
    ``first_pos[r] = seq_len - gather_len`` on, at ``ids[offsets[r]]``. An id is -1 where a table does not
    hold the entry, and so are those behind the last request. ``capacity``, the length of ids, comes from
    lengths that the caller knows on the host; ids past it are dropped.

    Returns (ids [capacity], first_pos [num_requests], gather_lens [num_requests], offsets [num_requests +
    1]), all int32: the ``out_*`` buffers if they are given. Raises RuntimeError naming the argument, what was
    expected and what came; ValueError for some of the buffers without the others.
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
        return torch.ops.mla_fp8.build_swa_token_ids(*inputs, **options)  # type: ignore[no-any-return]
    torch.ops.mla_fp8.build_swa_token_ids_out(*inputs, **options, **buffers)
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
